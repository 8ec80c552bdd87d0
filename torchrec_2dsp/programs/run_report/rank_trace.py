"""`RankTrace`: what a rank's trace of some steps says, read without torch."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.train.step_mark import marked_step

_COLLECTIVES = ("gloo:", "nccl:")
_BACKWARD = "autograd::engine::evaluate_function"
_RANGES = ("cpu_op", "user_annotation")
_REMEDY = "profile the run again with train --profile 20:30"


@dataclass(frozen=True)
class HostSpan:
    """A time in which a thread of the host was inside an operator or a named range."""

    name: str
    """The operator, or what the range is called."""
    start_us: float
    """The start, on the clock of the trace."""
    end_us: float
    """The end, on the same clock."""
    is_operator: bool = False
    """Whether it is an operator of torch, rather than a range that Python code has named."""


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """The profiled steps of a rank."""

    steps: tuple[HostSpan, ...]
    """The steps, in their order."""

    training: tuple[HostSpan, ...]
    """What the thread that trains was doing, by start; spans that hold others come first."""

    backward: tuple[tuple[HostSpan, ...], ...]
    """What each other thread was doing on which torch has run a backward, as it does on GPUs."""

    collectives: tuple[tuple[float, float], ...]
    """The times in which at least one collective was under way, by start, in microseconds."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a trace that `StepProfiler` has written.

        Raises:
            ConfigError: the file can't be read, is something else, or marks no step.
        """
        try:
            content = json.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}; {_REMEDY}") from error
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}; {_REMEDY}") from error
        events = content.get("traceEvents") if isinstance(content, dict) else None
        if not isinstance(events, list):
            raise ConfigError(f"{path} has no traceEvents, so it is no trace; {_REMEDY}")
        try:
            trace = cls.of_events(events)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} has an event that no profiler writes; {_REMEDY}") from error
        if not trace.steps:
            raise ConfigError(
                f"{path} doesn't mark where steps begin, as older versions didn't; {_REMEDY}"
            )
        return trace

    @classmethod
    def of_events(cls, events: Iterable[Mapping[str, Any]]) -> Self:
        """The trace that has these events, in the form of Chrome's traces."""
        threads: dict[Any, list[HostSpan]] = defaultdict(list)
        steps: list[tuple[Any, HostSpan]] = []
        collectives = []
        for event in events:
            if event.get("ph") != "X" or event.get("cat") not in _RANGES:
                continue
            name, start_us = str(event["name"]), float(event["ts"])
            end_us = start_us + float(event["dur"])
            span = HostSpan(name, start_us, end_us, is_operator=event["cat"] == "cpu_op")
            if name.startswith(_COLLECTIVES):
                collectives.append((start_us, end_us))
            elif marked_step(name) is None:
                threads[event["tid"]].append(span)
            else:
                steps.append((event["tid"], span))
        main = steps[0][0] if steps else None
        training = threads.pop(main, [])
        backward = [
            _outer_first(spans)
            for _, spans in sorted(threads.items(), key=lambda thread: str(thread[0]))
            if any(span.name.startswith(_BACKWARD) for span in spans)
        ]
        return cls(
            steps=_outer_first(span for _, span in steps),
            training=_outer_first(training),
            backward=tuple(backward),
            collectives=_joined(collectives),
        )


def _outer_first(spans: Iterable[HostSpan]) -> tuple[HostSpan, ...]:
    """Spans by start; of those that start together, the longest first."""
    return tuple(sorted(spans, key=lambda span: (span.start_us, -span.end_us)))


def _joined(times: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Times that may overlap, as times that don't."""
    joined: list[tuple[float, float]] = []
    for start_us, end_us in sorted(times):
        if joined and start_us <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end_us))
        else:
            joined.append((start_us, end_us))
    return tuple(joined)
