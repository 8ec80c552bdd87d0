"""`TableData`: a log of rows as a dataset."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Progress, Split
from torchrec_2dsp.programs.data.logs.batches import (
    EpochPlan,
    LogDataset,
    placed,
    row_order,
    windows,
)
from torchrec_2dsp.programs.data.logs.config import ColumnKind, TableLayout
from torchrec_2dsp.programs.data.logs.conversion import cut
from torchrec_2dsp.programs.data.logs.encoder import Encoder, Prepared
from torchrec_2dsp.programs.data.logs.files import list_files, real_path
from torchrec_2dsp.programs.data.logs.source import (
    LogPiece,
    LogReader,
    LogSource,
    count_rows,
)
from torchrec_2dsp.programs.data.logs.text import MalformedLines


class TableData(LogDataset):
    """Serves a log's rows as batches."""

    def __init__(self, config: TableLayout, progress: Progress | None = None) -> None:
        """Open the log.

        Args:
            config: the config's section.
            progress: called during conversion, and while vocabularies and scales are built.
        """
        super().__init__(config, {Split.TRAIN: "training", Split.EVAL: "held-out"})
        prepared = Prepared(config)
        self._source, self._pieces = _select(config, self.malformed, progress)
        trained = self._pieces[Split.TRAIN]
        self._encoder = Encoder(config, *prepared.prepare(self._source, trained, progress))
        self.fingerprint |= {
            **self._source.fingerprint,
            "training rows": str(count_rows(trained)),
            **self._encoder.fingerprint,
        }
        self._shuffled_blocks = {Split.TRAIN: config.shuffled_blocks, Split.EVAL: 0}
        self._seed = config.seed
        self.features = self._encoder.features
        """The sparse features, in batch order."""
        self.num_dense = len(config.dense)
        """The number of dense features."""
        self.held_out = config.held_out
        """The rule that selects held-out rows."""

    def num_rows(self, split: Split) -> int:
        """Return how many rows a split has."""
        return count_rows(self._pieces[split])

    def _read(self, split: Split, plan: EpochPlan, start: int) -> Iterator[Batch]:
        # Each stream has its own reader, since several may be read at the same time.
        reader = LogReader(self._source)
        for epoch, first_batch in plan.epochs(start):
            samples = self._epoch(split, plan, reader, epoch, first_batch)
            for part in cut(samples, plan.batch_size):
                yield self._encoder.batch(part)

    def _read_once(self, split: Split, rank: int, world_size: int) -> Iterator[Batch]:
        reader = LogReader(self._source)
        for piece in self._pieces[split][rank::world_size]:
            yield self._encoder.batch(self._encoder.encode(reader.read(piece)))

    def _epoch(
        self, split: Split, plan: EpochPlan, reader: LogReader, epoch: int, first_batch: int
    ) -> Iterator[pa.Table]:
        """Read the rank's samples in an epoch, in order, from a batch on."""
        shuffled_blocks, seed = self._shuffled_blocks[split], self._seed
        pieces = self._pieces[split]
        order = windows(pieces, epoch=epoch, shuffled_blocks=shuffled_blocks, seed=seed)
        for number, start, window in placed(order, plan.num_samples):
            num_rows = count_rows(window)
            rows = plan.own(start, start + num_rows, first_batch) - start
            if not len(rows):
                continue
            if not shuffled_blocks:
                yield self._samples(reader, window, rows)
                continue
            rows = row_order(num_rows, epoch=epoch, window=number, seed=seed)[rows]
            by_row = np.argsort(rows)
            samples = self._samples(reader, window, rows[by_row])
            yield samples.take(pa.array(np.argsort(by_row)))

    def _samples(
        self, reader: LogReader, window: Sequence[LogPiece], rows: NDArray[np.int64]
    ) -> pa.Table:
        """Read some of a window's rows, in ascending order."""
        ends = np.cumsum([piece.num_rows for piece in window])
        by_piece = np.split(rows, np.searchsorted(rows, ends[:-1]))
        parts = []
        for piece, end, chosen in zip(window, ends, by_piece, strict=True):
            if len(chosen):
                table = reader.read(piece, chosen - (end - piece.num_rows))
                parts.append(self._encoder.encode(table))
        return pa.concat_tables(parts)


def _select(
    config: TableLayout, malformed: MalformedLines, progress: Progress | None
) -> tuple[LogSource, dict[Split, list[LogPiece]]]:
    """Open the files, and select each split's rows."""
    choice = config.held_out
    files, held_out = list_files(config.files), list_files(choice.files)
    trained_on = set(map(real_path, files))
    both = [file for file in held_out if real_path(file) in trained_on]
    if both:
        raise ConfigError(
            f"{both[0]} is among files and among held_out.files; leave it out of one of them"
        )
    if choice.by == "hash" and choice.column not in config.read_columns():
        raise ConfigError(
            f"held_out.column={choice.column!r} is the column of no feature; name one of "
            f"{', '.join(feature.source for feature in config.features)}"
        )
    source = LogSource(config, malformed, progress)
    # A column that is also a time is read as integers, and may hold timestamps.
    others = [feature.source for feature in config.features if not feature.is_time]
    for column in (*others, *(column.column for column in config.dense)):
        if source.columns[column].kind is ColumnKind.INTEGER:
            source.check_single(column, "a feature that is no time")
    for column in (feature.source for feature in config.features if feature.separator):
        source.check_single(column, "a separator", "leave separator out")
    if choice.by == "last":
        pieces = source.last_rows(choice.share)
    elif choice.by == "hash":
        pieces = source.hashed_rows(choice.column, choice.share, config.prepared)
    else:
        pieces = {
            Split.TRAIN: source.rows_of_files(files),
            Split.EVAL: source.rows_of_files(held_out),
        }
    return source, {
        split: [piece for piece in part if piece.num_rows] for split, part in pieces.items()
    }
