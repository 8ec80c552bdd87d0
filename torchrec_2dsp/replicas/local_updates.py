"""Updates of the local replica that the fused backward can't do, before replicas are averaged."""

from collections.abc import Mapping, Sequence

from torchrec_2dsp.replicas.merge import RowMerge
from torchrec_2dsp.replicas.sync_reason import SyncReason
from torchrec_2dsp.replicas.sync_report import SyncReport


class LocalUpdates:
    """A sync action that sends nothing: it applies what the kernels of this rank have captured."""

    def __init__(self, merge: RowMerge) -> None:
        """
        Args:
            merge: the TBEs, captured for no peers.
        """
        self._merge = merge

    def backward_seen(self) -> None:
        """A backward has begun."""
        self._merge.backward_seen()

    @property
    def pending(self) -> bool:
        """Whether a captured backward waits to be applied."""
        return self._merge.pending

    def reach(self, reason: SyncReason) -> SyncReport:
        """Apply everything, at any moment: whoever averages comes next.

        Collectives:
            That of `Alarm.check`.
        """
        self._merge.run(everything=True)
        return SyncReport()

    def state_dict(self) -> dict[str, list[int]]:
        """Nothing: an update depends on its own step only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Nothing to take over."""
