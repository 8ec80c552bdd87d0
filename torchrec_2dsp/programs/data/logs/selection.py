"""`Selection`: the rows of a log that belong to a split."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.logs.blocks import ColumnKind, LogBlock, LogSource, Rows
from torchrec_2dsp.programs.data.logs.ids import fractions_of, hash_texts, texts_of
from torchrec_2dsp.programs.data.logs.row_index import RowIndex


@dataclass(frozen=True)
class LogPiece:
    """Rows of one block, all in a row or chosen by the hash of a column."""

    block: LogBlock
    """The block."""

    first: int
    """The first of the rows, if they are in a row."""

    num_rows: int
    """How many rows belong to the split."""


class Selection:
    """Rows of a source, numbered through."""

    def __init__(self, source: LogSource, pieces: Sequence[LogPiece]) -> None:
        """
        Args:
            source: reads the rows.
            pieces: which rows, in their order; pieces without rows are left out.
        """
        self._source = source
        self.pieces = tuple(piece for piece in pieces if piece.num_rows)
        """Which rows, in their order."""
        self.num_rows = sum(piece.num_rows for piece in self.pieces)
        """How many rows there are."""

    def read(
        self, piece: LogPiece, columns: Mapping[str, ColumnKind], rows: Rows | None = None
    ) -> pa.Table:
        """Some rows of a piece.

        Args:
            piece: one of `pieces`.
            columns: which columns, and what they are for.
            rows: numbers of rows in the piece, ascending; by default all.
        """
        return self._source.read(piece.block, columns, self._in_block(piece, rows))

    def fresh(self) -> "Selection":
        """A selection of these rows that reads through files of its own, for another thread."""
        return Selection(self._source.fresh(), self.pieces)

    def close(self) -> None:
        """Close the file that is open."""
        self._source.close()

    def _in_block(self, piece: LogPiece, rows: Rows | None) -> Rows | None:
        if rows is None:
            if piece.num_rows == piece.block.num_rows:
                return None
            rows = np.arange(piece.num_rows)
        return rows + piece.first


class HashedSelection(Selection):
    """Rows whose value in a column has a hash of the split."""

    def __init__(
        self,
        source: LogSource,
        pieces: Sequence[LogPiece],
        members: "Members",
        split: Split,
    ) -> None:
        """
        Args:
            source: reads the rows.
            pieces: the blocks, and how many rows of each belong to the split.
            members: says which rows belong to it.
            split: the split.
        """
        super().__init__(source, pieces)
        self._members, self._split = members, split

    def fresh(self) -> "HashedSelection":
        """A selection of these rows that reads through files of its own, for another thread."""
        members = self._members.fresh()
        return HashedSelection(self._source.fresh(), self.pieces, members, self._split)

    def close(self) -> None:
        """Close the files that are open."""
        super().close()
        self._members.close()

    def _in_block(self, piece: LogPiece, rows: Rows | None) -> Rows:
        members = self._members.rows(piece.block, self._split)
        return members if rows is None else members[rows]


class Members:
    """The rows of each split, by the hash of a column: equal values are in one split."""

    def __init__(
        self, source: LogSource, columns: Mapping[str, ColumnKind], column: str, share: float
    ) -> None:
        """
        Args:
            source: reads the rows.
            columns: the columns by which a line is judged malformed, ``column`` among them.
            column: whose values are hashed.
            share: the share of the values that is held out.
        """
        self._source, self._columns = source, dict(columns)
        self._column, self._share = column, share
        self._last: tuple[LogBlock, dict[Split, Rows]] | None = None

    def fresh(self) -> "Members":
        """An equal object that reads through files of its own, for another thread."""
        return Members(self._source.fresh(), self._columns, self._column, self._share)

    def close(self) -> None:
        """Close the file that is open."""
        self._source.close()

    def rows(self, block: LogBlock, split: Split) -> Rows:
        """The numbers of a split's rows in a block."""
        if self._last is None or self._last[0] != block:
            texts = texts_of(self._source.read(block, self._columns)[self._column])
            is_held_out = fractions_of(hash_texts(texts.values)) < self._share
            self._last = (
                block,
                {
                    Split.TRAIN: np.flatnonzero(~is_held_out),
                    Split.EVAL: np.flatnonzero(is_held_out),
                },
            )
        return self._last[1][split]


def last_rows(source: LogSource, share: float) -> dict[Split, Selection]:
    """Splits of which the second is the last ``share`` of all rows."""
    num_rows = sum(block.num_rows for block in source.blocks)
    num_trained = num_rows - round(share * num_rows)
    trained, held_out = [], []
    start = 0
    for block in source.blocks:
        here = min(max(num_trained - start, 0), block.num_rows)
        trained.append(LogPiece(block, 0, here))
        held_out.append(LogPiece(block, here, block.num_rows - here))
        start += block.num_rows
    return {Split.TRAIN: Selection(source, trained), Split.EVAL: Selection(source, held_out)}


def rows_of_files(source: LogSource, files: Sequence[str]) -> Selection:
    """Every row of some files of a source."""
    return Selection(
        source,
        [LogPiece(block, 0, block.num_rows) for block in source.blocks if block.file in set(files)],
    )


def hashed_rows(
    source: LogSource,
    columns: Mapping[str, ColumnKind],
    column: str,
    share: float,
    index: RowIndex,
) -> dict[Split, Selection]:
    """Splits by the hash of a column. Counting their rows takes a pass over the column, which
    ``index`` remembers."""
    if columns[column] not in (ColumnKind.TEXT, ColumnKind.INTEGER):
        raise ConfigError(
            f"held_out.column={column!r} is a dense feature or the label; split by a column of ids"
        )
    members = Members(source, columns, column, share)
    counts: list[int] = []
    files = dict.fromkeys(block.file for block in source.blocks)
    for file in files:
        blocks = [block for block in source.blocks if block.file == file]
        layout = [block.num_rows for block in blocks]
        how = f"{share} of {column!r} held out, in blocks of {layout[0]} and {layout[-1]} rows"
        with closing(members):
            counts += index.remembered(
                file,
                f"{how}, {len(layout)} blocks",
                lambda blocks=blocks: [len(members.rows(block, Split.TRAIN)) for block in blocks],
            )
    pairs = list(zip(source.blocks, counts, strict=True))
    trained = [LogPiece(block, 0, count) for block, count in pairs]
    held_out = [LogPiece(block, 0, block.num_rows - count) for block, count in pairs]
    return {
        Split.TRAIN: HashedSelection(source, trained, members, Split.TRAIN),
        Split.EVAL: HashedSelection(source, held_out, members, Split.EVAL),
    }
