"""Collectives that cost nothing: they return what was recorded once.

The model computes on the recorded values, so its kernels do the same work on the same rows, and no
rank waits for another.
"""

import enum
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from torchrec_2dsp._compat.c10d import tensors_in
from torchrec_2dsp.comms.full_duplex import GLOO_NAMES, OPERATIONS, GlooGroup

_NAME = "gloo_replay"


class Mode(enum.Enum):
    """The mode of this process's groups."""

    LIVE = "communicate"
    RECORD = "communicate, and keep what came out"
    REPLAY = "give what came out, from the first recorded one on, again and again"


class ReplayGroup(GlooGroup):
    """A gloo group whose collectives can be recorded and replayed.

    Replayed steps must issue the recorded steps' collectives, in the same order.
    """

    mode: ClassVar[Mode] = Mode.LIVE
    """All groups' mode, since a process runs one contestant; changed between two steps, on all
    ranks."""

    def __init__(self, gloo: dist.ProcessGroupGloo) -> None:
        super().__init__(gloo)
        self._recorded: list[list[torch.Tensor]] = []
        self._next = 0

    def getBackendName(self) -> str:
        """Return the name in logs and profiles."""
        return _NAME

    def run(self, name: str, outputs: Any, *inputs: Any) -> dist.Work:
        """Run one collective in the groups' mode; ``outputs`` may be nested lists of tensors."""
        issue = getattr(self._gloo, name)
        if ReplayGroup.mode is Mode.LIVE:
            return issue(outputs, *inputs)
        flat = tensors_in(outputs)
        if ReplayGroup.mode is Mode.RECORD:
            issue(outputs, *inputs).wait()
            self._recorded.append([output.clone() for output in flat])
        else:
            recorded = self._recorded[self._next % len(self._recorded)]
            self._next += 1
            for output, value in zip(flat, recorded, strict=True):
                output.copy_(value)
        return _Done(flat)


def _replayed(name: str) -> Callable[..., dist.Work]:
    def collective(self: ReplayGroup, outputs: Any, *inputs: Any) -> dist.Work:
        return self.run(name, outputs, *inputs)

    return collective


for _name in OPERATIONS:
    if _name not in ("barrier", "recv", "send"):  # All others take their outputs first.
        setattr(ReplayGroup, _name, _replayed(GLOO_NAMES.get(_name, _name)))


class _Done(dist.Work):
    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    def is_completed(self) -> bool:
        return True


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> ReplayGroup:
    return ReplayGroup(dist.ProcessGroupGloo(store, rank, size, timeout))


def replay_backend() -> str:
    """Return the backend's name for `new_group`, registered at the first call."""
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, _make, devices=["cpu"])
    return _NAME
