"""The figures of a benchmark's blocks: step times, ratios and how sure they are.

Nothing is averaged over contestants and no block is dropped: medians over blocks, and intervals
from resampling whole blocks, since the steps of a block share what disturbed it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.config import BenchConfig, is_stock
from torchrec_2dsp.programs.bench.results import BenchResult, ContestantResult
from torchrec_2dsp.programs.config.config_file import make_config

NUM_RESAMPLES = 10_000
"""How often the bootstrap draws."""

CONFIDENCE = 0.95
"""The share of the resampled medians that an interval holds."""

FOREIGN_LOAD_LIMIT_CORES = 0.25
"""A block during which others kept more cores busy is pointed out."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """How long a contestant's steps took, over its blocks."""

    min_s: float
    """The step time of the fastest block."""

    median_s: float
    """The step time of the middle block."""

    max_s: float
    """The step time of the slowest block."""

    low_s: float
    """The start of the median's interval."""

    high_s: float
    """The end of the median's interval."""

    @property
    def spread(self) -> float:
        """How far the blocks are apart, relative to their median."""
        return (self.max_s - self.min_s) / self.median_s


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """How many times as fast as another contestant one is."""

    base: str
    """The other contestant."""

    factor: float
    """The median factor over the rounds."""

    low: float
    """The start of the factor's interval."""

    high: float
    """The end of the factor's interval."""

    num_rounds: int
    """Rounds in which both trained."""


@dataclass(frozen=True, kw_only=True)
class ContestantSummary:
    """One measured contestant in figures."""

    result: ContestantResult
    """The result that the figures were computed from."""

    step: StepTime
    """How long its steps took."""

    samples_per_s: float
    """Samples of all ranks per second, at the median step time."""

    over_best_stock: Speedup | None
    """Against the best stock contestant; None without one, or without a common round."""

    over_plain_stock: Speedup | None
    """Against the best stock contestant that has gloo's own all-to-all."""

    share_of_ceiling: float | None
    """The lowest ceiling's step time, relative to this one's. With the ceiling's plan, no way to
    communicate gets above 1; a plan that computes less can."""

    link_bytes: float | None
    """Median over blocks of what a rank sent per step; None if nothing was counted."""

    sent_bytes: float
    """Bytes that the traced collectives ideally send, per rank and step."""

    foreign_load_cores: float
    """The load of other processes in cores, the median over blocks."""

    loaded_rounds: tuple[int, ...]
    """Rounds whose foreign load was above `FOREIGN_LOAD_LIMIT_CORES`."""

    @property
    def name(self) -> str:
        """The contestant's name in the config."""
        return self.result.name


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a benchmark."""

    contestants: tuple[ContestantSummary, ...]
    """The measured ones, in the order of the config."""

    best_stock: str | None
    """The fastest of TorchRec's own, whatever it was given."""

    best_plain_stock: str | None
    """The fastest of those that have gloo's own all-to-all."""

    ceiling: str | None
    """The name of the fastest ceiling."""

    probe_s: float | None = None
    """The time of a fixed piece of work, median over all blocks; None if it wasn't timed."""

    def find(self, name: str) -> ContestantSummary | None:
        """The contestant of this name, None if it was not measured."""
        return next(
            (contestant for contestant in self.contestants if contestant.name == name), None
        )


def median_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """A percentile-bootstrap interval of the median.

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
    """How often `median_interval` holds the true median, at least, whatever is measured.

    The ends of the interval are values by rank, and each value is below the true median in half
    of all cases.

    Example:
        >>> from torchrec_2dsp.programs.bench.statistics import interval_coverage
        >>> [round(interval_coverage(num_values), 2) for num_values in (5, 7, 9)]
        [0.94, 0.88, 0.96]
    """
    low, _ = median_interval(range(num_values))
    num_outside = sum(math.comb(num_values, rank) for rank in range(math.ceil(low) + 1))
    return 1 - 2 * num_outside / 2**num_values


def step_time(contestant: ContestantResult, *, seed: int = 0) -> StepTime:
    """How long its steps took.

    Raises:
        ConfigError: it has no blocks.
    """
    if not contestant.blocks:
        raise ConfigError(
            f"contestant {contestant.name!r} counts as {contestant.outcome} but has no blocks, so "
            "it has no step time; measure it again"
        )
    steps_s = [block.step_s for block in contestant.blocks]
    low_s, high_s = median_interval(steps_s, seed=seed)
    return StepTime(
        min_s=min(steps_s),
        median_s=float(np.median(steps_s)),
        max_s=max(steps_s),
        low_s=low_s,
        high_s=high_s,
    )


def speedup(
    contestant: ContestantResult, base: ContestantResult, *, seed: int = 0
) -> Speedup | None:
    """How many times as fast as ``base`` it is, None without a common round.

    Blocks of one round were trained shortly after one another, so they are compared as pairs:
    what slows a whole round cancels out.
    """
    base_s = {block.round: block.step_s for block in base.blocks}
    factors = [
        base_s[block.round] / block.step_s for block in contestant.blocks if block.round in base_s
    ]
    if not factors:
        return None
    low, high = median_interval(factors, seed=seed)
    return Speedup(
        base=base.name,
        factor=float(np.median(factors)),
        low=low,
        high=high,
        num_rounds=len(factors),
    )


def config_of(result: BenchResult) -> BenchConfig:
    """The config that it was run with."""
    return make_config(
        BenchConfig, result.setting.config, source=f"the config in {result.setting.title!r}"
    )


def summarize(result: BenchResult) -> Summary:
    """All figures of the contestants that were measured.

    Raises:
        ConfigError: a measured contestant has no blocks, or the config can't be read.
    """
    config = config_of(result)
    stock = [
        contestant
        for contestant in result.measured()
        if is_stock(config.contestants.get(contestant.name))
    ]
    best_stock = _fastest(stock)
    best_plain = _fastest(contestant for contestant in stock if not _is_duplex(config, contestant))
    ceiling = _fastest(
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
            share_of_ceiling=_median_s(ceiling) / step.median_s if ceiling else None,
            link_bytes=float(np.median(counted)) if counted else None,
            sent_bytes=sum(part.sent_bytes for part in contestant.traffic),
            foreign_load_cores=float(
                np.median([block.foreign_load for block in contestant.blocks])
            ),
            loaded_rounds=tuple(
                block.round
                for block in contestant.blocks
                if block.foreign_load > FOREIGN_LOAD_LIMIT_CORES
            ),
        )

    probes_s = [
        block.probe_s
        for contestant in result.measured()
        for block in contestant.blocks
        if block.probe_s
    ]
    return Summary(
        contestants=tuple(figures(contestant) for contestant in result.measured()),
        best_stock=best_stock.name if best_stock else None,
        best_plain_stock=best_plain.name if best_plain else None,
        ceiling=ceiling.name if ceiling else None,
        probe_s=float(np.median(probes_s)) if probes_s else None,
    )


def _fastest(contestants: Iterable[ContestantResult]) -> ContestantResult | None:
    """The one with the lowest median, the first of equals."""
    return min(contestants, key=_median_s, default=None)


def _median_s(contestant: ContestantResult) -> float:
    return step_time(contestant).median_s


def _is_duplex(config: BenchConfig, contestant: ContestantResult) -> bool:
    return bool(getattr(config.contestants[contestant.name], "full_duplex", False))
