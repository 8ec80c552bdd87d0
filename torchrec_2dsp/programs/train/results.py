"""A run's result, and the watchers that show and write it.

```text
program --run_planned, steps_trained, evaluated, run_finished, ...--> TrainWatcher, on rank 0
            RunFolder           config.toml, plan.json, progress.jsonl, record.json
            TensorBoardWatcher  scalars
            the command line's display
```
"""

import platform
from collections.abc import Mapping
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ConfigDict, Field

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan import serialize
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.programs.config.config_file import with_absolute_paths
from torchrec_2dsp.programs.config.section import Section, write_whole, writing
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.record import (
    Evaluation,
    ProgressFile,
    ProgressLine,
    RunRecord,
    StepsTrained,
    TrainRecord,
)
from torchrec_2dsp.programs.train.sharded import PlannedRun
from torchrec_2dsp.samples.dealer import BalanceReport

_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec-2dsp", "numpy")


class Ending(StrEnum):
    """Why a run has ended."""

    STEPS = "all steps are trained"
    """It has trained as many steps as the config says."""

    PATIENCE = "evaluations don't get better"
    """So many evaluations as the config's patience were no better than the best."""

    DATA = "there are no more batches"
    """The data has ended before."""


class RunResult(RunRecord):
    """The result of one run: its record, and figures that no file has."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    plan2d: Plan2D = Field(exclude=True)
    """The plan that the run trained by; mesh and sync config are part of it."""

    losses: tuple[float, ...] = Field(exclude=True)
    """The train loss of each step's global batch."""

    train_loss: float = Field(exclude=True)
    """The mean of the last losses (`LoopConfig.final_steps`)."""

    synced_rows_per_step: float = Field(exclude=True)
    """Rows that a rank's syncs wrote per step, averaged over the ranks."""

    balance: BalanceReport | None = Field(default=None, exclude=True)
    """How even the ranks' work was since the last start, batches that were taken ahead included;
    `None` unless samples are dealt."""

    @property
    def evaluated(self) -> Evaluation:
        """The evaluation at the end."""
        return self.evaluations[-1]


class TrainResult(Section):
    """The results of all runs of a config."""

    runs: tuple[RunResult, ...]
    """The runs, in the order of the config."""

    metric: str
    """The metric by which evaluations are compared."""

    planted_ne: float | None = None
    """The entropy of the held-out batches, as the model behind the labels predicts them; `None` for
    data without such a model."""

    @property
    def reference(self) -> RunResult | None:
        """The first run with one group, which has no replicas that could differ."""
        return next((run for run in self.runs if run.num_groups == 1), None)

    def record(self, config: TrainConfig) -> TrainRecord:
        """Return the record of these runs of ``config``."""
        return TrainRecord(
            config=config.model_dump(mode="json"),
            world_size=self.runs[0].plan2d.mesh.world_size,
            planted_ne=self.planted_ne,
            environment=environment(),
            runs=self.runs,
        )


def largest_loss_gap(run: RunResult, reference: RunResult) -> float:
    """Return the largest difference of a step's losses, over the steps that both have trained."""
    pairs = zip(run.losses, reference.losses, strict=False)
    return max(abs(loss - theirs) for loss, theirs in pairs)


def environment() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, and the processor.

    Example:
        >>> from torchrec_2dsp.programs.train.results import environment
        >>> "torch" in environment()
        True
    """
    versions = {"python": platform.python_version(), "processor": platform.machine()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue  # Of the two packages of FBGEMM only one is installed.
    return versions


class TrainWatcher:
    """Learns what happens on this rank, and does nothing; others build on it."""

    def data_opened(self, text: str) -> None:
        """Learn that a log was opened; ``text`` says what is trained on, and what is held out."""

    def run_planned(self, name: str, planned: PlannedRun, config: TrainConfig) -> None:
        """Learn that a run is about to start."""

    def run_resumed(self, name: str, path: Path, step: int) -> None:
        """Learn that a run goes on from a checkpoint, after ``step`` steps."""

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        """Learn that some steps of a run were trained."""

    def layers_moved(self, name: str, step: int, cuts: Mapping[str, tuple[int, ...]]) -> None:
        """Learn that pipelined layers were cut anew after ``step`` steps.

        ``cuts`` has the first layer of each stage but the first, by the name of the stack.
        """

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        """Learn that a run was evaluated; ``is_best`` if it was never better before."""

    def run_finished(self, result: RunResult) -> None:
        """Learn that a run is over."""

    def all_finished(self, result: TrainResult) -> None:
        """Learn that all runs are over."""


class RunFolder(TrainWatcher):
    """Writes, on one rank, the config, each run's plan, and a record that grows run by run.

    - ``config.toml``: the config as it was resolved, with absolute paths;
    - ``record.json``: a `TrainRecord` of the runs that are over;
    - ``<run>/plan.json`` and, after a search by cost, ``<run>/explanation.txt``;
    - ``<run>/progress.jsonl``: the curve of a run, also of one that isn't over.
    """

    def __init__(self, folder: str | Path, config: TrainConfig) -> None:
        """Make the folder if there is none, and write the config.

        Raises:
            ConfigError: the folder can't be written to.
        """
        self._folder, self._config = Path(folder), config
        self._results: list[RunResult] = []
        self._progress: dict[str, ProgressFile] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output.folder={str(folder)!r} can't be written to: {error.strerror}; use another"
            ) from error
        content = tomli_w.dumps(_without_none(with_absolute_paths(config)))
        write_whole(self._folder / "config.toml", content)

    def run_planned(self, name: str, planned: PlannedRun, config: TrainConfig) -> None:
        """Write the run's plan, and begin its progress."""
        folder = self._folder / name
        with writing(folder):
            folder.mkdir(exist_ok=True)
        self._progress[name] = ProgressFile(folder)
        with writing(folder / "plan.json"):
            serialize.save(planned.plan, folder / "plan.json")
        if planned.explanation:
            write_whole(folder / "explanation.txt", planned.explanation + "\n")

    def run_resumed(self, name: str, path: Path, step: int) -> None:
        """Take over the earlier life's progress up to the checkpoint."""
        self._progress[name].resume(step)

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        """Add the steps to the run's progress."""
        self._progress[name].add(ProgressLine(point=progress))

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        """Add the evaluation to the run's progress."""
        self._progress[name].add(ProgressLine(evaluation=evaluation))

    def run_finished(self, result: RunResult) -> None:
        """Write the record of the runs so far, so that a stop loses none of them."""
        self._results.append(result)
        self.all_finished(TrainResult(runs=tuple(self._results), metric=self._config.metric))
        self._progress[result.name].add(ProgressLine(is_over=True))

    def all_finished(self, result: TrainResult) -> None:
        """Write the record of all runs."""
        result.record(self._config).save(self._folder / "record.json")


def _without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the values for which TOML has no word."""
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if value is not None
    }


class TensorBoardWatcher(TrainWatcher):
    """Writes losses by step, evaluations, and a run's other figures at its end.

    TensorBoard writes in a thread of its own, so a full disk is noticed some calls later, at the
    latest when the run is over.
    """

    def __init__(self, folder: str | Path) -> None:
        """Each run writes to ``folder/<name of the run>``."""
        # An extra, which may be missing.
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._make_writer = Path(folder), SummaryWriter
        self._writers: dict[str, SummaryWriter] = {}

    def run_planned(self, name: str, planned: PlannedRun, config: TrainConfig) -> None:
        """Start the run's folder with its plan and config as texts."""
        with writing(self._folder / name):
            writer = self._writers[name] = self._make_writer(str(self._folder / name))
            writer.add_text("plan", f"```\n{planned.plan}\n```")
            writer.add_text("config", f"```\n{config.model_dump_json(indent=1)}\n```")

    def run_resumed(self, name: str, path: Path, step: int) -> None:
        """Let the new life's curves cover what an earlier one wrote after ``step``."""
        with writing(self._folder / name):
            self._writers[name].close()
            folder = str(self._folder / name)
            self._writers[name] = self._make_writer(folder, purge_step=step + 1)

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        """Write the loss of every step, and the other figures of all of them."""
        step, losses = progress.step, progress.losses
        figures = {
            "train/ne": progress.ne,
            "lr/tables": progress.table_lr,
            "lr/dense": progress.dense_lr,
            "speed/samples_per_s_now": progress.samples_per_s,
            "memory/largest_gb": max(progress.memory_bytes) / 1e9,
            "dense/density": progress.dense_density,
            "dense/residual_norm": progress.dense_residual_norm,
            "bytes/dense_fp32": progress.dense_fp32_bytes_per_step,
            "bytes/dense_sent": progress.dense_bytes_per_step,
        }
        with writing(self._folder / name):
            writer = self._writers[name]
            for number, loss in enumerate(losses, step - len(losses) + 1):
                writer.add_scalar("train/loss", loss, number)
            for tag, value in figures.items():
                if value is not None:
                    writer.add_scalar(tag, value, step)

    def layers_moved(self, name: str, step: int, cuts: Mapping[str, tuple[int, ...]]) -> None:
        """Write the first layer of each stage but the first, in words."""
        with writing(self._folder / name):
            for stack, firsts in cuts.items():
                self._writers[name].add_text(f"dense/cuts of {stack}", str(firsts), step)

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        """Write an evaluation's metrics."""
        with writing(self._folder / name):
            for metric, value in evaluation.metrics.items():
                self._writers[name].add_scalar(f"eval/{metric}", value, evaluation.step)

    def run_finished(self, result: RunResult) -> None:
        """Write the figures of the whole run, at its last step."""
        figures = {
            "speed/samples_per_s": result.samples_per_s,
            "sync/bytes_per_step": result.sync_bytes_per_step,
        }
        # Where nothing is encoded, nothing is counted.
        if result.rows_bytes_per_step:
            figures["bytes/rows_fp32"] = result.rows_fp32_bytes_per_step or 0.0
            figures["bytes/rows_sent"] = result.rows_bytes_per_step
        if result.sync_fp32_bytes_per_step != result.sync_bytes_per_step:
            figures["bytes/replicas_fp32"] = result.sync_fp32_bytes_per_step or 0.0
            figures["bytes/replicas_sent"] = result.sync_bytes_per_step
        with writing(self._folder / result.name):
            writer = self._writers.pop(result.name)
            for tag, value in figures.items():
                writer.add_scalar(tag, value, len(result.losses))
            writer.close()
