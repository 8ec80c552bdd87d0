"""Plot benchmark results, as SVG files that are reproducible byte for byte."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import numpy as np

from torchrec_2dsp.programs.bench.labels import places, setting_labels
from torchrec_2dsp.programs.bench.results import BenchResult, Outcome
from torchrec_2dsp.programs.bench.statistics import median_s
from torchrec_2dsp.programs.bench.tables import names_in, predicted_cost, predicted_in
from torchrec_2dsp.report.charts import MARKERS, PALETTE, Axis, Dash, Line, LineChart, draw_lines

_GREY = "#888888"
_CEILING_MARKERS = "v^<>"
_LAPS: tuple[Dash, ...] = ("-", ":", "-.")


def draw_plots(results: Sequence[BenchResult], page: Path) -> dict[str, Path]:
    """Draw all plots that the results have data for, beside a page.

    Returns:
        The plots' paths, by `markdown_report`'s names for them.
    """
    plots: dict[str, Callable[[Sequence[BenchResult], Path], None]] = {}
    if len(results) > 1 and any(result.measured() for result in results):
        plots["scaling"] = scaling_plot
    if sum(bool(predicted_in(result)) for result in results) > 1:
        plots["predicted"] = predicted_plot
    paths = {name: page.with_name(f"{page.stem}_{name}.svg") for name in plots}
    for name, draw in plots.items():
        draw(results, paths[name])
    return paths


def scaling_plot(results: Sequence[BenchResult], path: str | Path) -> None:
    """Write an SVG with step times by number of ranks, a panel for each network.

    Bars reach from the fastest block to the slowest, ceilings are grey, and a cross above all steps
    marks a contestant that failed.
    """
    names = names_in(results)
    # By place, contestant and shape; repeated runs are pooled.
    steps_ms: dict[tuple[str, str, tuple[int, int]], list[float]] = defaultdict(list)
    failed = set()
    for result, place in zip(results, places(results), strict=True):
        shape = (result.setting.hosts, result.setting.ranks_per_host)
        for contestant in result.contestants:
            trial = (place, contestant.name, shape)
            if contestant.outcome is Outcome.MEASURED:
                steps_ms[trial] += [block.step_s * 1e3 for block in contestant.blocks]
            else:
                failed.add(trial)
    shapes = sorted(
        {shape for *_, shape in [*steps_ms, *failed]},
        key=lambda shape: (shape[0] * shape[1], shape),
    )
    looks = _looks(results, names)

    def median_ms(name: str) -> float:
        own_ms = [step for trial in steps_ms if trial[1] == name for step in steps_ms[trial]]
        return float(np.median(own_ms or [0.0]))

    # Side by side, so that no bar hides another.
    shifts = {name: 0.4 * ((n + 0.5) / len(names) - 0.5) for n, name in enumerate(names)}
    above_ms = 1.1 * max(step for steps in steps_ms.values() for step in steps)
    charts = []
    for place in dict.fromkeys(places(results)):
        lines = []
        for name in sorted(names, key=median_ms, reverse=True):
            x_of = {(place, name, shape): x + shifts[name] for x, shape in enumerate(shapes)}
            points = {x: steps_ms[trial] for trial, x in x_of.items() if steps_ms.get(trial)}
            crosses = {x: above_ms for trial, x in x_of.items() if trial in failed}
            lines += _lines(looks[name], points, crosses)
        charts.append(
            LineChart(
                lines,
                x=Axis(
                    title="ranks, as hosts x ranks per host (x: failed)",
                    names=[f"{hosts * ranks}\n{hosts}x{ranks}" for hosts, ranks in shapes],
                ),
                y=Axis(title="median ms per step", is_log=True),
                title=place,
                width_inches=0.8 + 0.7 * len(shapes),
            )
        )
    draw_lines(charts, path)


def _lines(
    look: Line, points: Mapping[float, Sequence[float]], crosses: Mapping[float, float]
) -> list[Line]:
    """Return a contestant's line in one panel, and the crosses where it failed."""
    line = replace(
        look,
        x=list(points),
        y=[float(np.median(steps)) for steps in points.values()],
        low=list(map(min, points.values())),
        high=list(map(max, points.values())),
    )
    failed = Line(
        x=list(crosses), y=list(crosses.values()), way="points", marker="x", colour=look.colour
    )
    return [line, failed]


def _looks(results: Sequence[BenchResult], names: Sequence[str]) -> dict[str, Line]:
    """Choose each contestant's colour, dash and marker; its line has no points yet."""
    kinds = {
        contestant.name: contestant.kind for result in results for contestant in result.contestants
    }
    ceiling_markers, styles = cycle(_CEILING_MARKERS), cycle(product(_LAPS, PALETTE))
    looks = {}
    for name in names:
        look = Line(x=[], y=[], name=name)
        if kinds[name] == "ceiling":
            marker = next(ceiling_markers)
            looks[name] = replace(look, colour=_GREY, dash="--", marker=marker)
        else:
            dash, colour = next(styles)
            marker = "o" if kinds[name] == "stock" else "s"
            looks[name] = replace(look, colour=colour, dash=dash, marker=marker)
    return looks


_BAND = 0.15


def predicted_plot(results: Sequence[BenchResult], path: str | Path) -> None:
    """Write an SVG with a point for each predicted plan, in all settings."""
    points = [
        Line(
            name=label,
            x=[median_s(contestant) * 1e3 for contestant in contestants],
            y=[predicted_cost(contestant).total_s * 1e3 for contestant in contestants],
            way="points",
        )
        for label, result in zip(setting_labels(results), results, strict=True)
        if (contestants := predicted_in(result))
    ]
    steps_ms = [step_ms for line in points for step_ms in line.x]
    ends = [0.85 * min(steps_ms), 1.15 * max(steps_ms)]
    equal = Line(
        x=ends,
        y=ends,
        low=[(1 - _BAND) * end for end in ends],
        high=[(1 + _BAND) * end for end in ends],
        is_band=True,
        colour="#000000",
    )
    markers = cycle(MARKERS)
    chart = LineChart(
        [*(replace(line, marker=next(markers)) for line in points), equal],
        x=Axis(title="measured ms per step", is_log=True),
        y=Axis(title=f"predicted (grey: within {_BAND:.0%})", is_log=True),
    )
    draw_lines([chart], path)
