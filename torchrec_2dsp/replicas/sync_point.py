"""Exactly one sync per training backward, by the first caller, and `WeightSync`'s action."""

import time
from collections.abc import Mapping, Sequence

import torch
from torch.profiler import record_function

from torchrec_2dsp.errors import SyncError
from torchrec_2dsp.plan.sync import SyncPolicy
from torchrec_2dsp.replicas.drift import DriftCheck
from torchrec_2dsp.replicas.row_average import RowAverage
from torchrec_2dsp.replicas.sync_action import SyncAction, SyncReason, SyncReport
from torchrec_2dsp.replicas.whole_shard import ShardAverage


class WeightSyncAction(SyncAction):
    """`WeightSync`'s action: an average, and the step count that tells when it is due.

    A step has one backward and several sync points; the first of them counts the step.
    """

    def __init__(
        self, average: RowAverage | ShardAverage, policy: SyncPolicy, drift: DriftCheck
    ) -> None:
        self._average = average
        self._drift = drift
        self._policy = policy
        self.num_steps = 0
        """The policy's step count; a resumed run restores it."""
        self._is_counted = True
        self._is_due = False
        self._pending = False

    def backward_seen(self) -> None:
        """Note that a backward has begun."""
        self._pending, self._is_counted = True, False

    @property
    def pending(self) -> bool:
        """True if the local replica has changed since the last average."""
        return self._pending

    def drop(self) -> bool:
        """Drop the average that is due; the replicas stay as different as before."""
        was_pending, self._pending, self._is_due = self._pending, False, False
        return was_pending

    def reach(self, reason: SyncReason) -> SyncReport:
        """Average if the policy requires it at this step, or if a reader needs it.

        Collectives:
            `RowAverage.run`'s or `ShardAverage.run`'s, on the "replicate" axis.
        """
        if not self._is_counted:
            self.num_steps += 1
            self._is_counted = True
            self._is_due = self._is_due or self._policy.is_due(self.num_steps)
        if not (self._pending if reason is SyncReason.READ else self._is_due):
            return SyncReport()
        report = self._average.run()
        self._pending = self._is_due = False
        self._drift.synced()
        return report

    def state_dict(self) -> dict[str, list[int]]:
        """Return the policy's step count."""
        return {"num_steps": [self.num_steps]}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Restore the policy's step count."""
        (self.num_steps,) = state["num_steps"]


_LABEL = "## replica sync ##"


class SyncPoint:
    """A sharded module's sync.

    A training backward leaves its actions pending. The first trigger, ``model.sync()``, the
    fused optimizer's ``step()``, the next lookup or a read, runs the actions that can't wait any
    longer; later triggers find nothing to do. All ranks reach the same trigger first because they
    run the same program.
    """

    def __init__(self, actions: Sequence[SyncAction], *, can_hold: bool = True) -> None:
        self._actions = list(actions)
        self.can_hold = can_hold
        """True if `hold` can merge several backwards into one update."""
        self.is_held = False
        """True while backwards wait for others in their step."""
        self.total = SyncReport()
        """The sum over all sync reports so far."""

    @property
    def pending(self) -> bool:
        """True if a backward hasn't been synced yet."""
        return any(action.pending for action in self._actions)

    def hold(self) -> None:
        """Let backwards wait until `release`, and then merge them into one update.

        Collectives:
            A lookup's sync, for the backwards so far.
        """
        self.reach(SyncReason.LOOKUP)
        self.is_held = True
        for action in self._actions:
            action.accumulate()

    def release(self) -> None:
        """Let the next sync take the waiting backwards."""
        self.is_held = False

    def backward_seen(self) -> None:
        """Note that a training backward has begun; ranks without tables do so, too."""
        for action in self._actions:
            action.backward_seen()

    def drop(self) -> bool:
        """Drop what raised a `NotFiniteError` on all ranks; return whether anything did."""
        dropped = [action.drop() for action in self._actions]
        return any(dropped)

    # A sync point may be reached in inference mode, whose tensors can't be changed afterwards.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def reach(self, reason: SyncReason) -> SyncReport:
        """Sync what is due; a no-op if nothing is.

        Raises:
            SyncError: the tables are read while backwards wait for others in their step.
        """
        if not self.pending:
            return SyncReport()
        if self.is_held:
            if reason is not SyncReason.READ:
                return SyncReport()
            raise SyncError(
                "tables are read or evaluated between the batches of accumulate(), when their "
                "gradients aren't applied; do so after the last one"
            )
        start = time.perf_counter()
        with record_function(_LABEL):
            report = sum((action.reach(reason) for action in self._actions), SyncReport())
        if report.num_tensors:
            report += SyncReport(seconds=time.perf_counter() - start)
            self.total += report
        return report

    @property
    def policy_step(self) -> int:
        """The policies' step count; 0 without a policy."""
        return max((action.num_steps for action in self._averages), default=0)

    def count_from(self, step: int) -> None:
        """Let the policies continue from ``step``."""
        for action in self._averages:
            action.num_steps = step

    @property
    def _averages(self) -> list[WeightSyncAction]:
        return [action for action in self._actions if isinstance(action, WeightSyncAction)]

    def state_dict(self) -> list[dict[str, list[int]]]:
        """Return the state, besides the tables, that this rank's next syncs depend on, by action.

        Read it while nothing is pending.
        """
        return [action.state_dict() for action in self._actions]

    def load_state_dict(self, states: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Continue from the state of a sync point with the same plan and rank."""
        for action, state in zip(self._actions, states, strict=True):
            action.load_state_dict(state)
