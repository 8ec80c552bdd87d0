"""`Table`: rows under headings, as plain text and as Markdown; a `Page` shows them as well."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap

_GAP = "  "


@dataclass(frozen=True)
class Table:
    """Rows of texts, with a heading for each column.

    Example:
        >>> from torchrec_2dsp.report.table import Table
        >>> table = Table(("rank", "ms"), [("left", "1.5"), ("right", "12.5")], words={"rank"})
        >>> print(table.text())
        rank     ms
        ───────────
        left    1.5
        right  12.5
        >>> print(table.markdown())
        | rank | ms |
        | --- | ---: |
        | left | 1.5 |
        | right | 12.5 |
    """

    headings: Sequence[str]
    """The names of the columns."""

    rows: Sequence[Sequence[str]]
    """The cells of each row, one per column."""

    words: Collection[str] = ()
    """The headings of columns that have words, which begin at the left; numbers end at the
    right."""

    def text(self, width: int = 100) -> str:
        """The table in lines of at most ``width`` characters; long cells are folded."""
        columns = list(zip(self.headings, *self.rows, strict=True))
        widths = _widths([max(map(len, column)) for column in columns], width)
        head, *rows = (self._lines(row, widths) for row in (self.headings, *self.rows))
        rule = "─" * (sum(widths) + len(_GAP) * (len(widths) - 1))
        return "\n".join([*head, rule, *(line for lines in rows for line in lines)])

    def markdown(self) -> str:
        """The table as Markdown has it."""
        kinds = ["---" if heading in self.words else "---:" for heading in self.headings]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.headings, kinds, *self.rows))

    def _lines(self, row: Sequence[str], widths: Sequence[int]) -> list[str]:
        """The lines of one row."""
        folded = [wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
        return [
            _GAP.join(
                cell.ljust(width) if heading in self.words else cell.rjust(width)
                for heading, cell, width in zip(self.headings, cells, widths, strict=True)
            ).rstrip()
            for cells in zip_longest(*folded, fillvalue="")
        ]


def _widths(natural: Sequence[int], room: int) -> list[int]:
    """The widths of columns: their own, or less for the widest of them so that all have room."""
    widths = list(natural)
    while sum(widths) + len(_GAP) * (len(widths) - 1) > room and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    return widths
