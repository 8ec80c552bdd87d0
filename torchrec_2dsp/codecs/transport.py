"""`Transport`: what a user may ask for, and the codec of rows that it stands for."""

import enum

import torch

from torchrec_2dsp.codecs.rows import FloatRows, IntegerRows, RowCodec


class Transport(enum.StrEnum):
    """How numbers travel. They are added and applied in float32 in any case.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> [(way.value, way.codec.num_bytes(64)) for way in tdsp.Transport]
        [('fp32', 256), ('bf16', 128), ('fp16', 128), ('int8', 66), ('int4', 34)]
    """

    FP32 = "fp32"
    """Numbers travel as they are."""

    BF16 = "bf16"
    """Half the bytes, 8 bits of each number."""

    FP16 = "fp16"
    """Half the bytes, 11 bits of each number; what is beyond 65,504 becomes infinite."""

    INT8 = "int8"
    """About a quarter of the bytes: integers of -127 to 127, in units of a scale for each row."""

    INT4 = "int4"
    """About an eighth of the bytes: integers of -7 to 7, in units of a scale for each row."""

    @property
    def codec(self) -> RowCodec:
        """How rows look."""
        return _CODECS[self]

    def codec_for(self, dim: int) -> RowCodec:
        """How rows of ``dim`` numbers look: of a single one, which has no use for a scale, bf16 is
        the shortest."""
        is_integer = self in (Transport.INT8, Transport.INT4)
        return _CODECS[Transport.BF16] if is_integer and dim == 1 else self.codec


_CODECS: dict[Transport, RowCodec] = {
    Transport.FP32: FloatRows(torch.float32),
    Transport.BF16: FloatRows(torch.bfloat16),
    Transport.FP16: FloatRows(torch.float16),
    Transport.INT8: IntegerRows(bits=8),
    Transport.INT4: IntegerRows(bits=4),
}
