"""Train every run of a config, one after the other, on the ranks of this world."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy

from torchrec_2dsp.comms.agreement import agreeing
from torchrec_2dsp.comms.world_groups import release_groups, world_group
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Dataset, Split
from torchrec_2dsp.programs.data.logs.together import open_together
from torchrec_2dsp.programs.data.synthetic import click_probability
from torchrec_2dsp.programs.data.synthetic_dataset import SyntheticData
from torchrec_2dsp.programs.models.kinds import dataset_for
from torchrec_2dsp.programs.models.model import rank_device
from torchrec_2dsp.programs.train.checkpoints import Resume
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.datasets import splits_of
from torchrec_2dsp.programs.train.meter import Measured, Meter
from torchrec_2dsp.programs.train.profile import ProfiledSteps, StepProfiler
from torchrec_2dsp.programs.train.results import RunResult, TrainResult, TrainWatcher
from torchrec_2dsp.programs.train.trainer import RunTrainer

NEVER = Resume()
"""Runs that begin anew."""


def train(
    config: TrainConfig,
    watchers: Sequence[TrainWatcher] = (),
    *,
    resume: Resume = NEVER,
    profiled: ProfiledSteps | None = None,
) -> TrainResult:
    """Train all runs of ``config``; `torch.distributed` must be initialised.

    Args:
        config: equal on all ranks.
        watchers: told about this rank's progress; usually given on rank 0 only.
        resume: where runs go on from.
        profiled: the steps of which each rank writes a trace to the folder of the output.

    Returns:
        What came out, equal on all ranks.

    Collectives:
        Those of planning, sharding and training; one barrier per run; and agreements of all ranks
        where watchers are told of a plan, of a checkpoint and of an end.
    """
    config.check_world(dist.get_world_size(world_group()))
    if resume.path is not None and len(config.runs) > 1:
        raise ConfigError(
            f"--resume {resume.path} is a checkpoint of one run, and the config has "
            f"{', '.join(config.runs)}; choose a run with --only, or use --resume auto"
        )
    if profiled is not None and not config.output.folder:
        raise ConfigError("--profile writes to the folder of the output; set output.folder")
    opened: Dataset = open_together(config.data, world_group())
    if text := splits_of(opened):
        with agreeing(world_group()):
            for watcher in watchers:
                watcher.data_opened(text)
    dataset = dataset_for(config.model, opened)
    runs = [
        train_run(config, name, dataset, watchers, resume=resume, profiled=profiled)
        for name in config.runs
    ]
    result = TrainResult(runs=tuple(runs), metric=config.metric, planted=evaluate_planted(config))
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
    resume: Resume = NEVER,
    profiled: ProfiledSteps | None = None,
) -> RunResult:
    """Plan, train and evaluate one run of ``config``; see `train`."""
    trainer = RunTrainer(config, name, dataset)
    # What a watcher can't write is an error of all ranks.
    with agreeing(world_group()):
        for watcher in watchers:
            watcher.run_planned(name, trainer.planned, config)
    path = trainer.resume(resume)
    with agreeing(world_group()):
        if path is not None:
            for watcher in watchers:
                watcher.run_resumed(name, path, trainer.step)
    profiler = None
    if profiled is not None:
        device, rank = rank_device(config.loop.device), dist.get_rank(world_group())
        trace = Path(config.output.folder) / name / f"trace_rank{rank}.json"
        profiler = StepProfiler(profiled, trace, device)
    result = trainer.run(watchers, profiler)
    # Only after a success: after a failure the other ranks may never come.
    del trainer
    release_groups()
    with agreeing(world_group()):
        for watcher in watchers:
            watcher.run_finished(result)
    return result


def evaluate_planted(config: TrainConfig) -> Measured | None:
    """How well the planted model itself predicts the held-out batches: the best there is.

    `None` for data without a planted model.

    Collectives:
        One all-reduce, of three numbers for each held-out batch.
    """
    data, world = config.data, world_group()
    if not isinstance(data, SyntheticData):
        return None
    meter = Meter(world, rank_device(config.loop.device))
    batches = data.dataset().batches(
        Split.EVAL,
        global_batch_size=config.loop.batch_size,
        rank=dist.get_rank(world),
        world_size=dist.get_world_size(world),
    )
    for batch in islice(batches, config.loop.eval_steps):
        predicted = click_probability(data, batch)
        loss = binary_cross_entropy(predicted, batch.labels.double())
        meter.add(loss, batch.labels)
    return meter.gather().measured
