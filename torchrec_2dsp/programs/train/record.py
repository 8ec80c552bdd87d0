"""`TrainRecord`: what `train` found, in a file, so that runs with other seeds can join it.

This module needs neither torch nor TorchRec, so that a report reads records quickly;
`train.recording` makes them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, ValidationError

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.section import JsonFile, Section, writing

LESS_IS_BETTER = ("loss", "ne")
"""Metrics of which less is better: the log loss and the normalized entropy. Of others, such as the
area under the ROC curve, more is better."""

TRAIN_RECORD_FORMAT = 3
"""The format of the records that this version writes; it reads older ones, too."""


class CurvePoint(Section):
    """Some steps of a run."""

    # A run that diverges has figures for which JSON has no numbers.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    step: int
    """The last of the steps, from 1."""

    ne: float
    """The normalized entropy of the steps, on batches before the model had learned from them."""

    loss: float | None = None
    """The mean loss of the steps; `None` in files of format 1, as the next four."""

    table_lr: float | None = None
    """The learning rate of the tables in the last of the steps."""

    dense_lr: float | None = None
    """The learning rate of everything else in the last of the steps."""

    samples_per_s: float | None = None
    """Samples of all ranks per second."""

    memory_bytes: int | None = None
    """The most memory that a rank has used so far."""

    dense_bytes_per_step: float | None = None
    """Bytes of dense gradients that rank 0 sent to others; `None` unless they are thresholded, and
    before format 3."""

    dense_fp32_bytes_per_step: float | None = None
    """Bytes like `dense_bytes_per_step`, had all elements been added up in fp32 by a ring."""


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

    sync_fp32_bytes_per_step: float | None = None
    """Bytes like `sync_bytes_per_step`, had all numbers travelled as they are; `None` in files of
    format 1 and 2, as the next two."""

    rows_bytes_per_step: float | None = None
    """Bytes of the rows, bags and gradients that a rank encoded per step; 0 without a row
    transport."""

    rows_fp32_bytes_per_step: float | None = None
    """Bytes like `rows_bytes_per_step`, before they were encoded."""

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

    imbalance_before: float | None = None
    """How many times the mean the slowest rank would have taken with the samples that it reads, by
    their costs; `None` unless samples are dealt."""

    imbalance_after: float | None = None
    """How many times the mean the slowest rank took with the samples that it was dealt."""


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


PROGRESS_FILE = "progress.jsonl"
"""The name of the file, in the folder of a run."""


class ProgressLine(Section):
    """A line of the file: one of its fields says something."""

    point: CurvePoint | None = None
    """Some steps that were trained."""

    evaluation: EvaluationRecord | None = None
    """An evaluation."""

    is_over: bool = False
    """Whether the run has ended, so that the record has it."""

    def is_after(self, step: int) -> bool:
        """Whether a run that goes on after ``step`` steps will write this line again."""
        part = self.point or self.evaluation
        return part is None or part.step > step


class ProgressFile:
    """Adds lines to the progress of one run."""

    def __init__(self, folder: Path) -> None:
        """Begin the progress anew; an earlier life's lines are kept for `resume`."""
        self._path = folder / PROGRESS_FILE
        self._earlier = read_progress(folder)
        with writing(self._path):
            self._path.write_text("")

    def resume(self, step: int) -> None:
        """Take over what an earlier life of the run wrote up to ``step``."""
        for line in self._earlier:
            if not line.is_after(step):
                self.add(line)

    def add(self, line: ProgressLine) -> None:
        """Add a line.

        Raises:
            OutputError: it can't be written; `read_progress` passes over a line without an end.
        """
        with writing(self._path), self._path.open("a") as file:
            file.write(line.model_dump_json(exclude_defaults=True) + "\n")


def read_progress(folder: Path) -> tuple[ProgressLine, ...]:
    """The lines of a run's progress; none without a file.

    Args:
        folder: the folder of the run.

    Raises:
        ConfigError: the file can't be read, or is something else.
    """
    path = folder / PROGRESS_FILE
    if not path.exists():
        return ()
    try:
        # A line without an end is one that a killed run was about to write.
        *lines, _ = path.read_text().split("\n")
        return tuple(map(ProgressLine.model_validate_json, lines))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not the progress of a run: {error}") from error
