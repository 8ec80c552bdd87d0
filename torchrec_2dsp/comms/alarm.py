"""`Alarm`: an error of one rank stops all of them, and costs nothing where all is well."""

import enum
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.agreement import agree
from torchrec_2dsp.comms.notice_board import NoticeBoard
from torchrec_2dsp.errors import TwoDError

_BITS = 15
"""For each signal, the number of ranks that give it, which has to be below 32,768."""


class Signal(enum.IntEnum):
    """What a rank may say; all of it travels in one number, a sum over ranks."""

    WELL = 0
    """Nothing."""

    FAILED = 1
    """It has an error, which all ranks are to raise."""

    OUTSIDE = 1 << _BITS
    """It is outside of the training loop: it leaves it, or reads the state."""

    ENDED = 1 << 2 * _BITS
    """It has no batch left."""

    READY = 1 << 3 * _BITS
    """It has another batch."""


class Alarm:
    """Ranks say whether they are well, go on, and hear of the others when they need to.

    Some peers of a rank that fails would notice; the others would wait for what never comes. All
    that is said has one size, so that a rank that is elsewhere is heard, too, in its own words.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, board: NoticeBoard) -> None:
        """
        Args:
            group: all ranks that must stop together, used by nothing else.
            device: that the group's backend works on.
            board: where ranks say more.
        """
        self.group = group
        """All ranks that must stop together."""
        self.board = board
        """Where ranks say more."""
        self._device = device

    def check(self, error: TwoDError | None = None, signal: Signal = Signal.WELL) -> "Check":
        """Tell the others, without waiting.

        Args:
            error: what is wrong here, if anything.
            signal: what else to say, where nothing is wrong.

        Collectives:
            One all-reduce of 8 bytes, which nobody waits for yet.
        """
        said = Signal.FAILED if error is not None else signal
        total = torch.tensor([int(said)], device=self._device)
        work = dist.all_reduce(total, dist.ReduceOp.SUM, group=self.group, async_op=True)
        assert work is not None
        return Check(self, work, total, error)


@dataclass(frozen=True)
class Check:
    """What the ranks say, on its way."""

    alarm: Alarm
    work: dist.Work
    total: torch.Tensor
    error: TwoDError | None

    def wait(self) -> dict[Signal, int]:
        """Raise the error of the first rank that has one, on all ranks.

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
