"""`RankShares`: how the time of all ranks is used, and how much of it the slowest one costs.

Needs no torch, so that pages on what was measured are written quickly.
"""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class RankShares:
    """What ranks do in a step, as shares of its time.

    What is left of a step beside both shares is waiting that even work wouldn't save, most of all
    for the network.

    Example:
        >>> from torchrec_2dsp.programs.bench.rank_shares import RankShares
        >>> RankShares.of_times(mean=60.0, slowest=75.0, step=100.0)
        RankShares(busy=0.6, lost=0.15)
        >>> RankShares.of_times(mean=60.0, slowest=75.0, step=100.0).imbalance
        1.25
    """

    busy: float
    """The share of a step in which a rank computes, in the mean of all ranks and steps."""

    lost: float
    """The share of a step by which the slowest rank of that step computes longer than a rank in the
    mean, in the mean of all steps: meanwhile the others wait for it."""

    @classmethod
    def of_times(cls, *, mean: float, slowest: float, step: float) -> Self:
        """The shares that follow from times, which may have any unit.

        Args:
            mean: how long a rank computes in a step, in the mean of all ranks and steps.
            slowest: how long the slowest rank of a step computes, in the mean of all steps.
            step: what a step takes.
        """
        return cls(busy=mean / step, lost=(slowest - mean) / step)

    @property
    def imbalance(self) -> float:
        """How many times the mean the slowest rank computes; 1 is even."""
        return 1.0 + self.lost / self.busy if self.busy else 1.0
