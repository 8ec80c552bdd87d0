"""The plot of access statistics."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.report.charts import Axis, Line, LineChart, draw_lines

_MAX_POINTS = 400
"""How many points a line has at most: more can't be told apart."""


def plot_cdf(tables: Mapping[str, TableAccess], path: str | Path) -> None:
    """Write an SVG: which share of a table's lookups its hottest rows take."""
    draw_lines([cdf_chart(tables)], path)


def cdf_chart(
    tables: Mapping[str, TableAccess], hot_rows: Mapping[str, int] | None = None
) -> LineChart:
    """The chart of which share of a table's lookups its hottest rows take.

    Args:
        tables: the statistics of each table, by name.
        hot_rows: how many rows of a table are hot, for a mark on its line; none if it isn't there.

    Example:
        >>> from torchrec_2dsp.access.plot import cdf_chart
        >>> from torchrec_2dsp.access.table_access import TableAccess
        >>> table = TableAccess.of_counts([0, 7, 0, 2, 1], num_samples=5)
        >>> line, mark = cdf_chart({"t": table}, hot_rows={"t": 1}).lines
        >>> line.y, mark.x, mark.y, mark.hover
        ([70.0, 90.0, 100.0], [20.0], [70.0], ['t: 1 hot row takes 70.0 %'])
    """
    lines = []
    for name, table in tables.items():
        if not len(table.rows):
            continue
        num_hot = np.unique(np.geomspace(1, len(table.rows), _MAX_POINTS).astype(np.int64))
        shares = 100 * table.counts.cumsum()[num_hot - 1] / table.num_lookups
        lines.append(
            Line(name=name, x=(100 * num_hot / table.num_rows).tolist(), y=shares.tolist())
        )
    chart = LineChart(
        lines,
        x=Axis(title="hottest rows, % of the table", is_log=True),
        y=Axis(title="lookups that they take, %", limits=(0, 100)),
    )
    marks = [
        _hot_mark(tables[line.name], line, count)
        for line in chart.styled()
        if (count := (hot_rows or {}).get(line.name))
    ]
    return replace(chart, lines=[*lines, *marks])


def _hot_mark(table: TableAccess, line: Line, num_hot: int) -> Line:
    """The mark on a table's line, as far as its rows are hot."""
    share = 100 * table.share_of(num_hot)
    rows = "1 hot row takes" if num_hot == 1 else f"{num_hot:,} hot rows take"
    return Line(
        x=[100 * num_hot / table.num_rows],
        y=[share],
        hover=[f"{line.name}: {rows} {share:.1f} %"],
        way="points",
        marker="D",
        colour=line.colour,
    )
