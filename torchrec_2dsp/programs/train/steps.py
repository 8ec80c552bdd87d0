"""How a run trains one step: in a pipeline, or as several batches that make one update."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_2dsp._compat.ddp import data_parallel_wrapper
from torchrec_2dsp.comms.full_duplex import wait_for_exchanges
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.dense.gradient_sums import GradientReport
from torchrec_2dsp.dense.pipelined.pipelined_dense import PipelinedDense
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.parallel.loop import accumulate
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
from torchrec_2dsp.programs.config.sections import MEASURED, BalanceConfig
from torchrec_2dsp.programs.models.balance import deal_batches
from torchrec_2dsp.programs.models.dense import thresholded_gradients
from torchrec_2dsp.programs.models.kinds import ModelSection
from torchrec_2dsp.programs.models.planned import make_pipeline
from torchrec_2dsp.programs.traces import step_mark
from torchrec_2dsp.samples.balanced_batches import BalancedBatches
from torchrec_2dsp.samples.dealer import BalanceReport

Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What a model gives beside the loss that is trained: the detached loss, scores and labels."""


class Stepper(Protocol):
    """A way to train a step."""

    def step(self, batches: Iterator[Batch]) -> Output:
        """Train a step.

        Raises:
            StopIteration: the batches are over.
        """
        ...

    def pause(self) -> None:
        """Give the model back, so that it can be evaluated; the next step takes it again."""
        ...


class PipelinedSteps:
    """Steps in one of TorchRec's pipelines, which takes batches ahead."""

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        prefetch_rows: bool,
    ) -> None:
        self._model = model
        self._pipeline = make_pipeline(model, optimizer, device, prefetch_rows=prefetch_rows)
        self._is_detached = False

    def step(self, batches: Iterator[Batch]) -> Output:
        """Train one batch."""
        if self._is_detached and not isinstance(self._model, ModelParallel2D):
            # By default a pipeline starts the input exchange of its next batch once more. With
            # TorchRec's own sequences, that loses the sizes of the exchange that is over.
            self._pipeline.attach(self._model, sparse_dist=False)
        self._is_detached = False
        return self._pipeline.progress(batches)

    def pause(self) -> None:
        """Detach the model; batches that were taken ahead stay in the pipeline."""
        self._pipeline.detach()
        self._is_detached = True


class AccumulatedSteps:
    """Steps of several batches, which make one update."""

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
        """Train as many batches as make a step; what is left of the data for less is not trained.

        Collectives:
            Those of `accumulate` and of the model.
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
        """Nothing to do: between two steps the model is free."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which a model evaluates, and learns nothing."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


@contextmanager
def closing_batches(batches: Iterator[Batch]) -> Iterator[Iterator[Batch]]:
    """A context for an iterator over batches, which is closed at its end if it can be: readers
    have threads."""
    closable: Any = batches
    try:
        yield batches
    finally:
        if hasattr(closable, "close"):
            closable.close()


@contextmanager
def training_batches(
    batches: Iterator[Batch], balance: BalanceConfig | None, model: ModelSection
) -> Iterator[Iterator[Batch]]:
    """A context for the batches that a run trains, which are closed at its end.

    Args:
        batches: those that this rank reads.
        balance: how samples are dealt; without it each rank trains what it reads.
        model: what is trained.

    Collectives:
        Those of `deal_batches`.
    """
    with closing_batches(batches) as own:
        if balance is None:
            yield own
            return
        with deal_batches(own, balance, model) as dealt:
            yield dealt


def balance_report(batches: Iterator[Batch]) -> BalanceReport | None:
    """What became of batches so far; `None` if they aren't dealt."""
    return batches.report if isinstance(batches, BalancedBatches) else None


class TimedSteps:
    """Steps whose processor time each rank tells, so that slower ranks get less to do.

    While a rank waits for others it uses no processor.
    """

    def __init__(self, steps: Stepper, note_seconds: Callable[[float], None]) -> None:
        """
        Args:
            steps: the way to train a step.
            note_seconds: told the seconds of each.
        """
        self._steps, self._note_seconds = steps, note_seconds

    def step(self, batches: Iterator[Batch]) -> Output:
        """Train a step."""
        start = time.thread_time()
        output = self._steps.step(batches)
        self._note_seconds(time.thread_time() - start)
        return output

    def pause(self) -> None:
        """Give the model back."""
        self._steps.pause()


def timed_steps(steps: Stepper, batches: Iterator[Batch], balance: BalanceConfig | None) -> Stepper:
    """A way to train steps that tells their times, if ranks' speeds are measured."""
    is_measured = balance is not None and balance.rank_speeds == MEASURED
    if is_measured and isinstance(batches, BalancedBatches):
        return TimedSteps(steps, batches.note_seconds)
    return steps


@dataclass(frozen=True)
class ProfiledSteps:
    """The steps that are profiled, counted from 1.

    Example:
        >>> from torchrec_2dsp.programs.train.steps import ProfiledSteps
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


class LayerCuts:
    """Moves the layers of a pipeline now and then, if a model has one."""

    def __init__(self, model: nn.Module, optimizer: KeyedOptimizer, every: int) -> None:
        """
        Args:
            model: the sharded model.
            optimizer: of everything but the tables.
            every: layers may move after so many steps, and after each multiple; 0 for never.
        """
        wrapper = data_parallel_wrapper(model)
        self._pipeline = wrapper if isinstance(wrapper, PipelinedDense) else None
        self._optimizer, self._every = optimizer, every

    def due_after(self, step: int) -> int | None:
        """The next step after which layers may move; none if they never do."""
        if self._pipeline is None or not self._every:
            return None
        return (step // self._every + 1) * self._every

    def recut(self) -> Mapping[str, tuple[int, ...]] | None:
        """Cut the layers anew, between two steps; the cuts of each stack, if layers have moved.

        Collectives:
            Those of `PipelinedDense.recut`.
        """
        assert self._pipeline is not None, "no step is due"
        self._optimizer.zero_grad()
        return self._pipeline.cuts if self._pipeline.recut(self._optimizer) else None


@dataclass(frozen=True, kw_only=True)
class DenseProgress:
    """What became of this rank's dense gradients in some steps, if they are thresholded."""

    density: float
    """The share of elements that were chosen; 0 if all steps were dense."""

    bytes_per_step: float
    """Bytes that the rank sent to others."""

    fp32_bytes_per_step: float
    """Bytes like `bytes_per_step`, had all elements been added up in fp32 by a ring."""

    residual_norm: float
    """The Euclidean norm of what it hadn't sent yet after the last step."""


def dense_progress(
    model: nn.Module, before: GradientReport, num_steps: int
) -> DenseProgress | None:
    """What became of this rank's dense gradients in some steps; `None` if all are sent.

    Args:
        model: the sharded model.
        before: what was sent before these steps.
        num_steps: how many steps there were.
    """
    wrapper = thresholded_gradients(model)
    if wrapper is None:
        return None
    sent = wrapper.total - before
    return DenseProgress(
        density=sent.density,
        bytes_per_step=sent.num_bytes / num_steps,
        fp32_bytes_per_step=sent.dense_bytes / num_steps,
        residual_norm=wrapper.residual_norm(),
    )
