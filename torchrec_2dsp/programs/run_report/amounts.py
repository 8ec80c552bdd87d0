"""What runs took beside time: bytes on the wire, and memory, as charts."""

from collections.abc import Sequence

from torchrec_2dsp.programs.run_report.contents import RunContents, RunPart
from torchrec_2dsp.programs.run_report.curves import looks
from torchrec_2dsp.programs.train.record import CurvePoint
from torchrec_2dsp.report.charts import Axis, BarChart, Bars, Line, LineChart

_MB, _GB = 1e6, 1e9
_MAX_NAMES = 64
_PHASES = ("rows", "replicas", "dense gradients")


def memory_chart(contents: RunContents) -> LineChart | None:
    """The most memory that each rank has used, of the runs that are over; `None` before that."""
    look_of = looks(contents)
    lines = [
        Line(
            x=list(range(len(run.record.memory_bytes))),
            y=[num_bytes / _GB for num_bytes in run.record.memory_bytes],
            name=run.name,
            marker="o",
            way="points",
            colour=look_of[run.name].colour,
        )
        for run in contents.runs
        if run.record is not None and run.record.memory_bytes
    ]
    if not lines:
        return None
    num_ranks = max(len(line.x) for line in lines)
    # More names than these would cover each other.
    names = [str(rank) for rank in range(num_ranks)] if num_ranks <= _MAX_NAMES else []
    most = max(max(line.y) for line in lines)
    return LineChart(
        lines,
        x=Axis(title="rank", limits=(-0.5, num_ranks - 0.5), names=names),
        y=Axis(title="most memory of the rank's process, GB", limits=(0, 1.1 * most)),
    )


def bytes_chart(contents: RunContents) -> BarChart | None:
    """The bytes that a rank sends per step, by phase; `None` if nothing was counted.

    Where numbers are encoded, what they would take otherwise is another place of the chart.
    """
    sent: dict[str, dict[str, float]] = {phase: {} for phase in _PHASES}
    places = []
    for run in contents.runs:
        before, after = _bytes_by_phase(run)
        if not any([*before.values(), *after.values()]):
            continue
        states = [(run.name, after)]
        if before != after:
            states = [(f"{run.name}, before encoding", before), (f"{run.name}, sent", after)]
        for place, by_phase in states:
            places.append(place)
            for phase, num_bytes in by_phase.items():
                sent[phase][place] = num_bytes / _MB
    bars = [
        Bars(name=phase, values=values) for phase, values in sent.items() if any(values.values())
    ]
    if not bars:
        return None
    # A chart of one kind of bars has no legend.
    what = f"MB of {bars[0].name}" if len(bars) == 1 else "MB"
    return BarChart(bars, places=places, title=f"{what} per rank and step")


def _bytes_by_phase(run: RunPart) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes per step before they were encoded, and as they were sent."""
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    record = run.record
    if record is not None:
        if record.rows_bytes_per_step:
            after["rows"] = record.rows_bytes_per_step
            before["rows"] = record.rows_fp32_bytes_per_step or record.rows_bytes_per_step
        after["replicas"] = record.sync_bytes_per_step
        before["replicas"] = record.sync_fp32_bytes_per_step or record.sync_bytes_per_step
    dense = [point for point in run.curve if point.dense_bytes_per_step is not None]
    if dense:
        steps = _num_steps(run.curve)
        after["dense gradients"] = _mean(
            [(steps[point.step], point.dense_bytes_per_step or 0.0) for point in dense]
        )
        before["dense gradients"] = _mean(
            [(steps[point.step], point.dense_fp32_bytes_per_step or 0.0) for point in dense]
        )
    return before, after


def dense_bytes_chart(contents: RunContents) -> LineChart | None:
    """What thresholded dense gradients take over the steps; `None` without any."""
    look_of = looks(contents)
    lines = []
    for run in contents.runs:
        points = [point for point in run.curve if point.dense_bytes_per_step is not None]
        if not points:
            continue
        steps, colour = [point.step for point in points], look_of[run.name].colour
        sent = [(point.dense_bytes_per_step or 0.0) / _MB for point in points]
        whole = [(point.dense_fp32_bytes_per_step or 0.0) / _MB for point in points]
        unthresholded = f"{run.name}, had all been sent"
        lines += [
            Line(x=steps, y=sent, name=run.name, colour=colour, dash="-"),
            Line(x=steps, y=whole, name=unthresholded, colour=colour, dash=":"),
        ]
    if not lines:
        return None
    return LineChart(lines, x=Axis(title="step"), y=Axis(title="MB that rank 0 sends per step"))


def seconds_trained(run: RunPart, global_batch_size: int) -> float | None:
    """How long a run has trained, evaluations left out; `None` if its curve has no speed."""
    steps = _num_steps(run.curve)
    if not run.curve or not all(point.samples_per_s for point in run.curve):
        return None
    return sum(
        steps[point.step] * global_batch_size / (point.samples_per_s or 1.0) for point in run.curve
    )


def _num_steps(curve: Sequence[CurvePoint]) -> dict[int, int]:
    """How many steps each point of a curve is of, by its last step."""
    ends = [point.step for point in curve]
    return {end: end - before for before, end in zip([0, *ends], ends, strict=False)}


def _mean(weighted: Sequence[tuple[int, float]]) -> float:
    return sum(weight * value for weight, value in weighted) / sum(weight for weight, _ in weighted)
