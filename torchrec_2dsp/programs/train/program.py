"""Train every run of a config, one after the other, on the ranks of this world."""

import time
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy
from torchrec.datasets.utils import Batch

from torchrec_2dsp.comms.encoded_bytes import count_encoded
from torchrec_2dsp.comms.mesh_groups import MeshGroups, world_group
from torchrec_2dsp.dense.gradient_report import GradientReport
from torchrec_2dsp.parallel.failing_together import failing_together
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.synthetic import click_probability, make_batch
from torchrec_2dsp.programs.models.dense import (
    apply_late_gradients,
    dense_total,
    dense_wrapper,
    thresholded_gradients,
)
from torchrec_2dsp.programs.models.model import build_model, rank_device
from torchrec_2dsp.programs.models.pipeline import make_pipeline
from torchrec_2dsp.programs.models.splits import split_
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.meter import Measured, Meter
from torchrec_2dsp.programs.train.parts import (
    make_optimizer,
    make_plan,
    make_sharder,
)
from torchrec_2dsp.programs.train.results import (
    DenseProgress,
    RunResult,
    TrainResult,
    TrainWatcher,
)


def train(config: TrainConfig, watchers: Sequence[TrainWatcher] = ()) -> TrainResult:
    """Train all runs of ``config``; `torch.distributed` must be initialised.

    Args:
        config: equal on all ranks.
        watchers: told about this rank's progress; usually given on rank 0 only.

    Returns:
        What came out, equal on all ranks.

    Collectives:
        Those of planning, sharding and training; then one barrier per run.
    """
    config.check_world(dist.get_world_size(world_group()))
    runs = [train_run(config, name, watchers) for name in config.runs]
    return TrainResult(runs=tuple(runs), planted=evaluate_planted(config))


def train_run(config: TrainConfig, name: str, watchers: Sequence[TrainWatcher] = ()) -> RunResult:
    """Plan, train and evaluate one run of ``config``; see `train`."""
    mesh = config.mesh(name, dist.get_world_size(world_group()))
    trainer = _Trainer(config, name)
    for watcher in watchers:
        watcher.run_planned(name, trainer.plan, config)
    result = trainer.run(watchers)
    # Only after a success: after a failure the other ranks may never come.
    del trainer
    MeshGroups.for_mesh(mesh, config.loop.device).close()
    for watcher in watchers:
        watcher.run_finished(result)
    return result


def evaluate_planted(config: TrainConfig) -> Measured:
    """How well the planted model itself predicts the held-out batches: the best there is.

    Collectives:
        One all-reduce, of two numbers for each held-out batch.
    """
    meter = Meter(world_group(), rank_device(config.loop.device))
    for batch in _batches(config, Split.EVAL, config.loop.eval_steps):
        predicted = click_probability(config.data, batch)
        loss = binary_cross_entropy(predicted, batch.labels.double())
        meter.add(loss, batch.labels)
    return meter.gather()


class _Trainer:
    """A run's model, sharded, in a pipeline."""

    def __init__(self, config: TrainConfig, name: str) -> None:
        self._config, self._name = config, name
        self._world = world_group()
        self._device = rank_device(config.loop.device)
        run = config.runs[name]
        unsharded = build_model(config.data, config.model)
        split_(unsharded, run.splits, run.split_threshold)
        sharder = make_sharder(config, run)
        mesh = config.mesh(name, dist.get_world_size(self._world))
        self.plan: Plan2D = make_plan(config, run, mesh, unsharded, sharder)
        self._model = ModelParallel2D(
            unsharded,
            device=self._device,
            plan=self.plan,
            sharders=[sharder],
            data_parallel_wrapper=dense_wrapper(run.dense),
        )
        self._optimizer = make_optimizer(self._model, config, run)
        self._pipeline = make_pipeline(
            self._model, self._optimizer, self._device, prefetch_rows=run.prefetch_rows
        )
        self._meter = Meter(self._world, self._device)

    def run(self, watchers: Sequence[TrainWatcher]) -> RunResult:
        loop = self._config.loop
        dist.barrier(self._world)
        start = time.perf_counter()
        with count_encoded() as encoded, failing_together(self._model):
            losses = self._train(watchers)
        apply_late_gradients(self._model, self._optimizer)
        self._model.sync_now()
        # The last steps end with a collective, so that no rank is ahead of the others.
        seconds = time.perf_counter() - start
        synced = self._model.sync_total
        per_step = self._mean_per_step(
            {
                "sync_bytes_per_step": synced.num_bytes,
                "sync_fp32_bytes_per_step": synced.num_bytes + synced.saved_bytes,
                "synced_rows_per_step": synced.num_rows,
                "rows_bytes_per_step": encoded.after,
                "rows_fp32_bytes_per_step": encoded.before,
            }
        )
        last = losses[-loop.final_steps :]
        return RunResult(
            name=self._name,
            plan=self.plan,
            losses=tuple(losses),
            train_loss=sum(last) / len(last),
            evaluated=self._evaluate(),
            samples_per_s=loop.steps * loop.global_batch_size / seconds,
            **per_step,
        )

    def _train(self, watchers: Sequence[TrainWatcher]) -> list[float]:
        loop = self._config.loop
        batches = _batches(self._config, Split.TRAIN, loop.steps)
        losses: list[float] = []
        self._model.train()
        while len(losses) < loop.steps:
            num_steps, before = (
                min(loop.report_every, loop.steps - len(losses)),
                dense_total(self._model),
            )
            for _ in range(num_steps):
                loss, _, labels = self._pipeline.progress(batches)
                self._meter.add(loss, labels)
            measured = self._meter.gather()
            losses += measured.losses
            dense = self._dense_since(before, num_steps)
            for watcher in watchers:
                watcher.steps_trained(self._name, len(losses), measured, dense)
        return losses

    def _dense_since(self, before: GradientReport, num_steps: int) -> DenseProgress | None:
        """What became of dense gradients in the last steps."""
        wrapper = thresholded_gradients(self._model)
        if wrapper is None:
            return None
        sent = wrapper.total - before
        return DenseProgress(
            density=sent.density,
            bytes_per_step=sent.num_bytes / num_steps,
            fp32_bytes_per_step=sent.dense_bytes / num_steps,
            residual_norm=wrapper.residual_norm(),
        )

    def _evaluate(self) -> Measured:
        """Every rank looks up its own part of the batches, together with its group."""
        batches = _batches(self._config, Split.EVAL, self._config.loop.eval_steps)
        self._model.eval()
        with torch.no_grad():
            for _ in range(self._config.loop.eval_steps):
                loss, _, labels = self._pipeline.progress(batches)
                self._meter.add(loss, labels)
        return self._meter.gather()

    def _mean_per_step(self, totals: Mapping[str, int]) -> dict[str, float]:
        """Totals of this rank's whole run, averaged over steps and ranks."""
        means = torch.tensor(list(totals.values()), dtype=torch.float64, device=self._device)
        dist.all_reduce(means, group=self._world)
        means = means.cpu() / (dist.get_world_size(self._world) * self._config.loop.steps)
        return dict(zip(totals, means.tolist(), strict=True))


def _batches(config: TrainConfig, split: Split, steps: int) -> Iterator[Batch]:
    """The first batches of a split, this rank's part of each."""
    world = world_group()
    for step in range(steps):
        yield make_batch(
            config.data,
            step=step,
            global_batch_size=config.loop.global_batch_size,
            rank=dist.get_rank(world),
            world_size=dist.get_world_size(world),
            split=split,
        )
