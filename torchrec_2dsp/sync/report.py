"""`SyncReport`: what one sync did."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SyncReport:
    """What one sync moved and how long it took on this rank; zeros if there was nothing to do.

    Example:
        >>> from torchrec_2dsp import SyncReport
        >>> SyncReport(num_tensors=1, num_rows=3) + SyncReport(num_rows=2)
        SyncReport(num_tensors=1, num_rows=5, num_bytes=0, seconds=0.0)
    """

    num_tensors: int = 0
    """Tables (or state tensors) that were made equal."""

    num_rows: int = 0
    """Rows that were written."""

    num_bytes: int = 0
    """Bytes that this rank sent."""

    seconds: float = 0.0
    """Wall-clock time on this rank."""

    def __add__(self, other: "SyncReport") -> "SyncReport":
        return SyncReport(
            self.num_tensors + other.num_tensors,
            self.num_rows + other.num_rows,
            self.num_bytes + other.num_bytes,
            self.seconds + other.seconds,
        )
