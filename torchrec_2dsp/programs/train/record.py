"""`TrainRecord`: what `train` found, in a file, so that runs with other seeds can join it."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import ConfigDict, Field

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.json_file import JsonFile
from torchrec_2dsp.programs.config.sections import Section
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.environment import environment
from torchrec_2dsp.programs.train.results import RunResult, StepsTrained, TrainResult

TRAIN_RECORD_FORMAT = 2


class CurvePoint(Section):
    """Some steps of a run."""

    # A run that diverges has figures for which JSON has no numbers.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    step: int
    """The last of the steps, from 1."""

    ne: float
    """The normalized entropy of the steps, on batches before the model had learned from them."""

    loss: float | None = None
    """The mean loss of the steps; `None` in files of format 1, as the others."""

    table_lr: float | None = None
    """The learning rate of the tables in the last of the steps."""

    dense_lr: float | None = None
    """The learning rate of everything else in the last of the steps."""

    samples_per_s: float | None = None
    """Samples of all ranks per second."""

    memory_bytes: int | None = None
    """The most memory that a rank has used so far."""


class EvaluationRecord(Section):
    """The figures of an evaluation."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    step: int
    """How many steps were trained before."""

    metrics: dict[str, float]
    """The metrics by name: loss, ne, auc and calibration."""


class RunRecord(Section):
    """The figures of one run."""

    # A run that diverges has figures for which JSON has no numbers.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    name: str
    """The run's name in the config."""

    mesh: str
    """The run's mesh, in words."""

    sync: str
    """How replicas were kept equal, in words."""

    num_groups: int
    """How many copies of the tables there were."""

    curve: tuple[CurvePoint, ...]
    """The curve of the run while it trained."""

    eval_loss: float
    """The mean loss of the held-out batches."""

    eval_ne: float
    """The normalized entropy of the held-out batches."""

    samples_per_s: float
    """Samples of all ranks per second."""

    sync_bytes_per_step: float
    """Bytes that a rank sent to its replica peers per step."""

    evaluations: tuple[EvaluationRecord, ...] = ()
    """All evaluations, the one at the end included."""

    ending: str = ""
    """Why the run ended, in words."""

    plan: str = ""
    """The plan, in words."""

    explanation: str = ""
    """Why the plan is as it is, in words, if it was searched by cost."""

    memory_bytes: tuple[int, ...] = ()
    """The most memory that each rank has used."""

    resumed_from: str = ""
    """The checkpoint that the run went on from, in its last life."""


class TrainRecord(JsonFile):
    """All runs of one call."""

    what_it_is: ClassVar[str] = "what train --output writes"

    format: int = TRAIN_RECORD_FORMAT
    """The format of this file."""

    config: dict[str, Any]
    """The whole config, seeds included."""

    world_size: int
    """How many ranks trained."""

    planted_ne: float | None = None
    """The entropy of the held-out batches, as the model behind the labels predicts them; `None` for
    data without such a model."""

    environment: dict[str, str] = Field(default_factory=dict)
    """The versions of the packages that matter, and what computed."""

    runs: tuple[RunRecord, ...]
    """The runs, in the order of the config."""

    @property
    def num_samples(self) -> int:
        """How many samples each run was trained on."""
        loop = self.config["loop"]
        return loop["steps"] * loop["global_batch_size"]

    @property
    def seeds(self) -> tuple[int, int]:
        """The seeds of the data and of the initial weights."""
        return self.config["data"].get("seed", 0), self.config["model"].get("seed", 0)

    def only(self, names: Sequence[str]) -> "TrainRecord":
        """The record with these runs alone; all of them for no name.

        Raises:
            ConfigError: it has no such run.
        """
        if not names:
            return self
        have = [run.name for run in self.runs]
        if unknown := [name for name in names if name not in have]:
            raise ConfigError(f"there is no run {unknown[0]!r}; the records have {', '.join(have)}")
        runs = {name: run for name, run in self.config["runs"].items() if name in names}
        return self.model_copy(
            update={
                "config": {**self.config, "runs": runs},
                "runs": tuple(run for run in self.runs if run.name in names),
            }
        )

    def find(self, name: str) -> RunRecord | None:
        """The run of this name."""
        return next((run for run in self.runs if run.name == name), None)


def joined(records: Sequence[TrainRecord]) -> list[TrainRecord]:
    """One record for each pair of seeds: other runs of the same config and seeds are put together.

    So a variant can be trained later, with `train --only`, and join a study.

    Raises:
        ConfigError: two records of the same seeds differ in more than their runs, or have a run
            in common.
    """
    by_seeds: dict[tuple[int, int], TrainRecord] = {}
    for record in records:
        first = by_seeds.setdefault(record.seeds, record)
        if first is record:
            continue
        if common := {run.name for run in first.runs} & {run.name for run in record.runs}:
            raise ConfigError(
                f"two records with the seeds {record.seeds} have the run {min(common)!r}; give one"
            )
        if _without_runs(first) != _without_runs(record):
            raise ConfigError(
                f"two records with the seeds {record.seeds} differ in more than their runs; "
                "compare runs of one config"
            )
        runs = {**first.config["runs"], **record.config["runs"]}
        by_seeds[record.seeds] = first.model_copy(
            update={"config": {**first.config, "runs": runs}, "runs": first.runs + record.runs}
        )
    return list(by_seeds.values())


def _without_runs(record: TrainRecord) -> tuple[dict[str, Any], int]:
    return {name: part for name, part in record.config.items() if name != "runs"}, record.world_size


def run_record(result: RunResult, resumed_from: str = "") -> RunRecord:
    """The figures of a run that is over."""
    last = result.steps_trained[-1]
    return RunRecord(
        name=result.name,
        mesh=str(result.plan.mesh),
        sync=str(result.plan.sync),
        num_groups=result.plan.mesh.num_groups,
        curve=tuple(map(_point, result.steps_trained)),
        eval_loss=result.evaluated.metrics["loss"],
        eval_ne=result.evaluated.ne,
        samples_per_s=result.samples_per_s,
        sync_bytes_per_step=result.sync_bytes_per_step,
        evaluations=tuple(
            EvaluationRecord(step=evaluation.step, metrics=evaluation.metrics)
            for evaluation in result.evaluations
        ),
        ending=result.ending.value,
        plan=str(result.plan),
        explanation=result.explanation,
        memory_bytes=last.window.memory_bytes,
        resumed_from=resumed_from,
    )


def _point(progress: StepsTrained) -> CurvePoint:
    return CurvePoint(
        step=progress.step,
        ne=progress.measured.ne,
        loss=progress.measured.loss,
        table_lr=progress.table_lr,
        dense_lr=progress.dense_lr,
        samples_per_s=progress.samples_per_s,
        memory_bytes=max(progress.window.memory_bytes),
    )


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
