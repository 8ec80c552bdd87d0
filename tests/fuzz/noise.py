"""How numbers of the oracle are off by where they are rounded: not at all, at worst, or exactly."""

from dataclasses import dataclass

import torch

import torchrec_2dsp as tdsp
from torchrec_2dsp.codecs.rows import FloatRows

_SHARE_OF_ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Noise:
    """How numbers are rounded on their way; nowhere by default."""

    dtype: torch.dtype = torch.float64
    """The type of all arithmetic."""
    signs: tuple[int, int] | None = None
    """How rounded numbers are off: the signs of neighbouring rows (of ranks, or samples) and of
    neighbouring columns. Each choice is the worst one somewhere, where others cancel."""
    rounds: bool = False
    """Whether numbers that travel are really rounded, as the ranks do it."""
    nudge: float = 0.0
    """The share of its row's largest number by which a number is larger before it is rounded."""

    def rounded(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values with errors of the size that rounding to a type has at worst.

        Rounding itself may hit a number by chance and be no measure.
        """
        share = _SHARE_OF_ROUNDING[dtype]
        if self.signs is None or not share:
            return values
        return values * (1 + share * self._signs_of(values, self.signs))

    def sent(
        self, values: torch.Tensor, transport: tdsp.Transport, width: int | None = None
    ) -> torch.Tensor:
        """The values as they come after they have travelled.

        Args:
            values: their last dimension is that of rows.
            transport: how they travel.
            width: how many numbers have a scale in common; by default those of a whole row.
        """
        width = width or values.shape[-1]
        codec = transport.codec_for(width)
        if codec.is_exact or not values.numel():
            return values
        if self.rounds:
            rows = values.reshape(-1, width)
            rows = (rows + self.nudge * rows.abs().amax(dim=1, keepdim=True)).float()
            return codec.decode(codec.encode(rows), width).view(values.shape).to(values.dtype)
        if isinstance(codec, FloatRows):
            return self.rounded(values, codec.dtype)
        if self.signs is None:
            return values
        bounds = codec.error_bound(values.float().reshape(-1, width))
        bounds = bounds[:, None].expand(-1, width).reshape(values.shape)
        come = values + bounds.to(values.dtype) * self._signs_of(values, self.signs)
        # Integers have the sign of their number, or are zero.
        return torch.where(come * values > 0, come, 0.0)

    def _signs_of(self, values: torch.Tensor, signs: tuple[int, int]) -> torch.Tensor:
        pattern = torch.ones_like(values)
        pattern[1::2] *= signs[0]
        pattern[..., 1::2] *= signs[1]
        return pattern


SIGNS = ((1, 1), (-1, 1), (1, -1))
"""Those that are tried."""
