"""Several files, of any format, as one source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa

from torchrec_2dsp.programs.data.logs.blocks import ColumnKind, LogBlock, LogSource, Rows
from torchrec_2dsp.programs.data.logs.files import is_parquet
from torchrec_2dsp.programs.data.logs.malformed import MalformedLines
from torchrec_2dsp.programs.data.logs.parquet_source import ParquetSource
from torchrec_2dsp.programs.data.logs.row_index import RowIndex
from torchrec_2dsp.programs.data.logs.text_source import TextSource


class MixedSource:
    """Sources one after another."""

    def __init__(self, sources: Sequence[LogSource]) -> None:
        """
        Args:
            sources: the sources, in their order; no two have a file together.
        """
        self._sources = tuple(sources)
        self._by_file = {block.file: source for source in self._sources for block in source.blocks}

    @property
    def blocks(self) -> Sequence[LogBlock]:
        """All blocks, in the order of the sources."""
        return [block for source in self._sources for block in source.blocks]

    def read(
        self, block: LogBlock, columns: Mapping[str, ColumnKind], rows: Rows | None = None
    ) -> pa.Table:
        """Some rows of a block, see `LogSource.read`."""
        return self._by_file[block.file].read(block, columns, rows)

    def fresh(self) -> "MixedSource":
        """A source of these blocks with files of its own, for another thread."""
        return MixedSource([source.fresh() for source in self._sources])

    def close(self) -> None:
        """Close the files that are open."""
        for source in self._sources:
            source.close()


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """How files are read."""

    names: tuple[str, ...]
    """The names of a text file's columns; empty if its first line has them."""

    delimiter: str
    """What stands between two values of a text file."""

    quote: str
    """What stands around values of a text file; empty for nothing."""

    block_bytes: int
    """About how many bytes of a text file are read together."""

    block_rows: int
    """The most rows of a Parquet file that are read together."""


def open_source(
    layout: FileFormat,
    files: Sequence[str],
    columns: Mapping[str, ColumnKind],
    malformed: MalformedLines,
    index: RowIndex,
) -> LogSource:
    """The rows of some files.

    Args:
        layout: how they are read.
        files: the paths, in their order.
        columns: the columns that each has to have.
        malformed: counts lines that can't be read.
        index: remembers how many rows blocks have.

    Raises:
        ConfigError: a file can't be read, has no rows, or lacks a column.
    """
    sources: list[LogSource] = []
    for is_binary, group in groupby(files, is_parquet):
        if is_binary:
            source = ParquetSource(list(group), block_rows=layout.block_rows)
        else:
            source = TextSource(
                list(group),
                columns=layout.names,
                delimiter=layout.delimiter,
                quote=layout.quote,
                block_bytes=layout.block_bytes,
                malformed=malformed,
                index=index,
            )
        source.check(columns)
        sources.append(source)
    return sources[0] if len(sources) == 1 else MixedSource(sources)
