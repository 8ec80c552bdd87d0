"""Train every run in a config, one after the other, on this world's ranks.

```text
train --> train_run --> RunTrainer: model, optimizers, batches
                          steps until the next report, evaluation or checkpoint; then that; again
```
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy
from torchrec.datasets.utils import Batch

from torchrec_2dsp._compat.ddp import data_parallel_wrapper
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.counting import count_encoded
from torchrec_2dsp.comms.failure_detection import NoticeBoard, naming_faults
from torchrec_2dsp.comms.groups import release_groups, world_group
from torchrec_2dsp.dense.gradient_sums import GradientReport
from torchrec_2dsp.dense.pipelined.pipelined_dense import PipelinedDense
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.parallel.checkpoint.address import Place
from torchrec_2dsp.parallel.loop import failing_together
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
from torchrec_2dsp.parallel.train_state.state import TrainState
from torchrec_2dsp.programs.config.dense import PipelinedConfig
from torchrec_2dsp.programs.data.dataset import (
    Dataset,
    Progress,
    Split,
    open_together,
)
from torchrec_2dsp.programs.data.logs.batches import LogDataset
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig, click_probability
from torchrec_2dsp.programs.models.dense import apply_late_gradients, dense_total
from torchrec_2dsp.programs.models.kinds import dataset_for
from torchrec_2dsp.programs.models.model import rank_device
from torchrec_2dsp.programs.train.checkpoints import (
    Checkpoints,
    LocalMoments,
    Resume,
    RunHistory,
    RunSettings,
)
from torchrec_2dsp.programs.train.config import TrainConfig, splits_of
from torchrec_2dsp.programs.train.metrics import Meter, evaluated, held_out_batches, mean_per_step
from torchrec_2dsp.programs.train.record import best_of, num_since_best
from torchrec_2dsp.programs.train.results import Ending, RunResult, TrainResult, TrainWatcher
from torchrec_2dsp.programs.train.sharded import make_optimizers, sharded_model
from torchrec_2dsp.programs.train.steps import (
    AccumulatedSteps,
    PipelinedSteps,
    StepProfiler,
    after_stops,
    dense_figures,
    middle_steps,
)
from torchrec_2dsp.replicas.sync_action import SyncReport

logger = logging.getLogger(__name__)

Stepper = PipelinedSteps | AccumulatedSteps
"""The ways to train a step."""


def train(
    config: TrainConfig,
    watchers: Sequence[TrainWatcher] = (),
    *,
    resume: Resume = None,
    profiled: range = range(0),
    reading: Progress | None = None,
) -> TrainResult:
    """Train all runs in ``config``; `torch.distributed` must be initialised.

    Args:
        config: equal on all ranks.
        watchers: notified about this rank's progress; usually given on rank 0 only.
        resume: where runs resume; by default they start from scratch.
        profiled: the steps, counted from 1, that each rank traces into the output folder.
        reading: called with this rank's progress in reading a log's files, before training.

    Returns:
        The runs' results, equal on all ranks.

    Collectives:
        Same as planning, sharding and training; one barrier per run; and all ranks agree
        whether watchers failed at a plan, a checkpoint or an end.
    """
    config.check_world(dist.get_world_size(world_group()))
    if isinstance(resume, Place) and len(config.runs) > 1:
        raise ConfigError(
            f"--resume {resume} is a checkpoint of one run, and the config has "
            f"{', '.join(config.runs)}; choose a run with --only, or use --resume auto"
        )
    if profiled and not config.output.folder:
        raise ConfigError("--profile writes to the output folder; set output.folder")
    opened: Dataset = open_together(config.data, world_group(), reading)
    if isinstance(opened, LogDataset):
        opened.check(config.loop.global_batch_size)
    if text := splits_of(opened, config.loop):
        with agreeing(world_group()):
            for watcher in watchers:
                watcher.data_opened(text)
    dataset = dataset_for(config.model, opened)
    runs = [
        train_run(config, name, dataset, watchers, resume=resume, profiled=profiled)
        for name in config.runs
    ]
    result = TrainResult(runs=tuple(runs), metric=config.metric, planted_ne=_planted_ne(config))
    with agreeing(world_group()):
        for watcher in watchers:
            watcher.all_finished(result)
    return result


def train_run(
    config: TrainConfig,
    name: str,
    dataset: Dataset,
    watchers: Sequence[TrainWatcher] = (),
    *,
    resume: Resume = None,
    profiled: range = range(0),
) -> RunResult:
    """Plan, train and evaluate one run; see `train`."""
    trainer = RunTrainer(config, name, dataset, watchers)
    if profiled and profiled.start > trainer.planned.num_steps:
        raise ConfigError(
            f"--profile {profiled.start}:{profiled[-1]} begins after the last step of runs.{name}, "
            f"which is {trainer.planned.num_steps}; give earlier steps"
        )
    # First: watchers restart their files, and a refused start leaves these as they are.
    path = trainer.resume(resume)
    # A watcher's failure, such as a full disk, is raised on all ranks.
    with agreeing(world_group()):
        for watcher in watchers:
            watcher.run_planned(name, trainer.planned, config)
            if path is not None:
                watcher.run_resumed(name, path, trainer.step)
    result = trainer.run(profiled)
    # Only after a success: after a failure the other ranks may never come.
    del trainer
    release_groups()
    with agreeing(world_group()):
        for watcher in watchers:
            watcher.run_finished(result)
    return result


def _planted_ne(config: TrainConfig) -> float | None:
    """Evaluate the planted model on the held-out batches, a bound that no model beats.

    Collectives:
        One all-reduce: three numbers per held-out batch.
    """
    data = config.data
    if not isinstance(data, SyntheticConfig):
        return None
    meter = Meter(world_group(), rank_device(config.loop.device))
    for batch in held_out_batches(config, data.dataset()):
        predicted = click_probability(data, batch)
        loss = binary_cross_entropy(predicted, batch.labels.double())
        meter.add(loss, batch.labels)
    return meter.gather(0).ne


class RunTrainer:
    """A run's sharded model and its position in the data."""

    def __init__(
        self, config: TrainConfig, name: str, dataset: Dataset, watchers: Sequence[TrainWatcher]
    ) -> None:
        """Plan and shard the model; ``watchers`` are notified about this rank's steps.

        Collectives:
            Same as planning and sharding.
        """
        self._config, self._name, self._dataset, self._watchers = config, name, dataset, watchers
        self._run, self._loop = config.runs[name], config.loop
        self._world = world_group()
        self._device = rank_device(config.loop.device)
        self._model, self.planned = sharded_model(config, name, dataset)
        """The run's model and its plan."""
        self._board = NoticeBoard.of(self._world)
        self._optimizers = make_optimizers(self._model, config, self._run)
        self._base_rates = self._optimizers.rates()
        self._meter = Meter(self._world, self._device)
        self._history = RunHistory()
        dense = self._run.dense
        num_steps = self.planned.num_steps
        self._settings = RunSettings(config, name, dataset.fingerprint, num_steps)
        members: dict[str, Any] = {"history": self._history, "settings": self._settings}
        if dense.kind == "local":
            members["local_moments"] = LocalMoments(self._optimizers.dense)
        self._state = TrainState(self._model, self._optimizers.whole, **members)
        self._checkpoints = Checkpoints(
            config.checkpoint, name, self._optimizers.whole, self._state
        )
        self._resumed_from = ""
        self._recut_every = dense.recut_every if isinstance(dense, PipelinedConfig) else 0
        # Where a model draws random numbers, each rank draws different ones.
        torch.manual_seed(config.model.seed + dist.get_rank(self._world))

    def resume(self, resume: Resume) -> Place | None:
        """Resume from a checkpoint and return its path; none if the run starts from scratch.

        Collectives:
            Same as `Checkpoints.resume`.
        """
        path = self._checkpoints.resume(resume)
        if self.step > self._loop.steps:
            raise ConfigError(
                f"the checkpoint {path} is at step {self.step}, beyond loop.steps="
                f"{self._loop.steps}; raise loop.steps, or resume from an earlier checkpoint"
            )
        self._resumed_from = str(path or "")
        return path

    @property
    def step(self) -> int:
        """The steps trained so far."""
        return self._state.step

    def run(self, profiled: range) -> RunResult:
        """Train to the end; the result is equal on all ranks.

        Args:
            profiled: the steps whose traces are kept.

        Collectives:
            The model's, and those for reports, evaluations and checkpoints.
        """
        self._first_step, self._bytes_before = self.step, self._history.bytes_per_step
        own = self._model if isinstance(self._model, ModelParallel2D) else None
        naming = failing_together(own) if own else naming_faults(self._board, "a step of TorchRec")
        dist.barrier(self._world)
        with count_encoded() as self._encoded, naming:
            ending = self._train(self._profiler(profiled))
            if not self.step:
                raise ConfigError("the data has too few samples for a single step")
            apply_late_gradients(self._model, self._optimizers.whole)
            self._count_bytes()
            evaluations = self._history.evaluations
            # First, so that no step is lost if the evaluation fails.
            self._checkpoints.save()
            self._checkpoints.finish()
            if not evaluations or evaluations[-1].step != self.step:
                self._evaluate()
                self._checkpoints.finish()
        return self._result(ending)

    def _count_bytes(self) -> None:
        """Sync, as a save does, and average the bytes per step, with those before a resume.

        Collectives:
            Same as `ModelParallel2D.sync_now` and `mean_per_step`.
        """
        num_steps = self.step - self._first_step
        model, encoded, synced = self._model, self._encoded, SyncReport()
        if isinstance(model, ModelParallel2D):
            model.sync_now()
            synced = model.sync_total
        totals = {
            "sync_bytes_per_step": synced.num_bytes,
            "sync_fp32_bytes_per_step": synced.num_bytes + synced.saved_bytes,
            "rows_bytes_per_step": encoded.after,
            "rows_fp32_bytes_per_step": encoded.before,
        }
        means = mean_per_step(self._world, self._device, num_steps, totals)
        # Older checkpoints lack them.
        self._history.bytes_per_step = {
            name: mean + (self._bytes_before.get(name, mean) - mean) * self._first_step / self.step
            for name, mean in means.items()
        }

    def _profiler(self, profiled: range) -> StepProfiler:
        """Return a profiler that keeps traces of these steps, or one of the config's steps.

        Without an output folder it traces none, since nobody would read them.
        """
        folder = self._config.output.folder
        if profiled:
            if profiled.stop <= self.step + 1 and dist.get_rank(self._world) == 0:
                first, last = profiled.start, profiled[-1]
                logger.warning(
                    "--profile %d:%d traces nothing: %s begins after step %d",
                    *(first, last, self._name, self.step),
                )
            file = f"trace_rank{dist.get_rank(self._world)}.json"
            return StepProfiler(profiled, self._device, Path(folder) / self._name / file)
        num_steps = self._config.output.traced_steps if folder else 0
        steps = middle_steps(self.step, self.planned.num_steps, num_steps)
        for every in filter(None, (self._loop.eval_every, self._checkpoints.every)):
            steps = after_stops(steps, every)
        return StepProfiler(steps, self._device)

    def _result(self, ending: Ending) -> RunResult:
        history, plan = self._history, self.planned.plan
        last, metrics = history.losses[-self._loop.final_steps :], history.evaluations[-1].metrics
        return RunResult(
            name=self._name,
            mesh=str(plan.mesh),
            sync=str(plan.sync),
            num_groups=plan.mesh.num_groups,
            curve=tuple(history.progress),
            eval_loss=metrics["loss"],
            eval_ne=metrics.get("ne", float("nan")),
            samples_per_s=self.step * self._loop.global_batch_size / history.seconds,
            evaluations=tuple(history.evaluations),
            ending=ending.value,
            plan=str(plan),
            explanation=self.planned.explanation,
            memory_bytes=history.progress[-1].memory_bytes,
            resumed_from=self._resumed_from,
            plan2d=plan,
            losses=tuple(history.losses),
            train_loss=sum(last) / len(last),
            **history.bytes_per_step,
        )

    def _train(self, profiler: StepProfiler) -> Ending:
        ending = Ending.STEPS
        self._model.train()
        read = self._dataset.batches(
            Split.TRAIN,
            global_batch_size=self._loop.batch_size,
            rank=self._world.rank(),
            world_size=self._world.size(),
            start=self.step * self._loop.accumulate,
            batches_per_step=self._loop.accumulate,
        )
        with closing(read) as batches:
            stepper = self._stepper()
            while self.step < self._loop.steps:
                if self._is_out_of_patience():
                    ending = Ending.PATIENCE
                    break
                if not self._train_some(stepper, batches, profiler):
                    ending = Ending.DATA
                    break
                self._after_steps(stepper, profiler)
        stepper.pause()
        profiler.finish()
        self._tell_traced(profiler)
        return ending

    def _tell_traced(self, profiler: StepProfiler) -> None:
        if splits := profiler.take():
            for watcher in self._watchers:
                watcher.steps_traced(self._name, splits)

    def _after_steps(self, stepper: Stepper, profiler: StepProfiler) -> None:
        """Move layers, evaluate and save if due; the checkpoint includes the evaluation."""
        is_cut, is_evaluated, is_saved = (
            every > 0 and self.step % every == 0
            for every in (self._recut_every, self._loop.eval_every, self._checkpoints.every)
        )
        is_cut &= self.step < self._loop.steps
        is_over = self.step >= self.planned.num_steps
        if is_cut or is_evaluated or is_saved:
            profiler.interrupt()
        if is_cut:
            stepper.pause()
            self._move_layers()
        if is_over:
            # Evaluated and saved with the last gradients; `run` comes too late for that.
            stepper.pause()
            apply_late_gradients(self._model, self._optimizers.whole)
        if is_evaluated:
            stepper.pause()
            self._evaluate()
            if self._is_out_of_patience() and apply_late_gradients(
                self._model, self._optimizers.whole
            ):
                # The run ends here, unless its last gradients make it better.
                self._history.evaluations.pop()
                self._evaluate()
        if is_saved:
            self._count_bytes()
            self._checkpoints.save()

    def _move_layers(self) -> None:
        """Move a pipeline's layers, if that makes its slowest stage faster.

        Collectives:
            Same as `PipelinedDense.recut`.
        """
        pipeline, optimizer = data_parallel_wrapper(self._model), self._optimizers.dense
        assert isinstance(pipeline, PipelinedDense)
        optimizer.zero_grad()
        if pipeline.recut(optimizer):
            for watcher in self._watchers:
                watcher.layers_moved(self._name, self.step, pipeline.cuts)

    def _stepper(self) -> Stepper:
        model, optimizer, device = self._model, self._optimizers.whole, self._device
        if self._loop.accumulate > 1:
            # No config lets TorchRec alone accumulate.
            assert isinstance(model, ModelParallel2D)
            return AccumulatedSteps(model, optimizer, device, num_batches=self._loop.accumulate)
        return PipelinedSteps(model, optimizer, device)

    def _train_some(
        self, stepper: Stepper, batches: Iterator[Batch], profiler: StepProfiler
    ) -> bool:
        """Train until something is due; return whether there may be more data."""
        first_step, before = self.step, dense_total(self._model)
        has_more = True
        began = time.perf_counter()
        for step in range(self.step, self._next_stop()):
            self._set_rates(step)
            try:
                with profiler.step(step + 1):
                    loss, _, labels = stepper.step(batches)
            except StopIteration:
                has_more = False
                break
            self._meter.add(loss, labels)
            self._state.step += 1
        if self.step > first_step:
            seconds, num_steps = time.perf_counter() - began, self.step - first_step
            usual_s = self._history.seconds / max(1, first_step)
            self._meter.add_seconds(profiler.untraced_seconds(seconds, num_steps, usual_s))
            self._report(num_steps, before)
        self._tell_traced(profiler)
        return has_more

    def _next_stop(self) -> int:
        """Return the step after which ranks report, evaluate, save, move layers or end."""
        loop, step = self._loop, self.step
        intervals = (loop.report_every, loop.eval_every, self._checkpoints.every, self._recut_every)
        return min(loop.steps, *((step // every + 1) * every for every in intervals if every))

    def _set_rates(self, step: int) -> None:
        schedules, num_steps = self._config.optimizer.schedules, self._settings.num_steps
        if not all(schedule.is_constant for schedule in schedules):
            table_lr, dense_lr = (
                rate * schedule.multiplier(step, num_steps)
                for rate, schedule in zip(self._base_rates, schedules, strict=True)
            )
            self._optimizers.set_rates(table_lr, dense_lr)

    def _report(self, num_steps: int, before: GradientReport) -> None:
        with naming_faults(self._board, "the report"):
            progress = self._meter.gather(self.step)
        table_lr, dense_lr = self._optimizers.rates()
        samples, seconds = num_steps * self._loop.global_batch_size, progress.seconds
        figures = {
            "table_lr": table_lr,
            "dense_lr": dense_lr,
            "samples_per_s": samples / seconds if seconds else 0.0,
            **dense_figures(self._model, before, num_steps),
        }
        progress = progress.model_copy(update=figures)
        self._history.progress.append(progress)
        for watcher in self._watchers:
            watcher.steps_trained(self._name, progress)

    def _is_out_of_patience(self) -> bool:
        num_worse = num_since_best(self._history.evaluations, self._config.metric)
        return 0 < self._loop.patience <= num_worse

    def _evaluate(self) -> None:
        """Evaluate: every rank looks up its part of the batches, together with its group."""
        self._model.eval()
        evaluation = evaluated(self._config, self._model, self._dataset, self.step, self._device)
        self._model.train()
        self._history.evaluations.append(evaluation)
        is_best = best_of(self._history.evaluations, self._config.metric) is evaluation
        for watcher in self._watchers:
            watcher.evaluated(self._name, evaluation, is_best=is_best)
        if is_best and self._loop.eval_every:
            self._checkpoints.save_best()
