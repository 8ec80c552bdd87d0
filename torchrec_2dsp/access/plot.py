"""The plot of access statistics."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.report.plots import PALETTE, plotting, save_plot

_MAX_POINTS = 400
"""How many points a line has at most: more can't be told apart."""

_DASHES = ("-", "--", ":", "-.")


def plot_cdf(tables: Mapping[str, TableAccess], path: str | Path) -> None:
    """Write an SVG: which share of a table's lookups its hottest rows take."""
    with plotting():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        axis = figure.subplots()
        for number, (name, table) in enumerate(tables.items()):
            if not len(table.rows):
                continue
            num_hot = np.unique(np.geomspace(1, len(table.rows), _MAX_POINTS).astype(np.int64))
            axis.plot(
                100 * num_hot / table.num_rows,
                100 * table.counts.cumsum()[num_hot - 1] / table.num_lookups,
                color=PALETTE[number % len(PALETTE)],
                linestyle=_DASHES[number // len(PALETTE) % len(_DASHES)],
                linewidth=1.2,
                label=name,
            )
        axis.set(
            xscale="log",
            ylim=(0, 100),
            xlabel="hottest rows, % of the table",
            ylabel="lookups that they take, %",
        )
        axis.grid(True, which="major")
        figure.legend(loc="outside right upper", ncols=-(-len(tables) // 20))
        save_plot(figure, path)
