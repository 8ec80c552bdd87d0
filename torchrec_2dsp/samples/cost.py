"""`SampleCost`: what a sample takes to compute, by its length. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from torchrec_2dsp.errors import ConfigError

Lengths = torch.Tensor | npt.NDArray[np.int64] | Sequence[int]
"""The length of each sample."""


@dataclass(frozen=True, kw_only=True)
class SampleCost:
    """A sample's cost: a part that grows with its length, and one that grows with the square.

    Attention over a history costs the square of its length; lookups and dense layers cost the
    length. Only ratios count.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> tdsp.SampleCost(linear=2.0, quadratic=0.5).of([0, 1, 4])
        tensor([ 0.0000,  2.5000, 16.0000], dtype=torch.float64)
    """

    linear: float = 1.0
    """The cost of one more element."""

    quadratic: float = 0.0
    """The cost of one more pair of elements."""

    def __post_init__(self) -> None:
        numbers = (self.linear, self.quadratic)
        if not all(np.isfinite(number) and number >= 0 for number in numbers) or not any(numbers):
            raise ConfigError(
                f"SampleCost(linear={self.linear}, quadratic={self.quadratic}) is no cost; use "
                "numbers of 0 or more, at least one of them above 0"
            )

    def of(self, lengths: Lengths) -> torch.Tensor:
        """The cost of each sample, in float64."""
        exact = torch.as_tensor(lengths).double()
        return self.linear * exact + self.quadratic * exact.square()

    @classmethod
    def fit(cls, lengths_per_step: Sequence[Lengths], seconds: Sequence[float]) -> "SampleCost":
        """The cost that explains measured steps best, by non-negative least squares.

        What every step takes, whatever its samples, is fitted beside it and left out.

        Args:
            lengths_per_step: the lengths of the samples of each step of one rank.
            seconds: how long each step computed.

        Raises:
            ConfigError: there are fewer than three steps, or steps don't take longer with their
                samples' lengths.

        Example:
            >>> import torchrec_2dsp as tdsp
            >>> steps = [[1, 2], [4, 4], [8, 1], [16, 2]]
            >>> seconds = [0.1 + sum(0.02 * n + 0.001 * n * n for n in step) for step in steps]
            >>> cost = tdsp.SampleCost.fit(steps, seconds)
            >>> round(cost.linear, 6), round(cost.quadratic, 6)
            (0.02, 0.001)
        """
        # SciPy takes long to import, and only this needs it.
        from scipy.optimize import nnls

        if len(lengths_per_step) != len(seconds) or len(seconds) < 3:
            raise ConfigError(
                f"SampleCost.fit() got the lengths of {len(lengths_per_step)} steps and "
                f"{len(seconds)} times; give as many of both, at least 3"
            )
        steps = [torch.as_tensor(lengths).double() for lengths in lengths_per_step]
        sums = np.array([[1.0, float(n.sum()), float(n.square().sum())] for n in steps])
        times = np.asarray(seconds, dtype=np.float64)
        if not np.isfinite(times).all():
            raise ConfigError("SampleCost.fit() got a time that is not finite; leave that step out")
        # Columns of about one size, which the solver's tolerance is made for.
        scales = np.maximum(sums.max(axis=0), 1.0)
        solution, _ = nnls(sums / scales, times)
        _, linear, quadratic = solution / scales
        if linear == quadratic == 0:
            raise ConfigError(
                "SampleCost.fit() found no cost: these steps don't take longer with the lengths of "
                "their samples; measure more steps, of other lengths"
            )
        return cls(linear=float(linear), quadratic=float(quadratic))
