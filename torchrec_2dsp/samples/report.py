"""`BalanceReport`: how even the work of the ranks was, and what it took to make it so."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BalanceReport:
    """What became of the batches of all ranks, equal on all of them, but for the bytes.

    Example:
        >>> from torchrec_2dsp.samples.report import BalanceReport
        >>> step = BalanceReport(num_batches=1, mean_time=10.0, time_before=15.0, time_after=10.5)
        >>> (step + step).imbalance_before, (step + step).imbalance_after
        (1.5, 1.05)
    """

    num_batches: int = 0
    """How many global batches were dealt."""

    num_samples: int = 0
    """How many samples they had."""

    num_moved: int = 0
    """How many samples were given to another rank."""

    num_dropped: int = 0
    """Samples of last batches that had fewer of them than there are ranks."""

    num_bytes: int = 0
    """The bytes of samples that this rank has sent to others."""

    mean_time: float = 0.0
    """The cost of the batches, divided by the speeds of all ranks."""

    time_before: float = 0.0
    """What the slowest rank would have taken with its own samples, added up over the batches."""

    time_after: float = 0.0
    """What the slowest rank takes with the samples that it was given."""

    num_ids_before: int = 0
    """The distinct ids of each rank's own samples, added up, if `shared_ids` looks at them."""

    num_ids_after: int = 0
    """The distinct ids of the samples that each rank was given."""

    @property
    def imbalance_before(self) -> float:
        """How many times the mean the slowest rank would have taken; 1 is even."""
        return self.time_before / self.mean_time if self.mean_time else 1.0

    @property
    def imbalance_after(self) -> float:
        """How many times the mean the slowest rank takes."""
        return self.time_after / self.mean_time if self.mean_time else 1.0

    def __add__(self, other: "BalanceReport") -> "BalanceReport":
        return BalanceReport(
            **{name: value + getattr(other, name) for name, value in vars(self).items()}
        )
