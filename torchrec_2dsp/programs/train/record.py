"""Keep a run's figures: JSON lines while it trains, one record at its end.

- `StepsTrained`, `Evaluation`: figures for a few steps, and for an evaluation. Watchers,
  checkpoints, ``progress.jsonl`` and ``record.json`` share them.
- `ProgressFile`: ``progress.jsonl``, for a run in progress.
- `RunRecord`, `TrainRecord`: ``record.json``, for finished runs.

This module needs neither torch nor TorchRec, so reports start quickly.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, Field

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.section import JsonFile, Section, flat, reading, writing
from torchrec_2dsp.programs.traces import RankSplit

LESS_IS_BETTER = ("loss", "ne")
"""Metrics for which less is better: log loss and normalized entropy. For others, such as AUC, more
is better."""

TRAIN_RECORD_FORMAT = 4
"""The record format that this version writes; older ones, which it reads, have fewer figures."""

_WITHOUT_EFFECT = (
    "checkpoint.",
    "data.prepared",
    "loop.report_every",
    "loop.tensorboard_dir",
    "loop.timeout_s",
    "output.",
)
"""The beginnings of keys that change no figure."""

PROGRESS_FILE = "progress.jsonl"
"""The progress file's name, in a run's folder."""


class _Figures(Section):
    # JSON has no numbers for the figures of a run that diverges.
    model_config = ConfigDict(ser_json_inf_nan="strings")


class StepsTrained(_Figures):
    """Figures for steps that all ranks have trained."""

    step: int
    """The last step, counted from 1."""

    losses: tuple[float, ...] = Field(default=(), exclude=True)
    """Each step's mean loss over the global batch; never written to files."""

    loss: float | None = None
    """The mean loss over the steps; `None` in format 1 files, like all figures but `ne`."""

    ne: float
    """The normalized entropy over the steps, on batches that the model hadn't seen yet."""

    click_rate: float | None = None
    """The positive labels' share; `None` before format 4."""

    seconds: float | None = None
    """The steps' time, averaged over the ranks; `None` before format 4."""

    table_lr: float | None = None
    """The tables' learning rate in the last step."""

    dense_lr: float | None = None
    """The learning rate for everything else in the last step."""

    samples_per_s: float | None = None
    """Samples per second, over all ranks."""

    memory_bytes: tuple[int, ...] = ()
    """Each rank's peak memory so far."""

    dense_density: float | None = None
    """The share of dense gradient elements that rank 0 sent, 0 if all steps were dense; `None`
    unless gradients are thresholded, like the next three."""

    dense_bytes_per_step: float | None = None
    """Dense gradient bytes that rank 0 sent to other ranks."""

    dense_fp32_bytes_per_step: float | None = None
    """The bytes that a ring all-reduce in fp32 would have sent instead."""

    dense_residual_norm: float | None = None
    """The Euclidean norm of the gradients that rank 0 hadn't sent yet after the last step."""

    @classmethod
    def of_losses(cls, losses: Sequence[float], click_rate: float, **figures: Any) -> Self:
        """Build the figures from the steps' losses and their share of positive labels."""
        loss = sum(losses) / len(losses)
        ne = normalized_entropy(loss, click_rate)
        return cls(losses=tuple(losses), loss=loss, ne=ne, click_rate=click_rate, **figures)


class Evaluation(_Figures):
    """Figures for an evaluation on held-out batches."""

    step: int
    """The steps trained before."""

    losses: tuple[float, ...] = Field(default=(), exclude=True)
    """Each held-out batch's mean loss, over all ranks; never written to files."""

    click_rate: float | None = Field(default=None, exclude=True)
    """The positive labels' share; never written to files."""

    metrics: dict[str, float]
    """The metrics by name: loss, ne, auc and calibration for clicks; loss, recall and NDCG for
    rankings."""


def normalized_entropy(loss: float, click_rate: float) -> float:
    """Divide a log loss by the loss when always predicting ``click_rate``.

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
    """Return the first evaluation that no other beats; none if no value is finite."""
    sign = 1 if metric in LESS_IS_BETTER else -1
    finite = [
        evaluation
        for evaluation in evaluations
        if math.isfinite(evaluation.metrics.get(metric, math.nan))
    ]
    return min(finite, key=lambda evaluation: sign * evaluation.metrics[metric], default=None)


def heading_of(metric: str) -> str:
    """Return a metric's name as tables show it."""
    return metric.upper() if metric in ("ne", "auc") else metric


def num_since_best(evaluations: Sequence[Evaluation], metric: str) -> int:
    """Count the evaluations after the best; all of them if none is finite."""
    best = best_of(evaluations, metric)
    return len(evaluations) - (0 if best is None else 1 + evaluations.index(best))


class RunRecord(_Figures):
    """One run's figures."""

    # Earlier records also say how evenly samples were dealt to ranks.
    model_config = ConfigDict(extra="ignore")

    name: str
    """The run's name in the config."""

    mesh: str
    """The run's mesh, in words."""

    sync: str
    """The replica sync, in words."""

    num_groups: int
    """Table replicas."""

    curve: tuple[StepsTrained, ...]
    """All steps, a few at a time, including those before a resume."""

    eval_loss: float
    """The mean loss on the held-out batches, at the end."""

    eval_ne: float
    """The normalized entropy on the held-out batches, at the end."""

    samples_per_s: float
    """Samples per second over all ranks, without evaluation and set-up."""

    sync_bytes_per_step: float
    """Bytes that a rank sent to its replica peers per step, averaged over the ranks."""

    sync_fp32_bytes_per_step: float | None = None
    """Those bytes without encoding; `None` in format 1 and 2 files, like the next two."""

    rows_bytes_per_step: float | None = None
    """Row, bag and gradient bytes that a rank encoded per step, averaged over the ranks; 0 without
    a row transport."""

    rows_fp32_bytes_per_step: float | None = None
    """Those bytes before encoding."""

    evaluations: tuple[Evaluation, ...] = ()
    """All evaluations, including the last."""

    ending: str = ""
    """The reason why the run ended, in words."""

    plan: str = ""
    """The plan, in words."""

    explanation: str = ""
    """The reason for the plan, in words, if it was searched by cost."""

    memory_bytes: tuple[int, ...] = ()
    """Each rank's peak memory."""

    resumed_from: str = ""
    """The checkpoint from which the run last resumed."""


class TrainRecord(JsonFile):
    """All runs in one call."""

    what_it_is: ClassVar[str] = "what train --output writes"

    format: int = Field(default=TRAIN_RECORD_FORMAT, ge=1, le=TRAIN_RECORD_FORMAT)
    """This file's format."""

    config: dict[str, Any]
    """The whole config, seeds included."""

    world_size: int
    """Ranks that trained."""

    planted_ne: float | None = None
    """The held-out batches' entropy under the model that drew the labels; `None` for data without
    such a model."""

    environment: dict[str, str] = Field(default_factory=dict)
    """The processor and the main packages' versions."""

    runs: tuple[RunRecord, ...]
    """The runs, in config order."""

    @property
    def seeds(self) -> tuple[int, int]:
        """The seeds for the data and the initial weights."""
        return self.config["data"].get("seed", 0), self.config["model"].get("seed", 0)

    def only(self, names: Sequence[str]) -> "TrainRecord":
        """Return the record with only these runs; with all of them if no name is given.

        Raises:
            ConfigError: it has no such run.
        """
        if not names:
            return self
        have = [run.name for run in self.runs]
        if unknown := [name for name in names if name not in have]:
            raise ConfigError(f"there is no run {unknown[0]!r}; the records have {', '.join(have)}")
        sections = {name: run for name, run in self.config["runs"].items() if name in names}
        return self.with_runs(sections, tuple(run for run in self.runs if run.name in names))

    def find(self, name: str) -> RunRecord | None:
        """Return the run with this name, if there is one."""
        return next((run for run in self.runs if run.name == name), None)

    def joined(self, other: "TrainRecord") -> "TrainRecord":
        """Merge two records with the same config and seeds, or raise `ConfigError`."""
        if common := {run.name for run in self.runs} & {run.name for run in other.runs}:
            raise ConfigError(
                f"two records with the seeds {self.seeds} have the run {min(common)!r}; give one"
            )
        if difference := self.difference(other, "runs."):
            raise ConfigError(
                f"two records with the seeds {self.seeds} differ in more than their runs: "
                f"{difference}; compare runs of one config"
            )
        sections = {**self.config["runs"], **other.config["runs"]}
        return self.with_runs(sections, self.runs + other.runs)

    def with_runs(self, sections: dict[str, Any], runs: tuple[RunRecord, ...]) -> "TrainRecord":
        """Return the record with other runs."""
        config = {**self.config, "runs": sections}
        return self.model_copy(update={"config": config, "runs": runs})

    def difference(self, other: "TrainRecord", *ignored: str) -> str:
        """Name the first key that differs, with both values; empty if the records are alike.

        Keys without effect on figures, and those that begin with one of ``ignored``, don't count.
        """
        if self.world_size != other.world_size:
            return f"the number of ranks is {self.world_size} and {other.world_size}"
        first, second = (dict(flat("", record.config)) for record in (self, other))
        for key in sorted(first.keys() | second.keys()):
            value, other_value = first.get(key, "nothing"), second.get(key, "nothing")
            if value != other_value and not key.startswith((*_WITHOUT_EFFECT, *ignored)):
                return f"{key} is {value} and {other_value}"
        return ""


def joined(records: Sequence[TrainRecord]) -> list[TrainRecord]:
    """Merge records with equal seeds, so that a variant can be trained later and join.

    Raises:
        ConfigError: two records with equal seeds differ in more than their runs, or have a run
            in common.
    """
    by_seeds: dict[tuple[int, int], TrainRecord] = {}
    for record in records:
        first = by_seeds.get(record.seeds)
        by_seeds[record.seeds] = record if first is None else first.joined(record)
    return list(by_seeds.values())


class ProgressLine(Section):
    """A line in a progress file: exactly one field is set."""

    point: StepsTrained | None = None
    """Steps that were trained."""

    evaluation: Evaluation | None = None
    """An evaluation."""

    traced: tuple[RankSplit, ...] = ()
    """Each rank's mean step by phase, over the steps that were traced."""

    is_over: bool = False
    """True if the run has ended, so it is in the record."""

    def is_after(self, step: int) -> bool:
        """Return whether a run that resumes after ``step`` steps will write this line again."""
        part = self.point or self.evaluation
        steps = [part.step] if part else [number for split in self.traced for number in split.steps]
        return not steps or max(steps) > step


class ProgressFile:
    """Appends lines to one run's progress."""

    def __init__(self, folder: Path) -> None:
        """Start a new file; earlier lines are kept for `resume`."""
        self._path = folder / PROGRESS_FILE
        self._earlier = read_progress(folder)
        with writing(self._path):
            self._path.write_text("")

    def resume(self, step: int) -> None:
        """Restore earlier lines up to ``step``."""
        for line in self._earlier:
            if not line.is_after(step):
                self.add(line)

    def add(self, line: ProgressLine) -> None:
        """Append a line.

        Raises:
            OutputError: it can't be written; `read_progress` skips a line without an end.
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
    with reading(path, "the progress of a run"):
        # A killed run may leave a last line without an end.
        *lines, _ = path.read_text().split("\n")
        return tuple(map(ProgressLine.model_validate_json, lines))
