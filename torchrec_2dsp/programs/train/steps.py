"""Train one step: in a pipeline, or as several batches with one update.

```text
this rank's batches --> step --> loss, scores, labels
```

`StepProfiler` traces a few steps and splits them into phases.
"""

import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase

from torchrec_2dsp.comms.groups import WorldGroups, world_group
from torchrec_2dsp.dense.gradient_sums import GradientReport
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.parallel.loop import accumulate
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
from torchrec_2dsp.programs.config.section import writing
from torchrec_2dsp.programs.dilation import dilation
from torchrec_2dsp.programs.launch import silenced
from torchrec_2dsp.programs.models.dense import thresholded_gradients
from torchrec_2dsp.programs.models.planned import make_pipeline
from torchrec_2dsp.programs.traces import RankSplit, RankTrace, step_mark

Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A model's output besides the training loss: the detached loss, scores and labels."""


class PipelinedSteps:
    """Steps in one of TorchRec's pipelines, which prefetches batches."""

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        self._model = model
        self._pipeline = make_pipeline(model, optimizer, device)
        self._is_detached = False

    def step(self, batches: Iterator[Batch]) -> Output:
        """Train one batch.

        Raises:
            StopIteration: the data has ended.
        """
        if self._is_detached and not isinstance(self._model, ModelParallel2D):
            # By default a pipeline starts the input exchange for its next batch once more. With
            # TorchRec's own sequences, that loses the finished exchange's sizes.
            self._pipeline.attach(self._model, sparse_dist=False)  # type: ignore[union-attr]
        self._is_detached = False
        return self._pipeline.progress(batches)

    def pause(self) -> None:
        """Release the model for an evaluation; prefetched batches stay in the pipeline."""
        if not isinstance(self._pipeline, TrainPipelineBase):
            self._pipeline.detach()
            self._is_detached = True


class AccumulatedSteps:
    """Steps with several batches each, which make one update."""

    def __init__(
        self,
        model: ModelParallel2D,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        num_batches: int,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._device, self._num_batches = device, num_batches

    def step(self, batches: Iterator[Batch]) -> Output:
        """Train one step's batches.

        Raises:
            StopIteration: the data has ended; an incomplete last step isn't trained.

        Collectives:
            Same as `accumulate` and the model.
        """
        with record_function("## next_batch ##"):
            parts = [batch.to(self._device) for batch in islice(batches, self._num_batches)]
        if len(parts) < self._num_batches:
            raise StopIteration
        outputs: list[Output] = []
        self._optimizer.zero_grad()
        for batch in accumulate(self._model, parts):
            with record_function("## forward ##"):
                loss, output = self._model(batch)
            with record_function("## backward ##"):
                (loss / self._num_batches).backward()
            outputs.append(output)
        self._model.sync()
        with record_function("## optimizer ##"):
            self._optimizer.step()
        losses, scores, labels = zip(*outputs, strict=True)
        return torch.stack(losses).mean(), torch.cat(scores), torch.cat(labels)

    def pause(self) -> None:
        """Do nothing: between two steps the model is free."""


def dense_figures(model: nn.Module, before: GradientReport, num_steps: int) -> dict[str, float]:
    """Return figures for this rank's thresholded dense gradients; none if all are sent.

    They cover the ``num_steps`` steps since the report ``before``.
    """
    wrapper = thresholded_gradients(model)
    if wrapper is None:
        return {}
    sent = wrapper.total - before
    return {
        "dense_density": sent.density,
        "dense_bytes_per_step": sent.num_bytes / num_steps,
        "dense_fp32_bytes_per_step": sent.dense_bytes / num_steps,
        "dense_residual_norm": wrapper.residual_norm(),
    }


def profiled_steps(text: str) -> range:
    """Parse the steps to trace, counted from 1, from a text such as ``20:30``.

    Raises:
        ConfigError: it has another form.

    Example:
        >>> from torchrec_2dsp.programs.train.steps import profiled_steps
        >>> profiled_steps("20:30")
        range(20, 31)
    """
    numbers = re.fullmatch(r"(\d+):(\d+)", text)
    if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise ConfigError(
            f"--profile {text!r} names no steps; give the first and the last, such as 20:30"
        )
    return range(int(numbers[1]), int(numbers[2]) + 1)


def middle_steps(start: int, end: int, num_steps: int) -> range:
    """Choose steps in the middle of a run, or of its next 1,000 steps if it is longer.

    Args:
        start: the steps trained before.
        end: the run's last step.
        num_steps: the steps to choose, at most a third of those that are left.

    Example:
        >>> from torchrec_2dsp.programs.train.steps import middle_steps
        >>> middle_steps(0, 200, 10)
        range(96, 106)
    """
    num_left = min(end - start, 1000)
    num_steps = min(num_steps, num_left // 3)
    first = start + (num_left - num_steps) // 2 + 1
    return range(first, first + num_steps)


def after_stops(steps: range, every: int) -> range:
    """Shift steps to begin after the last multiple of ``every`` among them, their last aside.

    Example:
        >>> from torchrec_2dsp.programs.train.steps import after_stops
        >>> after_stops(range(96, 106), 50), after_stops(range(96, 106), 105)
        (range(101, 111), range(96, 106))
    """
    last_stop = (steps.stop - 2) // every * every
    shift = max(0, last_stop + 1 - steps.start)
    return range(steps.start + shift, steps.stop + shift)


class StepProfiler:
    """Traces a few steps on each rank, and splits them into phases."""

    def __init__(self, steps: range, device: torch.device, path: Path | None = None) -> None:
        """Prepare to trace.

        Args:
            steps: the steps to trace, counted from 1; there may be none.
            device: this rank's; kept traces include its own activity.
            path: the file to keep this rank's trace in; by default only the phases are kept.
        """
        self._steps, self._path, self._group = steps, path, world_group()
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda" and path is not None:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._is_running = False
        self._traced_s, self._num_traced = 0.0, 0
        self._splits: tuple[RankSplit, ...] = ()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace the block, which trains ``step``, if it is due.

        Collectives:
            Same as `finish`, after the last step to trace.
        """
        if step not in self._steps:
            yield
            return
        began = time.perf_counter()
        if not self._is_running:
            with silenced():
                self._profile.start()
            self._is_running = True
        with record_function(step_mark(step)):
            yield
        if step == self._steps[-1]:
            self.finish()
        self._traced_s += time.perf_counter() - began
        self._num_traced += 1

    def untraced_seconds(self, seconds: float, num_steps: int, usual_step_s: float) -> float:
        """Return the seconds that the steps since the last call would have taken untraced.

        Args:
            seconds: their duration.
            num_steps: their number. Traced ones count as much as the mean of the others.
            usual_step_s: a step's duration before, in case all of them are traced.
        """
        traced_s, num_traced = self._traced_s, self._num_traced
        self._traced_s, self._num_traced = 0.0, 0
        if num_traced < num_steps:
            return (seconds - traced_s) * num_steps / (num_steps - num_traced)
        return num_steps * usual_step_s or seconds

    def finish(self) -> None:
        """Split the traced steps into phases, also if the run ends before the last of them.

        Collectives:
            Same as `WorldGroups.settle`; and a gather to rank 0 of each rank's phases.
        """
        if not self._is_running:
            return
        self._is_running, self._steps = False, range(0)
        # Ids and row gradients travel from one step to the next.
        WorldGroups.current().settle()
        with silenced():
            self._profile.stop()
        own, splits = self._split(), None
        if dist.get_rank(self._group) == 0:
            splits = [None] * dist.get_world_size(self._group)
        dist.gather_object(own, splits, group=self._group, group_dst=0)
        self._splits = tuple(filter(None, splits or ()))

    def interrupt(self) -> None:
        """End before work that isn't a step, unless a trace of all steps was requested.

        Collectives:
            Same as `finish`.
        """
        if self._path is None:
            self.finish()

    def _split(self) -> RankSplit | None:
        """Return the trace's phases; `None` if the data had ended before the first traced step."""
        # A full disk costs a run only its phases; it ends the run if a trace was requested.
        is_whole = suppress(OSError, ValueError) if self._path is None else writing(self._path)
        with (
            suppress(ConfigError),
            is_whole,
            tempfile.TemporaryDirectory(prefix="torchrec_2dsp_") as folder,
        ):
            path = self._path or Path(folder) / "trace.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            with silenced():
                self._profile.export_chrome_trace(str(path))
            return RankSplit.of_trace(dist.get_rank(self._group), RankTrace.read(path, dilation()))
        return None

    def take(self) -> tuple[RankSplit, ...]:
        """Return the phases of all ranks once, on rank 0; nothing if there is nothing new."""
        splits, self._splits = self._splits, ()
        return splits
