"""`WeightSyncAction`: average weights and optimizer state over the replica peers after updates."""

from collections.abc import Callable, Mapping, Sequence

import torch

from torchrec_2dsp.plan.sync import SyncPolicy
from torchrec_2dsp.replicas.drift import DriftCheck
from torchrec_2dsp.replicas.row_average import RowAverage, SyncedShard
from torchrec_2dsp.replicas.sync_report import SyncReason, SyncReport
from torchrec_2dsp.replicas.whole_shard import ShardAverage


class WeightSyncAction:
    """The sync action of `WeightSync`: an average, and a count of steps that tells when it is due.

    A step has one backward and several sync points, of which the first counts the step.
    """

    def __init__(
        self, average: RowAverage | ShardAverage, policy: SyncPolicy, drift: DriftCheck
    ) -> None:
        """
        Args:
            average: averages the shards.
            policy: tells at which steps to average.
            drift: compares the copies afterwards.
        """
        self._average = average
        self._drift = drift
        self._policy = policy
        self.num_steps = 0
        """How many steps the policy has counted; a resumed run sets it to its old value."""
        self._is_counted = True
        self._is_due = False
        self._pending = False

    def before_update(
        self, shards: Sequence[SyncedShard], rows: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """Note that a backward is about to change these shards' rows, which ``rows`` returns."""
        self._average.before_update(shards, rows)

    def backward_seen(self) -> None:
        """Note that a backward has begun."""
        self._pending, self._is_counted = True, False

    def accumulate(self) -> None:
        """Do nothing: one update or several, rows have changed."""

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
        """How many steps the policy has counted."""
        return {"num_steps": [self.num_steps]}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Let the policy go on counting from another one's steps."""
        (self.num_steps,) = state["num_steps"]
