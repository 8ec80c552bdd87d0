"""`RankSplit`: where the mean step of a rank goes, from its trace."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.run_report.rank_trace import HostSpan, RankTrace
from torchrec_2dsp.programs.run_report.step_phases import PhaseAtMoment, StepPhase
from torchrec_2dsp.programs.train.step_mark import marked_step

_OTHER = PhaseAtMoment(StepPhase.OTHER)
_BACKWARD = PhaseAtMoment(StepPhase.DENSE_BACKWARD, may_wait=True)
_Segment = tuple[float, float, PhaseAtMoment]


@dataclass(frozen=True)
class StepTimes:
    """The times of one step of a rank."""

    computing_us: float
    """How long the rank computes."""

    whole_us: float
    """What the step takes, waiting included."""


@dataclass(frozen=True, kw_only=True)
class RankSplit:
    """The mean step of a rank, phase by phase; computing and waiting add up to ``step_us``.

    A moment belongs to the innermost span of the training thread. Where that thread is in the
    backward and nothing narrower, and torch runs the backward on threads of its own, it belongs to
    the innermost span of the first of them that has one. Other threads aren't counted: what they do
    overlaps.
    """

    rank: int
    """The rank."""

    num_steps: int
    """How many steps the mean is over."""

    step_us: float
    """What a step takes, from its begin to its end."""

    computing_us: Mapping[StepPhase, float]
    """What each phase takes, waiting for collectives apart; phases that take nothing lack."""

    waiting_us: Mapping[StepPhase, float]
    """How long the rank waits for collectives in each phase."""

    steps: Mapping[int, StepTimes]
    """The times of each step, by its number."""

    @classmethod
    def of_trace(cls, rank: int, trace: RankTrace) -> Self:
        """The split of the steps of a trace that have trained.

        Raises:
            ConfigError: none of them has a backward.
        """
        computing: dict[StepPhase, float] = {}
        waiting: dict[StepPhase, float] = {}
        starts = [span.start_us for span in trace.training]
        backward = [_innermost(spans, _BACKWARD) for spans in trace.backward]
        steps: dict[int, StepTimes] = {}
        for step in trace.steps:
            first, last = bisect_left(starts, step.start_us), bisect_left(starts, step.end_us)
            spans = [step, *trace.training[first:last]]
            segments = _innermost(spans, _OTHER)
            # A step for which there was no data any more has none.
            if all(state.phase is not StepPhase.DENSE_BACKWARD for _, _, state in segments):
                continue
            all_waited_us = 0.0
            for segment in segments:
                for start_us, end_us, state in _with_backward(segment, backward):
                    waited_us = (
                        _overlap_us(start_us, end_us, trace.collectives) if state.may_wait else 0.0
                    )
                    all_waited_us += waited_us
                    _add(computing, state.phase, end_us - start_us - waited_us)
                    # A backward that computes nothing and isn't over waits for dense gradients.
                    is_dense = state.phase is StepPhase.DENSE_BACKWARD
                    _add(waiting, StepPhase.DENSE_GRADIENTS if is_dense else state.phase, waited_us)
            whole_us = step.end_us - step.start_us
            steps[_number(step)] = StepTimes(whole_us - all_waited_us, whole_us)
        num_steps = len(steps)
        if not num_steps:
            raise ConfigError(
                f"the trace of rank {rank} has no step with a backward; profile more steps"
            )
        return cls(
            rank=rank,
            num_steps=num_steps,
            step_us=sum(times.whole_us for times in steps.values()) / num_steps,
            computing_us={phase: total / num_steps for phase, total in computing.items()},
            waiting_us={phase: total / num_steps for phase, total in waiting.items()},
            steps=steps,
        )

    @property
    def all_computing_us(self) -> float:
        """What a step takes apart from waiting for collectives."""
        return sum(self.computing_us.values())

    @property
    def all_waiting_us(self) -> float:
        """How long a step waits for collectives."""
        return sum(self.waiting_us.values())


def read_splits(traces: Sequence[Path]) -> list[RankSplit]:
    """The splits of a run's traces, in the order of the ranks.

    Raises:
        ConfigError: a file is no trace of training steps.
    """
    splits = [RankSplit.of_trace(rank_of_trace(path), RankTrace.read(path)) for path in traces]
    return sorted(splits, key=lambda split: split.rank)


def rank_of_trace(path: Path) -> int:
    """The rank that wrote a trace, by the name of the file; -1 if it names none."""
    digits = path.stem.removeprefix("trace_rank")
    return int(digits) if digits.isdecimal() else -1


def slowest(splits: Sequence[RankSplit]) -> RankSplit:
    """The rank that computes longest, for which the others wait."""
    return max(splits, key=lambda split: split.all_computing_us)


def _number(step: HostSpan) -> int:
    """The number that the mark of a step has."""
    number = marked_step(step.name)
    assert number is not None, step.name
    return number


def _add(totals: dict[StepPhase, float], phase: StepPhase, amount: float) -> None:
    """Add to a phase in place, if there is something to add."""
    if amount > 0.0:
        totals[phase] = totals.get(phase, 0.0) + amount


def _innermost(spans: Sequence[HostSpan], outside: PhaseAtMoment) -> list[_Segment]:
    """The times in which each span is the innermost, and what it says of them.

    Args:
        spans: those of a thread, by start, outer ones first. What reaches beyond the span that it
            lies in, because clocks are rounded, is cut off.
        outside: what is said outside of all spans.
    """
    segments: list[_Segment] = []
    open_spans: list[tuple[float, PhaseAtMoment]] = []
    at_us = 0.0

    def advance(to_us: float) -> None:
        nonlocal at_us
        if to_us > at_us:
            if open_spans:
                segments.append((at_us, to_us, open_spans[-1][1]))
            at_us = to_us

    for span in spans:
        while open_spans and open_spans[-1][0] <= span.start_us:
            advance(open_spans[-1][0])
            open_spans.pop()
        advance(span.start_us)
        end_us, around = open_spans[-1] if open_spans else (span.end_us, outside)
        open_spans.append((min(span.end_us, end_us), around.inside(span)))
    while open_spans:
        advance(open_spans[-1][0])
        open_spans.pop()
    return segments


def _with_backward(segment: _Segment, threads: Sequence[Sequence[_Segment]]) -> Iterator[_Segment]:
    """A segment of the training thread, cut where threads of the backward say more of it."""
    start_us, end_us, state = segment
    if not threads or state != _BACKWARD:
        yield segment
        return
    thread, others = threads[0], threads[1:]
    place = max(0, bisect_right(thread, start_us, key=lambda part: part[0]) - 1)
    for part_start_us, part_end_us, part in thread[place:]:
        if part_start_us >= end_us:
            break
        if part_end_us <= start_us:
            continue
        if part_start_us > start_us:
            yield from _with_backward((start_us, part_start_us, state), others)
        begun_us = max(start_us, part_start_us)
        start_us = min(end_us, part_end_us)
        yield begun_us, start_us, part
    if start_us < end_us:
        yield from _with_backward((start_us, end_us, state), others)


def _overlap_us(start_us: float, end_us: float, times: Sequence[tuple[float, float]]) -> float:
    """How much of a time lies in others, which don't overlap and are in their order."""
    place = max(0, bisect_right(times, start_us, key=lambda time: time[0]) - 1)
    overlap_us = 0.0
    while place < len(times) and times[place][0] < end_us:
        overlap_us += max(0.0, min(end_us, times[place][1]) - max(start_us, times[place][0]))
        place += 1
    return overlap_us
