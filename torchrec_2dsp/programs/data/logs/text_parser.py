"""`TextParser`: from the bytes of lines to columns, and which lines can't be read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from torchrec_2dsp.programs.data.logs.blocks import ColumnKind, Rows
from torchrec_2dsp.programs.data.logs.ids import compute
from torchrec_2dsp.programs.data.logs.lines import line_ends, select_lines

_MISSING = ("", "NA", "N/A", "NULL", "null", "None", "nan", "NaN")
_TYPES = {
    ColumnKind.TEXT: pa.binary(),
    ColumnKind.NUMBER: pa.float32(),
    ColumnKind.INTEGER: pa.int64(),
    ColumnKind.TIME: pa.float64(),
    ColumnKind.LABEL: pa.float32(),
}
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_PATTERNS = {
    ColumnKind.NUMBER: _NUMBER,
    ColumnKind.INTEGER: r"^[+-]?\d{1,18}$",
    ColumnKind.TIME: _NUMBER,
    ColumnKind.LABEL: _NUMBER,
}
_LINE_END, _RETURN = b"\n", b"\r"


@dataclass(frozen=True)
class ParsedLines:
    """The columns of the lines that could be read."""

    table: pa.Table
    """One row for each readable line."""

    readable: Rows
    """The numbers of these lines."""

    reasons: Mapping[int, str]
    """What is wrong with each other line, by its number."""


class TextParser:
    """Parses lines of one layout with pyarrow, on the thread that calls it."""

    def __init__(self, names: Sequence[str], delimiter: str, quote: str) -> None:
        """
        Args:
            names: the names of all columns, in their order.
            delimiter: what stands between two values.
            quote: what stands around values; empty for nothing.
        """
        self._names = tuple(names)
        self._delimiter, self._quote = delimiter, quote

    def parse(self, data: bytes, num_lines: int, columns: Mapping[str, ColumnKind]) -> ParsedLines:
        """The columns of some lines.

        Args:
            data: whole lines.
            num_lines: how many they are.
            columns: which columns, and what they are for.

        Raises:
            ArrowInvalid: a quote opens that no line closes, so that lines run into each other.
        """
        broken = self._broken(data)
        lines = np.arange(num_lines)
        if broken:
            lines = np.delete(lines, list(broken))
            data = select_lines(data, lines)
        types = {name: _TYPES[kind] for name, kind in columns.items()}
        try:
            table, invalid = self._columns(data, types)
        except pa.ArrowInvalid:
            # A value that is no number. pyarrow names one, so the numbers are looked at as texts.
            table, invalid = self._columns(data, dict.fromkeys(columns, pa.binary()))
            table, unreadable = _numbers(table, columns)
        else:
            unreadable = {}
        reasons = {**broken, **{int(lines[row]): why for row, why in invalid.items()}}
        if invalid:
            lines = np.delete(lines, list(invalid))
        if len(lines) != table.num_rows:
            raise pa.ArrowInvalid(f"{len(lines)} lines were read as {table.num_rows} rows")
        unreadable = {**_bad_labels(table, columns), **unreadable}
        if unreadable:
            reasons |= {int(lines[row]): why for row, why in unreadable.items()}
            rows = np.delete(np.arange(len(lines)), list(unreadable))
            table, lines = table.take(pa.array(rows)), lines[rows]
        return ParsedLines(table, lines, reasons)

    def _broken(self, data: bytes) -> dict[int, str]:
        """Lines that aren't lines to pyarrow: with a quote that doesn't close, or a return."""
        broken: dict[int, str] = {}
        num_returns = data.count(_RETURN)
        if num_returns and num_returns != data.count(_RETURN + _LINE_END):
            array = np.frombuffer(data, dtype=np.uint8)
            places = np.flatnonzero(array[:-1] == _RETURN[0])
            places = places[array[places + 1] != _LINE_END[0]]
            lines = np.searchsorted(line_ends(data), places)
            broken |= dict.fromkeys(np.unique(lines).tolist(), "a carriage return in the line")
        if self._quote and self._quote.encode() in data:
            places = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord(self._quote))
            per_line = np.bincount(np.searchsorted(line_ends(data), places))
            odd = np.flatnonzero(per_line % 2)
            broken |= dict.fromkeys(odd.tolist(), "a quote that doesn't close")
        return broken

    def _columns(
        self, data: bytes, types: Mapping[str, pa.DataType]
    ) -> tuple[pa.Table, dict[int, str]]:
        """The columns of the lines with the right number of values, and the other lines."""
        invalid: dict[int, str] = {}

        def skip(row: pa_csv.InvalidRow) -> str:
            # Numbers of rows are exact on one thread.
            number = (row.number or 0) - 1
            invalid[number] = f"{row.actual_columns} values for {row.expected_columns} columns"
            return "skip"

        if not data:
            return pa.table({name: pa.array([], kind) for name, kind in types.items()}), {}
        options: dict[str, Any] = {
            "read_options": pa_csv.ReadOptions(
                use_threads=False, column_names=list(self._names), block_size=len(data) + 1
            ),
            "parse_options": pa_csv.ParseOptions(
                delimiter=self._delimiter,
                quote_char=self._quote or False,
                ignore_empty_lines=False,
                invalid_row_handler=skip,
            ),
            "convert_options": pa_csv.ConvertOptions(
                column_types=dict(types), include_columns=list(types), null_values=list(_MISSING)
            ),
        }
        return pa_csv.read_csv(pa.BufferReader(data), **options), invalid


def _numbers(table: pa.Table, columns: Mapping[str, ColumnKind]) -> tuple[pa.Table, dict[int, str]]:
    """The columns of texts with numbers where numbers belong, and the rows where others stand."""
    unreadable: dict[int, str] = {}
    arrays = {}
    for name, kind in columns.items():
        texts = table[name]
        if kind in _PATTERNS:
            missing = compute.is_in(texts, pa.array([text.encode() for text in _MISSING]))
            texts = compute.if_else(missing, pa.scalar(None, pa.binary()), texts)
            is_number = compute.match_substring_regex(texts, _PATTERNS[kind]).fill_null(True)
            for row in np.flatnonzero(~np.asarray(is_number)).tolist():
                unreadable[row] = f"{name} is {texts[row].as_py()!r}, which is no number"
            texts = compute.if_else(is_number, texts, pa.scalar(None, pa.binary()))
            texts = texts.cast(pa.string()).cast(_TYPES[kind])
        arrays[name] = texts
    return pa.table(arrays), unreadable


def _bad_labels(table: pa.Table, columns: Mapping[str, ColumnKind]) -> dict[int, str]:
    """Rows without a label, or with one that isn't between 0 and 1."""
    bad: dict[int, str] = {}
    for name, kind in columns.items():
        if kind is ColumnKind.LABEL:
            labels = label_numbers(table[name])
            for row in np.flatnonzero(~is_label(labels)).tolist():
                bad[row] = f"{name} is {labels[row]}, which is no label from 0 to 1"
    return bad


def label_numbers(column: pa.ChunkedArray) -> NDArray[np.float32]:
    """Labels as numbers, NaN for missing ones."""
    return column.cast(pa.float32(), safe=False).to_numpy().astype(np.float32, copy=False)


def is_label(labels: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which numbers are labels."""
    return (labels >= 0) & (labels <= 1)
