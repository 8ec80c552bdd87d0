"""Compute figures from a benchmark's blocks: step times, ratios and intervals; compare runs.

Nothing is averaged over contestants and no block is dropped: medians over blocks, and intervals
from resampling whole blocks, since a block's steps share disturbances.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.results import DEALT_KEY, BenchResult, ContestantResult

if TYPE_CHECKING:
    from torchrec_2dsp.programs.bench.config import BenchConfig

NUM_RESAMPLES = 10_000
"""Bootstrap draws."""

CONFIDENCE = 0.95
"""The share of resampled medians that an interval contains."""

FOREIGN_LOAD_LIMIT_CORES = 0.25
"""The number of cores that others keep busy, above which a block is flagged."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A contestant's step time over its blocks; the median is between low and high."""

    min_s: float
    median_s: float
    max_s: float
    low_s: float
    high_s: float

    @property
    def spread(self) -> float:
        """The blocks' range, relative to their median."""
        return (self.max_s - self.min_s) / self.median_s


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """The ratio of a base's step times to a contestant's: the median over common rounds."""

    factor: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.factor:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, kw_only=True)
class ContestantSummary:
    """A measured contestant's figures."""

    result: ContestantResult
    step: StepTime
    samples_per_s: float
    over_best_stock: Speedup | None
    """The speedup over the best stock contestant; None without one, or without a common round."""

    over_plain_stock: Speedup | None
    """The speedup over the best stock contestant with gloo's own all-to-all."""

    share_of_ceiling: float | None
    """The lowest ceiling's step time, relative to this one's. With the ceiling's plan no
    communication gets above 1; a plan that computes less can."""

    link_bytes: float | None
    """Bytes that a rank sent per step, median over blocks; None if nothing was counted."""

    sent_bytes: float
    """Bytes that the traced collectives ideally send, per rank and step."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A benchmark's figures."""

    contestants: Mapping[str, ContestantSummary]
    """The measured contestants by name, in the config's order."""

    best_stock: str | None
    """The fastest stock contestant, with or without the full-duplex all-to-all."""

    best_plain_stock: str | None
    """The fastest stock contestant with gloo's own all-to-all."""

    ceiling: str | None


def median_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Compute a percentile-bootstrap interval for the median.

    With a handful of values it is somewhat too narrow; `interval_coverage` says how much.

    Example:
        >>> from torchrec_2dsp.programs.bench.statistics import median_interval
        >>> median_interval([3.0, 3.0, 3.0])
        (3.0, 3.0)
    """
    sample = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(sample.size, size=(NUM_RESAMPLES, sample.size))
    medians = np.median(sample[picks], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return float(low), float(high)


def interval_coverage(num_values: int) -> float:
    """Return how often `median_interval` contains the true median, at least.

    The interval's ends are order statistics, and each value is below the true median with
    probability one half.

    Example:
        >>> from torchrec_2dsp.programs.bench.statistics import interval_coverage
        >>> [round(interval_coverage(num_values), 2) for num_values in (5, 7, 9)]
        [0.94, 0.88, 0.96]
    """
    low, _ = median_interval(range(num_values))
    num_outside = sum(math.comb(num_values, rank) for rank in range(math.ceil(low) + 1))
    return 1 - 2 * num_outside / 2**num_values


def median_s(contestant: ContestantResult) -> float:
    """Return the median step time over a contestant's blocks."""
    if not contestant.blocks:
        raise ConfigError(
            f"contestant {contestant.name!r} counts as {contestant.outcome} but has no blocks, so "
            "it has no step time; measure it again"
        )
    return float(np.median([block.step_s for block in contestant.blocks]))


def step_time(contestant: ContestantResult, *, seed: int = 0) -> StepTime:
    """Compute a contestant's step time."""
    median, steps_s = median_s(contestant), [block.step_s for block in contestant.blocks]
    low_s, high_s = median_interval(steps_s, seed=seed)
    return StepTime(
        min_s=min(steps_s),
        median_s=median,
        max_s=max(steps_s),
        low_s=low_s,
        high_s=high_s,
    )


def speedup(
    contestant: ContestantResult, base: ContestantResult, *, seed: int = 0
) -> Speedup | None:
    """Compare two contestants round by round; None without a common round.

    Blocks in one round were trained shortly after one another, so a whole round's slowdown cancels
    out.
    """
    base_s = {block.round: block.step_s for block in base.blocks}
    factors = [
        base_s[block.round] / block.step_s for block in contestant.blocks if block.round in base_s
    ]
    if not factors:
        return None
    low, high = median_interval(factors, seed=seed)
    return Speedup(factor=float(np.median(factors)), low=low, high=high)


def config_of(result: BenchResult) -> "BenchConfig":
    """Return the config that a result was measured with."""
    # Step times and ratios alone need neither torch nor TorchRec, and are read quickly.
    from torchrec_2dsp.programs.bench.config import BenchConfig
    from torchrec_2dsp.programs.config.config_file import make_config

    tree = result.setting.config
    contestants = {
        name: {
            key: value
            for key, value in section.items()
            # What earlier versions had; figures that depend on it are in the result.
            if key != DEALT_KEY and (key, value) != ("moment_scale", "expected")
        }
        for name, section in tree["contestants"].items()
    }
    source = f"the config in {result.setting.title!r}"
    return make_config(BenchConfig, {**tree, "contestants": contestants}, source=source)


def summarize(result: BenchResult) -> Summary:
    """Compute all figures for the contestants that were measured."""
    config, stock = config_of(result), result.stock()
    best_stock = fastest(stock)
    best_plain = fastest(each for each in stock if not config.planned[each.name].full_duplex)
    ceiling = fastest(
        contestant for contestant in result.measured() if contestant.kind == "ceiling"
    )
    global_batch_size = (
        config.schedule.batch_size * result.setting.hosts * result.setting.ranks_per_host
    )
    seed = config.schedule.seed

    def figures(contestant: ContestantResult) -> ContestantSummary:
        step = step_time(contestant, seed=seed)
        counted = [block.link_bytes for block in contestant.blocks if block.link_bytes is not None]
        return ContestantSummary(
            result=contestant,
            step=step,
            samples_per_s=global_batch_size / step.median_s,
            over_best_stock=speedup(contestant, best_stock, seed=seed) if best_stock else None,
            over_plain_stock=speedup(contestant, best_plain, seed=seed) if best_plain else None,
            share_of_ceiling=median_s(ceiling) / step.median_s if ceiling else None,
            link_bytes=float(np.median(counted)) if counted else None,
            sent_bytes=sum(part.sent_bytes for part in contestant.traffic),
        )

    return Summary(
        contestants={contestant.name: figures(contestant) for contestant in result.measured()},
        best_stock=best_stock.name if best_stock else None,
        best_plain_stock=best_plain.name if best_plain else None,
        ceiling=ceiling.name if ceiling else None,
    )


def fastest(contestants: Iterable[ContestantResult]) -> ContestantResult | None:
    """Return the contestant with the lowest median, the first if several are equal."""
    return min(contestants, key=median_s, default=None)


@dataclass(frozen=True, kw_only=True)
class SwappedPair:
    """A contradiction: beyond doubt, ``first`` is faster in ``run`` and slower in ``other_run``."""

    first: str
    second: str
    run: int
    other_run: int


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The agreement between several runs."""

    medians_s: Mapping[str, tuple[float | None, ...]]
    """Each contestant's median step time by run, None where it was not measured."""

    swapped: tuple[SwappedPair, ...]
    tolerance: float
    """The largest relative distance at which medians agree."""

    probes_s: tuple[float, ...]
    """Each run's median seconds for a fixed piece of work; empty if a run measured nobody. Where
    they differ, the machine was not equally fast."""

    def difference(self, name: str) -> float:
        """Return the range of a contestant's medians, relative to the fastest."""
        measured = [median for median in self.medians_s[name] if median is not None]
        return max(measured) / min(measured) - 1 if measured else 0.0

    @property
    def apart(self) -> tuple[str, ...]:
        """The contestants whose medians differ too much, or that failed only in some runs."""
        return tuple(
            name
            for name, medians_s in self.medians_s.items()
            if self.difference(name) > self.tolerance
            or len({median is None for median in medians_s}) > 1
        )

    @property
    def passed(self) -> bool:
        """True if the runs agree."""
        return not self.apart and not self.swapped


def compare_runs(results: Sequence[BenchResult], *, tolerance: float = 0.1) -> Agreement:
    """Compare several runs of one command."""
    if len(results) < 2:
        raise ConfigError(f"{len(results)} run can't be compared; give at least two")
    if not tolerance >= 0:
        raise ConfigError(f"tolerance={tolerance} must be at least 0, such as 0.1 for 10 %")
    for number, result in enumerate(results[1:], 2):
        if differences := list(_differences(_identity(results[0]), _identity(result))):
            raise ConfigError(
                f"run {number} is not a repetition of run 1: {'; '.join(differences)}. "
                "Compare runs of the same command on the same machine"
            )
    seed = config_of(results[0]).schedule.seed
    runs = [
        {contestant.name: step_time(contestant, seed=seed) for contestant in result.measured()}
        for result in results
    ]
    names = [contestant.name for contestant in results[0].contestants]
    steps = {name: [run.get(name) for run in runs] for name in names}
    swapped = []
    for first, second in combinations(names, 2):
        faster_in = _runs_faster(steps[first], steps[second])
        slower_in = _runs_faster(steps[second], steps[first])
        if faster_in and slower_in:
            pair = SwappedPair(first=first, second=second, run=faster_in[0], other_run=slower_in[0])
            swapped.append(pair)
    probes_s = [
        [block.probe_s for contestant in result.measured() for block in contestant.blocks]
        for result in results
    ]
    return Agreement(
        medians_s={name: tuple(step and step.median_s for step in steps[name]) for name in names},
        swapped=tuple(swapped),
        tolerance=tolerance,
        probes_s=tuple(float(np.median(of_run)) for of_run in probes_s) if all(probes_s) else (),
    )


def _runs_faster(
    steps: Sequence[StepTime | None], other_steps: Sequence[StepTime | None]
) -> list[int]:
    """Return the runs in which the first contestant's interval is below the other's."""
    return [
        run
        for run, (step, other) in enumerate(zip(steps, other_steps, strict=True))
        if step and other and step.high_s < other.low_s
    ]


def _identity(result: BenchResult) -> dict[str, Any]:
    """Return the facts that all runs of a benchmark share."""
    setting = result.setting
    return {
        **setting.model_dump(exclude={"when", "command", "link_speeds"}),
        "contestants": [contestant.name for contestant in result.contestants],
    }


def _differences(first: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yield the leaves in which two trees differ, by path."""
    if isinstance(first, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*first, *other]):
            path = f"{where}.{key}" if where else str(key)
            yield from _differences(first.get(key, "nothing"), other.get(key, "nothing"), path)
    elif first != other:
        yield f"{where} is {other!r} instead of {first!r}"
