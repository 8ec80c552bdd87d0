"""Plots of benchmark results, as SVG files that are the same byte for byte for the same result."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.markdown_tables import ms, names_in, phase_label, phases_in
from torchrec_2dsp.programs.bench.results import BenchResult, Outcome, Phase
from torchrec_2dsp.programs.bench.setting_labels import places
from torchrec_2dsp.report.plots import PALETTE, plotting, save_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette's last colour. It is hard to see on white, so it only fills areas.
_YELLOW = "#F0E442"
_GREY = "#888888"
_MARKERS = {"stock": "o", "two_d": "s"}
_CEILING_MARKERS = "v^<>"
_LETTERS_PER_INCH = 11


def scaling_plot(results: Sequence[BenchResult], path: str | Path) -> None:
    """Write an SVG of step times by number of ranks, with a panel for each network.

    Bars reach from the fastest block to the slowest. Ceilings are grey. A cross at the upper edge
    is a contestant that failed.

    Raises:
        ConfigError: matplotlib is missing, or nothing was measured.
    """
    with plotting():
        save_plot(_scaling_figure(results), path)


def phase_plot(result: BenchResult, path: str | Path) -> None:
    """Write an SVG of the traced step of each contestant, part by part.

    First what computes; time in which ranks wait for a collective follows, hatched.

    Raises:
        ConfigError: matplotlib is missing, or nothing was traced.
    """
    with plotting():
        save_plot(_phase_figure(result), path)


def _scaling_figure(results: Sequence[BenchResult]) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    names = names_in(results)
    if not any(_steps_ms(results, name) for name in names):
        raise ConfigError("no contestant was measured, so there is no step time to plot")
    shapes = sorted(
        {_shape(result) for result in results}, key=lambda shape: (shape[0] * shape[1], shape)
    )
    by_place: dict[str, list[BenchResult]] = {}
    for result, place in zip(results, places(results), strict=True):
        by_place.setdefault(place, []).append(result)
    looks = _looks(results, names)
    panel_inches = 0.6 + 0.7 * len(shapes)
    figure = Figure(figsize=(2.6 + panel_inches * len(by_place), 3.6), layout="constrained")
    panels = figure.subplots(1, len(by_place), sharey=True, squeeze=False)[0]
    panels[0].set_yscale("log")
    for panel, (place, here) in zip(panels, by_place.items(), strict=True):
        for index, name in enumerate(names):
            # Side by side, so that no bar hides another.
            aside = 0.4 * ((index + 0.5) / len(names) - 0.5)
            trials = [
                (x + aside, [result for result in here if _shape(result) == shape])
                for x, shape in enumerate(shapes)
            ]
            _draw_line(
                panel, name, [(x, of_shape) for x, of_shape in trials if of_shape], looks[name]
            )
        panel.set_title(fill(place, int(panel_inches * _LETTERS_PER_INCH)))
        panel.set_xlim(-0.5, len(shapes) - 0.5)
        labels = [f"{hosts * ranks}\n{hosts}x{ranks}" for hosts, ranks in shapes]
        panel.set_xticks(range(len(shapes)), labels)
        panel.grid(axis="y")
    _number_log_axis(panels[0])
    panels[0].set_ylabel("median ms per step")
    figure.supxlabel("ranks, as hosts x ranks per host (x: failed)", fontsize="medium")
    slowest_first = sorted(names, key=lambda name: -_median_ms(results, name))
    figure.legend(
        [Line2D([], [], **looks[name]) for name in slowest_first],
        slowest_first,
        loc="outside right center",
    )
    return figure


def _draw_line(
    panel: "Axes",
    name: str,
    trials: Sequence[tuple[float, Sequence[BenchResult]]],
    look: dict[str, Any],
) -> None:
    """One contestant in one panel: where it is drawn, and the results found there."""
    points = [(x, steps) for x, of_shape in trials if (steps := _steps_ms(of_shape, name))]
    medians = np.array([np.median(steps) for _, steps in points])
    lows = medians - [min(steps) for _, steps in points]
    highs = np.array([max(steps) for _, steps in points]) - medians
    if points:
        panel.errorbar([x for x, _ in points], medians, yerr=[lows, highs], elinewidth=1, **look)
    for x, of_shape in trials:
        failed = [
            contestant
            for result in of_shape
            for contestant in result.contestants
            if contestant.name == name
        ]
        if any(contestant.outcome is not Outcome.MEASURED for contestant in failed):
            edge = panel.get_xaxis_transform()
            panel.plot([x], [0.98], marker="x", color=look["color"], transform=edge)


def _number_log_axis(panel: "Axes") -> None:
    """Plain numbers, and enough of them where the axis spans less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = panel.get_ylim()
    is_short = high < 5 * low
    panel.yaxis.set_major_locator(
        MaxNLocator(6) if is_short else LogLocator(subs=(1, 2, 5), numticks=20)
    )
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _phase_figure(result: BenchResult) -> "Figure":
    from matplotlib.figure import Figure

    traced = [contestant for contestant in result.measured() if contestant.phases]
    if not traced:
        raise ConfigError("no contestant was traced, so there are no phases to plot")
    parts = phases_in(traced)
    shown = [
        contestant
        for contestant in result.contestants
        if contestant in traced or contestant not in result.measured()
    ]
    figure = Figure(
        figsize=(7.6, max(0.9 + 0.36 * len(shown), 0.8 + 0.22 * len(parts))), layout="constrained"
    )
    panel = figure.subplots()
    ends = np.zeros(len(shown))
    for part in parts:
        widths = np.array(
            [
                sum(phase.seconds * 1e3 for phase in contestant.phases if _is(part, phase))
                if contestant in traced
                else 0.0
                for contestant in shown
            ]
        )
        panel.barh(
            range(len(shown)),
            widths,
            left=ends,
            label=phase_label(*part),
            height=0.7,
            **_fill(parts, part),
        )
        ends += widths
    for y, (contestant, end) in enumerate(zip(shown, ends, strict=True)):
        text = ms(end / 1e3) if contestant in traced else str(contestant.outcome)
        panel.annotate(text, (end, y), (4, 0), textcoords="offset points", va="center")
    panel.set_yticks(range(len(shown)), [contestant.name for contestant in shown])
    panel.tick_params(axis="y", length=0)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.12 * ends.max())
    panel.grid(axis="x")
    panel.set_xlabel("ms per step, traced; hatched: waits for a collective")
    figure.legend(loc="outside right center")
    return figure


def _fill(parts: Sequence[tuple[str, bool]], part: tuple[str, bool]) -> dict[str, Any]:
    """Colours of what computes start at one end of the palette, of what waits at the other."""
    _, waits = part
    palette = PALETTE[::-1] if waits else (*PALETTE, _YELLOW)
    place = [alike for alike in parts if alike[1] == waits].index(part)
    return {
        "facecolor": palette[place % len(palette)],
        "hatch": "////" if waits else "",
        "edgecolor": "white",
        "linewidth": 0.6,
    }


def _is(part: tuple[str, bool], phase: Phase) -> bool:
    return part == (phase.name, phase.waiting)


def _looks(results: Sequence[BenchResult], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, line and marker of each contestant."""
    kinds = {
        contestant.name: contestant.kind for result in results for contestant in result.contestants
    }
    looks: dict[str, dict[str, Any]] = {}
    for name in names:
        before = [
            other for other in looks if (kinds[other] == "ceiling") == (kinds[name] == "ceiling")
        ]
        if kinds[name] == "ceiling":
            marker = _CEILING_MARKERS[len(before) % len(_CEILING_MARKERS)]
            look = {"color": _GREY, "linestyle": "--", "marker": marker}
        else:
            lap, place = divmod(len(before), len(PALETTE))
            line = ("-", ":", "-.")[lap % 3]
            look = {"color": PALETTE[place], "linestyle": line, "marker": _MARKERS[kinds[name]]}
        looks[name] = {**look, "markersize": 4}
    return looks


def _shape(result: BenchResult) -> tuple[int, int]:
    return result.setting.hosts, result.setting.ranks_per_host


def _steps_ms(results: Sequence[BenchResult], name: str) -> list[float]:
    """Step times of the blocks that count; those of repeated runs together."""
    return [
        block.step_s * 1e3
        for result in results
        for contestant in result.measured()
        if contestant.name == name
        for block in contestant.blocks
    ]


def _median_ms(results: Sequence[BenchResult], name: str) -> float:
    """Over all results; 0 for what was measured in none."""
    steps = _steps_ms(results, name)
    return float(np.median(steps)) if steps else 0.0
