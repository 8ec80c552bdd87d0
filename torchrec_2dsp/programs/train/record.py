"""A run's figures: while it trains one JSON line after another, at its end one record.

- `StepsTrained`, `Evaluation`: the figures of some steps, and of an evaluation. Watchers,
  checkpoints, ``progress.jsonl`` and ``record.json`` all have these.
- `ProgressFile`: ``progress.jsonl``, the figures of a run that isn't over.
- `RunRecord`, `TrainRecord`: ``record.json``, the figures of runs that are over.

This module needs neither torch nor TorchRec, so that a report is quick.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.section import JsonFile, Section, writing

LESS_IS_BETTER = ("loss", "ne")
"""Metrics of which less is better: the log loss and the normalized entropy. Of others, such as the
area under the ROC curve, more is better."""

TRAIN_RECORD_FORMAT = 4
"""The format of the records that this version writes; it reads older ones, too."""

PROGRESS_FILE = "progress.jsonl"
"""The progress file's name, in the folder of a run."""


class _Figures(Section):
    # A run that diverges has figures for which JSON has no numbers.
    model_config = ConfigDict(ser_json_inf_nan="strings")


class StepsTrained(_Figures):
    """The figures of some steps, which all ranks have trained."""

    step: int
    """The last of the steps, from 1."""

    losses: tuple[float, ...] = Field(default=(), exclude=True)
    """The mean loss of each step's global batch; no file has it."""

    loss: float | None = None
    """The mean loss of the steps; `None` in files of format 1, as the other figures but `ne`."""

    ne: float
    """The normalized entropy of the steps, on batches before the model had learned from them."""

    click_rate: float | None = None
    """The share of positive labels; `None` before format 4."""

    seconds: float | None = None
    """The steps' time, averaged over the ranks; `None` before format 4."""

    table_lr: float | None = None
    """The learning rate of the tables in the last of the steps."""

    dense_lr: float | None = None
    """The learning rate of everything else in the last of the steps."""

    samples_per_s: float | None = None
    """Samples of all ranks per second."""

    memory_bytes: Annotated[
        tuple[int, ...], BeforeValidator(lambda most: (most,) if isinstance(most, int) else most)
    ] = ()
    """The most memory that each rank has used so far; before format 4 the largest alone."""

    dense_density: float | None = None
    """The share of dense gradients' elements that rank 0 chose, 0 if all steps were dense; `None`
    unless gradients are thresholded, as the next three."""

    dense_bytes_per_step: float | None = None
    """Bytes of dense gradients that rank 0 sent to others."""

    dense_fp32_bytes_per_step: float | None = None
    """Bytes like `dense_bytes_per_step`, had all elements been added up in fp32 by a ring."""

    dense_residual_norm: float | None = None
    """The Euclidean norm of the gradients that rank 0 hadn't sent yet after the last step."""

    @classmethod
    def of_losses(cls, losses: Sequence[float], click_rate: float, **figures: Any) -> Self:
        """Build the figures of steps with these losses and this share of positive labels."""
        loss = sum(losses) / len(losses)
        ne = normalized_entropy(loss, click_rate)
        return cls(losses=tuple(losses), loss=loss, ne=ne, click_rate=click_rate, **figures)


class Evaluation(_Figures):
    """The figures of an evaluation on held-out batches."""

    step: int
    """How many steps were trained before."""

    losses: tuple[float, ...] = Field(default=(), exclude=True)
    """The mean loss of each held-out batch, over all ranks; no file has it."""

    click_rate: float | None = Field(default=None, exclude=True)
    """The share of positive labels; no file has it."""

    metrics: dict[str, float]
    """The metrics by name: loss, ne, auc and calibration of clicks; loss, recall and NDCG of
    rankings."""


def normalized_entropy(loss: float, click_rate: float) -> float:
    """Divide a log loss by that of always predicting ``click_rate``.

    1 is as bad as knowing nothing; `nan` if all labels are equal.

    Reference: He et al., Practical lessons from predicting clicks on ads at Facebook, 2014.

    Example:
        >>> import math
        >>> from torchrec_2dsp.programs.train.record import normalized_entropy
        >>> normalized_entropy(math.log(2), click_rate=0.5)
        1.0
    """
    if not 0.0 < click_rate < 1.0:
        return math.nan
    rate = click_rate
    return loss / -(rate * math.log(rate) + (1.0 - rate) * math.log(1.0 - rate))


def best_of(evaluations: Sequence[Evaluation], metric: str) -> Evaluation | None:
    """Return the first evaluation that no other one beats; none if no value is finite."""
    sign = 1 if metric in LESS_IS_BETTER else -1
    finite = [
        evaluation
        for evaluation in evaluations
        if math.isfinite(evaluation.metrics.get(metric, math.nan))
    ]
    return min(finite, key=lambda evaluation: sign * evaluation.metrics[metric], default=None)


def num_since_best(evaluations: Sequence[Evaluation], metric: str) -> int:
    """Count the evaluations after the best one; all of them if none is finite."""
    best = best_of(evaluations, metric)
    return len(evaluations) - (0 if best is None else 1 + evaluations.index(best))


class RunRecord(_Figures):
    """The figures of one run."""

    name: str
    """The run's name in the config."""

    mesh: str
    """The run's mesh, in words."""

    sync: str
    """How replicas were kept equal, in words."""

    num_groups: int
    """How many copies of the tables there were."""

    curve: tuple[StepsTrained, ...]
    """All steps, some at a time, also those before a resume."""

    eval_loss: float
    """The mean loss of the held-out batches, at the end."""

    eval_ne: float
    """The normalized entropy of the held-out batches, at the end."""

    samples_per_s: float
    """Samples of all ranks trained per second, evaluation and set-up left out."""

    sync_bytes_per_step: float
    """Bytes that a rank sent to its replica peers per step, averaged over the ranks."""

    sync_fp32_bytes_per_step: float | None = None
    """Bytes like `sync_bytes_per_step`, had nothing been encoded; `None` in files of format 1 and
    2, as the next two."""

    rows_bytes_per_step: float | None = None
    """Bytes of the rows, bags and gradients that a rank encoded per step, averaged over the ranks;
    0 without a row transport."""

    rows_fp32_bytes_per_step: float | None = None
    """Bytes like `rows_bytes_per_step`, before they were encoded."""

    evaluations: tuple[Evaluation, ...] = ()
    """All evaluations, the one at the end included."""

    ending: str = ""
    """Why the run ended, in words."""

    plan: str = ""
    """The plan, in words."""

    explanation: str = ""
    """Why the plan was chosen, in words, if it was searched by cost."""

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
    """The versions of the packages that matter, and the processor."""

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
        """Return the record with these runs alone; with all of them for no name.

        Raises:
            ConfigError: it has no such run.
        """
        if not names:
            return self
        have = [run.name for run in self.runs]
        if unknown := [name for name in names if name not in have]:
            raise ConfigError(f"there is no run {unknown[0]!r}; the records have {', '.join(have)}")
        sections = {name: run for name, run in self.config["runs"].items() if name in names}
        return self._with_runs(sections, tuple(run for run in self.runs if run.name in names))

    def find(self, name: str) -> RunRecord | None:
        """Return the run of this name, if there is one."""
        return next((run for run in self.runs if run.name == name), None)

    def joined(self, other: "TrainRecord") -> "TrainRecord":
        """Return the runs of both records, which have the same config and seeds.

        Raises:
            ConfigError: they differ in more than their runs, or have a run in common.
        """
        if common := {run.name for run in self.runs} & {run.name for run in other.runs}:
            raise ConfigError(
                f"two records with the seeds {self.seeds} have the run {min(common)!r}; give one"
            )
        if self._without_runs() != other._without_runs():
            raise ConfigError(
                f"two records with the seeds {self.seeds} differ in more than their runs; "
                "compare runs of one config"
            )
        sections = {**self.config["runs"], **other.config["runs"]}
        return self._with_runs(sections, self.runs + other.runs)

    def _with_runs(self, sections: dict[str, Any], runs: tuple[RunRecord, ...]) -> "TrainRecord":
        config = {**self.config, "runs": sections}
        return self.model_copy(update={"config": config, "runs": runs})

    def _without_runs(self) -> tuple[dict[str, Any], int]:
        config = {name: part for name, part in self.config.items() if name != "runs"}
        return config, self.world_size


def joined(records: Sequence[TrainRecord]) -> list[TrainRecord]:
    """Return one record for each pair of seeds, so that a variant can be trained later and join.

    Raises:
        ConfigError: two records of the same seeds differ in more than their runs, or have a run
            in common.
    """
    by_seeds: dict[tuple[int, int], TrainRecord] = {}
    for record in records:
        first = by_seeds.get(record.seeds)
        by_seeds[record.seeds] = record if first is None else first.joined(record)
    return list(by_seeds.values())


class ProgressLine(Section):
    """A line of a progress file: one of its fields says something."""

    point: StepsTrained | None = None
    """Some steps that were trained."""

    evaluation: Evaluation | None = None
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
        """Take over an earlier life's lines up to ``step``."""
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
    """Read the progress in a run's folder; no lines without a file.

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
