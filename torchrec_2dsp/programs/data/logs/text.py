"""Parse lines of text files into columns, and report malformed lines with reasons."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.programs.data.logs.config import ColumnKind, Columns, LogLayout
from torchrec_2dsp.programs.data.logs.files import open_stream, reading
from torchrec_2dsp.programs.data.logs.ids import TIMES, compute, times_of

Rows = NDArray[np.int64]
"""Ascending row numbers."""


_MISSING = ("", "NA", "N/A", "NULL", "null", "None", "nan", "NaN")
_NO_TEXT = pa.scalar(None, pa.binary())
COLUMN_TYPES = {
    ColumnKind.TEXT: pa.binary(),
    ColumnKind.NUMBER: pa.float32(),
    ColumnKind.INTEGER: pa.int64(),
    ColumnKind.TIME: pa.float64(),
    ColumnKind.WRITTEN_TIME: TIMES,
    ColumnKind.LABEL: pa.float32(),
}
"""The Arrow type of each kind of text column."""
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_PATTERNS = {
    ColumnKind.NUMBER: _NUMBER,
    ColumnKind.INTEGER: r"^[+-]?\d{1,18}$",
    ColumnKind.TIME: _NUMBER,
    ColumnKind.LABEL: _NUMBER,
}
_BLANKS = " \t"
"""The characters that pyarrow's parser skips around numbers."""
_BOM = b"\xef\xbb\xbf"
_LINE_END, _RETURN = b"\n", b"\r"
_MAX_LINE_BYTES = 64 * 2**20
_MAX_FIRST_LINE_BYTES = 4 * 2**20
_MAX_EXAMPLES = 5
_MAX_TEXT = 80


class TextHead:
    """A file's column names, and the position of its first row."""

    def __init__(self, file: str, section: LogLayout) -> None:
        with reading(file), open_stream(file)[0] as stream:
            data = stream.read(_MAX_FIRST_LINE_BYTES)
        if not data:
            raise ConfigError(f"{file} is empty; leave it out")
        line, line_end, _ = data.partition(_LINE_END)
        if not line_end and len(data) == _MAX_FIRST_LINE_BYTES:
            raise ConfigError(
                f"{file}:1: the line has more than {_MAX_FIRST_LINE_BYTES} bytes; is it a text "
                "file, with line ends?"
            )
        skipped = len(_BOM) if line.startswith(_BOM) else 0
        text = line[skipped:].decode("utf-8", "replace").rstrip("\r")
        names, given = _split(file, text, section), section.columns
        if given and len(names) != len(given):
            raise ConfigError(
                f"{file} has {len(names)} column{'s' if len(names) > 1 else ''}, and columns names "
                f"{len(given)}; check the delimiter, which is {section.delimiter!r}, and the names"
            )
        has_names = not given or names == list(given)
        self.names = tuple(given or names)
        """The column names, in order."""
        self.offset = len(line + line_end) if has_names else skipped
        """The number of bytes before the first row."""
        self.num_lines = int(has_names)
        """The number of lines before the first row."""
        repeated = sorted({name for name in self.names if self.names.count(name) > 1})
        if repeated:
            raise ConfigError(
                f"{file} has two columns {repeated[0]!r}; rename one, or name them by `columns`"
            )


def _split(file: str, line: str, section: LogLayout) -> list[str]:
    rule = csv.QUOTE_MINIMAL if section.quote else csv.QUOTE_NONE
    reader = csv.reader(
        io.StringIO(line),
        delimiter=section.delimiter,
        quotechar=section.quote or None,
        quoting=rule,
    )
    try:
        return next(reader, [""])
    except csv.Error as error:
        raise ConfigError(
            f"{file}:1: {error}; is it a text file, with the delimiter {section.delimiter!r}?"
        ) from error


def blocks_of_lines(
    stream: pa.NativeFile,
    file: str,
    *,
    first_bytes: int,
    block_bytes: int,
    num_bytes: int | None = None,
) -> Iterator[bytes]:
    """Cut a stream into blocks that end at a line end.

    Args:
        stream: positioned at the start of a line.
        file: the file's name, for errors.
        first_bytes: how much to read first.
        block_bytes: how much to read each other time.
        num_bytes: how many bytes to read in all; bytes after the last line end among them
            belong to the file's next part. `None` reads to the end, where the last line needs no
            line end.

    Raises:
        ConfigError: a line is too long.
    """
    pending, position = b"", 0
    while num_bytes is None or position < num_bytes:
        size = block_bytes if position else first_bytes
        chunk = stream.read(size if num_bytes is None else min(size, num_bytes - position))
        if not chunk:
            break
        position += len(chunk)
        data = pending + chunk
        end = data.rfind(_LINE_END) + 1
        pending = data[end:]
        if end:
            yield data[:end]
        elif len(data) > _MAX_LINE_BYTES:
            raise ConfigError(
                f"{file} has {_MAX_LINE_BYTES} bytes without a line end; is it a text file?"
            )
    if num_bytes is None and pending:
        yield pending


def without_blank_end(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Drop the blank lines at the end of the last block, and blocks of such lines behind it."""
    block = b""
    for following in blocks:
        if following.isspace():
            block += following
            continue
        if block:
            yield block
        block = following
    if lines := block.rstrip(_RETURN + _LINE_END):
        yield lines + _LINE_END


def line_start_before(stream: pa.NativeFile, position: int, lowest: int) -> int:
    """Search backwards for the start of the line at a position."""
    while position > lowest:
        start = max(lowest, position - 2**16)
        stream.seek(start)
        end = stream.read(position - start).rfind(_LINE_END) + 1
        if end:
            return start + end
        position = start
    return lowest


def line_ends(data: bytes) -> NDArray[np.int64]:
    """Find each line's last byte; the last line needs no line end.

    Example:
        >>> from torchrec_2dsp.programs.data.logs.text import line_ends
        >>> line_ends(b"ab" + bytes([10]) + b"c")
        array([2, 3])
    """
    ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == _LINE_END[0])
    if data and data[-1] != _LINE_END[0]:
        ends = np.append(ends, len(data) - 1)
    return ends


def _without_lines(data: bytes, lines: Sequence[int]) -> bytes:
    ends = line_ends(data)
    is_kept = np.ones(len(ends), dtype=bool)
    is_kept[lines] = False
    array = np.frombuffer(data, dtype=np.uint8)
    return array[np.repeat(is_kept, np.diff(ends, prepend=-1))].tobytes()


@dataclass(frozen=True)
class ParsedLines:
    """Columns parsed from the readable lines."""

    table: pa.Table
    """One row for each readable line."""

    readable: Rows
    """The readable lines' numbers."""

    reasons: Mapping[int, str]
    """The reason why each other line is malformed, by its number."""


class TextParser:
    """Parses lines of one layout with pyarrow, on the calling thread."""

    def __init__(self, names: Sequence[str], section: LogLayout) -> None:
        """Store the layout.

        Args:
            names: all column names, in order.
            section: gives the delimiter, the quote character, and the columns to parse.
        """
        self._names, self._columns = tuple(names), section.read_columns()
        self._delimiter, self._quote = section.delimiter, section.quote

    def parse(self, data: bytes) -> ParsedLines:
        """Parse whole lines.

        Raises:
            ArrowInvalid: a quote isn't closed on its line, so that lines run together.
        """
        num_lines = data.count(_LINE_END) + (not data.endswith(_LINE_END))
        broken = self._broken(data)
        lines = np.arange(num_lines)
        if broken:
            lines = np.delete(lines, list(broken))
            data = _without_lines(data, list(broken))
        types = {
            name: pa.binary() if column.time_format else COLUMN_TYPES[column.kind]
            for name, column in self._columns.items()
        }
        try:
            table, invalid = self._read(data, types)
        except pa.ArrowInvalid:
            # pyarrow reports only one invalid number, so read the numbers as strings.
            table, invalid = self._read(data, dict.fromkeys(types, pa.binary()))
            table, unreadable = _numbers(table, self._columns)
        else:
            unreadable = {}
        reasons = {**broken, **{int(lines[row]): why for row, why in invalid.items()}}
        if invalid:
            lines = np.delete(lines, list(invalid))
        if len(lines) != table.num_rows:
            raise pa.ArrowInvalid(f"{len(lines)} lines were read as {table.num_rows} rows")
        table, no_times = _times(table, self._columns)
        unreadable = {**_bad_labels(table, self._columns), **no_times, **unreadable}
        if unreadable:
            reasons |= {int(lines[row]): why for row, why in unreadable.items()}
            rows = np.delete(np.arange(len(lines)), list(unreadable))
            table, lines = table.take(pa.array(rows)), lines[rows]
        return ParsedLines(table, lines, reasons)

    def _broken(self, data: bytes) -> dict[int, str]:
        """List lines that pyarrow can't split: those with an open quote or a carriage return."""
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

    def _read(
        self, data: bytes, types: Mapping[str, pa.DataType]
    ) -> tuple[pa.Table, dict[int, str]]:
        """Read the lines with the right number of values, and list the others."""
        invalid: dict[int, str] = {}

        def skip(row: pa_csv.InvalidRow) -> str:
            # Row numbers are exact only on one thread.
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


def _numbers(table: pa.Table, columns: Columns) -> tuple[pa.Table, dict[int, str]]:
    """Convert strings to numbers in numeric columns, and list rows with invalid ones."""
    unreadable: dict[int, str] = {}
    arrays = {}
    for name, column in columns.items():
        texts = table[name]
        if column.kind in _PATTERNS:
            texts = _with_nulls(texts)
            pattern, number_type = _PATTERNS[column.kind], COLUMN_TYPES[column.kind]
            is_usual = compute.match_substring_regex(texts, pattern).fill_null(True)
            is_number = np.array(is_usual)
            for row in np.flatnonzero(~is_number).tolist():
                text = texts[row].as_py()
                is_number[row] = _is_number(text, number_type)
                if not is_number[row]:
                    unreadable[row] = f"{name} is {text!r}, which isn't a number"
            texts = compute.if_else(pa.array(is_number), texts, _NO_TEXT).cast(pa.string())
            # pyarrow reads a plus sign before numbers, but not before integers.
            texts = compute.utf8_ltrim(compute.utf8_trim(texts, _BLANKS), "+").cast(number_type)
        arrays[name] = texts
    return pa.table(arrays), unreadable


def _is_number(text: bytes, number_type: pa.DataType) -> bool:
    """Return whether pyarrow reads an unusual number, such as inf, or one between blanks."""
    try:
        pa.scalar(text.decode("utf-8", "replace").strip(_BLANKS)).cast(number_type)
    except pa.ArrowInvalid:
        return False
    return True


def _times(table: pa.Table, columns: Columns) -> tuple[pa.Table, dict[int, str]]:
    """Convert strings to times in time columns, and list rows with invalid ones."""
    unreadable: dict[int, str] = {}
    for place, (name, column) in enumerate(columns.items()):
        if column.kind is ColumnKind.WRITTEN_TIME:
            texts = _with_nulls(table[name])
            times, is_wrong = times_of(texts, column.time_format)
            for row in np.flatnonzero(is_wrong).tolist():
                text = texts[row].as_py()
                unreadable[row] = f"{name} is {text!r}, which isn't a time ({column.time_format})"
            table = table.set_column(place, name, times)
    return table, unreadable


def _with_nulls(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Replace texts that stand for a missing value by nulls."""
    is_missing = compute.is_in(texts, pa.array([text.encode() for text in _MISSING]))
    return compute.if_else(is_missing, _NO_TEXT, texts)


def _bad_labels(table: pa.Table, columns: Columns) -> dict[int, str]:
    """List the rows without a label from 0 to 1."""
    bad: dict[int, str] = {}
    for name, column in columns.items():
        if column.kind is ColumnKind.LABEL:
            labels = label_numbers(table[name])
            for row in np.flatnonzero(~is_label(labels)).tolist():
                bad[row] = f"{name} is {labels[row]}, which isn't a label from 0 to 1"
    return bad


def label_numbers(column: pa.ChunkedArray) -> NDArray[np.float32]:
    """Return labels as numbers, with NaN for missing ones."""
    return column.cast(pa.float32(), safe=False).to_numpy().astype(np.float32, copy=False)


def is_label(labels: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return a mask of the valid labels."""
    return (labels >= 0) & (labels <= 1)


@dataclass(frozen=True)
class MalformedLine:
    """A malformed line."""

    file: str
    """The file's path."""

    line: int
    """The line number in the file, counted from 1 and including the header."""

    reason: str
    """The reason why the line is malformed."""

    text: str
    """The beginning of the line."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}: {self.text!r}"


class MalformedLines:
    """Counts the distinct malformed lines that this process reads, up to a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """The most malformed lines allowed."""
        self.examples: list[MalformedLine] = []
        """The first malformed lines."""
        self.lines: set[tuple[str, int]] = set()
        """The file and the number of each."""

    def __len__(self) -> int:
        return len(self.lines)

    def add(self, file: str, line: int, reason: str, text: str) -> None:
        """Count a line, unless it was counted before.

        Raises:
            InputError: there are more lines than the limit.
        """
        if (file, line) in self.lines:
            return
        self.lines.add((file, line))
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.append(MalformedLine(file, line, reason, text))
        if len(self.lines) > self.limit:
            raise InputError(
                f"more than malformed_limit={self.limit} lines can't be read; check the columns "
                "and the delimiter, mend the file, or raise malformed_limit:\n  "
                + "\n  ".join(map(str, self.examples))
            )


def shown(line: bytes) -> str:
    """Return a line's beginning, for messages."""
    return line[:_MAX_TEXT].decode("utf-8", "replace").rstrip("\r\n")
