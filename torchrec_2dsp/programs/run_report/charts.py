"""Charts on a run's page: curves over the steps, memory, bytes, and rows by use."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.run_report.contents import RunContents, RunPart
from torchrec_2dsp.programs.train.record import LESS_IS_BETTER, StepsTrained, best_of
from torchrec_2dsp.report.charts import DASHES, PALETTE, Axis, BarChart, Bars, Dash, Line, LineChart
from torchrec_2dsp.report.page import Page

_TITLES = {
    "loss": "Loss",
    "ne": "Normalized entropy (NE)",
    "auc": "AUC",
    "calibration": "Calibration (predicted over observed clicks)",
}
"""Metric names on pages."""
_WITHOUT_BEST = ("calibration",)
"""Metrics that have no best value at either end."""
_EXPECTED_COLOUR = "#777777"
_STEPS = Axis(title="step")

Figure = Callable[[StepsTrained], float | None]
"""A function that reads a figure from a point in the curve."""


def looks(contents: RunContents) -> dict[str, Line]:
    """Return a line without points for each run, by its name, in the style of all charts.

    Where runs have equal figures, the first line shows through the dashes of the others.
    """
    return {
        run.name: Line(
            x=[],
            y=[],
            name=run.name,
            colour=PALETTE[place % len(PALETTE)],
            dash=DASHES[place % len(DASHES)],
        )
        for place, run in enumerate(contents.runs)
    }


def line_charts(contents: RunContents) -> Iterator[tuple[str, LineChart]]:
    """Yield the curves over the steps that have more than one point, each with its heading."""
    charts = (
        (
            "Training loss",
            curve_chart(contents, "mean loss", lambda point: point.loss),
        ),
        (
            "Training NE",
            curve_chart(contents, "NE before learning", lambda point: point.ne),
        ),
        *metric_charts(contents),
        (
            "Throughput",
            curve_chart(contents, "samples per second", lambda point: point.samples_per_s),
        ),
        ("Learning rates", rates_chart(contents)),
    )
    yield from ((heading, chart) for heading, chart in charts if _is_curve(chart))


def _is_curve(chart: LineChart) -> bool:
    """Tell whether a line has several points: a single number is in a table."""
    return any(len(line.x) > 1 for line in chart.lines if line.way != "points")


def curve_chart(contents: RunContents, title: str, figure: Figure) -> LineChart:
    """Draw one figure for all runs over the steps."""
    look_of = looks(contents)
    lines = [
        _line(points, look_of[run.name])
        for run in contents.runs
        if (points := _numbers((point.step, figure(point)) for point in run.curve))
    ]
    return LineChart(lines, x=_STEPS, y=Axis(title=title))


def rates_chart(contents: RunContents) -> LineChart:
    """Draw the learning rates, one line for runs with equal rates."""
    look_of = looks(contents)
    runs_of: dict[tuple[str, tuple[tuple[int, float], ...]], list[str]] = {}
    figures: tuple[tuple[str, Figure], ...] = (
        ("tables", lambda point: point.table_lr),
        ("dense part", lambda point: point.dense_lr),
    )
    for part, figure in figures:
        for run in contents.runs:
            if points := _numbers((point.step, figure(point)) for point in run.curve):
                # Some optimizers keep their rate in float32.
                rates = tuple((step, float(f"{rate:.6g}")) for step, rate in points)
                runs_of.setdefault((part, rates), []).append(run.name)
    lines = [
        _line(
            points,
            replace(
                look_of[names[0]],
                name=f"{part}: {', '.join(names)}",
                dash="-" if part == "tables" else "--",
            ),
        )
        for (part, points), names in runs_of.items()
    ]
    return LineChart(lines, x=_STEPS, y=Axis(title="learning rate"))


def metric_charts(contents: RunContents) -> Iterator[tuple[str, LineChart]]:
    """Draw each evaluation metric that has a finite value; yield the heading and the chart."""
    look_of = looks(contents)
    for metric in contents.finite_metrics:
        lines: list[Line] = []
        for run in contents.runs:
            points = _numbers((part.step, part.metrics.get(metric)) for part in run.evaluations)
            if not points:
                continue
            look = look_of[run.name]
            lines.append(_line(points, look, marker="o"))
            best = best_of(run.evaluations, metric)
            if best is not None and metric not in _WITHOUT_BEST and len(points) > 1:
                value = best.metrics[metric]
                lines.append(_star(best.step, value, f"{run.name}, best: {value:.5g}", look.colour))
        if any(len(line.x) > 1 for line in lines):
            lines += _planted(contents, metric)
        yield (
            f"Held out: {_TITLES.get(metric, metric)}",
            LineChart(lines, x=_STEPS, y=_axis(metric)),
        )


def _axis(metric: str) -> Axis:
    title = _TITLES.get(metric, metric)
    if metric in _WITHOUT_BEST:
        return Axis(title=title)
    return Axis(title=f"{title}, {'less' if metric in LESS_IS_BETTER else 'more'} is better")


def _planted(contents: RunContents, metric: str) -> list[Line]:
    """Return the planted model's line, over all steps."""
    planted_ne = None if contents.record is None else contents.record.planted_ne
    if metric != "ne" or planted_ne is None or not math.isfinite(planted_ne):
        return []
    steps = [part.step for run in contents.runs for part in run.evaluations]
    ends = sorted({min(steps), max(steps)})
    return [
        Line(
            x=ends,
            y=[planted_ne] * len(ends),
            name="the model behind the labels",
            colour=_EXPECTED_COLOUR,
            dash=":",
        )
    ]


def _numbers(points: Iterator[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """Return the points with a finite figure; a run may not have measured it, or diverged."""
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def _line(points: Sequence[tuple[int, float]], look: Line, marker: str = "") -> Line:
    # A single point would be invisible without a marker.
    marker = marker or ("o" if len(points) == 1 else "")
    return replace(look, x=[x for x, _ in points], y=[y for _, y in points], marker=marker)


def _star(x: int, y: float, text: str, colour: str) -> Line:
    return Line(x=[x], y=[y], hover=[text], way="points", marker="*", colour=colour)


_GB = 1e9
_MAX_NAMES = 64
_PHASES = ("rows", "replicas", "dense gradients")


def memory_chart(contents: RunContents) -> LineChart | None:
    """Draw each rank's peak memory in finished runs; `None` for a single rank, or before."""
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
        if run.record is not None and len(run.record.memory_bytes) > 1
    ]
    if not lines:
        return None
    num_ranks = max(len(line.x) for line in lines)
    # More names than this would overlap.
    names = [str(rank) for rank in range(num_ranks)] if num_ranks <= _MAX_NAMES else []
    most = max(max(line.y) for line in lines)
    return LineChart(
        lines,
        x=Axis(title="rank", limits=(-0.5, num_ranks - 0.5), names=names),
        y=Axis(title="GB", limits=(0, 1.1 * most)),
    )


def bytes_chart(contents: RunContents) -> BarChart | None:
    """Draw the bytes that a rank sends per step, by phase; `None` if nothing was counted.

    Where numbers are encoded, a second bar shows their size before.
    """
    sent_bytes: dict[str, dict[str, float]] = {phase: {} for phase in _PHASES}
    places = []
    for run in contents.runs:
        amounts = _bytes_by_phase(run)
        if not any(map(any, amounts.values())):
            continue
        states = {run.name: 1}
        if any(before != after for before, after in amounts.values()):
            states = {f"{run.name}, before encoding": 0, f"{run.name}, sent": 1}
        for place, state in states.items():
            places.append(place)
            for phase, pair in amounts.items():
                sent_bytes[phase][place] = pair[state]
    unit, unit_bytes = _unit(
        [sum(by_place.get(place, 0.0) for by_place in sent_bytes.values()) for place in places]
    )
    bars = [
        Bars(name=phase, values={place: amount / unit_bytes for place, amount in values.items()})
        for phase, values in sent_bytes.items()
        if any(values.values())
    ]
    if not bars:
        return None
    # A chart with one kind of bar has no legend.
    what = f"{unit} of {bars[0].name}" if len(bars) == 1 else unit
    return BarChart(bars, places=places, title=f"{what} per rank and step")


def _unit(amounts: Sequence[float]) -> tuple[str, float]:
    """Choose a readable unit for byte counts; return it and its size in bytes."""
    most = max(amounts, default=0.0)
    units = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
    fitting = [name for name, num_bytes in units.items() if most >= num_bytes]
    name = fitting[-1] if fitting else "kB"
    return name, units[name]


def _bytes_by_phase(run: RunPart) -> dict[str, tuple[float, float]]:
    """Return the bytes per step, by phase: before encoding, and as sent."""
    amounts = {}
    record = run.record
    if record is not None:
        rows_bytes, sync_bytes = record.rows_bytes_per_step, record.sync_bytes_per_step
        if rows_bytes:
            amounts["rows"] = (record.rows_fp32_bytes_per_step or rows_bytes, rows_bytes)
        amounts["replicas"] = (record.sync_fp32_bytes_per_step or sync_bytes, sync_bytes)
    dense = [point for point in run.curve if point.dense_bytes_per_step is not None]
    if dense:
        steps = _num_steps(run.curve)
        weights = [steps[point.step] for point in dense]
        sent, whole = zip(*map(_dense_bytes, dense), strict=True)
        amounts["dense gradients"] = (fmean(whole, weights), fmean(sent, weights))
    return amounts


def dense_bytes_chart(contents: RunContents) -> LineChart | None:
    """Draw the bytes for thresholded dense gradients over the steps; `None` without any."""
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


def _dense_bytes(point: StepsTrained) -> tuple[float, float]:
    """Return the dense gradient bytes per step: as sent, and without thresholds."""
    return point.dense_bytes_per_step or 0.0, point.dense_fp32_bytes_per_step or 0.0


def seconds_trained(run: RunPart, global_batch_size: int) -> float | None:
    """Return the training seconds, without evaluations; `None` if the curve has no speed."""
    steps = _num_steps(run.curve)
    if not run.curve or not all(point.samples_per_s for point in run.curve):
        return None
    return sum(
        steps[point.step] * global_batch_size / (point.samples_per_s or 1.0) for point in run.curve
    )


def _num_steps(curve: Sequence[StepsTrained]) -> dict[int, int]:
    """Return each point's number of steps, by its last step."""
    ends = [point.step for point in curve]
    return {end: end - before for before, end in zip([0, *ends], ends, strict=False)}


_MAX_TABLES = 28
"""The most lines in a chart: as many as colours and dashes tell apart."""


def add_access(page: Page, contents: RunContents) -> None:
    """Add a chart for each pair of statistics and hot rows that runs have."""
    runs_of: dict[tuple[str, tuple[tuple[str, int], ...]], list[str]] = {}
    for run in contents.runs:
        if path := run.config.get("access"):
            runs_of.setdefault((path, tuple(_hot_rows(run).items())), []).append(run.name)
    for (path, hot_rows), names in runs_of.items():
        _add_chart(page, f"Rows by use, for {', '.join(names)}", path, dict(hot_rows))


def _hot_rows(run: RunPart) -> dict[str, int]:
    """Return each table's number of hot rows."""
    tables = [] if run.plan is None else run.plan.tables
    return {name: table.num_hot for name, table in tables if table.num_hot}


def _add_chart(page: Page, heading: str, path: str, hot_rows: dict[str, int]) -> None:
    # Reading Parquet takes a while to load, and most runs don't need it.
    from torchrec_2dsp.access.stats import AccessStats, cdf_chart

    try:
        stats = AccessStats.load(path)
    except ConfigError as error:
        # A log may have been recounted or moved since; the rest of the page still holds.
        page.add_text(f"{heading}: the statistics can't be shown. {error}")
        return
    most_used = sorted(stats, key=lambda name: -stats[name].num_lookups)[:_MAX_TABLES]
    page.add_lines(heading, cdf_chart({name: stats[name] for name in most_used}, hot_rows))
    left_out = len(stats) - len(most_used)
    page.add_text(
        ("A mark shows how many rows are hot. " if hot_rows else "No row is hot. ")
        + (f"The {left_out} tables with the fewest lookups are left out. " if left_out else "")
        + f"Counted in {path}."
    )
