"""`SyncPoint`: exactly one sync per training backward, whoever asks first."""

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from torchrec_2dsp.sync.report import SyncReport


class SyncAction(Protocol):
    """One way in which copies are made equal."""

    @property
    def pending(self) -> bool:
        """Whether a backward has happened since the last run."""
        ...

    def is_due(self) -> bool:
        """Whether training may not go on before a run."""
        ...

    def run(self) -> SyncReport:
        """Make the copies equal, whatever is pending."""
        ...


class SyncPoint:
    """The sync of one sharded module.

    A training backward leaves its actions pending. The first to ask, be it ``model.sync()``,
    the fused optimizer's ``step()``, the next lookup or a read of the state, runs them; the
    others find nothing to do. All ranks reach the same trigger first because they run the same
    program.
    """

    def __init__(self, actions: Sequence[SyncAction]) -> None:
        self._actions = list(actions)
        self.total = SyncReport()
        """Everything that was synced so far, whoever asked for it."""

    @property
    def pending(self) -> bool:
        """Whether a backward hasn't been synced yet."""
        return any(action.pending for action in self._actions)

    def sync(self) -> SyncReport:
        """Sync what is due; a no-op if nothing is."""
        return self._run([action for action in self._actions if action.is_due()])

    def complete(self) -> SyncReport:
        """Sync what is pending, due or not: someone looks at the replicas."""
        return self._run([action for action in self._actions if action.pending])

    def sync_now(self) -> SyncReport:
        """Sync, pending or not."""
        return self._run(self._actions)

    # A sync point may be reached in inference mode, whose tensors can't be changed afterwards.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _run(self, actions: Sequence[SyncAction]) -> SyncReport:
        start = time.perf_counter()
        report = SyncReport()
        if actions:
            for action in actions:
                report += action.run()
            report += SyncReport(seconds=time.perf_counter() - start)
            self.total += report
        return report
