"""Profile a contestant's steps, and reduce all ranks' measurements to one mean rank."""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from torch.profiler import ProfilerActivity, profile, record_function

from torchrec_2dsp.comms.counting import Collective, EncodedBytes
from torchrec_2dsp.programs.bench.results import (
    ComputeTimes,
    DenseTraffic,
    EncodedTraffic,
    MeasuredTraffic,
    Phase,
    RowTravel,
)
from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.dilation import dilation
from torchrec_2dsp.programs.launch import silenced
from torchrec_2dsp.programs.traces import RankSplit, RankTrace, mean_step, step_mark
from torchrec_2dsp.replicas.sync_action import SyncReport

Numbers = TypeVar("Numbers", bound=Section)


@dataclass(frozen=True)
class Traced:
    """The measurements in one rank's traced steps."""

    split: RankSplit
    """The mean step by phase."""
    collectives: list[Collective]
    """The collectives in as many steps without the profiler."""
    encoded: EncodedTraffic
    dense: DenseTraffic | None
    """Dense gradient bytes, if these are thresholded."""
    row_travel: RowTravel | None
    """The row gradients' travel window, and the lookup's wait for them."""
    compute_s: tuple[float, ...]
    """Each step's processor time, for all blocks; empty on accelerators."""
    peak_memory_bytes: int
    """The peak memory beyond what the process started with."""


def profiled(
    step: Callable[[], None], num_steps: int, settle: Callable[[], None] = lambda: None
) -> RankTrace:
    """Run ``step`` several times under the profiler.

    Args:
        step: the work to profile.
        num_steps: the number of calls.
        settle: waits for everything that the last step left in flight. A collective that ends after
            the profiler can crash torch when it reads the profile.
    """
    with tempfile.TemporaryDirectory(prefix="torchrec_2dsp_") as folder, silenced():
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for number in range(1, num_steps + 1):
                with record_function(step_mark(number)):
                    step()
            settle()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return RankTrace.read(path, dilation())


def phases_of(splits: Sequence[RankSplit]) -> tuple[Phase, ...]:
    """List the phases in the mean rank's step, which add up to it."""
    return tuple(
        Phase(name=name, seconds=us * 1e-6, waiting=waiting)
        for name, times_us in mean_step(splits).items()
        for waiting, us in zip((False, True), times_us, strict=True)
        if us > 0.0
    )


def measured_traffic(records: Iterable[Collective], num_steps: int) -> tuple[MeasuredTraffic, ...]:
    """Average the traffic over steps by collective name.

    Args:
        records: all ranks' collectives.
        num_steps: the number of steps, all ranks' together.
    """
    sent_bytes: dict[str, list[float]] = defaultdict(list)
    for record in records:
        sent_bytes[record.op].append(record.sent_bytes)
    return tuple(
        MeasuredTraffic(name=op, calls=len(each) / num_steps, sent_bytes=sum(each) / num_steps)
        for op, each in sorted(sent_bytes.items())
    )


def encoded_between(
    rows: EncodedBytes, before: SyncReport, after: SyncReport, num_steps: int
) -> EncodedTraffic:
    """Compute the bytes per step that were encoded between two sync totals."""
    replicas_bytes = after.num_bytes - before.num_bytes
    saved_bytes = after.saved_bytes - before.saved_bytes
    return EncodedTraffic(
        rows_fp32_bytes=rows.before / num_steps,
        rows_bytes=rows.after / num_steps,
        replicas_fp32_bytes=(replicas_bytes + saved_bytes) / num_steps,
        replicas_bytes=replicas_bytes / num_steps,
    )


def row_travel_between(before: SyncReport, after: SyncReport, num_steps: int) -> RowTravel | None:
    """Compute row gradients' travel time per step between two sync totals."""
    window_s, waited_s = after.window_s - before.window_s, after.waited_s - before.waited_s
    if not window_s:
        return None
    return RowTravel(window_s=window_s / num_steps, waited_s=waited_s / num_steps)


def traced_figures(ranks: Sequence[Traced], num_steps: int) -> dict[str, Any]:
    """Reduce all ranks' measurements of the steps to `ContestantResult` fields, by name."""
    records = chain.from_iterable(rank.collectives for rank in ranks)
    return {
        "phases": phases_of([rank.split for rank in ranks]),
        "compute": compute_times([rank.compute_s for rank in ranks]),
        "traffic": measured_traffic(records, num_steps * len(ranks)),
        "encoded": mean_encoded([rank.encoded for rank in ranks]),
        "dense": mean_known([rank.dense for rank in ranks]),
        "row_travel": mean_known([rank.row_travel for rank in ranks]),
        "peak_memory_bytes": max(rank.peak_memory_bytes for rank in ranks),
    }


def mean_encoded(ranks: Sequence[EncodedTraffic]) -> EncodedTraffic | None:
    """Average the encoded bytes over ranks; `None` if no rank's transport saves any."""
    mean = mean_known(ranks)
    assert mean is not None
    saves = mean.rows_bytes > 0 or mean.replicas_bytes != mean.replicas_fp32_bytes
    return mean if saves else None


def mean_known(ranks: Sequence[Numbers | None]) -> Numbers | None:
    """Average each field over the ranks that have a value; `None` if none has."""
    measured = [numbers for numbers in ranks if numbers is not None]
    if not measured:
        return None
    kind = type(measured[0])
    return kind(
        **{
            name: sum(getattr(numbers, name) for numbers in measured) / len(measured)
            for name in kind.model_fields
        }
    )


def compute_times(ranks: Sequence[Sequence[float]]) -> ComputeTimes | None:
    """Compare the ranks' processor seconds step by step; `None` if they aren't known.

    Another rank may be the slowest in each step, which the means of single ranks hide.
    """
    steps = list(zip(*ranks, strict=True))
    if not steps:
        return None
    return ComputeTimes(
        mean_s=sum(map(sum, steps)) / len(ranks) / len(steps),
        slowest_s=sum(map(max, steps)) / len(steps),
    )
