"""The curves of all runs over the steps, as charts."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torchrec_2dsp.programs.run_report.contents import RunContents, RunPart
from torchrec_2dsp.programs.train.record import CurvePoint, EvaluationRecord
from torchrec_2dsp.programs.train.sections import LESS_IS_BETTER
from torchrec_2dsp.report.charts import PALETTE, Axis, Dash, Line, LineChart

TITLES = {
    "loss": "Loss",
    "ne": "Normalized entropy (NE)",
    "auc": "AUC",
    "calibration": "Calibration (predicted over observed clicks)",
}
"""What pages call the metrics that have another name in records."""
_WITHOUT_BEST = ("calibration",)
"""Metrics whose largest and smallest values are no better than others."""
_EXPECTED_COLOUR = "#777777"
_DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.")
_STEPS = Axis(title="step")

Figure = Callable[[CurvePoint], float | None]
"""What is read from a point."""


@dataclass(frozen=True)
class Look:
    """How the lines of a run look, in all charts."""

    colour: str
    """The colour as ``#rrggbb``."""

    dash: Dash
    """The dash: where runs have equal figures, the first line is seen through the others."""


def looks(contents: RunContents) -> dict[str, Look]:
    """The look of each run, by its name."""
    return {
        run.name: Look(PALETTE[place % len(PALETTE)], _DASHES[place % len(_DASHES)])
        for place, run in enumerate(contents.runs)
    }


def curve_chart(contents: RunContents, title: str, figure: Figure) -> LineChart | None:
    """A figure of all runs over the steps; `None` if no run has it."""
    look_of = looks(contents)
    lines = [
        _line(points, name=run.name, look=look_of[run.name])
        for run in contents.runs
        if (points := _numbers((point.step, figure(point)) for point in run.curve))
    ]
    return LineChart(lines, x=_STEPS, y=Axis(title=title)) if lines else None


def rates_chart(contents: RunContents) -> LineChart | None:
    """The learning rates; runs with equal rates share a line. `None` if no run has any."""
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
            name=f"{part}: {', '.join(names)}",
            look=Look(look_of[names[0]].colour, "-" if part == "tables" else "--"),
        )
        for (part, points), names in runs_of.items()
    ]
    return LineChart(lines, x=_STEPS, y=Axis(title="learning rate")) if lines else None


def metric_charts(contents: RunContents) -> Iterator[tuple[str, LineChart]]:
    """The name and the chart of each metric of evaluations that has a number."""
    metrics = dict.fromkeys(
        metric
        for run in contents.runs
        for evaluation in run.evaluations
        for metric, value in evaluation.metrics.items()
        if math.isfinite(value)
    )
    look_of = looks(contents)
    for metric in metrics:
        lines = []
        for run in contents.runs:
            points = _numbers((part.step, part.metrics.get(metric)) for part in run.evaluations)
            if not points:
                continue
            look = look_of[run.name]
            lines.append(_line(points, name=run.name, look=look, marker="o"))
            best = best_evaluation(run, metric)
            if best is not None and metric not in _WITHOUT_BEST and len(points) > 1:
                value = best.metrics[metric]
                lines.append(_star(best.step, value, f"{run.name}, best: {value:.5g}", look.colour))
        yield metric, LineChart([*lines, *_planted(contents, metric)], x=_STEPS, y=_axis(metric))


def best_evaluation(run: RunPart, metric: str) -> EvaluationRecord | None:
    """The first evaluation that no other one beats; `None` if none has a number."""
    numbered = [
        part for part in run.evaluations if math.isfinite(part.metrics.get(metric, math.nan))
    ]
    sign = 1 if metric in LESS_IS_BETTER else -1
    return min(numbered, key=lambda part: sign * part.metrics[metric], default=None)


def _axis(metric: str) -> Axis:
    title = TITLES.get(metric, metric)
    if metric in _WITHOUT_BEST:
        return Axis(title=title)
    return Axis(title=f"{title}, {'less' if metric in LESS_IS_BETTER else 'more'} is better")


def _planted(contents: RunContents, metric: str) -> list[Line]:
    """What the model behind the labels reaches, over all steps."""
    planted_ne = None if contents.record is None else contents.record.planted_ne
    if metric != "ne" or planted_ne is None or not math.isfinite(planted_ne):
        return []
    steps = [part.step for run in contents.runs for part in run.evaluations]
    ends = (min(steps), max(steps)) if min(steps) < max(steps) else (0, max(steps))
    points = [(step, planted_ne) for step in ends]
    name = "the model behind the labels"
    return [_line(points, name=name, look=Look(_EXPECTED_COLOUR, ":"))]


def _numbers(points: Iterator[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """The points that have a number; what a run didn't measure, or lost, has none."""
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def _line(
    points: Sequence[tuple[int, float]],
    *,
    name: str,
    look: Look,
    marker: str = "",
) -> Line:
    # A single point would be invisible without a marker.
    marker = marker or ("o" if len(points) == 1 else "")
    x, y = [x for x, _ in points], [y for _, y in points]
    return Line(x=x, y=y, name=name, colour=look.colour, dash=look.dash, marker=marker)


def _star(x: int, y: float, text: str, colour: str) -> Line:
    return Line(x=[x], y=[y], hover=[text], way="points", marker="*", colour=colour)
