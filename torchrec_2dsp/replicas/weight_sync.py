"""Average weights and optimizer state over the replica peers after the update."""

from collections.abc import Callable, Mapping, Sequence

import torch

from torchrec_2dsp.plan.sync_policy import SyncPolicy
from torchrec_2dsp.replicas.drift import DriftCheck
from torchrec_2dsp.replicas.row_average import RowAverage, SyncedShard
from torchrec_2dsp.replicas.sync_reason import SyncReason
from torchrec_2dsp.replicas.sync_report import SyncReport
from torchrec_2dsp.replicas.whole_shard import ShardAverage


class AverageReplicas:
    """The sync action of `WeightSync`: an average, and the clock that tells when.

    A step has one backward, and several sync points, of which the first counts it.
    """

    def __init__(
        self, average: RowAverage | ShardAverage, policy: SyncPolicy, drift: DriftCheck
    ) -> None:
        """
        Args:
            average: what to do.
            policy: when.
            drift: looks at what came out.
        """
        self._average = average
        self._drift = drift
        self._policy = policy
        self.num_steps = 0
        """Steps that the policy has counted; a run that goes on sets it to what it was."""
        self._is_counted = True
        self._is_due = False
        self._pending = False

    def before_update(
        self, shards: Sequence[SyncedShard], rows: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """A backward is about to change rows of these shards, which ``rows`` tells."""
        self._average.before_update(shards, rows)

    def backward_seen(self) -> None:
        """A backward has begun."""
        self._pending, self._is_counted = True, False

    @property
    def pending(self) -> bool:
        """Whether the local replica has been updated since the last average."""
        return self._pending

    def reach(self, reason: SyncReason) -> SyncReport:
        """Average if the policy wants it at this step, or if a reader needs it.

        Collectives:
            Those of `RowAverage.run` or `ShardAverage.run`, on the "replicate" axis.
        """
        if not self._is_counted:
            self.num_steps += 1
            self._is_counted = True
            self._is_due = self._is_due or self._policy.is_due(self.num_steps)
        if not (self._pending if reason is SyncReason.READ else self._is_due):
            return SyncReport()
        self._pending = self._is_due = False
        report = self._average.run()
        self._drift.synced()
        return report

    def state_dict(self) -> dict[str, list[int]]:
        """The steps that the policy has counted."""
        return {"num_steps": [self.num_steps]}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Let the policy go on counting from there."""
        (self.num_steps,) = state["num_steps"]
