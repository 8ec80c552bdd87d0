"""`Transformer`: the layers of a dense part that nobody has built or measured yet."""

from dataclasses import dataclass

from torchrec_2dsp.cost.dense.layers import DenseLayers, LayerWork
from torchrec_2dsp.cost.kernels import Kernels
from torchrec_2dsp.errors import CalibrationError

_FLOAT_BYTES = 4
_CALLS = 6
"""The products of matrices in a block's forward: of keys, queries and values together, of
attention, of its output, and two of the feed-forward part."""
_BACKWARD = 2
"""How many products the backward of a product takes."""
_KEPT_VECTORS = 8
"""How many vectors of a block's width are kept of each item for the backward, beside those of the
feed-forward part and of attention."""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A pre-norm transformer over sequences of items.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> from torchrec_2dsp.cost.coefficients import KernelCost
        >>> from torchrec_2dsp.cost.dense.transformer import Transformer
        >>> calibration = tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml")
        >>> matmul = KernelCost(base_s=1e-5, per_item_s=1e-11, per_byte_s=0.0)
        >>> kernels = calibration.kernels.model_copy(update={"matmul": matmul})
        >>> layers = Transformer(num_blocks=12, dim=512, length=256).layers(kernels)
        >>> len(layers.layers), f"{layers.parameter_bytes / 4e6:.0f} million parameters"
        (12, '38 million parameters')
    """

    num_blocks: int
    """How many blocks there are."""

    dim: int
    """How many numbers an item has between blocks."""

    length: int
    """Items of a sample."""

    expansion: int = 4
    """How many times as wide the feed-forward part is inside."""

    num_targets: int = 1
    """Vectors that the loss is given for each item: the next one, and those that aren't."""

    state_per_weight: float = 2.0
    """Numbers of optimizer state for each weight: 2 with Adam."""

    def layers(self, kernels: Kernels) -> DenseLayers:
        """The blocks, by what products of matrices take.

        Raises:
            CalibrationError: that wasn't measured.
        """
        if kernels.matmul is None:
            raise CalibrationError(
                "the calibration is from before products of matrices were measured, so it can't "
                "say what a dense part takes; make one with the calibrate command"
            )
        weights = (4 + 2 * self.expansion) * self.dim**2
        attention = 4 * self.length * self.dim
        operations = self.length * (2 * weights + attention)
        inside = _KEPT_VECTORS + self.expansion
        moved_bytes = _FLOAT_BYTES * self.length * self.dim * inside
        forward_s = kernels.matmul.seconds(float(operations), float(moved_bytes))
        block = LayerWork(
            name="block",
            forward_s=forward_s,
            backward_s=_BACKWARD * forward_s,
            call_s=(1 + _BACKWARD) * _CALLS * kernels.matmul.base_s,
            parameter_bytes=float(_FLOAT_BYTES * weights),
            output_bytes=float(_FLOAT_BYTES * self.length * self.dim),
            kept_bytes=float(moved_bytes),
            # What attention gives, and what the feed-forward part gives.
            sums=2,
        )
        item_bytes = float(_FLOAT_BYTES * self.length * self.dim)
        return DenseLayers(
            layers=(block,) * self.num_blocks,
            input_bytes=item_bytes,
            target_bytes=self.num_targets * item_bytes,
            state_per_weight=self.state_per_weight,
        )
