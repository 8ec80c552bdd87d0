"""Plots of what an `Explanation` says."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchrec_2dsp.cost.loads import Ranks
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.planner.explanation.table_line import TableLine
from torchrec_2dsp.planner.search.meshes import Tried
from torchrec_2dsp.report.page import graph_objects
from torchrec_2dsp.report.plots import PALETTE

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MAX_BARS = 50
"""How many tables are plotted at most."""


def parts_plot(cost: StepCost) -> "Figure":
    """Each part begins where the one before it ends."""
    parts = [(name.replace("_", " "), 1e3 * seconds) for name, seconds in cost.parts() if seconds]
    figure = graph_objects().Figure(
        graph_objects().Waterfall(
            orientation="h",
            y=[*(name for name, _ in parts), "all"],
            x=[*(part_ms for _, part_ms in parts), None],
            measure=[*("relative" for _ in parts), "total"],
            increasing={"marker": {"color": PALETTE[0]}},
            decreasing={"marker": {"color": PALETTE[2]}},
            totals={"marker": {"color": PALETTE[3]}},
            hovertemplate="%{y}: %{delta:.2f} ms<extra></extra>",
        )
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="ms")
    return figure


def tables_plot(tables: Sequence[TableLine]) -> "Figure":
    """A colour for each way to shard them."""
    figure = graph_objects().Figure(layout={"barmode": "stack"})
    for way in dict.fromkeys(line.way for line in tables):
        lines = [line for line in tables if line.way == way]
        figure.add_bar(
            name=way,
            orientation="h",
            y=[line.name for line in lines],
            x=[1e3 * line.seconds for line in lines],
            customdata=[(f"{line.num_rows:,}", line.dim, line.sent_bytes / 1e6) for line in lines],
            hovertemplate="%{y}, %{customdata[0]} rows of %{customdata[1]}: %{x:.3f} ms, "
            "%{customdata[2]:.3f} MB sent",
        )
    order = [line.name for line in tables]
    figure.update_yaxes(categoryorder="array", categoryarray=order, autorange="reversed")
    figure.update_xaxes(title="ms that a table adds to a step")
    return figure


def ranks_plot(busy_by_rank: Ranks, bytes_by_rank: Ranks) -> "Figure":
    """How busy, and how full."""
    figure = graph_objects().Figure(layout={"barmode": "group"})
    ranks = list(range(len(busy_by_rank)))
    figure.add_bar(name="busy ms", x=ranks, y=1e3 * busy_by_rank, offsetgroup=1)
    figure.add_bar(name="GB", x=ranks, y=bytes_by_rank / 1e9, yaxis="y2", offsetgroup=2)
    figure.update_layout(
        xaxis={"title": "rank"},
        yaxis={"title": "ms"},
        yaxis2={"title": "GB", "overlaying": "y", "side": "right"},
    )
    return figure


def front_plot(front: Sequence[Tried], plan: tuple[float, float]) -> "Figure":
    """The attempts that nothing beats in time and memory; a star is the plan's fullest rank.

    Args:
        front: what else was tried.
        plan: its seconds, and the bytes of that rank.
    """
    figure = graph_objects().Figure()
    figure.add_scatter(
        name="dealt evenly",
        mode="lines+markers",
        line={"shape": "hv"},
        x=[point.bytes_of_rank / 1e9 for point in front],
        y=[1e3 * point.seconds for point in front],
        text=[str(point.mesh) for point in front],
        hovertemplate="%{text}: %{y:.2f} ms, %{x:.3f} GB",
    )
    figure.add_scatter(
        name="the plan",
        mode="markers",
        marker={"symbol": "star", "size": 14},
        x=[plan[1] / 1e9],
        y=[1e3 * plan[0]],
    )
    figure.update_xaxes(title="GB per rank")
    figure.update_yaxes(title="ms per step")
    return figure
