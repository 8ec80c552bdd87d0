"""Charts as SVG files and on pages, and tables in all formats."""

import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.planner.explanation import parts_chart
from torchrec_2dsp.report.charts import PALETTE, Axis, BarChart, Bars, Line, LineChart, draw_lines
from torchrec_2dsp.report.page import Page
from torchrec_2dsp.report.table import Table

RANKS, TIME = Axis(title="ranks"), Axis(title="ms")


def texts(path: Path) -> list[str]:
    """Return all texts in an SVG file."""
    return re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())


def drawn_lines(*charts: LineChart, folder: Path) -> list[str]:
    """Return the texts in line charts side by side."""
    pytest.importorskip("matplotlib")
    draw_lines(charts, folder / "lines.svg")
    return texts(folder / "lines.svg")


def figure_of(chart: LineChart | BarChart, *, upright: bool = False) -> Any:
    """Return a chart's figure on a page."""
    pytest.importorskip("plotly")
    page = Page("a page")
    if isinstance(chart, LineChart):
        page.add_lines("a chart", chart)
    else:
        page.add_bars("a chart", chart, upright=upright)
    return page.figures[0]


def test_coordinates_have_two_decimals_and_labels_all(tmp_path: Path) -> None:
    line = Line(name="gap 0.12345", x=[0, 1, 2], y=[0.12345, 1 / 3, 0.98765])
    assert "gap 0.12345" in drawn_lines(LineChart([line], x=RANKS, y=TIME), folder=tmp_path)
    lines = re.findall(r' d="([^"]*)"', (tmp_path / "lines.svg").read_text())
    assert any(re.search(r"\d\.\d\d\b", line) for line in lines)
    assert not any(re.search(r"\d\.\d{3}", line) for line in lines)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([100, 180], {"120", "140", "160", "180"}),
        ([1, 30], {"1", "2", "5", "10", "20"}),
        ([0.001, 2000], {"0.001", "0.01", "0.1", "1", "10", "100", "1,000"}),
    ],
)
def test_a_log_axis_has_plain_numbers(
    numbers: list[float], expected: set[str], tmp_path: Path
) -> None:
    axis = Axis(title="ms", is_log=True)
    for chart in (
        LineChart([Line(x=numbers, y=[1, 2])], x=axis, y=TIME),
        LineChart([Line(x=[1, 2], y=numbers)], x=RANKS, y=axis),
    ):
        shown = drawn_lines(chart, folder=tmp_path)
        assert expected <= set(shown)
        assert not any("math" in text for text in shown)
    assert figure_of(LineChart([], x=RANKS, y=axis)).layout.yaxis.type == "log"


def test_charts_side_by_side_share_their_legend_and_vertical_axis(tmp_path: Path) -> None:
    lines = [Line(name="left", x=[1, 2], y=[3, 4]), Line(name="right", x=[1], y=[3])]
    charts = [
        LineChart(lines, x=Axis(title="ranks", names=["a", "b"]), y=TIME, title="slow for $5"),
        LineChart(lines[:1], x=Axis(title="ranks", names=["a", "b"]), y=TIME, title="fast for $9"),
    ]
    shown = drawn_lines(*charts, folder=tmp_path)
    for text in ("left", "right", "ms", "ranks", "slow for $5", "fast for $9"):
        assert shown.count(text) == 1
    assert shown.count("a") == shown.count("b") == 2


def test_lines_of_the_same_colour_have_other_dashes() -> None:
    lines = [Line(name=str(n), x=[n], y=[n]) for n in range(len(PALETTE) + 1)]
    grey = Line(x=[0], y=[0], colour="#888888")
    first, plain, *_, last = LineChart([lines[0], grey, *lines[1:]], x=RANKS, y=TIME).styled()
    assert (first.colour, first.dash) == (PALETTE[0], "-")
    assert (plain.colour, plain.dash) == ("#888888", "-")
    assert (last.colour, last.dash) == (PALETTE[0], "--")


def test_a_page_has_the_numbers_of_a_line_chart() -> None:
    ranges: dict[str, Any] = {"x": [1, 2], "y": [3, 4], "low": [2, 3], "high": [5, 7]}
    chart = LineChart(
        [
            Line(name="bars", hover=["first", "second"], marker="o", **ranges),
            Line(name="band", is_band=True, way="steps", **ranges),
            Line(x=[1.5], y=[3], way="points", marker="*"),
        ],
        x=Axis(title="ranks", names=["a", "b", "c"]),
        y=Axis(title="ms", is_log=True, limits=(1, 100)),
    )
    figure = figure_of(chart)
    bars, band, steps, star = figure.data
    assert bars.error_y.array == (2, 3)
    assert bars.error_y.arrayminus == (1, 1)
    assert (bars.mode, bars.text, bars.line.color) == (
        "lines+markers",
        ("first", "second"),
        PALETTE[0],
    )
    assert band.y == (5, 7, 3, 2)
    assert band.fillcolor == steps.line.color == PALETTE[1]
    assert (steps.mode, steps.line.shape, steps.y) == ("lines", "hv", (3, 4))
    assert (star.mode, star.marker.symbol, star.showlegend) == ("markers", "star", False)
    assert figure.layout.yaxis.range == (0, 2)
    assert figure.layout.xaxis.ticktext == ("a", "b", "c")


STACKED = BarChart(
    [
        Bars(name="forward", values={"left": 2, "right": 3}, hover={"right": "three"}),
        Bars(name="waits", values={"right": 4}, is_hatched=True),
        Bars(name="goes back", values={"right": -5}),
    ],
    places=["left", "failed", "right"],
    title="ms",
)


@pytest.mark.parametrize("upright", [False, True])
def test_bars_follow_each_other_on_a_page(upright: bool) -> None:
    figure = figure_of(STACKED, upright=upright)
    forward, waits, back = figure.data
    lengths, places = ("y", "x") if upright else ("x", "y")
    assert (forward[lengths], forward[places]) == ((2, 3), ("left", "right"))
    assert (forward.base, waits.base, back.base) == ((0, 0), (3,), (7,))
    assert forward.hovertext == ("", "three")
    assert (forward.marker.color, waits.marker.color) == (PALETTE[0], PALETTE[-1])
    assert waits.marker.pattern.shape == "/"
    axis = figure.layout.xaxis if upright else figure.layout.yaxis
    assert axis.categoryarray == ("left", "failed", "right")


def test_what_is_hidden_of_a_step_goes_back() -> None:
    chart = parts_chart(StepCost(lookup_s=0.01, sync_s=0.03, hidden_s=-0.015))
    added, hidden, step = chart.styled()
    assert added.values == pytest.approx({"lookup": 10, "sync": 30})
    assert hidden.starts == pytest.approx({"hidden": 40})
    assert hidden.values == pytest.approx({"hidden": -15})
    assert (step.starts, step.values) == ({"all": 0}, pytest.approx({"all": 25}))


CELLS = st.text("abc de", max_size=30).map(str.strip)
HEADINGS = ("name", "min", "max")


@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=5),
    st.integers(8, 80),
    st.sets(st.sampled_from(HEADINGS)),
)
def test_text_fits_and_shows_every_cell(
    rows: list[tuple[str, str, str]], width: int, words: set[str]
) -> None:
    table = Table(HEADINGS, rows, words)
    text = table.text(width)
    assert max(map(len, text.splitlines())) <= width
    expected = "".join("".join(row) for row in (table.headings, *rows))
    letters = sorted(letter for letter in text if letter not in " \n─")
    assert letters == sorted(expected.replace(" ", ""))


def test_a_long_name_stands_above_its_row_and_only_the_widest_column_is_folded() -> None:
    table = Table(("name", "ms"), [("a long name", "1.5"), ("b", "120.5")], words={"name"})
    assert table.text(12).splitlines() == [
        "name      ms",
        "────────────",
        "a long name",
        "         1.5",
        "b      120.5",
    ]


def test_a_column_may_be_empty() -> None:
    assert Table(("ms", ""), [("1", "")]).text().splitlines()[::2] == ["ms", " 1"]


def test_words_are_folded_before_wider_numbers() -> None:
    table = Table(("name", "ms"), [("a long name", "1.5 [1.2, 1.7]")], words={"name"})
    assert "1.5 [1.2, 1.7]" in table.text(25)


def test_a_terminal_shows_title_and_row_styles_and_no_markup() -> None:
    table = Table(("na\nme", "ms"), [("[bold]", "1")], {"na\nme"}, title="T", styles={0: "red"})
    output = StringIO()
    console = Console(file=output, width=20, force_terminal=True, color_system="standard")
    console.print(table)
    lines = output.getvalue().splitlines()
    assert lines[:3] == ["\x1b[1mT\x1b[0m", "\x1b[1mna      ms\x1b[0m", "\x1b[1mme\x1b[0m"]
    assert lines[4] == "\x1b[31m[bold]   1\x1b[0m"


def test_markdown_and_html_escape_cells() -> None:
    table = Table(("a\nb", "ms"), [("x|<y>", "1")], {"a\nb"})
    assert table.markdown().splitlines()[0] == "| a b      |   ms |"
    assert table.markdown().splitlines()[2] == r"| x\|\<y\> |    1 |"
    assert '<td class="words">x|&lt;y&gt;</td><td>1</td>' in table.html()
