"""Records of what was trained: from the results of runs to a `TrainRecord`."""

from collections.abc import Mapping

from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.environment import environment
from torchrec_2dsp.programs.train.evaluation import Evaluation
from torchrec_2dsp.programs.train.record import (
    CurvePoint,
    EvaluationRecord,
    RunRecord,
    TrainRecord,
)
from torchrec_2dsp.programs.train.results import RunResult, StepsTrained, TrainResult


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
