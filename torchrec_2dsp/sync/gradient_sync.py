"""Merge row gradients before the update: exact replicas, and hot rows."""

from collections.abc import Callable

from torchrec_2dsp.rows.merge import RowMerge
from torchrec_2dsp.sync.report import SyncReport


class MergeRowGradients:
    """The sync action of `GradientSync`, and of hot rows under either config."""

    def __init__(self, merge: RowMerge, *, on_update: Callable[[], None] | None = None) -> None:
        """
        Args:
            merge: the TBEs and the ranks that hold copies of their rows.
            on_update: called after rows were updated.
        """
        self._merge = merge
        self._on_update = on_update

    @property
    def pending(self) -> bool:
        """Whether a captured backward waits."""
        return self._merge.pending

    def is_due(self) -> bool:
        """Captured gradients can't wait: no lookup may miss them."""
        return self.pending

    def run(self) -> SyncReport:
        """Merge and apply what was captured.

        Collectives:
            Those of `RowMerge.run`; none if nothing was captured.
        """
        stats = self._merge.run()
        if self._on_update is not None and stats.num_rows:
            self._on_update()
        return SyncReport(stats.num_tensors, stats.num_rows, stats.num_bytes)
