"""The parts of a step's time, from a profile of it."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile, record_function

from torchrec_2dsp.programs.bench.results import Phase

_STEP = "## bench step ##"
_SYNC = ("## dmp_collection_sync", "## replica sync")
_INPUT = ("## start_sparse_data_dist", "## wait_sparse_data_dist")
_LOOKUPS = ("embedding_codegen_lookup", "embedding_codegen_forward", "embedding_forward")
_UPDATES = ("embedding_codegen_backward", "embedding_backward")
_OPERATORS = ("aten::", "fbgemm::", "c10d::", "_c10d_functional::")
_COLLECTIVES = ("gloo:", "nccl:")


@dataclass(frozen=True)
class TracedSpan:
    """An operation or a collective of a profile, with its time."""

    name: str
    """An operator, a collective or a label."""
    start_us: float
    """The start, on any clock."""
    end_us: float
    """The end, on the same clock."""


@dataclass(frozen=True)
class Trace:
    """The profile of some steps."""

    labels: tuple[TracedSpan, ...]
    """TorchRec's names for the parts of a step, and the step itself."""
    operators: tuple[TracedSpan, ...]
    """The operations of the training thread."""
    collectives: tuple[TracedSpan, ...]
    """The collectives that were in flight."""


def traced(
    step: Callable[[], None], num_steps: int, settle: Callable[[], None] = lambda: None
) -> Trace:
    """Run ``step`` some times under the profiler.

    Args:
        step: what is profiled.
        num_steps: how often.
        settle: waits for what the last step has left under way. A collective that ends after the
            profiler can crash torch where it reads what was profiled.
    """
    with _silenced(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(num_steps):
            with record_function(_STEP):
                step()
        settle()
    return _sorted_out(profiled.events() or [])


@contextmanager
def _silenced() -> Iterator[None]:
    """Keep out what the profiler says, once per rank, on the error output."""
    sys.stderr.flush()
    saved_stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)


def _sorted_out(events: Iterable[Any]) -> Trace:
    events = list(events)
    main = next(event.thread for event in events if event.name == _STEP)
    labels, operators, collectives = [], [], []
    for event in events:
        span = TracedSpan(event.name, event.time_range.start, event.time_range.end)
        if event.name.startswith(_COLLECTIVES):
            collectives.append(span)
        elif event.thread == main and event.name.startswith("##"):
            labels.append(span)
        elif event.thread == main and event.name.startswith(_OPERATORS):
            operators.append(span)
    return Trace(tuple(labels), tuple(operators), tuple(collectives))


def split_by_phase(trace: Trace) -> tuple[Phase, ...]:
    """The mean step, part by part: what it computed, and what it waited for.

    A moment is *waiting* if a collective was in flight while no operator ran. It belongs to the
    part of the step that it lies in; in the backward pass, to the dense gradients if nothing but
    all-reduces was in flight.
    """
    clock = _Clock(trace)
    steps = clock.inside(trace.labels, _STEP)
    backward = clock.inside(trace.labels, "## backward")
    forward = clock.inside(trace.labels, "## forward")
    ids = clock.inside(trace.labels, *_INPUT)
    sync = clock.inside(trace.labels, *_SYNC)
    capture = clock.inside(trace.labels, "## capture rows")
    apply = clock.inside(trace.labels, "## apply rows")
    note = clock.inside(trace.labels, "## note rows")
    optimizer = clock.inside(trace.labels, "## optimizer")
    samples = clock.inside(trace.labels, "## wait for samples")
    lookup = clock.inside(trace.operators, *_LOOKUPS, anywhere=True)
    update = clock.inside(trace.operators, *_UPDATES, anywhere=True)
    busy = clock.inside(trace.operators, "")
    in_flight = clock.inside(trace.collectives, "")
    others = [span for span in trace.collectives if "all_reduce" not in span.name]
    waits = in_flight & ~busy
    only_dense = ~clock.inside(others, "")
    parts: list[tuple[str, NDArray[np.bool_], bool]] = [
        ("sync", sync & waits, True),
        ("capture rows", capture, False),
        ("apply rows", apply, False),
        ("note rows", note, False),
        ("sync", sync, False),
        ("ids", ids & waits, True),
        ("ids", ids, False),
        ("pooled rows", forward & waits, True),
        ("samples", samples, True),
        ("dense gradients", (backward | optimizer) & waits & only_dense, True),
        ("row gradients", (backward | optimizer) & waits, True),
        ("table update", update & ~forward, False),
        ("lookup", lookup & forward, False),
        ("forward", forward, False),
        ("backward", backward, False),
        ("optimizer", optimizer, False),
        ("other", steps & waits, True),
        ("other", steps, False),
    ]
    num_steps = sum(span.name == _STEP for span in trace.labels)
    unexplained, phases = steps.copy(), []
    for name, moments, waiting in parts:
        seconds = clock.seconds(moments & unexplained) / num_steps
        phases.append(Phase(name=name, seconds=seconds, waiting=waiting))
        unexplained &= ~moments
    return tuple(phase for phase in phases if phase.seconds > 0.0)


def mean_phases(ranks: Sequence[Sequence[Phase]]) -> tuple[Phase, ...]:
    """The mean over ranks, which may lack some phases."""
    order: dict[tuple[str, bool], float] = {}
    for phases in ranks:
        for phase in phases:
            key = (phase.name, phase.waiting)
            order[key] = order.get(key, 0.0) + phase.seconds / len(ranks)
    return tuple(
        Phase(name=name, waiting=waiting, seconds=seconds)
        for (name, waiting), seconds in order.items()
    )


class _Clock:
    """The moments between any two events, and which spans cover each."""

    def __init__(self, trace: Trace) -> None:
        spans = [*trace.labels, *trace.operators, *trace.collectives]
        edges = [edge for span in spans for edge in (span.start_us, span.end_us)]
        self._edges = np.unique(np.array(edges))

    def inside(
        self, spans: Iterable[TracedSpan], *prefixes: str, anywhere: bool = False
    ) -> NDArray[np.bool_]:
        """The moments that a span with one of these names covers."""
        chosen = [
            span
            for span in spans
            if (
                any(prefix in span.name for prefix in prefixes)
                if anywhere
                else span.name.startswith(prefixes)
            )
        ]
        change = np.zeros(self._edges.size, dtype=np.int64)
        np.add.at(change, np.searchsorted(self._edges, [span.start_us for span in chosen]), 1)
        np.add.at(change, np.searchsorted(self._edges, [span.end_us for span in chosen]), -1)
        return np.cumsum(change)[:-1] > 0

    def seconds(self, moments: NDArray[np.bool_]) -> float:
        """The seconds that moments last."""
        return float(np.diff(self._edges)[moments].sum()) * 1e-6
