"""`SampleGroup`: exchanges of samples that run on a thread, one after the other."""

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.own_group import own_group
from torchrec_2dsp.comms.world_groups import WorldGroups

T = TypeVar("T")


class Ahead(Generic[T]):
    """A call that runs on a thread, and its result or error."""

    def __init__(self, call: Callable[[], T], after: "Ahead[Any] | None") -> None:
        """
        Args:
            call: what to do.
            after: the call that has to be over before this one begins.
        """
        self._call, self._after = call, after
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="balanced batches", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        after, self._after = self._after, None
        if after is not None:
            after.wait()
        try:
            self._result.append(self._call())
        except BaseException as error:  # The thread that asks for the result raises it.
            self._error = error

    def wait(self) -> None:
        """Wait until the call is over and its thread has ended."""
        self._thread.join()

    def result(self) -> T:
        """What the call returned, after waiting for it; an error of it is raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result[0]


class SampleGroup:
    """The process group in which samples travel, and what is under way in it.

    All ranks start exchanges in one order, and each waits for the one before. So several
    `BalancedBatches` may share it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        accelerator = torch.accelerator.current_accelerator()
        is_gloo = "gloo" in dist.get_backend_config(group)
        device = torch.device("cpu") if is_gloo or accelerator is None else accelerator
        self.group = own_group(group, device, "samples", backend="gloo")
        """The ranks, over gloo, since batches are on the CPU."""
        self._last: Ahead[Any] | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "SampleGroup":
        """The group of these ranks, created at its first use.

        Collectives:
            The creation of a group, once.
        """
        shared = WorldGroups.current().shared
        if (cls, group) not in shared:
            shared[cls, group] = cls(group)
        samples: SampleGroup = shared[cls, group]
        return samples

    def start(self, call: Callable[[], T]) -> Ahead[T]:
        """Run a call on a thread, when those that were started before are over."""
        ahead = Ahead(call, self._last)
        self._last = ahead
        return ahead
