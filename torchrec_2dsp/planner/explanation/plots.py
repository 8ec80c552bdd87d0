"""Charts of what an `Explanation` says."""

from collections.abc import Sequence
from itertools import accumulate

from torchrec_2dsp.cost.loads import Ranks
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.planner.explanation.table_line import TableLine
from torchrec_2dsp.planner.search.result import Tried
from torchrec_2dsp.report.charts import PALETTE, Axis, BarChart, Bars, Line, LineChart

MAX_BARS = 50
"""How many tables are plotted at most."""


def parts_chart(cost: StepCost) -> BarChart:
    """Bars of which each begins where the one before it ends; what is hidden goes back."""
    parts = {name.replace("_", " "): 1e3 * seconds for name, seconds in cost.parts() if seconds}
    starts = dict(zip(parts, accumulate(parts.values(), initial=0.0), strict=False))
    total = {"all": 1e3 * cost.total_s}
    added = {name: part_ms for name, part_ms in parts.items() if part_ms > 0}
    hidden = {name: part_ms for name, part_ms in parts.items() if part_ms < 0}
    kinds = (
        ("adds time", added, PALETTE[0]),
        ("is hidden behind other parts", hidden, PALETTE[2]),
        ("the step", total, PALETTE[3]),
    )
    bars = [
        Bars(
            name=name,
            values=values,
            starts={place: starts.get(place, 0.0) for place in values},
            colour=colour,
            hover={place: f"{place}: {value:.2f} ms" for place, value in values.items()},
        )
        for name, values, colour in kinds
        if values
    ]
    return BarChart(bars, places=[*parts, *total], title="ms")


def tables_chart(tables: Sequence[TableLine]) -> BarChart:
    """A bar for each table, in a colour for each way to shard them."""
    bars = []
    for way in dict.fromkeys(line.way for line in tables):
        lines = [line for line in tables if line.way == way]
        hover = {
            line.name: f"{line.name}, {line.num_rows:,} rows of {line.dim}: "
            f"{1e3 * line.seconds:.3f} ms, {line.sent_bytes / 1e6:.3f} MB sent"
            for line in lines
        }
        lengths = {line.name: 1e3 * line.seconds for line in lines}
        bars.append(Bars(name=way, values=lengths, hover=hover))
    places = [line.name for line in tables]
    return BarChart(bars, places=places, title="ms that a table adds to a step")


def ranks_chart(numbers: Ranks, unit: str) -> BarChart:
    """A bar for each rank of a group."""
    values = {str(rank): float(number) for rank, number in enumerate(numbers)}
    hover = {rank: f"rank {rank}: {number:.3f} {unit}" for rank, number in values.items()}
    return BarChart([Bars(name=unit, values=values, hover=hover)], places=[*values], title=unit)


def front_chart(front: Sequence[Tried], plan: tuple[float, float]) -> LineChart:
    """The attempts that nothing beats in time and memory; a star is the plan's fullest rank.

    Args:
        front: what else was tried.
        plan: its seconds, and the bytes of that rank.
    """
    attempts = Line(
        name="dealt evenly",
        x=[point.bytes_of_rank / 1e9 for point in front],
        y=[1e3 * point.seconds for point in front],
        way="steps",
        marker="o",
        hover=[
            f"{point.mesh}: {1e3 * point.seconds:.2f} ms, {point.bytes_of_rank / 1e9:.3f} GB"
            for point in front
        ],
    )
    star = Line(name="the plan", x=[plan[1] / 1e9], y=[1e3 * plan[0]], way="points", marker="*")
    return LineChart([attempts, star], x=Axis(title="GB per rank"), y=Axis(title="ms per step"))
