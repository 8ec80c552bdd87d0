"""`SyncPoint`: exactly one sync per training backward, whoever asks first."""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch.profiler import record_function

from torchrec_2dsp.errors import SyncError
from torchrec_2dsp.replicas.sync_reason import SyncReason
from torchrec_2dsp.replicas.sync_report import SyncReport
from torchrec_2dsp.replicas.weight_sync import WeightSyncAction

_LABEL = "## replica sync ##"
"""The name of syncs in profiles."""


class SyncAction(Protocol):
    """One way in which copies are made equal."""

    @property
    def pending(self) -> bool:
        """Whether a backward hasn't been synced yet."""
        ...

    def backward_seen(self) -> None:
        """Note that a backward has begun."""
        ...

    def reach(self, reason: SyncReason) -> SyncReport:
        """Sync what can't wait any longer; an empty report if that is nothing."""
        ...

    def accumulate(self) -> None:
        """Make one update of all backwards until the next sync."""
        ...

    def state_dict(self) -> dict[str, list[int]]:
        """What the next sync depends on beside the tables, while nothing is pending."""
        ...

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Go on from the state of another action like this one."""
        ...


class SyncPoint:
    """The sync of one sharded module.

    A training backward leaves its actions pending. Whatever comes first, ``model.sync()``, the
    fused optimizer's ``step()``, the next lookup or a read of the state, runs the actions that
    can't wait any longer; what comes later finds nothing to do. All ranks reach the same trigger
    first because they run the same program.
    """

    def __init__(self, actions: Sequence[SyncAction], *, can_hold: bool = True) -> None:
        """
        Args:
            actions: run one after the other.
            can_hold: whether updates wait for them, so that several backwards can make one.
        """
        self._actions = list(actions)
        self.can_hold = can_hold
        """Whether `hold` can make one update of several backwards."""
        self.is_held = False
        """Whether backwards wait for others of their step."""
        self.total = SyncReport()
        """The reports of all syncs so far, added up."""

    @property
    def pending(self) -> bool:
        """Whether a backward hasn't been synced yet."""
        return any(action.pending for action in self._actions)

    def hold(self) -> None:
        """Let backwards wait until `release`, and make one update of all of them then.

        Collectives:
            Those of a sync before a lookup, for the backwards so far.
        """
        self.reach(SyncReason.LOOKUP)
        self.is_held = True
        for action in self._actions:
            action.accumulate()

    def release(self) -> None:
        """Let the next sync take what has waited."""
        self.is_held = False

    def backward_seen(self) -> None:
        """Note that a training backward has begun; all ranks do, also those without tables."""
        for action in self._actions:
            action.backward_seen()

    # A sync point may be reached in inference mode, whose tensors can't be changed afterwards.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def reach(self, reason: SyncReason) -> SyncReport:
        """Sync what is due; a no-op if nothing is.

        Raises:
            SyncError: the tables are read while backwards wait for others of their step.
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
        """How many steps the policies have counted; 0 for a sync that has none."""
        return max((action.num_steps for action in self._averages), default=0)

    def count_from(self, step: int) -> None:
        """Let the policies go on counting from ``step``."""
        for action in self._averages:
            action.num_steps = step

    @property
    def _averages(self) -> list[WeightSyncAction]:
        return [action for action in self._actions if isinstance(action, WeightSyncAction)]

    def state_dict(self) -> list[dict[str, list[int]]]:
        """What the next syncs of this rank depend on beside the tables, one dict per action.

        Read it while nothing is pending.
        """
        return [action.state_dict() for action in self._actions]

    def load_state_dict(self, states: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Go on from the state of another sync point of the same plan and rank."""
        for action, state in zip(self._actions, states, strict=True):
            action.load_state_dict(state)
