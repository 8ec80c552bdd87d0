"""`TextSource`: the rows of CSV and TSV files, plain or compressed."""

import copy
import os
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Self

import numpy as np
import pyarrow as pa

from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.programs.data.logs.blocks import ColumnKind, LogBlock, Rows
from torchrec_2dsp.programs.data.logs.files import is_gzip, reading
from torchrec_2dsp.programs.data.logs.lines import line_ends, select_lines
from torchrec_2dsp.programs.data.logs.malformed import MalformedLines
from torchrec_2dsp.programs.data.logs.row_index import RowIndex
from torchrec_2dsp.programs.data.logs.text_index import TextHead, index_lines, open_text
from torchrec_2dsp.programs.data.logs.text_parser import ParsedLines, TextParser


class TextSource:
    """The rows of text files.

    A line that can't be read keeps its place: in its stead comes the readable line before it in the
    block, or else the first one. So batches have the same samples whatever the number of ranks, and
    no rank has fewer. Which lines these were is in `MalformedLines`.
    """

    def __init__(
        self,
        files: Sequence[str],
        *,
        columns: Sequence[str],
        delimiter: str,
        quote: str,
        block_bytes: int,
        malformed: MalformedLines,
        index: RowIndex,
    ) -> None:
        """
        Args:
            files: the paths, in their order.
            columns: the names of the columns, if the files needn't have them; empty if the first
                line of each file has them.
            delimiter: what stands between two values.
            quote: what stands around values; empty for nothing.
            block_bytes: about how many bytes a block has.
            malformed: counts lines that can't be read.
            index: remembers how many rows blocks have.
        """
        self._heads = {file: TextHead(file, columns, delimiter, quote) for file in files}
        self._parsers = {
            file: TextParser(head.names, delimiter, quote) for file, head in self._heads.items()
        }
        self._malformed = malformed
        self._blocks = tuple(
            block
            for file, head in self._heads.items()
            for block in index.blocks(
                file,
                f"blocks of {block_bytes} bytes from byte {head.offset} on",
                lambda file=file, head=head: index_lines(file, head.offset, block_bytes),
            )
        )
        self._open: tuple[str, BinaryIO] | None = None

    @property
    def blocks(self) -> Sequence[LogBlock]:
        """All blocks, in the order of the files and of their lines."""
        return self._blocks

    def check(self, columns: Mapping[str, ColumnKind]) -> None:
        """Raise `ConfigError` unless every file has these columns."""
        for file, head in self._heads.items():
            for name in columns:
                if name not in head.names:
                    raise ConfigError(
                        f"{file} has no column {name!r}; it has {', '.join(head.names)}. If these "
                        "aren't names, give them by columns=; if they are one name, check the "
                        "delimiter"
                    )

    def read(
        self, block: LogBlock, columns: Mapping[str, ColumnKind], rows: Rows | None = None
    ) -> pa.Table:
        """Some rows of a block, see `LogSource.read`.

        Raises:
            InputError: too many lines can't be read, or none of the block can.
        """
        with reading(block.file):
            data = self._bytes(block)
        selected = np.arange(block.num_rows) if rows is None else rows
        own = data if rows is None else select_lines(data, rows)
        parsed = self._parse(block, own, len(selected), columns)
        if not parsed.reasons:
            return parsed.table
        self._count(block, own, selected, parsed.reasons)
        whole = parsed if rows is None else self._parse(block, data, block.num_rows, columns)
        if not whole.table.num_rows:
            raise InputError(
                f"none of the lines {self._line(block, 0)} to "
                f"{self._line(block, block.num_rows - 1)} of {block.file} can be read; check the "
                f"columns and the delimiter. The first: {next(iter(whole.reasons.values()))}"
            )
        stand_ins = np.searchsorted(whole.readable, selected, side="right") - 1
        return whole.table.take(pa.array(np.maximum(stand_ins, 0)))

    def _parse(
        self, block: LogBlock, data: bytes, num_lines: int, columns: Mapping[str, ColumnKind]
    ) -> ParsedLines:
        try:
            return self._parsers[block.file].parse(data, num_lines, columns)
        except pa.ArrowInvalid as error:
            raise InputError(
                f"the lines {self._line(block, 0)} to {self._line(block, block.num_rows - 1)} of "
                f"{block.file} can't be told apart: {error}; close its quotes, or set quote = ''"
            ) from error

    def _count(self, block: LogBlock, data: bytes, rows: Rows, reasons: Mapping[int, str]) -> None:
        ends = line_ends(data)
        for number, reason in sorted(reasons.items()):
            begin = ends[number - 1] + 1 if number else 0
            text = data[begin : ends[number] + 1]
            self._malformed.add(block.file, self._line(block, int(rows[number])), reason, text)

    def _line(self, block: LogBlock, row: int) -> int:
        return block.first_row + row + self._heads[block.file].num_lines + 1

    def _bytes(self, block: LogBlock) -> bytes:
        """The bytes of a block; of a compressed file, it is quick only in the order of blocks."""
        if self._open is None or self._open[0] != block.file:
            self.close()
            self._open = block.file, open_text(block.file)
        stream = self._open[1]
        if is_gzip(block.file):
            stream.seek(block.offset)
            data = stream.read(block.num_bytes)
        else:
            data = _pread(stream.fileno(), block.num_bytes, block.offset)
        if len(data) != block.num_bytes:
            raise EOFError("it has become shorter since it was opened")
        return data

    def fresh(self) -> Self:
        """A source of these blocks with files of its own, for another thread."""
        other = copy.copy(self)
        other._open = None
        return other

    def close(self) -> None:
        """Close the file that is open."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


def _pread(descriptor: int, num_bytes: int, offset: int) -> bytes:
    parts = []
    while num_bytes and (part := os.pread(descriptor, num_bytes, offset)):
        parts.append(part)
        num_bytes, offset = num_bytes - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
