"""A run's result, and the watchers that show and write it.

```text
program --run_planned, steps_trained, evaluated, run_finished, ...--> TrainWatcher, on rank 0
            RunFolder           config.toml, plan.json, progress.jsonl, record.json
            TensorBoardWatcher  scalars
            the command line's display
```
"""

import platform
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ConfigDict, Field

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.parallel.checkpoint.address import Place
from torchrec_2dsp.plan import serialize
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.programs.config.config_file import make_config, with_absolute_paths
from torchrec_2dsp.programs.config.section import Section, reading, write_whole, writing
from torchrec_2dsp.programs.launch import recorded_versions
from torchrec_2dsp.programs.traces import RankSplit
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.record import (
    Evaluation,
    ProgressFile,
    ProgressLine,
    RunRecord,
    StepsTrained,
    TrainRecord,
    read_progress,
)
from torchrec_2dsp.programs.train.sharded import PlannedRun


class Ending(StrEnum):
    """The reason why a run ended."""

    STEPS = "all steps are trained"
    """All the config's steps are trained."""

    PATIENCE = "evaluations don't get better"
    """The last `patience` evaluations brought no improvement."""

    DATA = "there are no more batches"
    """The data ended first."""


class RunResult(RunRecord):
    """One run's result: its record, and figures that are never written to files."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    plan2d: Plan2D = Field(exclude=True)
    """The plan that the run trained by, mesh and sync config included."""

    losses: tuple[float, ...] = Field(exclude=True)
    """Each step's train loss over the global batch."""

    train_loss: float = Field(exclude=True)
    """The mean of the last losses (`LoopConfig.final_steps`)."""

    @property
    def evaluated(self) -> Evaluation:
        """The last evaluation."""
        return self.evaluations[-1]


class TrainResult(Section):
    """The results for all runs in a config."""

    runs: tuple[RunResult, ...]
    """The runs, in config order."""

    metric: str
    """The metric that compares evaluations."""

    planted_ne: float | None = None
    """The held-out batches' entropy under the model that drew the labels; `None` for data without
    such a model."""

    @property
    def reference(self) -> RunResult | None:
        """The first run with one group, which has no replicas that could differ."""
        return next((run for run in self.runs if run.num_groups == 1), None)

    def record(self, config: TrainConfig) -> TrainRecord:
        """Return these runs' record."""
        return TrainRecord(
            config=config.model_dump(mode="json"),
            world_size=self.runs[0].plan2d.mesh.world_size,
            planted_ne=self.planted_ne,
            environment=environment(),
            runs=self.runs,
        )


def largest_loss_gap(run: RunResult, reference: RunResult) -> float:
    """Return the largest loss difference over the steps that both runs trained."""
    pairs = zip(run.losses, reference.losses, strict=False)
    return max(abs(loss - theirs) for loss, theirs in pairs)


def environment() -> dict[str, str]:
    """Return Python's and the main packages' versions, and the processor."""
    return {**recorded_versions(), "processor": platform.machine()}


class TrainWatcher:
    """An observer of this rank's progress that does nothing; subclasses override its methods."""

    def data_opened(self, text: str) -> None:
        """Handle an opened log; ``text`` names the training and the held-out rows."""

    def run_planned(self, name: str, planned: PlannedRun, config: TrainConfig) -> None:
        """Handle a run's plan, just before it starts."""

    def run_resumed(self, name: str, path: Place, step: int) -> None:
        """Handle a resume from a checkpoint, after ``step`` steps."""

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        """Handle trained steps."""

    def steps_traced(self, name: str, splits: tuple[RankSplit, ...]) -> None:
        """Handle the phases of each rank's traced steps."""

    def layers_moved(self, name: str, step: int, cuts: Mapping[str, tuple[int, ...]]) -> None:
        """Handle moved pipeline layers after ``step`` steps.

        ``cuts`` has each stage's first layer, except the first stage's, by stack name.
        """

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        """Handle an evaluation; ``is_best`` if it beats all earlier ones."""

    def run_finished(self, result: RunResult) -> None:
        """Handle a run's end."""

    def all_finished(self, result: TrainResult) -> None:
        """Handle the end of all runs."""


_TRAINED = ("model", "optimizer", "loop")
"""Sections that distinguish records' configs, and that name no files to read."""


def _content_of(config: TrainConfig) -> dict[str, Any]:
    """Return the content of a config's file."""
    return tomllib.loads(tomli_w.dumps(with_absolute_paths(config)))


def _content_now(earlier: dict[str, Any]) -> dict[str, Any]:
    """Return an earlier config as this version would write it, if it can read it."""
    try:
        return _content_of(make_config(TrainConfig, earlier))
    except ConfigError:
        return earlier


class RunFolder(TrainWatcher):
    """Writes, on one rank, the config, each run's plan, and a record that grows run by run.

    - ``config.toml``: the resolved config, with absolute paths; a run with another config's
      files is added once it begins;
    - ``record.json``: a `TrainRecord` with the finished runs;
    - ``<run>/plan.json`` and, after a search by cost, ``<run>/explanation.txt``;
    - ``<run>/progress.jsonl``: a run's curve and traced steps, also while it trains.

    Runs of one config that are trained one by one (``--only``) share these files.
    """

    def __init__(self, folder: str | Path, config: TrainConfig) -> None:
        """Create the folder if needed; the first run that is planned writes the config.

        Raises:
            ConfigError: the folder can't be written to, or another config has other runs there.
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
        self._content = _content_of(config)
        self._older: set[str] = set()
        self._others = self._take_others(self._content)

    def _take_others(self, content: dict[str, Any]) -> TrainRecord | None:
        """Add the folder's other runs that wrote something to a config; return their record."""
        path, record = self._folder / "config.toml", self._folder / "record.json"
        if not path.exists():
            return None
        with reading(path, "a config"):
            earlier = _content_now(tomllib.loads(path.read_text()))
        runs, rest = earlier.pop("runs", {}), {k: v for k, v in content.items() if k != "runs"}
        progress = {
            name: lines
            for name in runs
            if name not in content["runs"] and (lines := read_progress(self._folder / name))
        }
        if progress and earlier != rest:
            raise self._error(next(iter(progress)))
        self._older = {
            name
            for name, section in content["runs"].items()
            if (earlier, runs.get(name)) != (rest, section) and (self._folder / name).is_dir()
        }
        content["runs"] = {**{name: runs[name] for name in progress}, **content["runs"]}
        over = {name for name, lines in progress.items() if lines[-1].is_over}
        if not over or not record.exists():
            return None
        whole = TrainRecord.load(record)
        finished = [run.name for run in whole.runs if run.name in over]
        recorded = _content_now(whole.config)
        # Earlier versions left the record of one config beside another.
        if finished and any(recorded.get(key) != content[key] for key in _TRAINED):
            raise self._error(finished[0])
        return whole.only(finished) if finished else None

    def _error(self, name: str) -> ConfigError:
        return ConfigError(
            f"output.folder={str(self._folder)!r} has the run {name!r}, which another config or "
            "number of ranks trained; use another folder, or delete this one"
        )

    def run_planned(self, name: str, planned: PlannedRun, config: TrainConfig) -> None:
        """Write the config and the run's plan, and start its progress."""
        world_size = planned.plan.mesh.world_size
        if self._others and self._others.world_size != world_size:
            raise self._error(self._others.runs[0].name)
        self._older.discard(name)
        runs = {run: part for run, part in self._content["runs"].items() if run not in self._older}
        write_whole(self._folder / "config.toml", tomli_w.dumps({**self._content, "runs": runs}))
        folder = self._folder / name
        with writing(folder):
            folder.mkdir(exist_ok=True)
        self._progress[name] = ProgressFile(folder)
        with writing(folder / "plan.json"):
            serialize.save(planned.plan, folder / "plan.json")
        explanation = folder / "explanation.txt"
        if planned.explanation:
            write_whole(explanation, planned.explanation + "\n")
        else:
            with writing(explanation):
                explanation.unlink(missing_ok=True)

    def run_resumed(self, name: str, path: Place, step: int) -> None:
        """Keep the earlier progress up to the checkpoint."""
        self._progress[name].resume(step)

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        """Append the steps to the run's progress."""
        self._progress[name].add(ProgressLine(point=progress))

    def steps_traced(self, name: str, splits: tuple[RankSplit, ...]) -> None:
        """Append the traced steps to the run's progress."""
        self._progress[name].add(ProgressLine(traced=splits))

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        """Append the evaluation to the run's progress."""
        self._progress[name].add(ProgressLine(evaluation=evaluation))

    def run_finished(self, result: RunResult) -> None:
        """Write the record after each run, so that an interruption loses none."""
        self._results.append(result)
        self.all_finished(TrainResult(runs=tuple(self._results), metric=self._config.metric))
        self._progress[result.name].add(ProgressLine(is_over=True))

    def all_finished(self, result: TrainResult) -> None:
        """Write the record with all runs."""
        record, others = result.record(self._config), self._others
        if others is not None:
            runs = {**others.config["runs"], **record.config["runs"]}
            record = record.with_runs(runs, others.runs + record.runs)
        record.save(self._folder / "record.json")


class TensorBoardWatcher(TrainWatcher):
    """Writes losses by step, evaluations, and a run's final figures.

    TensorBoard writes in a separate thread, so a full disk is noticed a few calls later, at the
    latest when the run ends.
    """

    def __init__(self, folder: str | Path) -> None:
        """Prepare to write each run to ``folder/<name>``."""
        # An optional dependency.
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._make_writer = Path(folder), SummaryWriter
        self._writers: dict[str, SummaryWriter] = {}

    def run_planned(self, name: str, planned: PlannedRun, config: TrainConfig) -> None:
        """Start the run's folder with its plan and config as texts."""
        with writing(self._folder / name):
            writer = self._writers[name] = self._make_writer(str(self._folder / name))
            writer.add_text("plan", f"```\n{planned.plan}\n```")
            writer.add_text("config", f"```\n{config.model_dump_json(indent=1)}\n```")

    def run_resumed(self, name: str, path: Place, step: int) -> None:
        """Purge points that an earlier process wrote after ``step``."""
        with writing(self._folder / name):
            self._writers[name].close()
            folder = str(self._folder / name)
            self._writers[name] = self._make_writer(folder, purge_step=step + 1)

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        """Write every step's loss, and the other figures once for all steps."""
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
        """Write each later stage's first layer as text."""
        with writing(self._folder / name):
            for stack, firsts in cuts.items():
                self._writers[name].add_text(f"dense/cuts of {stack}", str(firsts), step)

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        """Write an evaluation's metrics."""
        with writing(self._folder / name):
            for metric, value in evaluation.metrics.items():
                self._writers[name].add_scalar(f"eval/{metric}", value, evaluation.step)

    def run_finished(self, result: RunResult) -> None:
        """Write the whole run's figures at its last step."""
        figures = {
            "speed/samples_per_s": result.samples_per_s,
            "sync/bytes_per_step": result.sync_bytes_per_step,
        }
        # Without encoding, nothing is counted.
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
