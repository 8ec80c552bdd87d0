"""`LineChart` and `BarChart`: what a plot shows, as plain data.

`report.svg` draws them as files, and `report.page` on pages.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

# Okabe and Ito's palette, which colour-blind readers can tell apart. Its yellow is hard to see on
# white, so it only fills areas.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#333333", "#CC79A7", "#56B4E9", "#D55E00")
"""The colours of lines and marks."""
_YELLOW = "#F0E442"
MARKERS = "osDv^<>"
"""The markers of lines that are told apart by more than their colour."""

Dash = Literal["", "-", "--", ":", "-."]
_DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What one direction of a line chart means."""

    title: str
    """What the numbers are, with their unit."""

    is_log: bool = False
    """Whether equal distances are equal ratios."""

    limits: tuple[float, float] | None = None
    """The first and the last number; by default those of the lines, and some room."""

    names: Sequence[str] = ()
    """The names of the places 0, 1, 2 and so on, which are shown instead of numbers."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points in their order, and how far each of them may be off."""

    x: Sequence[float]
    y: Sequence[float]

    name: str = ""
    """What the legend says. A line without a name isn't in the legend, and is thinner."""

    low: Sequence[float] = ()
    """The lower end of each point's range; without any, no range is shown."""

    high: Sequence[float] = ()
    """The upper end of each point's range."""

    is_band: bool = False
    """Whether the ranges are a band along the line, rather than a bar at each point."""

    way: Literal["straight", "steps", "points"] = "straight"
    """How points are joined: not at all as ``"points"``."""

    colour: str = ""
    """The colour as ``#rrggbb``; by default the palette's next one."""

    dash: Dash = ""
    """The dash of the line; by default one that tells apart lines of the same colour."""

    marker: str = ""
    """A letter of `MARKERS`, ``"x"`` or ``"*"``; none by default."""

    hover: Sequence[str] = ()
    """What a page says of each point under the mouse; by default its numbers."""


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
    """What is said above the chart."""

    width_inches: float = 5.2
    """The width in a file, without the legend; a page's plots are as wide as the page."""

    def styled(self) -> list[Line]:
        """The lines, each with its colour and dash."""
        styled_lines = []
        place = 0
        for line in self.lines:
            lap, step = divmod(place, len(PALETTE))
            styled_lines.append(
                replace(
                    line,
                    colour=line.colour or PALETTE[step],
                    dash=line.dash or ("-" if line.colour else _DASHES[lap % len(_DASHES)]),
                )
            )
            place += not line.colour
        return styled_lines


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A bar in each of several places of a chart."""

    name: str
    """What the legend says."""

    values: Mapping[str, float]
    """The length of each bar, by place; a place that isn't there has none."""

    starts: Mapping[str, float] = field(default_factory=dict)
    """Where bars begin, by place; by default where the bar before ends, or at zero."""

    colour: str = ""
    """The colour as ``#rrggbb``; by default the palette's next one."""

    is_hatched: bool = False
    """Whether the bars are hatched. Such bars take their colours from the palette's end."""

    hover: Mapping[str, str] = field(default_factory=dict)
    """What a page says of each bar under the mouse, by place; by default its number."""


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Bars in named places, one after the other in each place.

    Example:
        >>> from torchrec_2dsp.report.charts import BarChart, Bars
        >>> forward = Bars(name="forward", values={"left": 2.0, "right": 3.0})
        >>> backward = Bars(name="backward", values={"right": 4.0})
        >>> chart = BarChart([forward, backward], places=["left", "right"], title="ms")
        >>> chart.styled()[1].starts, chart.end("right")
        ({'right': 3.0}, 7.0)
    """

    bars: Sequence[Bars] = field(kw_only=False)

    places: Sequence[str]
    """The names of the places, in their order."""

    title: str
    """What the lengths are, with their unit."""

    notes: Mapping[str, str] = field(default_factory=dict)
    """What a file says at the end of each place's bars, by place."""

    def styled(self) -> list[Bars]:
        """The bars, each with its colour and all of its starts."""
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

    def end(self, place: str) -> float:
        """Where the bars of a place end; zero without any."""
        return max(
            (
                bars.starts[place] + bars.values[place]
                for bars in self.styled()
                if place in bars.values
            ),
            default=0.0,
        )
