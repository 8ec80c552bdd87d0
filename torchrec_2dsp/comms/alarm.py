"""`Alarm`: an error of one rank stops all of them, and costs nothing where all is well."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.agreement import agree
from torchrec_2dsp.errors import SyncError, TwoDError


class Alarm:
    """Ranks say whether they are well, go on, and hear of the others when they need to.

    Some peers of a rank that fails would notice; the others would wait for what never comes.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """
        Args:
            group: all ranks that must stop together, used by nothing else.
            device: that the group's backend works on.
        """
        self.group = group
        self._device = device

    def check(self, error: TwoDError | None) -> "Check":
        """Tell the others, without waiting.

        Args:
            error: what is wrong here, if anything.

        Collectives:
            One all-reduce of 8 bytes, which nobody waits for yet.
        """
        has_failed = torch.tensor([int(error is not None)], device=self._device)
        work = dist.all_reduce(has_failed, dist.ReduceOp.MAX, group=self.group, async_op=True)
        assert work is not None
        return Check(self.group, work, has_failed, error)


@dataclass(frozen=True)
class Check:
    """What the ranks say, on its way."""

    group: dist.ProcessGroup
    work: dist.Work
    has_failed: torch.Tensor
    error: TwoDError | None

    def wait(self) -> None:
        """Raise the error of the first rank that has one, on all ranks.

        Collectives:
            An agreement, if a rank has failed.
        """
        try:
            self.work.wait()
        except RuntimeError as error:
            raise SyncError(
                "not all ranks have reached this sync; lookups, syncs and reads of the state are "
                f"for all ranks alike, or one of them died ({error})"
            ) from error
        if self.has_failed.item():
            agree(self.group, error=self.error)
