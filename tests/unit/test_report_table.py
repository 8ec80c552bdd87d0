"""`Table`: text that fits a width and leaves nothing out."""

from hypothesis import given, strategies as st

from torchrec_2dsp.report.table import Table

CELLS = st.text("abc de", max_size=30).map(str.strip)


@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=5),
    st.integers(8, 80),
    st.sets(st.sampled_from(["one", "two", "three"])),
)
def test_a_text_fits_and_has_every_cell(
    rows: list[tuple[str, str, str]], width: int, words: set[str]
) -> None:
    table = Table(("one", "two", "three"), rows, words)
    text = table.text(width)
    assert max(map(len, text.splitlines())) <= width
    expected = "".join("".join(row) for row in (table.headings, *rows))
    letters = sorted(letter for letter in text if letter not in " \n─")
    assert letters == sorted(expected.replace(" ", ""))


def test_words_begin_at_the_left_and_only_the_widest_column_is_folded() -> None:
    table = Table(("name", "ms"), [("a long name", "1.5"), ("b", "120.5")], words={"name"})
    assert table.text(12).splitlines() == [
        "name      ms",
        "────────────",
        "a        1.5",
        "long",
        "name",
        "b      120.5",
    ]
