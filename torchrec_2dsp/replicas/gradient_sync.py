"""`GradientSyncAction`: row gradients are sent after the backward, and applied when needed."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch.profiler import record_function

from torchrec_2dsp.comms.alarm import Alarm, Check, as_ours
from torchrec_2dsp.errors import NotFiniteError, SyncError, TwoDError
from torchrec_2dsp.replicas.capture import RowCapture
from torchrec_2dsp.replicas.drift import DriftCheck
from torchrec_2dsp.replicas.exchange import PendingGradients
from torchrec_2dsp.replicas.sync_action import SyncAction, SyncReason, SyncReport
from torchrec_2dsp.rows.update import Updater, quickest_updater

_LABEL = "## apply rows ##"


@dataclass
class _SentStep:
    """A step's row gradients in flight."""

    pending: list[list[PendingGradients]]
    """For each TBE, its backwards' gradients."""
    check: Check
    """The check that raises if a rank couldn't send."""
    sent_at: float
    is_checked: bool = False


class GradientSyncAction(SyncAction):
    """The sync action of `GradientSync` and of hot rows.

    Gradients are sent at the end of a step, and may be in flight until a lookup needs the rows;
    ``delay`` steps may wait even longer. All ranks add the same numbers in the same order, so their
    copies stay equal bit for bit.

    There is one capture per TBE, none on a rank without tables; the alarm reaches all ranks. With
    ``precedes_average`` an average follows, which needs updated rows at every sync point, and whose
    report covers both.
    """

    def __init__(
        self,
        captures: Sequence[RowCapture],
        alarm: Alarm,
        drift: DriftCheck | None = None,
        *,
        delay: int = 0,
        is_layered: bool = False,
        on_update: Callable[[], None] = lambda: None,
        precedes_average: bool = False,
    ) -> None:
        self._captures = list(captures)
        self._updaters = [quickest_updater(capture.tbe) for capture in captures]
        self._alarm = alarm
        self._drift = drift
        self._delay = delay
        self._is_layered = is_layered
        self._on_update = on_update
        self._precedes_average = precedes_average
        self._is_unsent = False
        self._steps: deque[_SentStep] = deque()
        self._failure: TwoDError | None = None

    @property
    def pending(self) -> bool:
        """True if a captured backward hasn't been applied."""
        return self._is_unsent or bool(self._steps) or self._failure is not None

    def backward_seen(self) -> None:
        """Note that a backward has begun, on all ranks."""
        self._is_unsent = True

    def accumulate(self) -> None:
        """Merge all backwards until the next sync into one update."""
        for capture in self._captures:
            capture.accumulate()

    def drop(self) -> bool:
        """Drop a failed step; all ranks had sent their rows before one refused them."""
        if not isinstance(self._failure, NotFiniteError):
            return False
        self._failure = None
        self._steps.clear()
        return True

    def reach(self, reason: SyncReason) -> SyncReport:
        """Send or apply captured gradients, depending on ``reason``.

        Collectives:
            `send`'s or `apply`'s.
        """
        if self._precedes_average:
            self.apply(everything=True)
            return SyncReport()
        if reason is SyncReason.BACKWARD_OVER:
            self.send()
            return SyncReport()
        return self.apply(everything=reason is SyncReason.READ)

    def send(self) -> None:
        """Send the gradients that backwards have captured.

        Collectives:
            `RowCapture.take`'s, and `Alarm.check`'s; and
            `PendingGradients.send_to_other_hosts`', if rows are summed inside hosts.
        """
        if self._failure is not None:
            # Only some rows of the failed step may have been sent.
            raise self._failure
        if not self._is_unsent:
            return
        self._is_unsent = False
        pending: list[list[PendingGradients]] = []
        error: TwoDError | None = None
        for capture in self._captures:
            # After an error, too: peers receive every kernel's message, and wait in the check.
            try:
                pending.append(capture.take())
            except Exception as raised:
                error = error or as_ours(raised, SyncError)
        check = self._alarm.check(error)
        if self._is_layered:
            # Peers would wait for a failed rank's rows.
            self._wait(check)
            for gradients in chain.from_iterable(pending):
                gradients.send_to_other_hosts()
        sent = _SentStep(pending, check, time.perf_counter(), is_checked=self._is_layered)
        self._steps.append(sent)

    # A sync point may be reached in inference mode, whose tensors autograd can't use.
    @torch.inference_mode(mode=False)
    def apply(self, *, everything: bool) -> SyncReport:
        """Apply steps, oldest first: all of them, or all but those that may wait at a lookup.

        All ranks raise any rank's error before any rank has applied part of its step.

        Collectives:
            `send`'s for unsent gradients; the others are waited for.
        """
        self.send()
        needed_at = time.perf_counter()
        # Waiting steps are checked, too: if a rank couldn't send, later messages don't match.
        for step in self._steps:
            if not step.is_checked:
                self._wait(step.check)
                step.is_checked = True
        total = SyncReport()
        num_applied = 0
        while len(self._steps) > (0 if everything else self._delay):
            total += self._apply_step(self._steps.popleft(), needed_at)
            num_applied += 1
            needed_at = time.perf_counter()
        if total.num_rows:
            self._on_update()
        if num_applied and self._drift is not None:
            self._drift.synced()
        return total

    def state_dict(self) -> dict[str, list[int]]:
        """Return the route of each kernel's next gradients, as chosen by the last exchange."""
        if self._precedes_average:
            return {}
        return {"by_owner": [int(capture.exchange.by_owner) for capture in self._captures]}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Restore these routes; all peers load the same."""
        if self._precedes_average:
            return
        for capture, by_owner in zip(self._captures, state["by_owner"], strict=True):
            capture.exchange.by_owner = bool(by_owner)

    def _apply_step(self, step: _SentStep, needed_at: float) -> SyncReport:
        for gradients in chain.from_iterable(step.pending):
            gradients.wait()
        waited_s = time.perf_counter() - needed_at
        report = SyncReport(window_s=needed_at - step.sent_at, waited_s=waited_s)
        for updater, pending in zip(self._updaters, step.pending, strict=True):
            for gradients in pending:
                report += _update(updater, gradients)
        return report

    def _wait(self, check: Check) -> None:
        """Wait until all ranks have sent; after any rank's error, none can send again."""
        try:
            check.wait()
        except TwoDError as error:
            self._failure = error
            raise


def _update(updater: Updater, pending: PendingGradients) -> SyncReport:
    gradients = pending.gradients()
    with record_function(_LABEL):
        updater.apply(gradients)
    return SyncReport(
        updater.num_tables,
        gradients.num_rows,
        pending.num_bytes,
        saved_bytes=pending.saved_bytes,
    )
