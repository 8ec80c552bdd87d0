"""`Thresholded`: an activation's largest elements, where a dense model is split."""

import math
from typing import Final, Literal, get_args

import torch
from torch import nn

from torchrec_2dsp.errors import ConfigError, check_choice

ThresholdKind = Literal["exact", "laplace"]
"""The rule for the smallest element that is kept."""


class Thresholded(nn.Module):
    r"""Keeps each sample's largest elements and zeroes the others, forward and backward.

    With :math:`m_j = 1` for kept elements and 0 for the others,

    .. math::    y_j = m_j x_j, \qquad \partial L / \partial x_j = m_j \, \partial L / \partial y_j

    so gradients go back through the same mask, whose positions both ends know from the forward.
    Nothing carries over to the next batch. The module is part of the model: it thresholds in
    evaluation as in training, and must be in the model that serves.

    A sample is the input's last dim. NaNs are always kept.

    Args:
        density: the share of a sample's elements to keep, above 0 and at most 1.
        threshold: "exact" keeps ``max(1, ceil(density * d))`` of a sample's ``d`` elements.
            "laplace" keeps elements above the quantile of a Laplace distribution fitted to the
            whole batch, :math:`-\operatorname{mean}|x| \ln(\text{density})`, a pass instead of a
            sort. Evaluation uses this threshold's running mean, ``running_threshold`` in the
            state dict.

    Raises:
        ConfigError: the density is no share, or the threshold is unknown.

    Example:
        >>> import torch
        >>> import torchrec_2dsp as tdsp
        >>> tdsp.Thresholded(density=0.5)(torch.tensor([[3.0, -4.0, 1.0, 0.0]]))
        tensor([[ 3., -4.,  0.,  0.]])

    Reference: Dynamic Communication Thresholding, arXiv 2010.08899, algorithm 2.
    """

    density: Final[float]
    """The share of a sample's elements to keep."""

    threshold: Final[str]
    """The rule for the smallest element that is kept."""

    update_share: Final[float] = 0.01
    """Each batch's weight in the running threshold."""

    def __init__(self, density: float = 0.1, threshold: ThresholdKind = "exact") -> None:
        super().__init__()
        if not 0 < density <= 1:
            raise ConfigError(
                f"density={density} is no share of numbers to keep; use one above 0 and at most 1"
            )
        check_choice("threshold", threshold, get_args(ThresholdKind))
        self.density = float(density)
        self.threshold = threshold
        self.register_buffer(
            "running_threshold", torch.zeros(()) if threshold == "laplace" else None
        )
        # Not among the other fields: TorchScript would turn the buffer into a plain attribute.
        self.running_threshold: torch.Tensor | None
        """The threshold of "laplace" in evaluation: zero, which keeps everything, before the first
        training batch. `None` with "exact"."""

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """Zero the elements that aren't kept."""
        if self.density == 1.0:
            return activations
        magnitudes = activations.detach().abs()
        running_threshold = self.running_threshold
        if running_threshold is None:
            places = self._largest(magnitudes)
            is_left_out = torch.ones_like(magnitudes, dtype=torch.bool).scatter(-1, places, False)
        else:
            lowest = running_threshold
            if self.training:
                lowest = self._fitted(magnitudes, running_threshold)
            is_left_out = magnitudes <= lowest
        # Not a product with the mask, because infinity times zero isn't zero.
        return activations.masked_fill(is_left_out & ~magnitudes.isnan(), 0.0)

    def _largest(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """Return the places of each sample's largest elements, in any order."""
        return magnitudes.topk(self.num_kept(magnitudes.shape[-1]), dim=-1, sorted=False).indices

    def num_kept(self, dim: int) -> int:
        """Return how many of ``dim`` elements are kept; approximately as many with "laplace"."""
        # A product such as 0.07 * 100 is slightly above 7, and means 7.
        return min(dim, max(1, math.ceil(self.density * dim - 1e-6)))

    @torch.jit.unused
    def num_bytes(self, num_samples: int, dim: int, *, backward: bool = False) -> int:
        """Return a batch's bytes on the wire, in float32.

        The forward sends the kept elements and their positions: 16 bits each, or one bit per
        element of the sample, whichever is shorter. The backward only sends elements.

        Args:
            num_samples: the batch size.
            dim: the number of elements per sample.
            backward: True if gradients travel.
        """
        num_kept = self.num_kept(dim)
        places = 0 if backward or num_kept == dim else place_bytes(num_kept, dim)
        return num_samples * (4 * num_kept + places)

    @torch.jit.unused
    def kept(self, activations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elements that "exact" keeps, and their places in the last dim, ascending."""
        places = self._largest(activations.detach().abs()).sort(dim=-1).values
        return activations.gather(-1, places), places

    def extra_repr(self) -> str:
        """Return the arguments for the module's ``repr``."""
        return f"density={self.density}, threshold={self.threshold!r}"

    def _fitted(self, magnitudes: torch.Tensor, running_threshold: torch.Tensor) -> torch.Tensor:
        """Fit the batch's threshold, and update the running one."""
        # A number that isn't finite would spread to the threshold, and stay in the running mean.
        is_finite = magnitudes.isfinite()
        num_finite = is_finite.sum()
        # Divided first, because a sum of large numbers may overflow.
        parts = torch.where(is_finite, magnitudes.float(), 0.0) / num_finite.clamp(min=1)
        fitted = parts.sum() * -math.log(self.density)
        # The first threshold is taken whole; a batch without finite numbers changes nothing.
        moved = running_threshold + self.update_share * (fitted - running_threshold)
        moved = torch.where(running_threshold > 0, moved, fitted)
        running_threshold.copy_(torch.where(num_finite > 0, moved, running_threshold))
        return fitted


def place_bytes(num_kept: int, dim: int) -> int:
    """Return the bytes for the places of a sample's kept elements.

    Samples with more elements than 16 bits can address have 32-bit places.
    """
    return min(num_kept * (2 if dim <= 2**16 else 4), (dim + 7) // 8)
