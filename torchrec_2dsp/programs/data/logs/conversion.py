"""Convert files in other formats to Parquet files below ``prepared``, once.

    day_0.csv   --parts of 256 MB-->  logs/day_0.csv-<digest>/0000.parquet  0001.parquet ...
    day_1.gz    --one part------->    logs/day_1.gz-<digest>/0000.parquet

Each rank converts its share of the parts. A block of lines becomes a row group. The digest covers
the file's state and the settings, so a change in either leads to a new folder. A part gets its
name once it is complete: an interrupted conversion leaves no partial files under final names, and
concurrent runs merely repeat work.
"""

import contextlib
import hashlib
import json
import math
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.programs.data.dataset import Progress
from torchrec_2dsp.programs.data.logs.config import ColumnKind, Columns, LogLayout
from torchrec_2dsp.programs.data.logs.files import (
    columnar_fragment,
    kind_of,
    open_stream,
    reading,
    state_of,
    writing_prepared,
)
from torchrec_2dsp.programs.data.logs.text import (
    COLUMN_TYPES,
    ParsedLines,
    TextHead,
    TextParser,
    blocks_of_lines,
    line_ends,
    line_start_before,
    shown,
    without_blank_end,
)

MALFORMED = "malformed line"
"""A column in converted text files: a malformed line's reason and text, in the row that replaces
it."""

_PART_BYTES = 256 * 2**20
_VERSION = 1
"""The format version; a new number converts all files again."""
_STALE_S = 3600.0
MALFORMED_REASON = f"{MALFORMED}.reason"
"""The place of the reasons in Parquet files. Its statistics count the other rows, except in files
that earlier versions converted."""
_MALFORMED_TYPE = pa.struct([("reason", pa.string()), ("text", pa.string())])
_NO_NAMES = (
    ". If these aren't names, give them by columns=; if they are one name, check the delimiter"
)
_NUMBERS = (ColumnKind.NUMBER, ColumnKind.LABEL)


class ConvertedFile:
    """The Parquet files that replace one file in another format."""

    def __init__(self, file: str, section: LogLayout) -> None:
        """Inspect the file and lay out its parts.

        Args:
            file: the path.
            section: describes the file, and where to convert it to.

        Raises:
            ConfigError: it can't be read, or is a text file that lacks a column.
        """
        self.file = file
        """The file's path."""
        self._section, self._columns = section, section.read_columns()
        self._state = state_of(file)
        self._kind = kind_of(file)
        self.head = TextHead(file, section) if self._kind.format == "text" else None
        """A text file's column names; `None` for other formats."""
        self._num_chunks = num_parts = 1
        self._chunks_per_part = max(1, _PART_BYTES // section.block_bytes)
        if self.head is None:
            check_names(file, self.source_fragment().physical_schema.names, self._columns)
        else:
            check_names(file, self.head.names, self._columns, _NO_NAMES)
            if self._kind.compression is None:
                num_bytes = self._state.num_bytes - self.head.offset
                self._num_chunks = max(1, math.ceil(num_bytes / section.block_bytes))
                num_parts = math.ceil(self._num_chunks / self._chunks_per_part)
        self.folder = _folder_of(section.prepared) / f"{Path(file).name}-{self._digest()}"
        """The folder for them, named after the file's state and how it is read."""
        self.parts = tuple(self.folder / f"{part:04}.parquet" for part in range(num_parts))
        """The Parquet files, in row order."""

    @property
    def num_bytes(self) -> int:
        """The file's size."""
        return self._state.num_bytes

    def source_fragment(self) -> ds.Fragment:
        """Return a file with named columns as a fragment."""
        return columnar_fragment(self.file, _columnar_format(self._kind.format, self._columns))

    def convert(self, part: int, advance: Callable[[int], None]) -> None:
        """Write one part.

        Args:
            part: its number.
            advance: called with the number of bytes read.

        Raises:
            ConfigError: the file can't be read or has changed, or the part can't be written.
            InputError: lines run together, or a whole block is malformed.
        """
        path = self.parts[part]
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.draft")
        tables = self._tables(advance) if self.head is None else self._text_tables(part, advance)
        with writing_prepared(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_stale_drafts(self.folder)
        try:
            first = next(tables, None)
            with writing_prepared(path):
                schema = self._schema() if first is None else first.schema
                # Not compressed: each rank decodes all rows of a block, and the disk is fast.
                texts = [field.name for field in schema if pa.types.is_binary(field.type)]
                options: dict[str, Any] = {
                    "compression": "none",
                    "use_dictionary": texts or False,
                    "write_statistics": [MALFORMED_REASON],
                }
                with pq.ParquetWriter(draft, schema, **options) as writer:
                    while first is not None:
                        writer.write_table(first, row_group_size=max(1, first.num_rows))
                        first = next(tables, None)
            if state_of(self.file) != self._state:
                raise ConfigError(f"{self.file} changed during conversion; start again")
            with writing_prepared(path):
                draft.replace(path)
        finally:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def _digest(self) -> str:
        # Files whose times have a pattern were converted without a check of their days.
        has_days = any("%" in column.time_format for column in self._columns.values())
        facts = {
            "version": _VERSION + has_days,
            "file": self.file if "://" in self.file else os.path.abspath(self.file),
            "state": self._state,
            "part_bytes": _PART_BYTES,
            "layout": {
                "names": self._section.columns,
                "delimiter": self._section.delimiter,
                "quote": self._section.quote,
                "block_bytes": self._section.block_bytes,
                "block_rows": self._section.block_rows,
            },
            "columns": {
                name: (column.kind.name, column.time_format)
                for name, column in sorted(self._columns.items())
            },
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def _schema(self) -> pa.Schema:
        fields = [(name, COLUMN_TYPES[column.kind]) for name, column in self._columns.items()]
        return pa.schema([*fields, (MALFORMED, _MALFORMED_TYPE)])

    def _tables(self, advance: Callable[[int], None]) -> Iterator[pa.Table]:
        """Read a file with named columns, one block's rows at a time."""
        size = self._section.block_rows
        with reading(self.file):
            batches = self.source_fragment().to_batches(
                columns=list(self._columns), batch_size=size
            )
            try:
                yield from cut((pa.Table.from_batches([batch]) for batch in batches), size)
            except pa.ArrowInvalid as error:
                raise InputError(f"{self.file} can't be read: {error}") from error
        advance(self.num_bytes)

    def _text_tables(self, part: int, advance: Callable[[int], None]) -> Iterator[pa.Table]:
        """Parse a part of a text file, a block at a time."""
        head, size = self.head, self._section.block_bytes
        assert head is not None
        parser = TextParser(head.names, self._section)
        first_chunk = part * self._chunks_per_part
        end_chunk = first_chunk + self._chunks_per_part
        is_last = end_chunk >= self._num_chunks
        with reading(self.file):
            stream, raw = open_stream(self.file)
            with stream, raw:
                start = head.offset + first_chunk * size
                if self._kind.compression is not None:
                    stream.read(head.offset)
                else:
                    start = line_start_before(stream, start, head.offset)
                    stream.seek(start)
                blocks = blocks_of_lines(
                    stream,
                    self.file,
                    first_bytes=head.offset + (first_chunk + 1) * size - start,
                    block_bytes=size,
                    num_bytes=None if is_last else head.offset + end_chunk * size - start,
                )
                if is_last and len(head.names) > 1:
                    blocks = without_blank_end(blocks)
                begin, first_row, table = raw.tell(), 0, None
                for data in blocks:
                    table = self._parsed(parser, data, start, first_row, table)
                    yield table
                    first_row += data.count(b"\n")
                    advance(raw.tell() - begin)

    def _parsed(
        self, parser: TextParser, data: bytes, start: int, first_row: int, before: pa.Table | None
    ) -> pa.Table:
        """Parse a block; replace malformed lines by the readable one before, or the first."""
        try:
            parsed = parser.parse(data)
        except pa.ArrowInvalid as error:
            raise InputError(
                f"the {self._lines(data, start, first_row)} run together: {error}; close "
                "its quotes, or set quote = ''"
            ) from error
        num_lines = len(parsed.readable) + len(parsed.reasons)
        if not len(parsed.readable) and num_lines == 1 and before is not None:
            # A last line may be cut off.
            table = before.drop_columns([MALFORMED]).slice(before.num_rows - 1)
            return table.append_column(MALFORMED, _malformed(parsed, data, num_lines))
        if not len(parsed.readable):
            raise InputError(
                f"none of the {self._lines(data, start, first_row)} can be read; check the columns "
                f"and the delimiter. The first: {next(iter(parsed.reasons.values()))}"
            )
        table = parsed.table
        if parsed.reasons:
            places = np.searchsorted(parsed.readable, np.arange(num_lines), side="right") - 1
            table = table.take(pa.array(np.maximum(places, 0)))
        return table.append_column(MALFORMED, _malformed(parsed, data, num_lines))

    def _lines(self, data: bytes, start: int, first_row: int) -> str:
        """Name a block's lines, for an error."""
        assert self.head is not None
        num_before = self.head.num_lines
        if self._kind.compression is None:
            with open_stream(self.file)[0] as stream:
                num_before = stream.read(start).count(b"\n")
        first = num_before + first_row + 1
        return f"lines {first} to {first + len(line_ends(data)) - 1} of {self.file}"


def convert(
    files: Sequence[ConvertedFile],
    *,
    rank: int = 0,
    world_size: int = 1,
    progress: Progress | None = None,
) -> None:
    """Convert this rank's share of the missing parts."""
    parts = [(file, part) for file in files for part in range(len(file.parts))]
    own = [(file, part) for file, part in parts[rank::world_size] if not file.parts[part].exists()]
    total = sum(file.num_bytes // len(file.parts) for file, _ in own)
    done = 0
    for file, part in own:

        def advance(num_bytes: int, done: int = done, file: str = file.file) -> None:
            if progress is not None:
                progress(f"converting {file}", done + num_bytes, total)

        file.convert(part, advance)
        done += file.num_bytes // len(file.parts)


def cut(tables: Iterable[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """Cut rows that come in tables of any size into tables of one size; the last may be smaller."""
    pending = None
    for table in tables:
        pending = pa.concat_tables([pending, table]) if pending else table
        while pending.num_rows >= num_rows:
            yield pending.slice(0, num_rows)
            pending = pending.slice(num_rows)
    if pending:
        yield pending


def check_names(file: str, names: Sequence[str], columns: Columns, remedy: str = "") -> None:
    """Raise `ConfigError` unless a file has each of these columns once."""
    for name in columns:
        if names.count(name) > 1:
            raise ConfigError(f"{file} has two columns {name!r}; rename one")
        if name not in names:
            shown = ", ".join(map(repr, names))
            raise ConfigError(f"{file} has no column {name!r}; it has {shown}{remedy}")


def _malformed(parsed: ParsedLines, data: bytes, num_lines: int) -> pa.Array:
    if not parsed.reasons:
        return pa.nulls(num_lines, _MALFORMED_TYPE)
    ends = line_ends(data)
    lines: list[dict[str, str] | None] = [None] * num_lines
    for number, reason in parsed.reasons.items():
        begin = ends[number - 1] + 1 if number else 0
        lines[number] = {"reason": reason, "text": shown(data[begin : ends[number] + 1])}
    return pa.array(lines, _MALFORMED_TYPE)


def _columnar_format(name: str, columns: Columns) -> ds.FileFormat:
    if name == "orc":
        return ds.OrcFileFormat()
    if name == "feather":
        return ds.FeatherFileFormat()
    # Types are inferred from the first lines, where a number may be an integer.
    numbers = [(name, pa.float64()) for name, column in columns.items() if column.kind in _NUMBERS]
    options = pa_json.ParseOptions(
        explicit_schema=pa.schema(numbers), unexpected_field_behavior="infer"
    )
    return ds.JsonFileFormat(ds.JsonFragmentScanOptions(parse_options=options))


def _folder_of(prepared: str) -> Path:
    if prepared:
        return Path(prepared, "logs")
    return Path(tempfile.gettempdir(), f"torchrec_2dsp_{os.getuid()}", "logs")


def _remove_stale_drafts(folder: Path) -> None:
    """Remove drafts of killed processes, which are older than any draft in progress."""
    for draft in folder.glob("*.draft"):
        with contextlib.suppress(OSError):
            if time.time() - draft.stat().st_mtime > _STALE_S:
                draft.unlink()
