"""The results of a run: while it trains, and at its end."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.dense_progress import DenseProgress
from torchrec_2dsp.programs.train.evaluation import Evaluation
from torchrec_2dsp.programs.train.meter import Measured, Window
from torchrec_2dsp.programs.train.parts import PlannedRun
from torchrec_2dsp.samples.report import BalanceReport


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
