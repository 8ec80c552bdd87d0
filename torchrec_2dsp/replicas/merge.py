"""`RowMerge`: the captured row gradients of several TBEs, applied when they have come."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch.profiler import record_function

from torchrec_2dsp._compat.fbgemm import SplitTableBatchedEmbeddingBagsCodegen
from torchrec_2dsp.comms.agreement import as_ours
from torchrec_2dsp.comms.alarm import Alarm, Check
from torchrec_2dsp.errors import SyncError, TwoDError
from torchrec_2dsp.replicas.capture import Backward, RowCapture
from torchrec_2dsp.rows.direct_update import DirectUpdater, rule_for
from torchrec_2dsp.rows.gradients import RowGradients
from torchrec_2dsp.rows.update import RowUpdater

_LABEL = "## apply rows ##"
"""In profiles."""


class MergeStats(NamedTuple):
    """What one merge moved."""

    num_steps: int = 0
    """Steps whose backwards were applied."""
    num_tensors: int = 0
    """Tables that were updated."""
    num_rows: int = 0
    """Distinct rows that were updated."""
    num_bytes: int = 0
    """Bytes that this rank sent to other ranks."""
    window_s: float = 0.0
    """From sending to the moment when the rows were needed."""
    waited_s: float = 0.0
    """What this rank then waited."""

    def and_(self, other: "MergeStats") -> "MergeStats":
        """Both together."""
        return MergeStats(
            num_steps=self.num_steps + other.num_steps,
            num_tensors=self.num_tensors + other.num_tensors,
            num_rows=self.num_rows + other.num_rows,
            num_bytes=self.num_bytes + other.num_bytes,
            window_s=self.window_s + other.window_s,
            waited_s=self.waited_s + other.waited_s,
        )


class Updater(Protocol):
    """Applies row gradients to a TBE."""

    @property
    def num_tables(self) -> int:
        """How many tables the kernel holds."""
        ...

    def apply(self, gradients: RowGradients) -> None:
        """One update."""
        ...


def quickest_updater(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> Updater:
    """On a CPU the rule itself, where it is known; elsewhere FBGEMM's fused optimizer."""
    rule = rule_for(tbe)
    return RowUpdater(tbe) if rule is None else DirectUpdater(tbe, rule)


@dataclass
class _Step:
    """What the backwards of a step have sent."""

    backwards: list[list[Backward]]
    """By TBE."""
    check: Check
    """Whether all ranks could send."""
    sent_at: float
    """When they had sent."""
    is_checked: bool = False
    """Whether they have told each other."""


class RowMerge:
    """Applies what some TBEs captured.

    All ranks that merge add the same numbers in the same order, so their copies stay equal bit
    for bit.
    """

    def __init__(
        self,
        captures: Sequence[RowCapture],
        alarm: Alarm,
        delay: int = 0,
        *,
        is_layered: bool = False,
        make_updater: Callable[[SplitTableBatchedEmbeddingBagsCodegen], Updater] = quickest_updater,
    ) -> None:
        """
        Args:
            captures: the TBEs; none on a rank that holds no table.
            alarm: of all ranks, also of those that don't merge with this one.
            delay: how many steps may wait when a lookup comes.
            is_layered: whether rows are added up inside hosts first; the same on all ranks.
            make_updater: what applies the gradients to a TBE, the quickest by default.
        """
        self._captures = list(captures)
        self._updaters = [make_updater(capture.tbe) for capture in captures]
        self._alarm = alarm
        self._delay = delay
        self._is_layered = is_layered
        self._is_unsent = False
        self._steps: deque[_Step] = deque()
        self._failure: TwoDError | None = None

    @property
    def pending(self) -> bool:
        """Whether a backward waits to be applied."""
        return self._is_unsent or bool(self._steps) or self._failure is not None

    @property
    def by_owner(self) -> list[bool]:
        """For each TBE, whether its next gradients go by owners."""
        return [capture.by_owner for capture in self._captures]

    @by_owner.setter
    def by_owner(self, values: Sequence[bool]) -> None:
        for capture, value in zip(self._captures, values, strict=True):
            capture.by_owner = value

    def backward_seen(self) -> None:
        """A backward has begun, on all ranks."""
        self._is_unsent = True

    def send(self) -> None:
        """Send what the backwards have left.

        Collectives:
            Those of `RowCapture.take`, and of `Alarm.check`; and of `InFlight.leave_host`, if
            that is needed.
        """
        if self._failure is not None:
            # Some rows of that step may have travelled, and others not.
            raise self._failure
        if not self._is_unsent:
            return
        self._is_unsent = False
        backwards: list[list[Backward]] = []
        error: TwoDError | None = None
        try:
            backwards = [capture.take() for capture in self._captures]
        except Exception as raised:
            error = as_ours(raised, SyncError)
        check = self._alarm.check(error)
        if self._is_layered:
            # Peers of a rank that failed would wait for its rows.
            self._wait(check)
            for backward in chain.from_iterable(backwards):
                backward.in_flight.leave_host()
        step = _Step(backwards, check, time.perf_counter(), is_checked=self._is_layered)
        self._steps.append(step)

    # A sync point may be reached in inference mode, whose tensors autograd can't use.
    @torch.inference_mode(mode=False)
    def run(self, *, everything: bool) -> MergeStats:
        """Apply backwards, oldest first: everything, or what a lookup may not miss.

        An error of one rank is raised by all, before any has applied anything of its step.

        Collectives:
            Those of `send` for what isn't sent yet; waits for the others.
        """
        self.send()
        needed_at = time.perf_counter()
        # Also of steps that may wait: where a rank couldn't send, the next messages don't match.
        for step in self._steps:
            if not step.is_checked:
                self._wait(step.check)
                step.is_checked = True
        total = MergeStats()
        while len(self._steps) > (0 if everything else self._delay):
            step = self._steps.popleft()
            for backward in chain.from_iterable(step.backwards):
                backward.in_flight.wait()
            waited_s = time.perf_counter() - needed_at
            window_s = needed_at - step.sent_at
            total = total.and_(MergeStats(1, window_s=window_s, waited_s=waited_s))
            for updater, backwards in zip(self._updaters, step.backwards, strict=True):
                for backward in backwards:
                    total = total.and_(_apply(updater, backward))
            needed_at = time.perf_counter()
        return total

    def _wait(self, check: Check) -> None:
        """Until all ranks have sent; after an error of one, nothing can be sent again."""
        try:
            check.wait()
        except TwoDError as error:
            self._failure = error
            raise


def _apply(updater: Updater, backward: Backward) -> MergeStats:
    gradients = backward.gradients()
    with record_function(_LABEL):
        updater.apply(gradients)
    return MergeStats(0, updater.num_tables, gradients.num_rows, backward.in_flight.num_bytes)
