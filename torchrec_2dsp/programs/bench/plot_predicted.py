"""A plot of predicted against measured steps, as an SVG file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.markdown_predicted import measured_s, predicted_in, predicted_s
from torchrec_2dsp.programs.bench.results import BenchResult
from torchrec_2dsp.programs.bench.setting_labels import setting_labels
from torchrec_2dsp.report.plots import PALETTE, plotting, save_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "os^vD<>P"
_BAND = 0.15


def predicted_plot(results: Sequence[BenchResult], path: str | Path) -> None:
    """Write an SVG with a point for each plan that was predicted, of all settings.

    Raises:
        ConfigError: matplotlib is missing, or nothing was predicted.
    """
    with plotting():
        save_plot(_figure(results), path)


def _figure(results: Sequence[BenchResult]) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    labels = setting_labels(results)
    predicted = [
        (label, predicted_in(result)) for label, result in zip(labels, results, strict=True)
    ]
    predicted = [(label, contestants) for label, contestants in predicted if contestants]
    if not predicted:
        raise ConfigError("no contestant was predicted, so there is nothing to plot")
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    panel = figure.subplots()
    for place, (label, contestants) in enumerate(predicted):
        panel.plot(
            [measured_s(contestant) * 1e3 for contestant in contestants],
            [predicted_s(contestant) * 1e3 for contestant in contestants],
            linestyle="",
            color=PALETTE[place % len(PALETTE)],
            marker=_MARKERS[place % len(_MARKERS)],
            markersize=5,
            label=label,
        )
    steps = [
        measured_s(contestant) * 1e3 for _, contestants in predicted for contestant in contestants
    ]
    ends = np.array([0.85 * min(steps), 1.15 * max(steps)])
    panel.plot(ends, ends, color="black", linewidth=0.8)
    low, high = (1 - _BAND) * ends, (1 + _BAND) * ends
    panel.fill_between(ends, low, high, alpha=0.12, color="black", linewidth=0)
    for axis, set_scale in ((panel.xaxis, panel.set_xscale), (panel.yaxis, panel.set_yscale)):
        set_scale("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.grid()
    panel.set_xlabel("measured ms per step")
    panel.set_ylabel(f"predicted (grey: within {_BAND:.0%})")
    figure.legend(loc="outside right center")
    return figure
