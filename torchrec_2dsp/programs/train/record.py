"""`TrainRecord`: what `train` found, in a file, so that runs with other seeds can join it."""

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import ConfigDict

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.programs.config.json_file import JsonFile
from torchrec_2dsp.programs.config.sections import Section
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.meter import Measured
from torchrec_2dsp.programs.train.results import DenseProgress, RunResult, TrainResult

TRAIN_RECORD_FORMAT = 1


class CurvePoint(Section):
    """Some steps of a run."""

    step: int
    """The last of the steps, from 1."""

    ne: float
    """The normalized entropy of the steps, on batches before the model had learned from them."""


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


class TrainRecord(JsonFile):
    """All runs of one call."""

    what_it_is: ClassVar[str] = "what train --output writes"

    format: int = TRAIN_RECORD_FORMAT
    """The format of this file."""

    config: dict[str, Any]
    """The whole config, seeds included."""

    world_size: int
    """How many ranks trained."""

    planted_ne: float
    """The entropy of the held-out batches, as the model behind the labels predicts them."""

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
        return self.config["data"]["seed"], self.config["model"]["seed"]

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


class Recorder:
    """A watcher that keeps the curves for a `TrainRecord`."""

    def __init__(self) -> None:
        self._curves: dict[str, list[CurvePoint]] = {}

    def run_planned(self, name: str, plan: Plan2D, config: TrainConfig) -> None:
        """Begin the curve of a run."""
        self._curves[name] = []

    def steps_trained(
        self, name: str, last_step: int, measured: Measured, dense: DenseProgress | None
    ) -> None:
        """Add a point to the curve of a run."""
        self._curves[name].append(CurvePoint(step=last_step, ne=measured.ne))

    def run_finished(self, result: RunResult) -> None:
        """Nothing to do: its figures are in the result."""

    def record(self, config: TrainConfig, result: TrainResult) -> TrainRecord:
        """Everything, once all runs are over."""
        return TrainRecord(
            config=config.model_dump(mode="json"),
            world_size=result.runs[0].plan.mesh.world_size,
            planted_ne=result.planted.ne,
            runs=tuple(
                RunRecord(
                    name=run.name,
                    mesh=str(run.plan.mesh),
                    sync=str(run.plan.sync),
                    num_groups=run.plan.mesh.num_groups,
                    curve=tuple(self._curves[run.name]),
                    eval_loss=run.evaluated.loss,
                    eval_ne=run.evaluated.ne,
                    samples_per_s=run.samples_per_s,
                    sync_bytes_per_step=run.sync_bytes_per_step,
                )
                for run in result.runs
            ),
        )
