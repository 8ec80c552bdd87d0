"""`Alarm`: an error of one rank is raised on all ranks; a check costs an all-reduce of 8 bytes."""

import enum
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.agreement import agree
from torchrec_2dsp.comms.notice_board import NoticeBoard
from torchrec_2dsp.errors import TwoDError

_BITS = 15
"""The bits that count the ranks which give a signal; there have to be fewer than 32,768 ranks."""


class Signal(enum.IntEnum):
    """What a rank tells the others. One number, the sum over all ranks, says how many gave each."""

    WELL = 0
    """The rank has nothing to tell."""

    FAILED = 1
    """The rank has an error, which all ranks are to raise."""

    OUTSIDE = 1 << _BITS
    """The rank is outside of the training loop: it leaves the loop, or reads the state."""

    ENDED = 1 << 2 * _BITS
    """The rank has no batch left."""

    READY = 1 << 3 * _BITS
    """The rank has another batch."""


class Alarm:
    """Lets each rank tell how it is, go on, and learn later how the others are.

    Without it, only some peers of a failed rank would notice, and the others would wait forever.
    All signals have one size, so that they match even where ranks are at different places of the
    program.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, board: NoticeBoard) -> None:
        """
        Args:
            group: all ranks that must stop together, used by nothing else.
            device: the device that the group's backend works on.
            board: where ranks post details of a failure.
        """
        self.group = group
        """All ranks that must stop together."""
        self.board = board
        """Where ranks post details of a failure."""
        self._device = device

    def check(self, error: TwoDError | None = None, signal: Signal = Signal.WELL) -> "Check":
        """Tell the other ranks how this one is, without waiting.

        Args:
            error: the error of this rank, if any.
            signal: what to tell without an error.

        Collectives:
            One all-reduce of 8 bytes, not waited for.
        """
        own_signal = Signal.FAILED if error is not None else signal
        total = torch.tensor([int(own_signal)], device=self._device)
        work = dist.all_reduce(total, dist.ReduceOp.SUM, group=self.group, async_op=True)
        assert work is not None
        return Check(self, work, total, error)


@dataclass(frozen=True)
class Check:
    """The signals of all ranks, on their way."""

    alarm: Alarm
    work: dist.Work
    total: torch.Tensor
    error: TwoDError | None

    def wait(self) -> dict[Signal, int]:
        """Wait for all signals; raise the error of the first rank that has one, on all ranks.

        Returns:
            How many ranks gave each signal.

        Collectives:
            An agreement, if a rank has failed.
        """
        group, board = self.alarm.group, self.alarm.board
        try:
            self.work.wait()
        except RuntimeError as error:
            raise board.explain(error) from error
        total = int(self.total.item())
        counts = {signal: total // int(signal) % (1 << _BITS) for signal in Signal if signal.value}
        if counts[Signal.FAILED]:
            agree(group, error=self.error)
        if 0 < counts[Signal.OUTSIDE] < dist.get_world_size(group):
            raise board.explain()
        return counts
