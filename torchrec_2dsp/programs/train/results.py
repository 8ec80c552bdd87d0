"""The results of a run: while it trains, and at its end."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import tomli_w

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan import serialize
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.programs.config.config_file import with_absolute_paths
from torchrec_2dsp.programs.config.section import write_whole, writing
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.metrics import Evaluation, Measured, Window
from torchrec_2dsp.programs.train.record import (
    CurvePoint,
    EvaluationRecord,
    ProgressFile,
    ProgressLine,
    RunRecord,
    TrainRecord,
)
from torchrec_2dsp.programs.train.sharded import PlannedRun
from torchrec_2dsp.programs.train.steps import DenseProgress
from torchrec_2dsp.samples.dealer import BalanceReport


@dataclass(frozen=True, kw_only=True)
class StepsTrained:
    """Some steps of a run, which all ranks have trained."""

    step: int
    """How many steps of the run are over."""

    window: Window
    """The losses of the steps, the time that they took and the memory of the ranks."""

    table_lr: float
    """The learning rate of the tables in the last of the steps."""

    dense_lr: float
    """The learning rate of everything else in the last of the steps."""

    samples_per_s: float
    """Samples of all ranks per second, over the steps."""

    dense: DenseProgress | None = None
    """What became of dense gradients, if they are thresholded."""

    @property
    def measured(self) -> Measured:
        """The losses and the labels of the steps."""
        return self.window.measured


class Ending(StrEnum):
    """Why a run has ended."""

    STEPS = "all steps are trained"
    """It has trained as many steps as the config says."""

    PATIENCE = "evaluations don't get better"
    """So many evaluations as the config's patience were no better than the best."""

    DATA = "there are no more batches"
    """The data has ended before."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of one run."""

    name: str
    """The run's name in the config."""

    plan: Plan2D
    """The plan that the run trained by; mesh and sync config are part of it."""

    losses: tuple[float, ...]
    """The train loss of each step's global batch."""

    train_loss: float
    """The mean of the last losses (`LoopConfig.final_steps`)."""

    evaluated: Evaluation
    """The evaluation at the end."""

    evaluations: tuple[Evaluation, ...]
    """All evaluations, in their order; the last one is that of the end."""

    steps_trained: tuple[StepsTrained, ...]
    """The curve of the run: all its steps, some at a time, also those before a resume."""

    ending: Ending
    """Why the run ended."""

    explanation: str
    """Why the plan is as it is, in words; empty on other ranks than 0, and without a search by
    cost."""

    samples_per_s: float
    """Samples of all ranks trained per second, evaluation and set-up left out."""

    sync_bytes_per_step: float
    """Bytes that a rank sent to its replica peers per step, averaged over the ranks."""

    sync_fp32_bytes_per_step: float
    """Bytes like `sync_bytes_per_step`, had all numbers travelled as they are."""

    rows_bytes_per_step: float
    """Bytes of the rows, bags and gradients that a rank encoded per step, averaged over the ranks;
    0 without a row transport."""

    rows_fp32_bytes_per_step: float
    """Bytes like `rows_bytes_per_step`, before they were encoded."""

    synced_rows_per_step: float
    """Rows that a rank's syncs wrote per step, averaged over the ranks."""

    balance: BalanceReport | None = None
    """How even the work of the ranks was, since the run was started last, batches that were taken
    ahead included; `None` unless samples are dealt."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The results of all runs of a config."""

    runs: tuple[RunResult, ...]
    """The runs, in the order of the config."""

    metric: str
    """The metric by which evaluations are compared."""

    planted: Measured | None
    """The figures of the held-out batches as the model behind the labels predicts them; `None` for
    data without such a model."""

    @property
    def reference(self) -> RunResult | None:
        """The first run with one group, which has no replicas that could differ."""
        return next((run for run in self.runs if run.plan.mesh.num_groups == 1), None)


def largest_loss_gap(run: RunResult, reference: RunResult) -> float:
    """How far two runs were apart in the step in which they were farthest apart, as long as both
    trained."""
    pairs = zip(run.losses, reference.losses, strict=False)
    return max(abs(loss - theirs) for loss, theirs in pairs)


class TrainWatcher(Protocol):
    """Someone who is told what happens on this rank."""

    def data_opened(self, text: str) -> None:
        """The files of a log were opened; ``text`` says what is trained on, and what is held out.
        Other kinds of data have no files."""
        ...

    def run_planned(self, name: str, planned: PlannedRun, config: TrainConfig) -> None:
        """A run is about to start."""
        ...

    def run_resumed(self, name: str, path: Path, step: int) -> None:
        """A run goes on from a checkpoint, after ``step`` steps."""
        ...

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        """Some steps of a run were trained."""
        ...

    def layers_moved(self, name: str, step: int, cuts: Mapping[str, tuple[int, ...]]) -> None:
        """Pipelined layers were cut anew after ``step`` steps; ``cuts`` has the first layer of each
        stage but the first, by the name of the stack."""
        ...

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        """A run was evaluated; ``is_best`` if it was never better before."""
        ...

    def run_finished(self, result: RunResult) -> None:
        """A run is over."""
        ...

    def all_finished(self, result: TrainResult) -> None:
        """All runs are over."""
        ...


class QuietWatcher:
    """A watcher that does nothing, for others to build on."""

    def data_opened(self, text: str) -> None:
        """Do nothing."""

    def run_planned(self, name: str, planned: PlannedRun, config: TrainConfig) -> None:
        """Do nothing."""

    def run_resumed(self, name: str, path: Path, step: int) -> None:
        """Do nothing."""

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        """Do nothing."""

    def layers_moved(self, name: str, step: int, cuts: Mapping[str, tuple[int, ...]]) -> None:
        """Do nothing."""

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        """Do nothing."""

    def run_finished(self, result: RunResult) -> None:
        """Do nothing."""

    def all_finished(self, result: TrainResult) -> None:
        """Do nothing."""


def run_record(result: RunResult, resumed_from: str = "") -> RunRecord:
    """The figures of a run that is over."""
    last, balance = result.steps_trained[-1], result.balance
    return RunRecord(
        name=result.name,
        mesh=str(result.plan.mesh),
        sync=str(result.plan.sync),
        num_groups=result.plan.mesh.num_groups,
        curve=tuple(map(curve_point, result.steps_trained)),
        eval_loss=result.evaluated.metrics["loss"],
        eval_ne=result.evaluated.ne,
        samples_per_s=result.samples_per_s,
        sync_bytes_per_step=result.sync_bytes_per_step,
        sync_fp32_bytes_per_step=result.sync_fp32_bytes_per_step,
        rows_bytes_per_step=result.rows_bytes_per_step,
        rows_fp32_bytes_per_step=result.rows_fp32_bytes_per_step,
        evaluations=tuple(map(evaluation_record, result.evaluations)),
        ending=result.ending.value,
        plan=str(result.plan),
        explanation=result.explanation,
        memory_bytes=last.window.memory_bytes,
        resumed_from=resumed_from,
        imbalance_before=None if balance is None else balance.imbalance_before,
        imbalance_after=None if balance is None else balance.imbalance_after,
    )


def curve_point(progress: StepsTrained) -> CurvePoint:
    """The figures of some steps."""
    dense = progress.dense
    return CurvePoint(
        step=progress.step,
        ne=progress.measured.ne,
        loss=progress.measured.loss,
        table_lr=progress.table_lr,
        dense_lr=progress.dense_lr,
        samples_per_s=progress.samples_per_s,
        memory_bytes=max(progress.window.memory_bytes),
        dense_bytes_per_step=None if dense is None else dense.bytes_per_step,
        dense_fp32_bytes_per_step=None if dense is None else dense.fp32_bytes_per_step,
    )


def evaluation_record(evaluation: Evaluation) -> EvaluationRecord:
    """The figures of an evaluation."""
    return EvaluationRecord(step=evaluation.step, metrics=evaluation.metrics)


def train_record(
    config: TrainConfig, result: TrainResult, resumed_from: Mapping[str, str] | None = None
) -> TrainRecord:
    """The record of a program whose runs are over.

    Args:
        config: the config of the program.
        result: what came out.
        resumed_from: the checkpoints that runs went on from, by the names of the runs.
    """
    resumed = resumed_from or {}
    return TrainRecord(
        config=config.model_dump(mode="json"),
        world_size=result.runs[0].plan.mesh.world_size,
        planted_ne=None if result.planted is None else result.planted.ne,
        environment=environment(),
        runs=tuple(run_record(run, resumed.get(run.name, "")) for run in result.runs),
    )


_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec-2dsp", "numpy")


def environment() -> dict[str, str]:
    """The versions of Python and of the packages that matter, and the kind of the processor.

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


class RunFolder(QuietWatcher):
    """Writes, on one rank, the config, each run's plan, and a record that grows run by run.

    - ``config.toml``: the config as it was resolved, with absolute paths;
    - ``record.json``: a `TrainRecord` of the runs that are over;
    - ``<run>/plan.json`` and, after a search by cost, ``<run>/explanation.txt``;
    - ``<run>/progress.jsonl``: the curve of a run, also of one that isn't over.
    """

    def __init__(self, folder: str | Path, config: TrainConfig) -> None:
        """
        Args:
            folder: it is made if it doesn't exist.
            config: the config of the program.

        Raises:
            ConfigError: the folder can't be written to.
        """
        self._folder, self._config = Path(folder), config
        self._results: list[RunResult] = []
        self._resumed_from: dict[str, str] = {}
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
        """Remember the checkpoint for the record, and take over the progress up to it."""
        self._resumed_from[name] = str(path)
        self._progress[name].resume(step)

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        """Add a point to the run's progress."""
        self._progress[name].add(ProgressLine(point=curve_point(progress)))

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        """Add the evaluation to the run's progress."""
        self._progress[name].add(ProgressLine(evaluation=evaluation_record(evaluation)))

    def run_finished(self, result: RunResult) -> None:
        """Write the record of the runs so far, so that a stop loses none of them."""
        self._results.append(result)
        runs, metric = tuple(self._results), self._config.metric
        self.all_finished(TrainResult(runs=runs, metric=metric, planted=None))
        self._progress[result.name].add(ProgressLine(is_over=True))

    def all_finished(self, result: TrainResult) -> None:
        """Write the record of all runs."""
        record = train_record(self._config, result, self._resumed_from)
        record.save(self._folder / "record.json")


def _without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree without the values for which TOML has no word."""
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if value is not None
    }


class TensorBoardWatcher(QuietWatcher):
    """Writes losses by step, evaluations, and a run's other figures at its end.

    TensorBoard writes in a thread of its own, so a disk that is full is noticed some calls later,
    at the latest when the run is over.
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
        """Let the curves of the new life cover what an earlier one wrote after ``step``."""
        with writing(self._folder / name):
            self._writers[name].close()
            self._writers[name] = self._make_writer(str(self._folder / name), purge_step=step + 1)

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        """The loss of every step; and of them all the entropy, the rates, the speed, the memory,
        and what thresholds did."""
        step, losses = progress.step, progress.measured.losses
        figures = {
            "train/ne": progress.measured.ne,
            "lr/tables": progress.table_lr,
            "lr/dense": progress.dense_lr,
            "speed/samples_per_s_now": progress.samples_per_s,
            "memory/largest_gb": max(progress.window.memory_bytes) / 1e9,
        }
        if (dense := progress.dense) is not None:
            figures |= {
                "dense/density": dense.density,
                "dense/residual_norm": dense.residual_norm,
                "bytes/dense_fp32": dense.fp32_bytes_per_step,
                "bytes/dense_sent": dense.bytes_per_step,
            }
        with writing(self._folder / name):
            writer = self._writers[name]
            for number, loss in enumerate(losses, step - len(losses) + 1):
                writer.add_scalar("train/loss", loss, number)
            for tag, value in figures.items():
                writer.add_scalar(tag, value, step)

    def layers_moved(self, name: str, step: int, cuts: Mapping[str, tuple[int, ...]]) -> None:
        """The first layer of each stage but the first, in words."""
        with writing(self._folder / name):
            for stack, firsts in cuts.items():
                self._writers[name].add_text(f"dense/cuts of {stack}", str(firsts), step)

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        """The metrics of an evaluation."""
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
            figures["bytes/rows_fp32"] = result.rows_fp32_bytes_per_step
            figures["bytes/rows_sent"] = result.rows_bytes_per_step
        if result.sync_fp32_bytes_per_step != result.sync_bytes_per_step:
            figures["bytes/replicas_fp32"] = result.sync_fp32_bytes_per_step
            figures["bytes/replicas_sent"] = result.sync_bytes_per_step
        with writing(self._folder / result.name):
            writer = self._writers.pop(result.name)
            for tag, value in figures.items():
                writer.add_scalar(tag, value, len(result.losses))
            writer.close()
