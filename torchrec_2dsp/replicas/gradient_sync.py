"""Merge row gradients before the update: exact replicas, and hot rows."""

from collections.abc import Callable, Mapping, Sequence

from torchrec_2dsp.replicas.drift import DriftCheck
from torchrec_2dsp.replicas.merge import RowMerge
from torchrec_2dsp.replicas.sync_reason import SyncReason
from torchrec_2dsp.replicas.sync_report import SyncReport


class MergeRowGradients:
    """The sync action of `GradientSync`, and of hot rows under either config.

    Gradients are sent at the end of a step, and may travel until a lookup needs the rows.
    """

    def __init__(
        self, merge: RowMerge, drift: DriftCheck, *, on_update: Callable[[], None] | None = None
    ) -> None:
        """
        Args:
            merge: the TBEs and the ranks that hold copies of their rows.
            drift: looks at what came out.
            on_update: called after rows were updated.
        """
        self._merge = merge
        self._drift = drift
        self._on_update = on_update

    def backward_seen(self) -> None:
        """A backward has begun."""
        self._merge.backward_seen()

    @property
    def pending(self) -> bool:
        """Whether a captured backward waits to be applied."""
        return self._merge.pending

    def reach(self, reason: SyncReason) -> SyncReport:
        """Send, or apply, what was captured.

        Collectives:
            Those of `RowMerge.send` or `RowMerge.run`.
        """
        if reason is SyncReason.STEP:
            self._merge.send()
            return SyncReport()
        stats = self._merge.run(everything=reason is SyncReason.READ)
        if self._on_update is not None and stats.num_rows:
            self._on_update()
        if stats.num_steps:
            self._drift.synced()
        return SyncReport(
            num_tensors=stats.num_tensors,
            num_rows=stats.num_rows,
            num_bytes=stats.num_bytes,
            window_s=stats.window_s,
            waited_s=stats.waited_s,
        )

    def state_dict(self) -> dict[str, list[int]]:
        """Which route each kernel's next gradients take, which the last exchange has decided."""
        return {"by_owner": [int(by_owner) for by_owner in self._merge.by_owner]}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Let the next gradients take these routes; all peers load the same."""
        self._merge.by_owner = [bool(by_owner) for by_owner in state["by_owner"]]
