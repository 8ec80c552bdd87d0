"""`Page`: a report in one HTML file, with sortable tables and interactive plots."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.report.charts import Axis, BarChart, Line, LineChart
from torchrec_2dsp.report.table import Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


_SYMBOLS = {
    "o": "circle",
    "s": "square",
    "D": "diamond",
    "v": "triangle-down",
    "^": "triangle-up",
    "<": "triangle-left",
    ">": "triangle-right",
    "x": "x",
    "*": "star",
}
_DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}


def graph_objects() -> Any:
    """Import plotly's ``graph_objects``.

    Raises:
        ConfigError: plotly is missing.
    """
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise ConfigError(
            "pages with plots need plotly, which is not installed; "
            "pip install 'torchrec-2dsp[report]'"
        ) from error
    return graph_objects


def lines_figure(chart: LineChart) -> "Figure":
    """Build a line chart's figure."""
    figure = graph_objects().Figure(layout={"title": chart.title or None})
    for line in chart.styled():
        if len(line.low) and line.is_band:
            figure.add_scatter(
                x=[*line.x, *reversed(line.x)],
                y=[*line.high, *reversed(line.low)],
                mode="none",
                fill="toself",
                fillcolor=line.colour,
                opacity=0.15,
                hoverinfo="skip",
                showlegend=False,
            )
        figure.add_scatter(**_trace(line))
    figure.update_xaxes(**_axis(chart.x))
    figure.update_yaxes(**_axis(chart.y))
    return figure


def bars_figure(chart: BarChart, *, upright: bool = False) -> "Figure":
    """Build a bar chart's figure, horizontal or upright."""
    figure = graph_objects().Figure(layout={"barmode": "overlay"})
    for bars in chart.styled():
        places, lengths = list(bars.values), list(bars.values.values())
        texts = [bars.hover.get(place, "") for place in places]
        figure.add_bar(
            name=bars.name,
            orientation="v" if upright else "h",
            x=places if upright else lengths,
            y=lengths if upright else places,
            base=list(bars.starts.values()),
            marker={"color": bars.colour, "pattern": {"shape": "/" if bars.is_hatched else ""}},
            **({"hovertext": texts, "hovertemplate": "%{hovertext}"} if any(texts) else {}),
        )
    order = {"type": "category", "categoryorder": "array", "categoryarray": list(chart.places)}
    figure.update_layout(
        xaxis=order if upright else {"title": chart.title},
        yaxis={"title": chart.title} if upright else {**order, "autorange": "reversed"},
    )
    return figure


def _trace(line: Line) -> dict[str, Any]:
    modes = [] if line.way == "points" else ["lines"]
    trace: dict[str, Any] = {
        "x": list(line.x),
        "y": list(line.y),
        "name": line.name,
        "showlegend": bool(line.name),
        "mode": "+".join([*modes, "markers"] if line.marker else modes) or "none",
        "line": {
            "color": line.colour,
            "dash": _DASHES[line.dash],
            "shape": "hv" if line.way == "steps" else "linear",
            "width": 2 if line.name else 1,
        },
    }
    if line.marker:
        size = 14 if line.marker == "*" else 6
        trace["marker"] = {"color": line.colour, "symbol": _SYMBOLS[line.marker], "size": size}
    if len(line.low) and not line.is_band:
        trace["error_y"] = {
            "symmetric": False,
            "array": [high - y for high, y in zip(line.high, line.y, strict=True)],
            "arrayminus": [y - low for low, y in zip(line.low, line.y, strict=True)],
        }
    if line.hover:
        trace |= {"text": list(line.hover), "hovertemplate": "%{text}"}
    return trace


def _axis(axis: Axis) -> dict[str, Any]:
    layout: dict[str, Any] = {"title": axis.title, "type": "log" if axis.is_log else "linear"}
    if axis.limits is not None:
        layout["range"] = [math.log10(end) if axis.is_log else end for end in axis.limits]
    if axis.names:
        layout |= {"tickvals": list(range(len(axis.names))), "ticktext": list(axis.names)}
    return layout


_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1300px; padding: 0 1em }
nav { position: sticky; top: 0; background: white; z-index: 1 }
nav a { display: block; padding: .3em 0; color: inherit; text-decoration: none }
nav a:hover { text-decoration: underline }
section { scroll-margin-top: 3em; border-top: 1px solid #ddd; margin-top: 2em }
main, .small > div { min-width: 0 }
.small { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24em), 1fr)) }
.numbers { display: flex; flex-wrap: wrap; gap: 1em 3em; margin: 1em 0 }
.numbers b { display: block; font-size: 2.4em; line-height: 1.2 }
.numbers div { max-width: 22em }
@media (min-width: 60em) {
  body:has(nav) { display: grid; grid-template-columns: 13em minmax(0, 1fr); gap: 2em }
  nav { align-self: start; padding-top: 1.5em; max-height: 100vh; overflow-y: auto }
}
@media (max-width: 60em) {
  nav { display: flex; gap: 1.2em; overflow-x: auto; white-space: nowrap; font-size: 13px }
}
table { border-collapse: collapse; margin: 1em 0 }
th, td { padding: .2em .7em; text-align: right; border-bottom: 1px solid #ddd }
th { cursor: pointer; position: sticky; top: 0; background: white }
.wide { overflow-x: auto }
.words { text-align: left }
pre { font-size: 12px; background: #f6f6f6; padding: .8em; overflow-x: auto }
summary { cursor: pointer; margin: .8em 0 }
"""
# Columns of numbers are sorted as numbers; commas and what follows a number don't count.
_SORT = """
for (const heading of document.querySelectorAll("th")) heading.onclick = () => {
  const body = heading.closest("table").tBodies[0], place = heading.cellIndex;
  const value = row => {
    const text = row.cells[place].textContent, number = parseFloat(text.replaceAll(",", ""));
    return heading.className == "words" || isNaN(number) ? text : number;
  };
  const order = heading.dataset.order = heading.dataset.order == "1" ? "-1" : "1";
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (typeof x != typeof y) return typeof x == "number" ? -1 : 1;
    return x < y ? -order : x > y ? +order : 0;
  });
  body.append(...rows);
};
"""
_PLOT_HEIGHT, _SMALL_HEIGHT, _PLOT_MARGIN = 400, 280, 60
"""A plot's height, a small one's, and the margin above it, in pixels."""
_BARS_MARGIN, _BAR_HEIGHT = 160, 18
"""The margins of horizontal bars, and the height per place, in pixels."""
_NAMES_PER_LINE, _LINE_HEIGHT = 5, 20
"""The fewest names per legend line, and its height in pixels."""


class Page:
    """Texts, tables and plots in sections, with a list of links at the side.

    Example:
        >>> from torchrec_2dsp.report.page import Page
        >>> from torchrec_2dsp.report.table import Table
        >>> page = Page("Two ranks")
        >>> page.add_table("Load", Table(("rank", "ms"), [("0", "1.5"), ("1", "2.5")]))
        >>> "<td>2.5</td>" in page.html()
        True
    """

    def __init__(self, title: str) -> None:
        self.title = title
        """The title, also the first heading."""
        self.figures: list[Figure] = []
        self._parts: list[str] = []
        self._sections: list[str] = []

    def begin_section(self, heading: str) -> None:
        """Begin a section, to which the following parts belong."""
        self._parts.append("</section>" if self._sections else "")
        self._sections.append(heading)
        anchor = f'id="section-{len(self._sections)}"'
        self._parts.append(f"<section {anchor}><h2>{escape(heading)}</h2>")

    def add_numbers(self, numbers: Sequence[tuple[str, str]]) -> None:
        """Add large numbers side by side, each with its description."""
        tiles = (f"<div><b>{escape(number)}</b>{escape(what)}</div>" for number, what in numbers)
        self._parts.append(f'<div class="numbers">{"".join(tiles)}</div>')

    def add_text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def add_code(self, heading: str, text: str, *, is_folded: bool = False) -> None:
        """Add preformatted text, folded under its heading if wanted."""
        self._add(heading, f"<pre>{escape(text)}</pre>", is_folded=is_folded)

    def add_table(self, heading: str, table: Table, *, is_folded: bool = False) -> None:
        """Add a table that a click on a heading sorts, folded under its own heading if wanted."""
        self._add(heading, f'<div class="wide">{table.html()}</div>', is_folded=is_folded)

    def _add(self, heading: str, content: str, *, is_folded: bool = False) -> None:
        """Add a part under its heading, which is smaller inside a section."""
        heading, rank = escape(heading), 3 if self._sections else 2
        self._parts.append(
            f"<details><summary>{heading}</summary>{content}</details>"
            if is_folded
            else f"<h{rank}>{heading}</h{rank}>\n{content}"
        )

    def add_lines(self, heading: str, chart: LineChart) -> None:
        """Add a line chart as wide as the page."""
        self._add_figure(heading, lines_figure(chart), _PLOT_HEIGHT)

    def add_bars(self, heading: str, chart: BarChart, *, upright: bool = False) -> None:
        """Add a bar chart as wide as the page; upright bars suit many places."""
        height = _PLOT_HEIGHT if upright else _BARS_MARGIN + _BAR_HEIGHT * len(chart.places)
        self._add_figure(heading, bars_figure(chart, upright=upright), height)

    def add_small_charts(self, charts: Sequence[tuple[str, LineChart | BarChart]]) -> None:
        """Add charts with their headings, as many side by side as fit."""
        self._parts.append('<div class="small">')
        for heading, chart in charts:
            self._parts.append("<div>")
            if isinstance(chart, LineChart):
                self._add_figure(heading, lines_figure(chart), _SMALL_HEIGHT, has_toolbar=False)
            else:
                height = max(_SMALL_HEIGHT, _BARS_MARGIN + _BAR_HEIGHT * len(chart.places))
                self._add_figure(heading, bars_figure(chart), height, has_toolbar=False)
            self._parts.append("</div>")
        self._parts.append("</div>")

    def _add_figure(
        self, heading: str, figure: "Figure", height: int, *, has_toolbar: bool = True
    ) -> None:
        """Add a plotly figure, with a legend if it has several parts."""
        drawn_things: Any = figure.data
        more_lines_height = _LINE_HEIGHT * ((len(drawn_things) - 1) // _NAMES_PER_LINE)
        figure.update_layout(
            template="simple_white",
            height=height + more_lines_height,
            # Room for the toolbar and the names.
            margin={"t": _PLOT_MARGIN + more_lines_height, "r": 20},
            legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
            showlegend=len(drawn_things) > 1,
        )
        self.figures.append(figure)
        drawn: str = figure.to_html(
            full_html=False,
            # The first plot includes the script for all, so that the file needs no network.
            include_plotlyjs=len(self.figures) == 1,
            div_id=f"plot-{len(self.figures)}",
            config={"responsive": True, "displaylogo": False}
            | ({} if has_toolbar else {"displayModeBar": False}),
        )
        self._add(heading, drawn)

    def html(self) -> str:
        """Return the page as self-contained HTML."""
        title = escape(self.title)
        links = "".join(
            f'<a href="#section-{number}">{escape(heading)}</a>'
            for number, heading in enumerate(self._sections, 1)
        )
        return "\n".join(
            [
                '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<title>{title}</title><style>{_STYLE}</style></head>",
                f"<body>{f'<nav>{links}</nav>' if links else ''}<main><h1>{title}</h1>",
                *self._parts,
                f"{'</section>' if links else ''}</main>",
                f"<script>{_SORT}</script></body></html>\n",
            ]
        )

    def write(self, path: str | Path) -> None:
        """Write the page to a file."""
        Path(path).write_text(self.html(), encoding="utf-8")
