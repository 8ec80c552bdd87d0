"""Read the traces of profiled steps, and split each step into phases.

```text
trace of a rank --RankTrace--> spans of its threads --RankSplit--> us of a mean step, by StepPhase:
                                                                   computing, and waiting for others
```

`train` and `bench` trace steps; nothing here needs torch.
"""

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from torchrec_2dsp.errors import ConfigError

_COLLECTIVES = ("gloo:", "nccl:")
_BACKWARD_OPERATOR = "autograd::engine::evaluate_function"
_RANGES = ("cpu_op", "user_annotation")
_MARK = re.compile(r"## train step (\d+) ##")
PAYING = "## pay for computing ##"
"""The range in which a rank sleeps because time passes slower for it."""


def step_mark(step: int) -> str:
    """Return the name of the range that a trace has around a step, counted from 1.

    Example:
        >>> from torchrec_2dsp.programs.traces import marked_step, step_mark
        >>> step_mark(20), marked_step(step_mark(20)), marked_step("## forward 20 ##")
        ('## train step 20 ##', 20, None)
    """
    return f"## train step {step} ##"


def marked_step(name: str) -> int | None:
    """Return the step that a range surrounds; `None` for any other range."""
    mark = _MARK.fullmatch(name)
    return None if mark is None else int(mark[1])


@dataclass(frozen=True)
class HostSpan:
    """The time that a host thread spent in an operator or a named range."""

    name: str
    """The operator's or the range's name."""
    start_us: float
    """The start, on the trace's clock."""
    end_us: float
    """The end, on the same clock."""
    is_operator: bool = False
    """True for a torch operator, False for a range that Python code has named."""


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """A rank's profiled steps."""

    steps: tuple[HostSpan, ...]
    """The steps, in order."""

    training: tuple[HostSpan, ...]
    """The training thread's spans, by start; outer spans come first."""

    backward: tuple[tuple[HostSpan, ...], ...]
    """The spans of each other thread on which torch ran a backward, as it does on GPUs."""

    collectives: tuple[tuple[float, float], ...]
    """The times in which a collective was in flight, in microseconds."""

    dilation: float = 1.0
    """The factor by which time passed slower; waiting is divided by it."""

    @classmethod
    def read(cls, path: Path, dilation: float = 1.0) -> Self:
        """Read a trace that torch's profiler has exported."""
        return cls.of_events(json.loads(path.read_text())["traceEvents"], dilation)

    @classmethod
    def of_events(cls, events: Iterable[Mapping[str, Any]], dilation: float = 1.0) -> Self:
        """Sort the events of a Chrome trace by thread.

        Where time passed slower, the rank computed at full speed, and slept to pay for it: a
        sleep takes none of the cluster's time.
        """
        events = list(events)
        awake = _clock_awake(
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event.get("name") == PAYING
        )
        threads: dict[Any, list[HostSpan]] = defaultdict(list)
        steps: list[tuple[Any, HostSpan]] = []
        collectives = []
        for event in events:
            if event.get("ph") != "X" or event.get("cat") not in _RANGES:
                continue
            name = str(event["name"])
            start_us, end_us = awake(event["ts"]), awake(event["ts"] + event["dur"])
            span = HostSpan(name, start_us, end_us, is_operator=event["cat"] == "cpu_op")
            if name.startswith(_COLLECTIVES):
                collectives.append((start_us, end_us))
            elif marked_step(name) is None:
                threads[event["tid"]].append(span)
            else:
                steps.append((event["tid"], span))
        training = threads.pop(steps[0][0] if steps else None, [])
        backward = [
            _outer_first(spans)
            for _, spans in sorted(threads.items(), key=lambda thread: str(thread[0]))
            if any(span.name.startswith(_BACKWARD_OPERATOR) for span in spans)
        ]
        return cls(
            steps=_outer_first(span for _, span in steps),
            training=_outer_first(training),
            backward=tuple(backward),
            collectives=tuple(collectives),
            dilation=dilation,
        )


def _clock_awake(sleeps: Iterable[tuple[float, float]]) -> Callable[[float], float]:
    """Return a function that maps a trace's times to a clock that stops during sleeps."""
    in_order = sorted(sleeps)
    slept_us = [0.0, *accumulate(end_us - start_us for start_us, end_us in in_order)]

    def awake(time_us: float) -> float:
        place = bisect_left(in_order, time_us, key=lambda sleep: sleep[1])
        began_us = in_order[place][0] if place < len(in_order) else time_us
        return min(time_us, began_us) - slept_us[place]

    return awake


def _outer_first(spans: Iterable[HostSpan]) -> tuple[HostSpan, ...]:
    return tuple(sorted(spans, key=lambda span: (span.start_us, -span.end_us)))


class StepPhase(StrEnum):
    """A rank's activity at a moment of a step, in the order of a step."""

    NEXT_BATCH = "next batch"
    """Take a batch from the data, and copy it to the device."""
    IDS = "ids"
    """Send a batch's ids to the ranks that own their rows."""
    LOOKUP = "lookup"
    """Look up rows."""
    ROWS = "rows"
    """Send rows or pooled rows to the ranks that have the samples."""
    DENSE_FORWARD = "dense forward"
    """Run the forward of the dense part."""
    DENSE_BACKWARD = "dense backward"
    """Run the backward of the dense part."""
    ROW_GRADIENTS = "row gradients"
    """Send gradients of rows, or of pooled rows, to the row owners."""
    TABLE_UPDATE = "table update"
    """Sum each row's gradients, and update the tables."""
    REPLICA_SYNC = "replica sync"
    """Keep replicas equal."""
    DENSE_GRADIENTS = "dense gradients"
    """Reduce dense gradients over all ranks."""
    OPTIMIZER = "optimizer"
    """Update the dense part, and clear gradients."""
    OTHER = "other"
    """Anything that no range of the trace names."""


@dataclass(frozen=True)
class PhaseAtMoment:
    """The meaning of a thread's innermost span."""

    phase: StepPhase
    """The part of the step."""

    may_wait: bool = False
    """True if the thread waits while a collective is in flight: it runs no operator, and is where
    TorchRec or this package waits."""

    @cache  # noqa: B019  # A trace has hundreds of thousands of spans, and few names.
    def inside(self, name: str, is_operator: bool = False) -> "PhaseAtMoment":
        """Return the meaning of a span of this name inside a span with this meaning."""
        if name.startswith("c10d::"):
            sends_dense = self.phase is StepPhase.DENSE_BACKWARD
            phase = StepPhase.DENSE_GRADIENTS if sends_dense else self.phase
            return PhaseAtMoment(phase, may_wait=True)
        for phase, names in _NAMES.items():
            if names.search(name):
                # Row gradients are applied by a lookup of their rows and its backward.
                if (self.phase, phase) == (StepPhase.TABLE_UPDATE, StepPhase.LOOKUP):
                    phase = self.phase
                computes = is_operator and not _EXCHANGES.search(name)
                return PhaseAtMoment(phase, may_wait=phase in _WAITING and not computes)
        return replace(self, may_wait=False) if is_operator else self


_OTHER = PhaseAtMoment(StepPhase.OTHER)
_BACKWARD = PhaseAtMoment(StepPhase.DENSE_BACKWARD, may_wait=True)
_WAITING = (
    StepPhase.IDS,
    StepPhase.ROWS,
    StepPhase.DENSE_BACKWARD,
    StepPhase.ROW_GRADIENTS,
    StepPhase.REPLICA_SYNC,
    StepPhase.DENSE_GRADIENTS,
)
"""Phases in which ranks wait for collectives."""

_EXCHANGES = re.compile(
    r"_(Req|Wait)(Backward)?$|AllToAllSingle"
    r"|_(Arriving|Leaving|Put|Taken|ReduceScatterRagged)(Backward)?$"
)
"""Autograd functions that send and wait."""

# The first match counts: backward names come before their forward's.
_NAMES: dict[StepPhase, re.Pattern[str]] = {
    phase: re.compile(names)
    for phase, names in (
        (StepPhase.OPTIMIZER, r"^## (optimizer|zero_grad)|^Optimizer\."),
        (
            StepPhase.NEXT_BATCH,
            r"^## (next_batch|load_batch|wait_for_batch|(inplace_)?copy_(batch_)?to_gpu)",
        ),
        (
            StepPhase.IDS,
            r"^## (start|wait)_sparse_data_dist|^\[(splits|input)_dist|^## all2all_data"
            r"|^## \w*(KJT|Splits)\w* wait|^## (runtime_forward_assemble_KJT|dist_init)"
            r"|^## ((request|announce) rows|(check|map) ids)",
        ),
        (
            StepPhase.TABLE_UPDATE,
            r"^## (capture|apply) rows|(Captured|Direct)LookupBackward|SplitLookupFunc"
            r"|^fbgemm::\w*embedding\w*backward",
        ),
        (
            StepPhase.ROW_GRADIENTS,
            r"^## finish row gradients|_bwd?\b|_bwd_|_(Req|Wait)Backward$|AllToAllSingleBackward"
            r"|_(Alias|Arriving|Clipped|Leaving|Pooled|Put|Taken|Tied|Weighed|ReduceScatterRagged)Backward$",
        ),
        (
            StepPhase.LOOKUP,
            r"^\[lookup|^## (start_embedding_lookup|arrange rows)|_(Captured|Direct)Lookup$"
            r"|^fbgemm::\w*embedding\w*(lookup|forward)",
        ),
        (
            StepPhase.ROWS,
            r"^\[output_dist|^## \w*Embedding\w*Awaitable wait|_fwd\b|_fwd_|_(Req|Wait)$"
            r"|AllToAllSingle$|^## (all2all_(pooled|sequence)|reduce_scatter|ebc )"
            r"|^## (send late rows|rows beside computing)"
            r"|^_(Alias|Arriving|Clipped|Leaving|Pooled|Put|Taken|Tied|Weighed|ReduceScatterRagged)$",
        ),
        (
            StepPhase.REPLICA_SYNC,
            r"^## (replica sync|dmp_collection_sync|note rows|2d_reduce_scatter|2d_allgather)",
        ),
        (StepPhase.DENSE_GRADIENTS, r"^## dense gradients"),
        (StepPhase.DENSE_BACKWARD, r"^## backward \d* ?##"),
        (StepPhase.DENSE_FORWARD, r"^## (dense_)?forward|^DistributedDataParallel\.forward"),
    )
}
"""The range and operator names that identify a phase: TorchRec's, torch's and ours."""


@dataclass(frozen=True)
class StepTimes:
    """One step's times on a rank."""

    computing_us: float
    """The time that the rank computes."""

    whole_us: float
    """The whole step, waiting included."""


@dataclass(frozen=True, kw_only=True)
class RankSplit:
    """A rank's mean step by phase; computing and waiting add up to ``step_us``.

    A moment belongs to the training thread's innermost span. Where that is the backward itself, and
    torch runs the backward on threads of its own, it belongs to the innermost span of the first of
    them that says more. Other threads overlap and aren't counted.
    """

    rank: int
    """The rank."""

    num_steps: int
    """The number of steps in the mean."""

    step_us: float
    """The length of a step."""

    computing_us: Mapping[StepPhase, float]
    """The computing time of each phase that has any."""

    waiting_us: Mapping[StepPhase, float]
    """The time that the rank waits for collectives, for each phase that has any."""

    steps: Mapping[int, StepTimes]
    """The times of each step, by its number."""

    @classmethod
    def of_trace(cls, rank: int, trace: RankTrace) -> Self:
        """Split a trace's steps that have trained.

        Raises:
            ConfigError: no step has a backward.
        """
        cuts_us, place_of = _cuts(trace)
        training = states = _innermost(_within_steps(trace), place_of, _OTHER)
        for spans in trace.backward:
            thread = _innermost(spans, place_of, _BACKWARD)
            pairs = zip(states, thread, strict=True)
            states = [other if state == _BACKWARD else state for state, other in pairs]
        in_flight = {
            place
            for start_us, end_us in trace.collectives
            for place in range(place_of[start_us], place_of[end_us])
        }
        computing: dict[StepPhase, float] = defaultdict(float)
        waiting: dict[StepPhase, float] = defaultdict(float)
        steps: dict[int, StepTimes] = {}
        for step in trace.steps:
            places = range(place_of[step.start_us], place_of[step.end_us])
            # A step for which the data had ended has no backward.
            if all(training[place].phase is not StepPhase.DENSE_BACKWARD for place in places):
                continue
            computed_us = all_waited_us = 0.0
            for place in places:
                state, length_us = states[place], cuts_us[place + 1] - cuts_us[place]
                if state.may_wait and place in in_flight:
                    # A backward that computes nothing and isn't over waits for dense gradients.
                    is_dense = state.phase is StepPhase.DENSE_BACKWARD
                    phase = StepPhase.DENSE_GRADIENTS if is_dense else state.phase
                    waiting[phase] += length_us / trace.dilation
                    all_waited_us += length_us / trace.dilation
                else:
                    computing[state.phase] += length_us
                    computed_us += length_us
            number = marked_step(step.name)
            assert number is not None, step.name
            steps[number] = StepTimes(computed_us, computed_us + all_waited_us)
        num_steps = len(steps)
        if not num_steps:
            raise ConfigError(
                f"the trace of rank {rank} has no step with a backward; profile more steps"
            )
        return cls(
            rank=rank,
            num_steps=num_steps,
            step_us=sum(times.whole_us for times in steps.values()) / num_steps,
            computing_us={phase: us / num_steps for phase, us in computing.items() if us > 0.0},
            waiting_us={phase: us / num_steps for phase, us in waiting.items() if us > 0.0},
            steps=steps,
        )

    @property
    def all_computing_us(self) -> float:
        """The length of a step without its waiting."""
        return sum(self.computing_us.values())

    @property
    def all_waiting_us(self) -> float:
        """The time that a step waits for collectives."""
        return sum(self.waiting_us.values())


def mean_step(splits: Sequence[RankSplit]) -> dict[str, tuple[float, float]]:
    """Average over ranks how long each phase computes and waits, in microseconds."""
    return {
        phase.value: (
            fmean(split.computing_us.get(phase, 0.0) for split in splits),
            fmean(split.waiting_us.get(phase, 0.0) for split in splits),
        )
        for phase in StepPhase
    }


def _within_steps(trace: RankTrace) -> list[HostSpan]:
    """Return the steps, each followed by the training thread's spans that start in it."""
    starts = [span.start_us for span in trace.training]
    spans: list[HostSpan] = []
    for step in trace.steps:
        first, last = bisect_left(starts, step.start_us), bisect_left(starts, step.end_us)
        spans += [step, *trace.training[first:last]]
    return spans


def _cuts(trace: RankTrace) -> tuple[list[float], dict[float, int]]:
    """Return all times at which a span or a collective starts or ends, and each one's place."""
    threads = (trace.steps, trace.training, *trace.backward)
    spans = [(span.start_us, span.end_us) for thread in threads for span in thread]
    cuts_us = sorted({time_us for times in (*spans, *trace.collectives) for time_us in times})
    return cuts_us, {time_us: place for place, time_us in enumerate(cuts_us)}


def _innermost(
    spans: Iterable[HostSpan], place_of: Mapping[float, int], outside: PhaseAtMoment
) -> list[PhaseAtMoment]:
    """Return a thread's activity after each cut: the meaning of its innermost span.

    Spans come by start, outer ones first. A part that reaches beyond the span around it, because
    clocks are rounded, is cut off. ``outside`` is the meaning outside all spans.
    """
    states = [outside] * len(place_of)
    ends = [len(place_of)] * len(place_of)
    for span in spans:
        start = place_of[span.start_us]
        end = min(place_of[span.end_us], ends[start])
        states[start:end] = [states[start].inside(span.name, span.is_operator)] * (end - start)
        ends[start:end] = [end] * (end - start)
    return states


@dataclass(frozen=True, kw_only=True)
class RankShares:
    """The shares of a step that ranks compute, and that they lose to the slowest.

    The rest of a step is waiting that even work wouldn't save, most of all for the network.

    Example:
        >>> from torchrec_2dsp.programs.traces import RankShares
        >>> RankShares.of_times(mean=60.0, slowest=75.0, step=100.0)
        RankShares(busy=0.6, lost=0.15)
        >>> RankShares.of_times(mean=60.0, slowest=75.0, step=100.0).imbalance
        1.25
    """

    busy: float
    """The share of a step in which a rank computes, mean over ranks and steps."""

    lost: float
    """The share of a step by which its slowest rank computes longer than the mean rank, mean over
    steps: meanwhile the others wait for it."""

    @classmethod
    def of_times(cls, *, mean: float, slowest: float, step: float) -> Self:
        """Divide times, which may have any unit, by the step's.

        Args:
            mean: a rank's computing time in a step, mean over ranks and steps.
            slowest: the computing time of a step's slowest rank, mean over steps.
            step: the length of a step.
        """
        return cls(busy=mean / step, lost=(slowest - mean) / step)

    @property
    def imbalance(self) -> float:
        """The slowest rank's computing time in units of the mean; 1 is even."""
        return 1.0 + self.lost / self.busy if self.busy else 1.0
