"""The statistics of runs with several seeds: gaps between runs that had the same seed."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t as student

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.train.record import TrainRecord

CONFIDENCE = 0.95
"""The confidence of the intervals."""


@dataclass(frozen=True)
class Gap:
    """How far a run is from the reference, over the seeds."""

    name: str
    """The name of the run."""
    ne: tuple[float, ...]
    """The run's normalized entropy on held-out batches, by seed."""
    gaps: tuple[float, ...]
    """The run's entropy minus the reference's with the same seed: above 0 is worse."""

    @property
    def mean(self) -> float:
        """The mean of the gaps."""
        return statistics.fmean(self.gaps)

    @property
    def interval(self) -> tuple[float, float]:
        """Student's interval of the mean gap; the whole line with a single seed."""
        count = len(self.gaps)
        if count < 2:
            return float("-inf"), float("inf")
        half = student.ppf((1 + CONFIDENCE) / 2, count - 1) * statistics.stdev(self.gaps)
        half /= count**0.5
        return self.mean - half, self.mean + half


def gaps_to(records: Sequence[TrainRecord], reference: str) -> list[Gap]:
    """The gap of each run, the reference's own first.

    Args:
        records: one for each pair of seeds, otherwise alike.
        reference: the run that the others are held against.

    Raises:
        ConfigError: the records don't belong together, or lack the reference.
    """
    check_alike(records)
    names = [run.name for run in records[0].runs]
    if reference not in names:
        raise ConfigError(f"there is no run {reference!r}; the records have {', '.join(names)}")
    base = _evaluated(records, reference)
    ordered = [reference, *(name for name in names if name != reference)]
    return [
        Gap(
            name,
            tuple(evaluated := _evaluated(records, name)),
            tuple(ne - other for ne, other in zip(evaluated, base, strict=True)),
        )
        for name in ordered
    ]


def check_alike(records: Sequence[TrainRecord]) -> None:
    """Raise `ConfigError` unless nothing but the seeds differs."""
    if not records:
        raise ConfigError("there is no record to report on; give at least one")
    first = _without_seeds(records[0])
    for record in records:
        if _without_seeds(record) != first or record.world_size != records[0].world_size:
            raise ConfigError(
                f"the records with seeds {records[0].seeds} and {record.seeds} differ in more than "
                "their seeds; compare runs of one config"
            )
    seeds = [record.seeds for record in records]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"two records have the same seeds {seeds}; give each its own")


def _without_seeds(record: TrainRecord) -> dict[str, object]:
    config = dict(record.config)
    for section in ("data", "model"):
        config[section] = {key: value for key, value in config[section].items() if key != "seed"}
    return config


def _evaluated(records: Sequence[TrainRecord], name: str) -> list[float]:
    return [run.eval_ne for record in records for run in record.runs if run.name == name]
