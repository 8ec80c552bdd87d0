"""`StepProfiler`: a trace of some steps of each rank, for Perfetto or Chrome."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from torchrec_2dsp.comms.full_duplex import wait_for_exchanges
from torchrec_2dsp.comms.world_groups import world_group
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.traces import step_mark


@dataclass(frozen=True)
class ProfiledSteps:
    """The steps that are profiled, counted from 1.

    Example:
        >>> from torchrec_2dsp.programs.train.profile import ProfiledSteps
        >>> ProfiledSteps.of("20:30")
        ProfiledSteps(first=20, last=30)
    """

    first: int
    """The first step of the trace."""

    last: int
    """The last step of the trace."""

    @classmethod
    def of(cls, text: str) -> "ProfiledSteps":
        """The steps of a text such as ``20:30``.

        Raises:
            ConfigError: it says something else.
        """
        numbers = re.fullmatch(r"(\d+):(\d+)", text)
        if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
            raise ConfigError(
                f"--profile {text!r} names no steps; give the first and the last, such as 20:30"
            )
        return cls(int(numbers[1]), int(numbers[2]))


class StepProfiler:
    """Records what a rank does in some steps, and writes it when they are over."""

    def __init__(self, steps: ProfiledSteps, path: Path, device: torch.device) -> None:
        """
        Args:
            steps: the steps to record.
            path: the file to write, of this rank.
            device: the device whose work is recorded beside that of the host.
        """
        self._steps, self._path = steps, path
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._is_running = False

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A context in which ``step``, counted from 1, is trained, and recorded if it is due.

        Collectives:
            Those of `finish` at the end of the last step to record.
        """
        if not self._steps.first <= step <= self._steps.last:
            yield
            return
        if not self._is_running:
            self._profile.start()
            self._is_running = True
        with record_function(step_mark(step)):
            yield
        if step == self._steps.last:
            self.finish()

    def finish(self) -> None:
        """Write what was recorded, also if the run ends before the last step to record.

        Collectives:
            A barrier of all ranks.
        """
        if self._is_running:
            self._is_running = False
            # Row gradients travel from one step to the next. Behind the barrier all ranks have sent
            # theirs.
            dist.barrier(world_group())
            wait_for_exchanges()
            self._profile.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
