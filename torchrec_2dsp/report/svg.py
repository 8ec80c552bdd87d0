"""Charts as SVG files in our style: the same byte for byte for the same numbers."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.report.charts import Axis, BarChart, Line, LineChart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "figure.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "hatch.linewidth": 1.2,
    "legend.frameon": False,
    # A dollar in a name is no formula.
    "text.parse_math": False,
    # Text stays text: smaller files, and found by searching.
    "svg.fonttype": "none",
    "svg.hashsalt": "torchrec_2dsp",
}
_LETTERS_PER_INCH = 11
_MAX_NAMES_PER_COLUMN = 20
_HEIGHT_INCHES, _BARS_INCHES = 3.6, 5.2


def draw_lines(charts: Sequence[LineChart], path: str | Path) -> None:
    """Write an SVG of line charts side by side, with one vertical axis and one legend.

    Raises:
        ConfigError: matplotlib is missing.
    """
    with _plotting():
        _save(_lines_figure(charts), path)


def draw_bars(chart: BarChart, path: str | Path) -> None:
    """Write an SVG of bars from the left to the right, the first place at the top.

    Raises:
        ConfigError: matplotlib is missing.
    """
    with _plotting():
        _save(_bars_figure(chart), path)


def _lines_figure(charts: Sequence[LineChart]) -> "Figure":
    from matplotlib.figure import Figure

    names = {line.name for chart in charts for line in chart.lines if line.name}
    num_columns = -(-len(names) // _MAX_NAMES_PER_COLUMN)
    widths = [chart.width_inches for chart in charts]
    figure = Figure(
        figsize=(sum(widths) + num_columns * _legend_inches(names), _HEIGHT_INCHES),
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
    """Draw a line and its ranges, and return what stands for it in a legend."""
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
    """Set scale, limits and ticks of a panel's axis "x" or "y", once its lines are there."""
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
        # Plain numbers, and enough of them where the axis spans little.
        low, high = ruler.get_view_interval()
        subs = (1, 2, 5) if high < 500 * low else (1,)
        ruler.set_major_locator(
            MaxNLocator(6, steps=(1, 2, 5, 10))
            if high < 5 * low
            else LogLocator(subs=subs, numticks=20)
        )
        ruler.set_minor_locator(NullLocator())
        ruler.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _bars_figure(chart: BarChart) -> "Figure":
    from matplotlib.figure import Figure

    names = [bars.name for bars in chart.bars]
    figure = Figure(
        figsize=(
            _BARS_INCHES + _legend_inches(names),
            max(0.9 + 0.36 * len(chart.places), 0.8 + 0.22 * len(names)),
        ),
        layout="constrained",
    )
    panel = figure.subplots()
    heights = {place: height for height, place in enumerate(chart.places)}
    for bars in chart.styled():
        panel.barh(
            [heights[place] for place in bars.values],
            list(bars.values.values()),
            left=list(bars.starts.values()),
            label=bars.name,
            height=0.7,
            facecolor=bars.colour,
            hatch="////" if bars.is_hatched else "",
            edgecolor="white",
            linewidth=0.6,
        )
    for place, note in chart.notes.items():
        end = (chart.end(place), heights[place])
        panel.annotate(note, end, (4, 0), textcoords="offset points", va="center")
    panel.set_yticks(list(heights.values()), list(heights))
    panel.tick_params(axis="y", length=0)
    # Room for places without bars, too.
    panel.set_ylim(len(heights) - 0.5, -0.5)
    panel.margins(x=0.12)
    panel.grid(axis="x")
    panel.set_xlabel(chart.title)
    figure.legend(loc="outside right center")
    return figure


def _legend_inches(names: "Sequence[str] | set[str]") -> float:
    """How wide a column of a legend is."""
    return 0.6 + max(map(len, names), default=0) / _LETTERS_PER_INCH


@contextmanager
def _plotting() -> Iterator[None]:
    """Plot in our style, whatever the user's is, and restore the user's afterwards."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib, which is not installed; pip install 'torchrec-2dsp[report]', "
            "or do without plots"
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def _save(figure: "Figure", path: str | Path) -> None:
    """Write the SVG; its coordinates have two decimals, which are enough and take less room."""
    # Without a date and a version, which differ between two plots of the same numbers.
    metadata: dict[str, Any] = {"Date": None, "Creator": None}
    drawn = StringIO()
    figure.savefig(drawn, format="svg", facecolor="white", metadata=metadata)
    Path(path).write_text(_COORDINATES.sub(_with_two_decimals, drawn.getvalue()))


_COORDINATES = re.compile(r' (?:d|x|y|transform)="[^"]*"')


def _with_two_decimals(attribute: re.Match[str]) -> str:
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2f}", attribute[0])
