"""Charts as plotly's figures, which answer to the mouse on a page."""

import math
from typing import TYPE_CHECKING, Any

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.report.charts import Axis, BarChart, Line, LineChart

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
    """Plotly's module ``graph_objects``.

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
    """The figure of a line chart.

    Raises:
        ConfigError: plotly is missing.
    """
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
    """The figure of a bar chart: from the left to the right, or upright.

    Raises:
        ConfigError: plotly is missing.
    """
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
    """What plotly is told of a line."""
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
    """What plotly is told of an axis."""
    layout: dict[str, Any] = {"title": axis.title, "type": "log" if axis.is_log else "linear"}
    if axis.limits is not None:
        layout["range"] = [math.log10(end) if axis.is_log else end for end in axis.limits]
    if axis.names:
        layout |= {"tickvals": list(range(len(axis.names))), "ticktext": list(axis.names)}
    return layout
