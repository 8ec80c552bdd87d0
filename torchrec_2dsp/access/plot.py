"""The plot of access statistics."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.report.charts import Axis, Line, LineChart
from torchrec_2dsp.report.svg import draw_lines

_MAX_POINTS = 400
"""How many points a line has at most: more can't be told apart."""


def plot_cdf(tables: Mapping[str, TableAccess], path: str | Path) -> None:
    """Write an SVG: which share of a table's lookups its hottest rows take."""
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
    draw_lines([chart], path)
