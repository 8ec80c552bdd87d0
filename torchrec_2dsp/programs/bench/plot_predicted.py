"""A plot of predicted against measured steps, as an SVG file."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.markdown_predicted import measured_s, predicted_in, predicted_s
from torchrec_2dsp.programs.bench.results import BenchResult
from torchrec_2dsp.programs.bench.setting_labels import setting_labels
from torchrec_2dsp.report.charts import MARKERS, Axis, Line, LineChart, draw_lines

_BAND = 0.15


def predicted_plot(results: Sequence[BenchResult], path: str | Path) -> None:
    """Write an SVG with a point for each plan that was predicted, of all settings.

    Raises:
        ConfigError: matplotlib is missing, or nothing was predicted.
    """
    points = [
        Line(
            name=label,
            x=[measured_s(contestant) * 1e3 for contestant in contestants],
            y=[predicted_s(contestant) * 1e3 for contestant in contestants],
            way="points",
        )
        for label, result in zip(setting_labels(results), results, strict=True)
        if (contestants := predicted_in(result))
    ]
    if not points:
        raise ConfigError("no contestant was predicted, so there is nothing to plot")
    steps_ms = [step_ms for line in points for step_ms in line.x]
    ends = [0.85 * min(steps_ms), 1.15 * max(steps_ms)]
    equal = Line(
        x=ends,
        y=ends,
        low=[(1 - _BAND) * end for end in ends],
        high=[(1 + _BAND) * end for end in ends],
        is_band=True,
        colour="#000000",
    )
    markers = cycle(MARKERS)
    chart = LineChart(
        [*(replace(line, marker=next(markers)) for line in points), equal],
        x=Axis(title="measured ms per step", is_log=True),
        y=Axis(title=f"predicted (grey: within {_BAND:.0%})", is_log=True),
    )
    draw_lines([chart], path)
