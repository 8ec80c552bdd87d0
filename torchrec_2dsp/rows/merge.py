"""`RowMerge`: the captured row gradients of several TBEs, applied when they have come."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.profiler import record_function

from torchrec_2dsp.comms.agreement import as_ours
from torchrec_2dsp.comms.alarm import Alarm, Check
from torchrec_2dsp.errors import SyncError, TwoDError
from torchrec_2dsp.rows.capture import Backward, RowCapture
from torchrec_2dsp.rows.update import RowUpdater

_LABEL = "## apply rows ##"
"""In profiles."""


class MergeStats(NamedTuple):
    """What one merge moved."""

    num_steps: int
    """Steps whose backwards were applied."""
    num_tensors: int
    """Tables that were updated."""
    num_rows: int
    """Distinct rows that were updated."""
    num_bytes: int
    """Bytes that this rank sent to other ranks."""

    def and_(self, other: "MergeStats") -> "MergeStats":
        """Both together."""
        return MergeStats(*map(sum, zip(self, other, strict=True)))


@dataclass(frozen=True)
class _Step:
    """What the backwards of a step have sent."""

    backwards: list[list[Backward]]
    """By TBE."""
    check: Check
    """Whether all ranks could send."""


class RowMerge:
    """Applies what some TBEs captured.

    All ranks that merge add the same numbers in the same order, so their copies stay equal bit
    for bit.
    """

    def __init__(self, captures: Sequence[RowCapture], alarm: Alarm, delay: int = 0) -> None:
        """
        Args:
            captures: the TBEs; none on a rank that holds no table.
            alarm: of all ranks, also of those that don't merge with this one.
            delay: how many steps may wait when a lookup comes.
        """
        self._captures = list(captures)
        self._updaters = [RowUpdater(capture.tbe) for capture in captures]
        self._alarm = alarm
        self._delay = delay
        self._is_unsent = False
        self._steps: deque[_Step] = deque()

    @property
    def pending(self) -> bool:
        """Whether a backward waits to be applied."""
        return self._is_unsent or bool(self._steps)

    def backward_seen(self) -> None:
        """A backward has begun, on all ranks."""
        self._is_unsent = True

    def send(self) -> None:
        """Send what the backwards have left.

        Collectives:
            Those of `RowCapture.take`, and of `Alarm.check`.
        """
        if not self._is_unsent:
            return
        self._is_unsent = False
        backwards: list[list[Backward]] = []
        error: TwoDError | None = None
        try:
            backwards = [capture.take() for capture in self._captures]
        except Exception as raised:
            error = as_ours(raised, SyncError)
        self._steps.append(_Step(backwards, self._alarm.check(error)))

    # A sync point may be reached in inference mode, whose tensors autograd can't use.
    @torch.inference_mode(mode=False)
    def run(self, *, everything: bool) -> MergeStats:
        """Apply backwards, oldest first: everything, or what a lookup may not miss.

        An error of one rank is raised by all, before any has applied anything of its step.

        Collectives:
            Those of `send` for what isn't sent yet; waits for the others.
        """
        self.send()
        total = MergeStats(0, 0, 0, 0)
        while len(self._steps) > (0 if everything else self._delay):
            step = self._steps.popleft()
            step.check.wait()
            total = total.and_(MergeStats(1, 0, 0, 0))
            for updater, backwards in zip(self._updaters, step.backwards, strict=True):
                for backward in backwards:
                    total = total.and_(_apply(updater, backward))
        return total


def _apply(updater: RowUpdater, backward: Backward) -> MergeStats:
    gradients = backward.gradients()
    with record_function(_LABEL):
        updater.apply(gradients)
    return MergeStats(0, updater.num_tables, gradients.num_rows, backward.in_flight.num_bytes)
