"""`LogBlock` and `LogSource`: rows of files in an order, of which any can be read."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Rows = NDArray[np.int64]
"""Numbers of rows, ascending."""


class ColumnKind(enum.Enum):
    """The purpose of a column, which says what its values may be."""

    TEXT = "text, integers or booleans, or lists of them"
    """Values that ids are made from."""

    NUMBER = "numbers"
    """A dense feature."""

    INTEGER = "integers or timestamps"
    """A time that ids are made from, or integers that are ids and a dense feature."""

    TIME = "integers, numbers or timestamps"
    """A time that rows are sorted by."""

    LABEL = "numbers from 0 to 1"
    """The label, which no row may lack."""


@dataclass(frozen=True)
class LogBlock:
    """Rows of a file that are read together."""

    file: str
    """The path of the file."""

    unit: int
    """The number of what can be read without reading what comes before it in the file. Blocks of
    one unit are read in their order."""

    offset: int
    """The place of the block in the file, or in what a compressed file holds; of a Parquet file,
    the block's first row in its row group."""

    num_bytes: int
    """The bytes of the block, uncompressed; 0 in a Parquet file."""

    first_row: int
    """How many rows of the file come before the block."""

    num_rows: int
    """How many rows the block has."""


class LogSource(Protocol):
    """Blocks, and how to read rows of them."""

    @property
    def blocks(self) -> Sequence[LogBlock]:
        """All blocks, in the order of the files and of their rows."""
        ...

    def read(
        self, block: LogBlock, columns: Mapping[str, ColumnKind], rows: Rows | None = None
    ) -> pa.Table:
        """Some rows of a block.

        Args:
            block: one of `blocks`.
            columns: which columns, and what they are for.
            rows: numbers of rows in the block, ascending; by default all.
        """
        ...

    def fresh(self) -> Self:
        """A source of these blocks with files of its own, for another thread."""
        ...

    def close(self) -> None:
        """Close the file that is open."""
        ...
