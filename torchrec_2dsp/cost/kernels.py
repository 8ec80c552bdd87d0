"""`Kernels`: the time that work on a rank's rows takes on some machines."""

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.coefficients import BagCost, CalibrationPart, KernelCost

_PASSES = {
    Transport.FP32: 0.0,
    Transport.BF16: 1.5,
    Transport.FP16: 1.5,
    Transport.INT8: 5.0,
    Transport.INT4: 9.0,
}
"""How many times as long as a copy of rows their encoding and decoding take together, on CPUs where
that wasn't measured."""


class Kernels(CalibrationPart):
    """The time that work on a rank's rows takes, while its neighbours do the same."""

    lookup: BagCost
    """The forward of a fused embedding kernel that sums bags."""

    update: BagCost
    """The backward of that kernel, with the optimizer."""

    row_lookup: KernelCost
    """The forward of row exchange's kernel, which gives rows as they are."""

    row_update: KernelCost
    """Applying gradients of rows, those of a row added up first."""

    find: KernelCost
    """Finding the distinct among ids, and where each id's row will be."""

    pool: KernelCost
    """Copying rows to where they are wanted, or adding them up there."""

    add: KernelCost
    """Adding up the gradients that belong to one row."""

    dense_update: KernelCost
    """An optimizer's pass over all of a table."""

    matmul: KernelCost | None = None
    """Multiplying matrices, by floating-point operations, and by the bytes of what goes in and out;
    `None` in files from before it was measured."""

    encode_bf16: KernelCost | None = None
    """Encoding and decoding rows in bf16; like the next ones, `None` in files from before it was
    measured."""

    encode_fp16: KernelCost | None = None
    """Encoding and decoding rows in fp16."""

    encode_int8: KernelCost | None = None
    """Encoding and decoding rows in 8 bits."""

    encode_int4: KernelCost | None = None
    """Encoding and decoding rows in 4 bits."""

    def codec(self, transport: Transport) -> KernelCost:
        """The time of encoding and decoding rows, of whose float32 bytes it counts each once."""
        measured = getattr(self, encoding(transport), None)
        if measured is not None:
            return measured
        return KernelCost(
            base_s=0.0, per_item_s=0.0, per_byte_s=_PASSES[transport] * self.pool.per_byte_s
        )


def encoding(transport: Transport) -> str:
    """The name that a calibration has for encoding and decoding rows."""
    return f"encode_{transport.value}"
