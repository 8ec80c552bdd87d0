"""`compare_runs`: whether several runs of one benchmark say the same."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.results import BenchResult
from torchrec_2dsp.programs.bench.statistics import StepTime, Summary, summarize


@dataclass(frozen=True, kw_only=True)
class ContestantAgreement:
    """One contestant in all runs."""

    name: str
    """The contestant's name in the config."""

    medians_s: tuple[float | None, ...]
    """The contestant's median step time by run, None where it was not measured."""

    @property
    def difference(self) -> float:
        """How much the slowest run's median is above the fastest's, relative to that."""
        measured = [median for median in self.medians_s if median is not None]
        return max(measured) / min(measured) - 1 if measured else 0.0

    @property
    def has_one_outcome(self) -> bool:
        """Whether it was measured in all runs or in none."""
        return len({median is None for median in self.medians_s}) == 1


@dataclass(frozen=True, kw_only=True)
class SwappedPair:
    """Two contestants whose order is beyond doubt in two runs, and not the same."""

    first: str
    """The contestant that is faster in `run`."""

    second: str
    """The contestant that is faster in `other_run`."""

    run: int
    """The number of a run, from 0."""

    other_run: int
    """The number of the other run, from 0."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The outcome of a comparison of runs."""

    contestants: tuple[ContestantAgreement, ...]
    """The contestants, in the order of the config."""

    swapped: tuple[SwappedPair, ...]
    """Contradictions between runs, one for each pair of contestants."""

    tolerance: float
    """How far medians may be apart."""

    probes_s: tuple[float | None, ...] = ()
    """Seconds of a fixed piece of work, median over a run's blocks; None where it wasn't timed.
    Where it differs, the machine was not equally fast, whatever ran on it."""

    @property
    def apart(self) -> tuple[ContestantAgreement, ...]:
        """The contestants whose medians differ too much, or that failed in some runs."""
        return tuple(
            contestant
            for contestant in self.contestants
            if contestant.difference > self.tolerance or not contestant.has_one_outcome
        )

    @property
    def passed(self) -> bool:
        """Whether the runs say the same."""
        return not self.apart and not self.swapped


def compare_runs(results: Sequence[BenchResult], *, tolerance: float = 0.1) -> Agreement:
    """How well several runs of the same command agree.

    Args:
        results: one for each run.
        tolerance: how far the medians of a contestant may be apart, relative to the lowest.

    Raises:
        ConfigError: there are fewer than two runs, or they are not runs of the same; it says
            what differs.
    """
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
    summaries = [summarize(result) for result in results]
    names = [contestant.name for contestant in results[0].contestants]
    steps = {name: [_step(summary, name) for summary in summaries] for name in names}
    return Agreement(
        contestants=tuple(
            ContestantAgreement(
                name=name, medians_s=tuple(step and step.median_s for step in steps[name])
            )
            for name in names
        ),
        swapped=tuple(
            pair
            for first, second in combinations(names, 2)
            if (pair := _swapped(first, second, steps[first], steps[second]))
        ),
        tolerance=tolerance,
        probes_s=tuple(summary.probe_s for summary in summaries),
    )


def _swapped(
    first: str,
    second: str,
    first_steps: Sequence[StepTime | None],
    second_steps: Sequence[StepTime | None],
) -> SwappedPair | None:
    for run, other_run in permutations(range(len(first_steps)), 2):
        if _is_faster(first_steps[run], second_steps[run]) and _is_faster(
            second_steps[other_run], first_steps[other_run]
        ):
            return SwappedPair(first=first, second=second, run=run, other_run=other_run)
    return None


def _is_faster(step: StepTime | None, other: StepTime | None) -> bool:
    """Whether its interval is wholly below the other's."""
    return step is not None and other is not None and step.high_s < other.low_s


def _step(summary: Summary, name: str) -> StepTime | None:
    contestant = summary.find(name)
    return contestant.step if contestant else None


def _identity(result: BenchResult) -> dict[str, Any]:
    """The parts of a result that two runs of the same benchmark have in common."""
    setting = result.setting
    return {
        **setting.model_dump(exclude={"when", "command", "link_speeds"}),
        "contestants": [contestant.name for contestant in result.contestants],
    }


def _differences(first: Any, other: Any, where: str = "") -> Iterator[str]:
    """The leaves in which two trees differ, by path."""
    if isinstance(first, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*first, *other]):
            path = f"{where}.{key}" if where else str(key)
            yield from _differences(first.get(key, "nothing"), other.get(key, "nothing"), path)
    elif first != other:
        yield f"{where} is {other!r} instead of {first!r}"
