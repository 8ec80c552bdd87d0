"""`ParquetSource`: the rows of Parquet files, some thousand at a time."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.programs.data.logs.blocks import ColumnKind, LogBlock, Rows
from torchrec_2dsp.programs.data.logs.files import reading
from torchrec_2dsp.programs.data.logs.text_parser import is_label, label_numbers


class ParquetSource:
    """The rows of Parquet files. A block is a part of a row group; only the footers are read to
    know how many rows there are."""

    def __init__(self, files: Sequence[str], *, block_rows: int) -> None:
        """
        Args:
            files: the paths, in their order.
            block_rows: the most rows of a block.
        """
        self._schemas: dict[str, pa.Schema] = {}
        self._blocks: list[LogBlock] = []
        for file in files:
            with _open(file) as parquet:
                self._schemas[file] = parquet.schema_arrow
                counts = [
                    parquet.metadata.row_group(number).num_rows
                    for number in range(parquet.num_row_groups)
                ]
            if not sum(counts):
                raise ConfigError(f"{file} has no row; leave it out")
            self._blocks += _blocks(file, counts, block_rows)
        self._cursor: _Cursor | None = None

    @property
    def blocks(self) -> Sequence[LogBlock]:
        """All blocks, in the order of the files and of their rows."""
        return self._blocks

    def check(self, columns: Mapping[str, ColumnKind]) -> None:
        """Raise `ConfigError` unless every file has these columns, with values of one kind."""
        first_file = next(iter(self._schemas))
        for file, schema in self._schemas.items():
            for name, kind in columns.items():
                if name not in schema.names:
                    raise ConfigError(f"{file} has no column {name!r}; it has {_names(schema)}")
                what, expected = (
                    _described(self._schemas[path].field(name).type) for path in (file, first_file)
                )
                if what not in _ALLOWED[kind]:
                    raise ConfigError(
                        f"{file}: column {name!r} has {schema.field(name).type}, and should have "
                        f"{kind.value}; cast it when the file is written, or use another column"
                    )
                if what != expected:
                    raise ConfigError(
                        f"{file}: column {name!r} has {what}, and in {first_file} it has "
                        f"{expected}; write all files with one schema"
                    )

    def read(
        self, block: LogBlock, columns: Mapping[str, ColumnKind], rows: Rows | None = None
    ) -> pa.Table:
        """Some rows of a block, see `LogSource.read`.

        Raises:
            InputError: a row has no label from 0 to 1.
        """
        key = block.file, block.unit, tuple(columns)
        cursor = self._cursor
        if cursor is None or cursor.key != key or cursor.position > block.offset:
            self.close()
            cursor = self._cursor = _Cursor(key, block.num_rows)
        with reading(block.file):
            table = cursor.rows(block.offset, block.num_rows)
        if rows is not None:
            is_run = len(rows) and rows[-1] - rows[0] == len(rows) - 1
            table = table.slice(int(rows[0]), len(rows)) if is_run else table.take(pa.array(rows))
        for name, kind in columns.items():
            if kind is ColumnKind.LABEL:
                labels = label_numbers(table[name])
                bad = np.flatnonzero(~is_label(labels))
                if len(bad):
                    row = block.first_row + int(bad[0] if rows is None else rows[bad[0]])
                    raise InputError(
                        f"{block.file}: {name!r} of row {row} is {labels[bad[0]]}, which is no "
                        "label from 0 to 1; leave such rows out when the file is written"
                    )
        return table

    def fresh(self) -> Self:
        """A source of these blocks with files of its own, for another thread."""
        other = copy.copy(self)
        other._cursor = None
        return other

    def close(self) -> None:
        """Close the file that is open."""
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None


@dataclass
class _Cursor:
    """A row group that is read from its start on."""

    key: tuple[str, int, tuple[str, ...]]
    batch_rows: int
    position: int = 0

    def __post_init__(self) -> None:
        file, row_group, columns = self.key
        self._file = _open(file)
        self._batches: Iterator[pa.RecordBatch] = self._file.iter_batches(
            batch_size=self.batch_rows,
            row_groups=[row_group],
            columns=list(columns),
            use_threads=False,
        )
        self._pending: pa.RecordBatch | None = None

    def rows(self, start: int, num_rows: int) -> pa.Table:
        """Rows from ``start`` on, which is not before `position`."""
        parts = []
        stop = start + num_rows
        while self.position < stop:
            batch = next(self._batches, None) if self._pending is None else self._pending
            if batch is None:
                raise EOFError("a row group has fewer rows than the footer says")
            first, last = max(start - self.position, 0), stop - self.position
            if first < batch.num_rows:
                parts.append(batch.slice(first, min(last, batch.num_rows) - first))
            self._pending = batch.slice(last) if last < batch.num_rows else None
            self.position += min(last, batch.num_rows)
        return pa.Table.from_batches(parts)

    def close(self) -> None:
        self._file.close()


def _open(file: str) -> pq.ParquetFile:
    try:
        with reading(file):
            return pq.ParquetFile(file, pre_buffer=False)
    except pa.ArrowException as error:
        raise ConfigError(f"{file} is no Parquet file, or it is damaged: {error}") from error


def _blocks(file: str, counts: Sequence[int], block_rows: int) -> Iterator[LogBlock]:
    first_row = 0
    for row_group, num_rows in enumerate(counts):
        for offset in range(0, num_rows, block_rows):
            size = min(block_rows, num_rows - offset)
            yield LogBlock(file, row_group, offset, 0, first_row + offset, size)
        first_row += num_rows


def _names(schema: pa.Schema) -> str:
    return ", ".join(schema.names)


def _described(kind: pa.DataType) -> str:
    """What a column holds, in words; types that hold the same are the same."""
    if pt.is_dictionary(kind):
        return _described(kind.value_type)
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        return f"lists of {_described(kind.value_type)}"
    for is_kind, word in _WORDS:
        if is_kind(kind):
            return word
    return str(kind)


_WORDS = (
    (pt.is_boolean, "booleans"),
    (pt.is_integer, "integers"),
    (pt.is_floating, "numbers"),
    (pt.is_decimal, "decimals"),
    (pt.is_string, "text"),
    (pt.is_large_string, "text"),
    (pt.is_binary, "text"),
    (pt.is_large_binary, "text"),
    (pt.is_timestamp, "timestamps"),
)
_IDS = ("text", "integers", "booleans")
_NUMBERS = ("booleans", "integers", "numbers", "decimals")
_ALLOWED = {
    ColumnKind.TEXT: (*_IDS, *(f"lists of {word}" for word in _IDS)),
    ColumnKind.NUMBER: _NUMBERS,
    ColumnKind.INTEGER: ("integers", "timestamps"),
    ColumnKind.TIME: ("integers", "numbers", "timestamps"),
    ColumnKind.LABEL: _NUMBERS,
}
