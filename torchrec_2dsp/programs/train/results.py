"""The results of a run: while it trains, and at its end."""

from dataclasses import dataclass
from typing import Protocol

from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.meter import Measured


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

    evaluated: Measured
    """The figures of the held-out batches."""

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


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The results of all runs of a config."""

    runs: tuple[RunResult, ...]
    """The runs, in the order of the config."""

    planted: Measured
    """The figures of the held-out batches as the model behind the labels predicts them."""

    @property
    def reference(self) -> RunResult | None:
        """The first run with one group, which has no replicas that could differ."""
        return next((run for run in self.runs if run.plan.mesh.num_groups == 1), None)


def largest_loss_gap(run: RunResult, reference: RunResult) -> float:
    """How far two runs were apart in the step in which they were farthest apart."""
    pairs = zip(run.losses, reference.losses, strict=True)
    return max(abs(loss - theirs) for loss, theirs in pairs)


class TrainWatcher(Protocol):
    """Someone who is told what happens on this rank."""

    def run_planned(self, name: str, plan: Plan2D, config: TrainConfig) -> None:
        """A run is about to start."""
        ...

    def steps_trained(
        self, name: str, last_step: int, measured: Measured, dense: DenseProgress | None
    ) -> None:
        """Some steps were trained, up to and with ``last_step`` (from 1).

        Args:
            name: the run's.
            last_step: how many steps of it are over.
            measured: the figures of the steps, on all ranks.
            dense: what became of dense gradients, if they are thresholded.
        """
        ...

    def run_finished(self, result: RunResult) -> None:
        """A run has been evaluated."""
        ...
