"""Read a log's rows in blocks from Parquet files, its own or converted ones.

A block is a row group, or some thousand rows from one. Parquet footers give each block's row count,
so any rank finds any batch's rows by arithmetic.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.types as pt

from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.programs.data.dataset import Progress, Split
from torchrec_2dsp.programs.data.logs.config import ColumnKind, LogLayout
from torchrec_2dsp.programs.data.logs.conversion import (
    MALFORMED,
    MALFORMED_REASON,
    ConvertedFile,
    check_names,
    convert,
    cut,
)
from torchrec_2dsp.programs.data.logs.files import (
    columnar_fragment,
    end_of,
    file_system,
    kind_of,
    reading,
    state_of,
    write_prepared,
)
from torchrec_2dsp.programs.data.logs.ids import digest_of, encoded_texts, fractions_of, hash_texts
from torchrec_2dsp.programs.data.logs.text import (
    MalformedLines,
    Rows,
    is_label,
    label_numbers,
)

_COUNTS = "row_counts.json"


@dataclass(frozen=True)
class LogBlock:
    """Rows of a file that are read together."""

    file: str
    """The log file's path."""

    part: int
    """The Parquet file's index in the source."""

    unit: int
    """The index of the unit: shuffling keeps a unit's blocks together, in order."""

    row_group: int
    """The index of the row group that has the rows."""

    offset: int
    """The first row within the row group."""

    first_row: int
    """The number of the file's rows before the block."""

    num_rows: int


@dataclass(frozen=True)
class HashSplit:
    """A split by a column's hash: equal values are in one split."""

    column: str
    """The column to hash."""

    share: float
    """The share of values that is held out."""

    split: Split

    def rows(self, table: pa.Table) -> Rows:
        """Return the split's row numbers in a table."""
        hashes, _ = encoded_texts(table[self.column], hash_texts)
        is_held_out = fractions_of(hashes) < self.share
        return np.flatnonzero(is_held_out == (self.split is Split.EVAL))


@dataclass(frozen=True)
class LogPiece:
    """Rows of one block, contiguous or chosen by a column's hash."""

    block: LogBlock

    first: int
    """The first row, if they are contiguous."""

    num_rows: int
    """The number of rows in the split."""

    by_hash: HashSplit | None = None
    """The split that chooses rows; `None` if they are contiguous."""


def count_rows(pieces: Iterable[LogPiece]) -> int:
    """Return the pieces' total number of rows."""
    return sum(piece.num_rows for piece in pieces)


class LogSource:
    """The rows in a log's files.

    A neighbouring row replaces a malformed line, so that batches have the same samples for any
    number of ranks. `MalformedLines` counts these lines.
    """

    def __init__(
        self,
        config: LogLayout,
        malformed: MalformedLines,
        progress: Progress | None = None,
    ) -> None:
        """Convert files where needed, and list all blocks.

        Args:
            config: describes the files, and the columns that each must have.
            malformed: counts malformed lines.
            progress: called during conversion.

        Raises:
            ConfigError: a file can't be read, has no rows, or lacks a column.
            InputError: too many lines are malformed.
        """
        self.columns, self.malformed = config.read_columns(), malformed
        self.block_rows = config.block_rows
        """The most rows in a block of a Parquet file that wasn't converted."""
        converted = {file.file: file for file in converted_files(config)}
        convert(list(converted.values()), progress=progress)
        self.fragments: list[ds.ParquetFileFragment] = []
        """The Parquet files."""
        self._schemas: dict[str, pa.Schema] = {}
        self._config, self._converted = config, converted
        self.num_head_lines = {
            file: source.head.num_lines
            for file, source in converted.items()
            if source.head is not None
        }
        """The number of lines before a text file's first row."""
        self.blocks: list[LogBlock] = []
        """All blocks, in file and row order."""
        for file in config.all_files():
            source, is_text = converted.get(file), file in self.num_head_lines
            blocks = self._list(file, source)
            if not blocks:
                extent = "no row, at most the names of columns" if is_text else "no row"
                raise ConfigError(f"{file} has {extent}; leave it out")
            if not is_text:
                fragment = source.source_fragment() if source else self.fragments[-1]
                self._check(file, fragment.physical_schema)
            self.blocks += blocks
        self._check_malformed()

    def _list(self, file: str, source: ConvertedFile | None) -> list[LogBlock]:
        """List a file's blocks: row groups that were written as such, or parts of others."""
        blocks: list[LogBlock] = []
        first_row = unit = 0
        for path in [file] if source is None else source.parts:
            fragment = self._fragment(file, str(path))
            for group in fragment.row_groups:
                max_rows = self.block_rows if source is None else max(1, group.num_rows)
                for offset in range(0, group.num_rows, max_rows):
                    size = min(max_rows, group.num_rows - offset)
                    place = (len(self.fragments), unit, group.id, offset, first_row + offset)
                    blocks.append(LogBlock(file, *place, size))
                first_row += group.num_rows
                # Shuffling keeps the blocks of a compressed file together.
                unit += source is None or kind_of(file).compression is None
            self.fragments.append(fragment)
        return blocks

    def _fragment(self, file: str, path: str) -> ds.ParquetFileFragment:
        """Open a Parquet file, with strings read as dictionaries."""
        at = file_system(path)
        schema = columnar_fragment(file, ds.ParquetFileFormat(), at).physical_schema
        check_names(file, schema.names, self.columns)
        texts = [
            name
            for name, column in self.columns.items()
            if column.kind is ColumnKind.TEXT and _described(schema.field(name).type) == "text"
        ]
        options = ds.ParquetReadOptions(dictionary_columns=texts)
        fragment = columnar_fragment(file, ds.ParquetFileFormat(read_options=options), at)
        assert isinstance(fragment, ds.ParquetFileFragment)
        return fragment

    def _check(self, file: str, schema: pa.Schema) -> None:
        """Raise `ConfigError` unless a file's columns have values of one kind."""
        self._schemas[file] = schema
        first_file, first = next(iter(self._schemas.items()))
        for name, column in self.columns.items():
            what, expected = (_described(part.field(name).type) for part in (schema, first))
            if what not in _ALLOWED[column.kind]:
                raise ConfigError(
                    f"{file}: column {name!r} has {schema.field(name).type}, and should have "
                    f"{column.kind.value}; cast it when the file is written, or use another column"
                )
            if what != expected:
                raise ConfigError(
                    f"{file}: column {name!r} has {what}, and in {first_file} it has {expected}; "
                    "write all files with one schema"
                )

    def _check_malformed(self) -> None:
        """Raise `InputError` if text files have more malformed lines than the limit."""
        malformed = MalformedLines(self.malformed.limit)
        for block in self.blocks:
            if block.file in self.num_head_lines and self._may_have_malformed(block):
                group = self.fragments[block.part].subset(row_group_ids=[block.row_group])
                lines = group.to_table(columns=[MALFORMED], use_threads=False)[MALFORMED]
                self.count_malformed(block, lines, np.arange(block.num_rows), malformed)

    def _may_have_malformed(self, block: LogBlock) -> bool:
        group = self.fragments[block.part].metadata.row_group(block.row_group)
        columns = map(group.column, range(group.num_columns))
        reasons = next(column for column in columns if column.path_in_schema == MALFORMED_REASON)
        counts = reasons.statistics
        return counts is None or counts.null_count < block.num_rows

    def count_malformed(
        self, block: LogBlock, lines: pa.ChunkedArray, rows: Rows, malformed: MalformedLines
    ) -> None:
        """Count the malformed lines among some rows of a text file's block."""
        if lines.null_count == len(lines):
            return
        first = block.first_row + self.num_head_lines[block.file] + 1
        for row, line in zip(rows.tolist(), lines.to_pylist(), strict=True):
            if line is not None:
                malformed.add(block.file, first + row, line["reason"], line["text"])

    def check_single(self, column: str, purpose: str, remedy: str = "use another column") -> None:
        """Raise `ConfigError` if a column that needs one id per row has lists or timestamps."""
        for file, schema in self._schemas.items():
            kind = schema.field(column).type
            if _described(kind) not in _IDS:
                raise ConfigError(
                    f"{file}: column {column!r} has {kind}, and {purpose} needs one text, integer "
                    f"or boolean in each row; cast it when the file is written, or {remedy}"
                )

    @property
    def fingerprint(self) -> dict[str, str]:
        """Each file's size, rows and end, by its number and name; see `Dataset.fingerprint`."""
        lines = {}
        for number, (file, blocks) in enumerate(self._blocks_by_file().items(), 1):
            num_rows = sum(block.num_rows for block in blocks)
            name = f"file {number} ({os.path.basename(file)})"
            lines[name] = f"{num_rows} rows, {self._contents[file]}"
        return lines

    @cached_property
    def _contents(self) -> dict[str, str]:
        """Each file's size and end."""
        contents = {}
        for file in self._blocks_by_file():
            end = digest_of(np.frombuffer(end_of(file), dtype=np.uint8))
            contents[file] = f"{state_of(file).num_bytes} bytes that end with digest {end}"
        return contents

    @property
    def digest(self) -> str:
        """A short text that identifies the files, independent of how they are read."""
        text = "\n".join(self._contents.values())
        return digest_of(np.frombuffer(text.encode(), dtype=np.uint8))

    def layout(self, column: str) -> str:
        """Describe a column's place in text files, and how it is read; empty for other formats."""
        heads = [source.head.names for source in self._converted.values() if source.head]
        # Files mostly have it at one place.
        places = dict.fromkeys(f"{names.index(column) + 1} of {len(names)}" for names in heads)
        if not places:
            return ""
        kind, config = self.columns[column].kind, self._config
        return (
            f"value {', '.join(places)}, delimiter={config.delimiter!r}, quote={config.quote!r}, "
            f"as {kind.value}"
        )

    def _blocks_by_file(self) -> dict[str, list[LogBlock]]:
        groups = groupby(self.blocks, key=lambda block: block.file)
        return {file: list(blocks) for file, blocks in groups}

    def last_rows(self, share: float) -> dict[Split, list[LogPiece]]:
        """Hold out the last ``share`` of all rows."""
        num_rows = sum(block.num_rows for block in self.blocks)
        num_trained = num_rows - round(share * num_rows)
        pieces: dict[Split, list[LogPiece]] = {Split.TRAIN: [], Split.EVAL: []}
        start = 0
        for block in self.blocks:
            here = min(max(num_trained - start, 0), block.num_rows)
            pieces[Split.TRAIN].append(LogPiece(block, 0, here))
            pieces[Split.EVAL].append(LogPiece(block, here, block.num_rows - here))
            start += block.num_rows
        return pieces

    def rows_of_files(self, files: Sequence[str]) -> list[LogPiece]:
        """Select all rows of the given files."""
        chosen = set(files)
        return [LogPiece(block, 0, block.num_rows) for block in self.blocks if block.file in chosen]

    def hashed_rows(self, column: str, share: float, prepared: str) -> dict[Split, list[LogPiece]]:
        """Hold out rows by a column's hash; one pass counts them, cached in ``prepared``."""
        if self.columns[column].kind not in (ColumnKind.TEXT, ColumnKind.INTEGER):
            raise ConfigError(
                f"held_out.column={column!r} is a dense feature, a time or the label; split by a "
                "column of ids"
            )
        self.check_single(column, "held_out.column")
        trained, held_out = (HashSplit(column, share, split) for split in Split)
        pieces: dict[Split, list[LogPiece]] = {Split.TRAIN: [], Split.EVAL: []}
        cached, reader = _read_counts(prepared), LogReader(self)
        for file, blocks in self._blocks_by_file().items():
            sizes = [block.num_rows for block in blocks]
            how = (
                f"{share} of {column!r} held out, in blocks of {sizes[0]} and {sizes[-1]} rows, "
                f"{len(sizes)} blocks"
            )
            if file in self._converted:
                how += f", read as in {self._converted[file].folder.name}"
            key = f"{file if '://' in file else os.path.abspath(file)}: {how}"
            state = list(state_of(file))
            if cached.get(key, {}).get("file") != state:
                counts = [len(trained.rows(reader.block(block))) for block in blocks]
                cached[key] = {"file": state, "counted": counts}
                if prepared:
                    write_prepared(Path(prepared, _COUNTS), json.dumps(cached).encode())
            for block, count in zip(blocks, cached[key]["counted"], strict=True):
                pieces[Split.TRAIN].append(LogPiece(block, 0, count, trained))
                pieces[Split.EVAL].append(LogPiece(block, 0, block.num_rows - count, held_out))
        return pieces


class LogReader:
    """Reads a source's rows on one thread; sequential reads are fast."""

    def __init__(self, source: LogSource) -> None:
        self._source = source
        self._row_group: tuple[int, int] | None = None
        self._tables: Iterator[pa.Table] = iter(())
        self._offset = 0

    def read(self, piece: LogPiece, rows: Rows | None = None) -> pa.Table:
        """Read a piece's rows.

        Args:
            piece: the piece.
            rows: ascending row numbers within the piece; all by default.

        Raises:
            InputError: too many lines are malformed, or a row has no label from 0 to 1.
        """
        if rows is None:
            rows = np.arange(piece.num_rows)
        if piece.by_hash is None:
            return self.block(piece.block, piece.first + rows)
        table = self.block(piece.block)
        return table.take(pa.array(piece.by_hash.rows(table)[rows]))

    def block(self, block: LogBlock, rows: Rows | None = None) -> pa.Table:
        """Read and check a block's rows, all by default; see `read`."""
        names = list(self._source.columns)
        if block.file in self._source.num_head_lines:
            names.append(MALFORMED)
        with reading(block.file):
            table = self._table(block, names)
        if rows is not None and len(rows) < block.num_rows:
            is_run = len(rows) and rows[-1] - rows[0] == len(rows) - 1
            table = table.slice(int(rows[0]), len(rows)) if is_run else table.take(pa.array(rows))
        numbers = np.arange(block.num_rows) if rows is None else rows
        if names[-1] == MALFORMED:
            source = self._source
            source.count_malformed(block, table[MALFORMED], numbers, source.malformed)
            return table.drop_columns([MALFORMED])
        self._check_labels(block, table, numbers)
        return table

    def _table(self, block: LogBlock, names: list[str]) -> pa.Table:
        """Read a block, after the earlier ones in its row group."""
        row_group = block.part, block.row_group
        if self._row_group != row_group or self._offset > block.offset:
            group = self._source.fragments[block.part].subset(row_group_ids=[block.row_group])
            size = self._source.block_rows if block.offset else block.num_rows
            batches = group.to_batches(
                columns=names,
                batch_size=size,
                batch_readahead=1,
                fragment_readahead=1,
                use_threads=False,
            )
            self._tables = cut((pa.Table.from_batches([batch]) for batch in batches), size)
            self._row_group, self._offset = row_group, 0
        for table in self._tables:
            self._offset += table.num_rows
            if self._offset == block.offset + block.num_rows:
                return table
        raise EOFError("a row group has fewer rows than the footer says")

    def _check_labels(self, block: LogBlock, table: pa.Table, rows: Rows) -> None:
        for name, column in self._source.columns.items():
            if column.kind is ColumnKind.LABEL:
                labels = label_numbers(table[name])
                bad = np.flatnonzero(~is_label(labels))
                if len(bad):
                    row = block.first_row + int(rows[bad[0]])
                    raise InputError(
                        f"{block.file}: {name!r} of row {row} is {labels[bad[0]]}, which isn't a "
                        "label from 0 to 1; leave such rows out when the file is written"
                    )


def _read_counts(prepared: str) -> dict[str, dict[str, Any]]:
    """Read the files' row counts, each with its file's state."""
    path = Path(prepared, _COUNTS)
    if not prepared or not path.exists():
        return {}
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} can't be read: {error}; delete it, and rows are counted again"
        ) from error


def converted_files(config: LogLayout) -> list[ConvertedFile]:
    """List the files that need conversion."""
    return [
        ConvertedFile(file, config)
        for file in config.all_files()
        if kind_of(file).format != "parquet"
    ]


def _described(kind: pa.DataType) -> str:
    """Name a column type's values for messages; types with equal contents have one name."""
    if pt.is_dictionary(kind):
        return _described(kind.value_type)
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        return f"lists of {_described(kind.value_type)}"
    return next((word for is_kind, word in _WORDS if is_kind(kind)), str(kind))


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
    (pt.is_date, "dates"),
)
_IDS = ("text", "integers", "booleans")
_NUMBERS = ("booleans", "integers", "numbers", "decimals")
_ALLOWED: Mapping[ColumnKind, tuple[str, ...]] = {
    ColumnKind.TEXT: (*_IDS, *(f"lists of {word}" for word in _IDS)),
    ColumnKind.NUMBER: _NUMBERS,
    ColumnKind.INTEGER: ("integers", "timestamps"),
    ColumnKind.TIME: ("integers", "numbers", "timestamps"),
    ColumnKind.WRITTEN_TIME: ("timestamps", "dates", "text"),
    ColumnKind.LABEL: _NUMBERS,
}
