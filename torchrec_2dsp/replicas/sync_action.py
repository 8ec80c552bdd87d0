"""`SyncAction`: one way to make copies equal, the reasons to run it, and its report."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add


class SyncReason(enum.Enum):
    """The reason why a program reaches a sync point."""

    BACKWARD_OVER = "a backward is over"
    """Sends captured gradients, and averages if due. Nobody needs the rows yet."""

    LOOKUP = "rows are about to be looked up in training"
    """Applies sent gradients, except those of steps that may be late."""

    READ = "someone looks at the replicas: a checkpoint, an evaluation, a user"
    """Applies everything; all copies are equal afterwards."""


@dataclass(frozen=True)
class SyncReport:
    """One sync's traffic and time on this rank; zeros if nothing was due.

    Example:
        >>> from torchrec_2dsp import SyncReport
        >>> total = SyncReport(num_tensors=1, num_rows=3) + SyncReport(num_rows=2)
        >>> total == SyncReport(num_tensors=1, num_rows=5)
        True
    """

    num_tensors: int = 0
    """Tables (or state tensors) that were made equal."""

    num_rows: int = 0
    """Rows that were written."""

    num_bytes: int = 0
    """Bytes that this rank sent."""

    seconds: float = 0.0
    """Wall-clock time on this rank."""

    window_s: float = 0.0
    """The time in which the exchange of row gradients could overlap with compute: from the send
    until a lookup needed the rows."""

    waited_s: float = 0.0
    """The time for which this rank then waited for row gradients; with NCCL, where a CUDA
    stream waits, only the thread's share."""

    saved_bytes: int = 0
    """Bytes that a transport has saved in addition to `num_bytes`."""

    def __add__(self, other: "SyncReport") -> "SyncReport":
        return SyncReport(*map(add, vars(self).values(), vars(other).values()))


class SyncAction:
    """One way to make copies equal; hooks that an action doesn't override do nothing."""

    @property
    def pending(self) -> bool:
        """True if a backward hasn't been synced yet."""
        raise NotImplementedError

    def backward_seen(self) -> None:
        """Note that a backward has begun, on all ranks."""

    def accumulate(self) -> None:
        """Merge all backwards until the next sync into one update."""

    def drop(self) -> bool:
        """Drop what raised a `NotFiniteError` on all ranks; return whether anything did."""
        return False

    def reach(self, reason: SyncReason) -> SyncReport:
        """Sync what can't wait any longer; return an empty report if nothing is due."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, list[int]]:
        """Return what the next sync depends on besides the tables, while nothing is pending."""
        return {}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Continue from the state of another action of this kind."""
