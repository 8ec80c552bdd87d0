"""`Thresholded`: the largest numbers of an activation, for places where a dense model is split."""

import math
from typing import Final, Literal, get_args

import torch
from torch import nn

from torchrec_2dsp.errors import ConfigError

ThresholdKind = Literal["exact", "laplace"]
"""How the smallest number that is kept is found."""


class Thresholded(nn.Module):
    r"""Keeps the largest numbers of each sample and sets the others to zero, in both directions.

    With :math:`m_j = 1` for the numbers that are kept and 0 for the others,

    .. math::    y_j = m_j x_j, \qquad \partial L / \partial x_j = m_j \, \partial L / \partial y_j

    so gradients go back through the same mask, whose places both ends know from the forward.
    Nothing is carried over to the next batch. The module is part of the model: it thresholds in
    evaluation as in training, and must be in the model that serves.

    A sample is the last dim of the input. Not-a-numbers are never left out.

    Args:
        density: the share of a sample's numbers to keep, above 0 and at most 1.
        threshold: "exact" keeps ``max(1, ceil(density * d))`` of a sample's ``d`` numbers.
            "laplace" keeps what is above the quantile of a Laplace distribution that fits the
            whole batch, :math:`-\operatorname{mean}|x| \ln(\text{density})`, which takes a pass
            instead of a sort. Evaluation uses the running mean of this threshold, which is in the
            state dict as ``running_threshold``.

    Raises:
        ConfigError: the density is no share, or the threshold unknown.

    Example:
        >>> import torch
        >>> import torchrec_2dsp as tdsp
        >>> tdsp.Thresholded(density=0.5)(torch.tensor([[3.0, -4.0, 1.0, 0.0]]))
        tensor([[ 3., -4.,  0.,  0.]])

    Reference: Dynamic Communication Thresholding, arXiv 2010.08899, algorithm 2.
    """

    density: Final[float]
    """The share of a sample's numbers to keep."""

    threshold: Final[str]
    """How the smallest number that is kept is found."""

    update_share: Final[float] = 0.01
    """The part of the running threshold that each batch replaces."""

    def __init__(self, density: float = 0.1, threshold: ThresholdKind = "exact") -> None:
        super().__init__()
        if not 0 < density <= 1:
            raise ConfigError(
                f"density={density} is no share of numbers to keep; use one above 0 and at most 1"
            )
        if threshold not in get_args(ThresholdKind):
            raise ConfigError(
                f"threshold={threshold!r} is unknown; use one of "
                f"{', '.join(map(repr, get_args(ThresholdKind)))}"
            )
        self.density = float(density)
        self.threshold = threshold
        self.register_buffer(
            "running_threshold", torch.zeros(()) if threshold == "laplace" else None
        )
        # Not beside the other fields: TorchScript would make a plain attribute of the buffer.
        self.running_threshold: torch.Tensor | None
        """The threshold of "laplace" in evaluation: zero, which leaves nothing out, before the
        first batch of a training. There is none with "exact"."""

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """The activations, with zeros in place of the numbers that are left out."""
        if self.density == 1.0:
            return activations
        magnitudes = activations.detach().abs()
        running_threshold = self.running_threshold
        if running_threshold is None:
            num_kept = self.num_kept(activations.shape[-1])
            places = magnitudes.topk(num_kept, dim=-1, sorted=False).indices
            is_left_out = torch.ones_like(magnitudes, dtype=torch.bool).scatter(-1, places, False)
        else:
            lowest = running_threshold
            if self.training:
                lowest = self._fitted(magnitudes, running_threshold)
            is_left_out = magnitudes <= lowest
        # Not a product with the mask, because infinity times zero isn't zero.
        return activations.masked_fill(is_left_out & ~magnitudes.isnan(), 0.0)

    def num_kept(self, dim: int) -> int:
        """How many of a sample's ``dim`` numbers are kept, with "laplace" about as many."""
        # A product such as 0.07 * 100 is a little above 7, and means 7.
        return min(dim, max(1, math.ceil(self.density * dim - 1e-6)))

    @torch.jit.unused
    def num_bytes(self, num_samples: int, dim: int, *, backward: bool = False) -> int:
        """The bytes of a batch on the wire, in float32.

        The forward sends the kept numbers and their places: 16 bits for each place, or one bit for
        each number of the sample, whichever is shorter. The backward sends numbers alone.

        Args:
            num_samples: how many samples there are.
            dim: how many numbers a sample has.
            backward: whether it is the gradients that travel.
        """
        num_kept = self.num_kept(dim)
        # Samples of more numbers than 16 bits can tell apart have places of 32.
        place_bytes = num_kept * (2 if dim <= 2**16 else 4)
        places = 0 if backward else min(place_bytes, (dim + 7) // 8)
        return num_samples * (4 * num_kept + (places if num_kept < dim else 0))

    def extra_repr(self) -> str:
        """The arguments, for the text of the module."""
        return f"density={self.density}, threshold={self.threshold!r}"

    def _fitted(self, magnitudes: torch.Tensor, running_threshold: torch.Tensor) -> torch.Tensor:
        """The threshold of this batch, which the running one takes its share of."""
        # A number that isn't finite would make the threshold so, and stay in the running mean.
        is_finite = magnitudes.isfinite()
        num_finite = is_finite.sum()
        # Divided first, because a sum of large numbers may overflow.
        parts = torch.where(is_finite, magnitudes.float(), 0.0) / num_finite.clamp(min=1)
        fitted = parts.sum() * -math.log(self.density)
        # The first threshold is taken whole; a batch without numbers says nothing.
        moved = running_threshold + self.update_share * (fitted - running_threshold)
        moved = torch.where(running_threshold > 0, moved, fitted)
        running_threshold.copy_(torch.where(num_finite > 0, moved, running_threshold))
        return fitted
