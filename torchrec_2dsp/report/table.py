"""`Table`: the project's one table renderer, for terminals, Markdown and HTML.

table.text(width)       plain lines, long cells folded       logs, files
console.print(table)    the same lines, with row styles      terminals, through rich
table.markdown()        padded pipes, cells escaped          benchmark pages, study reports
table.html()            an element that a `Page` can sort    HTML reports
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import zip_longest
from textwrap import wrap
from typing import Any

MISSING = "-"
"""The cell for an unknown value."""

_GAP = "  "
_WORDS_CLASS = ' class="words"'
_NARROW_WORDS = 8
"""The width to which word columns are folded before number columns are folded at all."""


@dataclass(frozen=True)
class Table:
    """Rows of text cells under headings.

    Example:
        >>> from torchrec_2dsp.report.table import Table
        >>> table = Table(("rank", "ms"), [("left", "1.5"), ("right", "12.5")], words={"rank"})
        >>> print(table.text())
        rank     ms
        ───────────
        left    1.5
        right  12.5
        >>> print(table.markdown())
        | rank  |   ms |
        | :---- | ---: |
        | left  |  1.5 |
        | right | 12.5 |
    """

    headings: Sequence[str]
    """The column names; a line break in one is kept in text, and becomes a space elsewhere."""

    rows: Sequence[Sequence[str]]
    """Each row's cells, one per column."""

    words: Collection[str] = ()
    """Headings of the left-aligned columns; the others hold numbers, aligned right."""

    title: str = field(default="", kw_only=True)
    """A line above the table, in text and terminals only: pages have headings."""

    styles: Mapping[int, str] = field(default_factory=dict, kw_only=True)
    """Rich styles by row number, such as ``{0: "bold red"}``; only terminals show them."""

    def text(self, width: int = 100) -> str:
        """Return lines with at most ``width`` characters; long cells are folded, except names."""
        return "\n".join(line for line, _ in self._styled_lines(width))

    def markdown(self) -> str:
        """Return a Markdown table that is readable as plain text."""
        cells = [[escape_markdown(cell) for cell in row] for row in (self.headings, *self.rows)]
        widths = [max(4, *map(len, column)) for column in zip(*cells, strict=True)]
        rule = [
            ":" + "-" * (width - 1) if is_words else "-" * (width - 1) + ":"
            for width, is_words in zip(widths, self._is_words, strict=True)
        ]
        return "\n".join(
            f"| {' | '.join(self._padded(row, widths))} |" for row in (cells[0], rule, *cells[1:])
        )

    def html(self) -> str:
        """Return a ``<table>`` whose word columns have the class ``words``."""
        head = self._html_row("th", self.headings)
        body = "\n".join(self._html_row("td", row) for row in self.rows)
        return f"<table><thead>{head}</thead>\n<tbody>{body}</tbody></table>"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        for line, style in self._styled_lines(options.max_width):
            yield Text(line, style=style, no_wrap=True)

    @property
    def _is_words(self) -> list[bool]:
        return [heading in self.words for heading in self.headings]

    def _styled_lines(self, room: int) -> Iterator[tuple[str, str]]:
        widths = self._widths(room)
        if self.title:
            yield from ((line, "bold") for line in wrap(self.title, room))
        yield from ((line, "bold") for line in self._folded(self.headings, widths))
        width = sum(widths) + len(_GAP) * (len(widths) - 1)
        yield "─" * width, ""
        for number, row in enumerate(self.rows):
            style = self.styles.get(number, "")
            if self._is_words[0] and len(row) > 1 and len(row[0]) > widths[0]:
                # A name that is too long gets its own line above the row.
                yield from ((line, style) for line in wrap(row[0], width))
                row = ("", *row[1:])
            yield from ((line, style) for line in self._folded(row, widths))

    def _widths(self, room: int) -> list[int]:
        columns = zip(self.headings, *self.rows, strict=True)
        widths = [
            max(len(line) for cell in column for line in cell.split("\n")) for column in columns
        ]
        while sum(widths) + len(_GAP) * (len(widths) - 1) > room and max(widths) > 1:
            words = [w for w, is_words in zip(widths, self._is_words, strict=True) if is_words]
            widest = max(words, default=0)
            widths[widths.index(widest if widest > _NARROW_WORDS else max(widths))] -= 1
        return widths

    def _folded(self, row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
        folded = [
            [line for part in cell.split("\n") for line in wrap(part, max(1, width)) or [""]]
            for cell, width in zip(row, widths, strict=True)
        ]
        for cells in zip_longest(*folded, fillvalue=""):
            yield _GAP.join(self._padded(cells, widths)).rstrip()

    def _padded(self, cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
        for cell, width, is_words in zip(cells, widths, self._is_words, strict=True):
            yield cell.ljust(width) if is_words else cell.rjust(width)

    def _html_row(self, tag: str, cells: Sequence[str]) -> str:
        elements = (
            f"<{tag}{_WORDS_CLASS if is_words else ''}>{escape(cell)}</{tag}>"
            for cell, is_words in zip(cells, self._is_words, strict=True)
        )
        return f"<tr>{''.join(elements)}</tr>"


def escape_markdown(text: str) -> str:
    r"""Return text on one line, which Markdown shows unchanged.

    Example:
        >>> from torchrec_2dsp.report.table import escape_markdown
        >>> print(escape_markdown("a|b of row_wise"))
        a\|b of row_wise
    """
    text = re.sub(r"([\\`*<>|]|\](?=[(\[:]))", r"\\\1", " ".join(text.split()))
    # An underscore between letters needs no escape, nor does a bracket without a link after it.
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)
