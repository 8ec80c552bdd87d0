"""`Table`: one description as text, in a terminal, as Markdown and as HTML."""

from io import StringIO

from hypothesis import given, strategies as st
from rich.console import Console

from torchrec_2dsp.report.table import Table

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


def test_words_are_aligned_left_and_only_the_widest_column_is_folded() -> None:
    table = Table(("name", "ms"), [("a long name", "1.5"), ("b", "120.5")], words={"name"})
    assert table.text(12).splitlines() == [
        "name      ms",
        "────────────",
        "a        1.5",
        "long",
        "name",
        "b      120.5",
    ]


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
