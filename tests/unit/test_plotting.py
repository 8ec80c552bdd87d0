"""`save_plot`: files are small, and say what they said."""

import re
from pathlib import Path

import pytest

from torchrec_2dsp.report.plots import plotting, save_plot


def test_coordinates_have_two_decimals_and_labels_all(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    with plotting():
        from matplotlib.figure import Figure

        figure = Figure()
        panel = figure.subplots()
        panel.plot([0, 1, 2], [0.12345, 1 / 3, 0.98765])
        panel.set_title("gap 0.12345")
        save_plot(figure, path)
    text = path.read_text()
    assert ">gap 0.12345<" in text
    lines = re.findall(r' d="([^"]*)"', text)
    assert any(re.search(r"\d\.\d\d\b", line) for line in lines)
    assert not any(re.search(r"\d\.\d{3}", line) for line in lines)
