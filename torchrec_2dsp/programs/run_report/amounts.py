"""What runs took beside time: bytes on the wire, and memory, as charts."""

import operator
from collections.abc import Mapping, Sequence

from torchrec_2dsp.programs.run_report.contents import RunContents, RunPart
from torchrec_2dsp.programs.run_report.curves import looks
from torchrec_2dsp.programs.train.record import CurvePoint
from torchrec_2dsp.report.charts import Axis, BarChart, Bars, Dash, Line, LineChart

_GB = 1e9
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
    sent_bytes: dict[str, dict[str, float]] = {phase: {} for phase in _PHASES}
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
                sent_bytes[phase][place] = num_bytes
    unit, unit_bytes = _unit([sum(amounts) for amounts in _by_place(sent_bytes, places)])
    bars = [
        Bars(name=phase, values={place: amount / unit_bytes for place, amount in values.items()})
        for phase, values in sent_bytes.items()
        if any(values.values())
    ]
    if not bars:
        return None
    # A chart of one kind of bars has no legend.
    what = f"{unit} of {bars[0].name}" if len(bars) == 1 else unit
    return BarChart(bars, places=places, title=f"{what} per rank and step")


def _by_place(
    sent_bytes: Mapping[str, Mapping[str, float]], places: Sequence[str]
) -> list[list[float]]:
    """The bytes of all phases, for each place of a chart."""
    return [[by_place.get(place, 0.0) for by_place in sent_bytes.values()] for place in places]


def _unit(amounts: Sequence[float]) -> tuple[str, float]:
    """The unit in which amounts of bytes are read well, and how many bytes it is."""
    most = max(amounts, default=0.0)
    units = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
    fitting = [name for name, num_bytes in units.items() if most >= num_bytes]
    name = fitting[-1] if fitting else "kB"
    return name, units[name]


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
        weights = [steps[point.step] for point in dense]
        sent, whole = zip(*map(_dense_bytes, dense), strict=True)
        after["dense gradients"] = _mean(weights, sent)
        before["dense gradients"] = _mean(weights, whole)
    return before, after


def dense_bytes_chart(contents: RunContents) -> LineChart | None:
    """What thresholded dense gradients take over the steps; `None` without any."""
    curves = {
        run.name: points
        for run in contents.runs
        if (points := [point for point in run.curve if point.dense_bytes_per_step is not None])
    }
    if not curves:
        return None
    look_of, lines = looks(contents), []
    amounts = [_dense_bytes(point) for points in curves.values() for point in points]
    most = max(max(pair) for pair in amounts)
    unit, unit_bytes = _unit([most])
    for name, points in curves.items():
        steps = [point.step for point in points]
        sent, whole = zip(*map(_dense_bytes, points), strict=True)
        drawn: list[tuple[str, Dash, Sequence[float]]] = [
            (f"{name}, had all been sent", ":", whole),
            (name, "-", sent),
        ]
        for title, dash, num_bytes in drawn:
            y = [amount / unit_bytes for amount in num_bytes]
            lines.append(Line(x=steps, y=y, name=title, colour=look_of[name].colour, dash=dash))
    return LineChart(
        lines,
        x=Axis(title="step"),
        y=Axis(
            title=f"{unit} that rank 0 sends per step",
            limits=(0, 1.1 * most / unit_bytes) if most else None,
        ),
    )


def _dense_bytes(point: CurvePoint) -> tuple[float, float]:
    """Bytes of dense gradients per step: as sent, and had all been sent."""
    return point.dense_bytes_per_step or 0.0, point.dense_fp32_bytes_per_step or 0.0


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


def _mean(weights: Sequence[int], values: Sequence[float]) -> float:
    return sum(map(operator.mul, weights, values)) / sum(weights)
