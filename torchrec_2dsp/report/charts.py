"""`LineChart` and `BarChart`: plots as plain data; line charts also as SVG files in this style.

Equal numbers give equal files, byte for byte.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from torchrec_2dsp.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's palette, which colour-blind readers can tell apart. Its yellow is hard to see on
# white, so it only fills areas.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#333333", "#CC79A7", "#56B4E9", "#D55E00")
"""Colours for lines and marks."""
_YELLOW = "#F0E442"
MARKERS = "osDv^<>"
"""Markers for lines that differ in more than their colour."""

Dash = Literal["", "-", "--", ":", "-."]
DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.")
"""Dashes for lines with equal colours."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of a line chart."""

    title: str
    """The quantity, with its unit."""

    is_log: bool = False
    limits: tuple[float, float] | None = None
    """The first and last number; by default the lines' own, with a margin."""

    names: Sequence[str] = ()
    """Names shown instead of the numbers 0, 1, 2 and so on."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line's points, with optional error ranges."""

    x: Sequence[float]
    y: Sequence[float]

    name: str = ""
    """The legend entry. A line without a name isn't in the legend, and is thinner."""

    low: Sequence[float] = ()
    """Each point's lower bound; empty for no ranges."""

    high: Sequence[float] = ()
    """Each point's upper bound."""

    is_band: bool = False
    """True if the ranges form a band, rather than a bar at each point."""

    way: Literal["straight", "steps", "points"] = "straight"
    """The way points are joined; not at all as ``"points"``."""

    colour: str = ""
    """The colour as ``#rrggbb``; by default the palette's next one."""

    dash: Dash = ""
    """The dash; by default one that tells lines with equal colours apart."""

    marker: str = ""
    """A letter from `MARKERS`, ``"x"`` or ``"*"``; none by default."""

    hover: Sequence[str] = ()
    """Each point's text under the mouse, on a page; by default its numbers."""


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Lines over the same axes.

    Example:
        >>> from torchrec_2dsp.report.charts import Axis, Line, LineChart
        >>> lines = [Line(name=name, x=[1, 2], y=[3, 4]) for name in ("left", "right")]
        >>> chart = LineChart(lines, x=Axis(title="ranks"), y=Axis(title="ms", is_log=True))
        >>> [line.colour for line in chart.styled()]
        ['#0072B2', '#E69F00']
    """

    lines: Sequence[Line] = field(kw_only=False)
    x: Axis
    y: Axis

    title: str = ""
    width_inches: float = 5.2
    """The width in a file, without the legend; on a page, plots fill the width."""

    def styled(self) -> list[Line]:
        """Return the lines with their colours and dashes."""
        styled_lines = []
        place = 0
        for line in self.lines:
            lap, step = divmod(place, len(PALETTE))
            styled_lines.append(
                replace(
                    line,
                    colour=line.colour or PALETTE[step],
                    dash=line.dash or ("-" if line.colour else DASHES[lap % len(DASHES)]),
                )
            )
            place += not line.colour
        return styled_lines


@dataclass(frozen=True, kw_only=True)
class Bars:
    """One bar in each of several places in a chart."""

    name: str
    """The legend entry."""

    values: Mapping[str, float]
    """Each bar's length, by place."""

    starts: Mapping[str, float] = field(default_factory=dict)
    """Each bar's start, by place; by default the previous bar's end, or zero."""

    colour: str = ""
    """The colour as ``#rrggbb``; by default the palette's next one."""

    is_hatched: bool = False
    """True if the bars are hatched, with colours from the palette's end."""

    hover: Mapping[str, str] = field(default_factory=dict)
    """Each bar's text under the mouse, by place, on a page; by default its number."""


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Bars in named places, stacked in each place.

    Example:
        >>> from torchrec_2dsp.report.charts import BarChart, Bars
        >>> forward = Bars(name="forward", values={"left": 2.0, "right": 3.0})
        >>> backward = Bars(name="backward", values={"right": 4.0})
        >>> chart = BarChart([forward, backward], places=["left", "right"], title="ms")
        >>> chart.styled()[1].starts
        {'right': 3.0}
    """

    bars: Sequence[Bars] = field(kw_only=False)

    places: Sequence[str]
    """The places' names, in order."""

    title: str
    """The quantity, with its unit."""

    def styled(self) -> list[Bars]:
        """Return the bars with their colours and all starts."""
        ends: dict[str, float] = defaultdict(float)
        styled_bars = []
        for bars in self.bars:
            starts = {place: bars.starts.get(place, ends[place]) for place in bars.values}
            ends |= {place: start + bars.values[place] for place, start in starts.items()}
            alike = [others for others in styled_bars if others.is_hatched == bars.is_hatched]
            palette = PALETTE[::-1] if bars.is_hatched else (*PALETTE, _YELLOW)
            colour = bars.colour or palette[len(alike) % len(palette)]
            styled_bars.append(replace(bars, starts=starts, colour=colour))
        return styled_bars


_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "figure.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    # A dollar in a name starts no formula.
    "text.parse_math": False,
    # Text stays text: smaller files that can be searched.
    "svg.fonttype": "none",
    "svg.hashsalt": "torchrec_2dsp",
}
_LETTERS_PER_INCH = 11
_MAX_NAMES_PER_COLUMN = 20
_HEIGHT_INCHES = 3.6


def draw_lines(charts: Sequence[LineChart], path: str | Path) -> None:
    """Write an SVG of line charts side by side, with one vertical axis and one legend.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib import style
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib, which is not installed; pip install 'torchrec-2dsp[report]', "
            "or do without plots"
        ) from error
    # Without a date and a version, which would differ between two plots of the same numbers.
    metadata: dict[str, Any] = {"Date": None, "Creator": None}
    drawn = StringIO()
    # Use this module's style, and restore the user's afterwards.
    with style.context(_STYLE, after_reset=True):
        figure = _lines_figure(charts)
        figure.savefig(drawn, format="svg", facecolor="white", metadata=metadata)
    Path(path).write_text(_COORDINATES.sub(_with_two_decimals, drawn.getvalue()))


def _lines_figure(charts: Sequence[LineChart]) -> "Figure":
    from matplotlib.figure import Figure

    names = {line.name for chart in charts for line in chart.lines if line.name}
    num_columns = -(-len(names) // _MAX_NAMES_PER_COLUMN)
    widths = [chart.width_inches for chart in charts]
    column_inches = 0.6 + max(map(len, names), default=0) / _LETTERS_PER_INCH
    figure = Figure(
        figsize=(sum(widths) + num_columns * column_inches, _HEIGHT_INCHES),
        layout="constrained",
    )
    panels = figure.subplots(1, len(charts), sharey=True, squeeze=False, width_ratios=widths)[0]
    handles = {}
    for panel, chart in zip(panels, charts, strict=True):
        for line in chart.styled():
            handle = _draw_line(panel, line)
            if line.name:
                handles.setdefault(line.name, handle)
        panel.set_title(fill(chart.title, max(1, int(chart.width_inches * _LETTERS_PER_INCH))))
        panel.grid(axis="y" if chart.x.names else "both")
        _show_axis(panel, "x", chart.x)
    _show_axis(panels[0], "y", charts[0].y)
    panels[0].set_ylabel(charts[0].y.title)
    if len(charts) > 1:
        figure.supxlabel(charts[0].x.title)
    else:
        panels[0].set_xlabel(charts[0].x.title)
    figure.legend(
        list(handles.values()), list(handles), loc="outside right upper", ncols=num_columns
    )
    return figure


def _draw_line(panel: "Axes", line: Line) -> Any:
    """Draw a line with its ranges, and return its legend handle."""
    (handle,) = panel.plot(
        line.x,
        line.y,
        color=line.colour,
        linestyle="" if line.way == "points" else line.dash,
        drawstyle="steps-post" if line.way == "steps" else "default",
        linewidth=1.2 if line.name else 0.8,
        marker=line.marker,
        markersize=9 if line.marker == "*" else 4,
    )
    if len(line.low) and line.is_band:
        panel.fill_between(line.x, line.low, line.high, color=line.colour, alpha=0.15, linewidth=0)
    elif len(line.low):
        panel.vlines(line.x, line.low, line.high, color=line.colour, linewidth=1)
    return handle


def _show_axis(panel: "Axes", letter: str, axis: Axis) -> None:
    """Set the scale, limits and ticks of a panel's axis "x" or "y", after its lines."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if axis.is_log:
        panel.set(**{f"{letter}scale": "log"})
    if axis.limits is not None:
        panel.set(**{f"{letter}lim": axis.limits})
    ruler = panel.xaxis if letter == "x" else panel.yaxis
    if axis.names:
        panel.set(**{f"{letter}lim": (-0.5, len(axis.names) - 0.5)})
        ruler.set_ticks(range(len(axis.names)), list(axis.names))
    elif axis.is_log:
        # Show plain numbers, and enough of them on short axes.
        low, high = ruler.get_view_interval()
        subs = (1, 2, 5) if high < 500 * low else (1,)
        ruler.set_major_locator(
            MaxNLocator(6, steps=(1, 2, 5, 10))
            if high < 5 * low
            else LogLocator(subs=subs, numticks=20)
        )
        ruler.set_minor_locator(NullLocator())
        ruler.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


_COORDINATES = re.compile(r' (?:d|x|y|transform)="[^"]*"')


def _with_two_decimals(attribute: re.Match[str]) -> str:
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2f}", attribute[0])
