"""Turn a log's rows into a rank's batches, which a thread prefetches."""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, groupby

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Batches, Dataset, Progress, Share, Split
from torchrec_2dsp.programs.data.draws import uniforms
from torchrec_2dsp.programs.data.logs.config import ColumnKind, LogFiles, Rest, TableLayout
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


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """A rank's part of an epoch's batches.

    Example:
        >>> from torchrec_2dsp.programs.data.logs.batches import EpochPlan
        >>> plan = EpochPlan(num_rows=10, global_batch_size=4, rest="pad", num_epochs=3)
        >>> plan.num_batches, list(plan.epochs(start=4))
        (3, [(1, 1), (2, 0)])
    """

    num_rows: int
    """The number of rows in an epoch."""

    global_batch_size: int
    """The number of samples in a batch over all ranks."""

    rest: Rest
    """The treatment of the last, incomplete step: drop it, or pad it with the epoch's first
    rows."""

    batches_per_step: int = 1
    """The number of batches in a step; an epoch has whole steps."""

    num_epochs: int = 1
    """The number of epochs; 0 for no end."""

    rank: int = 0
    """The rank whose part it is."""

    world_size: int = 1
    """The number of ranks that share a batch."""

    @property
    def batch_size(self) -> int:
        """The number of samples in the rank's part of a batch."""
        return self.global_batch_size // self.world_size

    @property
    def step_size(self) -> int:
        """The number of samples in a step over all ranks."""
        return self.global_batch_size * self.batches_per_step

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch."""
        num_steps, rest = divmod(self.num_rows, self.step_size)
        return (num_steps + (self.rest == "pad" and rest > 0)) * self.batches_per_step

    @property
    def num_samples(self) -> int:
        """The number of samples in an epoch's batches."""
        return self.num_batches * self.global_batch_size

    def epochs(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield the epochs from batch ``start`` on, each with the first of its batches to make."""
        epoch, first_batch = divmod(start, self.num_batches)
        while not self.num_epochs or epoch < self.num_epochs:
            yield epoch, first_batch
            epoch, first_batch = epoch + 1, 0

    def check(self, what: str) -> None:
        """Raise `ConfigError` if an epoch has no batch.

        Args:
            what: names the rows in the error.
        """
        if not self.num_batches:
            raise ConfigError(
                f"the {self.num_rows} {what} rows make no batch of {self.step_size}; use a "
                'smaller global batch, or rest = "pad"'
                if self.num_rows
                else f"there are no {what} rows; name more files, or hold out another share"
            )

    def own(self, start: int, stop: int, first_batch: int) -> NDArray[np.int64]:
        """Return the positions in ``start..stop-1`` that belong to the rank, from a batch on."""
        positions = np.arange(
            max(start, first_batch * self.global_batch_size), min(stop, self.num_samples)
        )
        return positions[positions % self.global_batch_size // self.batch_size == self.rank]


def windows(
    pieces: Sequence[LogPiece], *, epoch: int, shuffled_blocks: int, seed: int
) -> list[tuple[LogPiece, ...]]:
    """Group pieces into windows, in reading order; a window's rows are read together.

    Without shuffling, each piece is a window. With it, the log's units come in a random order, and
    ``shuffled_blocks`` pieces make a window. The order depends only on the arguments.
    """
    if not shuffled_blocks:
        return [(piece,) for piece in pieces]
    units = [
        list(group)
        for _, group in groupby(pieces, lambda piece: (piece.block.file, piece.block.unit))
    ]
    order = np.argsort(uniforms(seed, epoch, np.arange(len(units))), kind="stable")
    shuffled = [piece for unit in order.tolist() for piece in units[unit]]
    return [
        tuple(shuffled[first : first + shuffled_blocks])
        for first in range(0, len(shuffled), shuffled_blocks)
    ]


def row_order(num_rows: int, *, epoch: int, window: int, seed: int) -> NDArray[np.int64]:
    """Return the random order of a window's rows."""
    draws = uniforms(seed, epoch, window, np.arange(num_rows))
    return np.argsort(draws, kind="stable")


def placed(
    order: Sequence[tuple[LogPiece, ...]], num_samples: int
) -> Iterator[tuple[int, int, tuple[LogPiece, ...]]]:
    """Yield an epoch's windows with their numbers and first rows' positions.

    They start over to fill the last batch.
    """
    start = 0
    for number, window in cycle(enumerate(order)):
        if start >= num_samples:
            return
        yield number, start, window
        start += count_rows(window)


def prefetched(batches: Iterator[Batch], num_ahead: int) -> Batches:
    """Yield batches prefetched by a thread, from the first request on; without a thread for 0.

    The thread ends with the batches, after an error, and when the generator is closed or garbage
    collected. The thread's error is raised in place of its batch.
    """
    if not num_ahead:
        yield from batches
        return
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
    try:
        ahead = deque(executor.submit(next, batches, None) for _ in range(num_ahead))
        while (batch := ahead.popleft().result()) is not None:
            ahead.append(executor.submit(next, batches, None))
            yield batch
    finally:
        executor.shutdown(cancel_futures=True)


class LogDataset(Dataset):
    """A log as a `Dataset`: its rows, cut into batches as its section says.

    Training batches end after the section's epochs, held-out ones after one. Held-out rows are
    never shuffled.
    """

    def __init__(self, config: LogFiles, row_words: Mapping[Split, str]) -> None:
        """Store the section, and the words for each split's rows in errors."""
        self._files, self._row_words = config, row_words
        self.malformed = MalformedLines(config.malformed_limit)
        """The malformed lines that this process read."""

    @abstractmethod
    def num_rows(self, split: Split) -> int:
        """Return a split's number of rows."""

    @abstractmethod
    def _read(self, split: Split, plan: EpochPlan, start: int) -> Iterator[Batch]:
        """Make a plan's batches from number ``start`` on."""

    @abstractmethod
    def _read_once(self, split: Split, rank: int, world_size: int) -> Iterator[Batch]:
        """Make a rank's part of all samples, in batches of any size."""

    def num_batches(self, split: Split, global_batch_size: int) -> int:
        """Return the number of batches in a split's epoch."""
        return self._plan(split, Share(global_batch_size)).num_batches

    def num_train_batches(self, global_batch_size: int) -> int | None:
        """Return the number of global batches in all epochs; `None` if they never end."""
        plan = self._plan(Split.TRAIN, Share(global_batch_size))
        return plan.num_epochs * plan.num_batches if plan.num_epochs else None

    def read(self, split: Split, share: Share, start: int) -> Batches:
        """Read a share of a split's global batches, from number ``start`` on.

        An epoch's batch n is the split's rows n*B to (n+1)*B, in their order of that epoch.
        """
        plan = self._plan(split, share)
        plan.check(self._row_words[split])
        return self._stream(self._read(split, plan, start))

    def check(self, global_batch_size: int) -> None:
        """Raise `ConfigError` if a split has no batch."""
        for split in Split:
            self._plan(split, Share(global_batch_size)).check(self._row_words[split])

    def samples_once(self, split: Split, *, rank: int, world_size: int) -> Batches:
        """Read every sample of a split once, dealt to ranks, in batches of any size."""
        return self._stream(self._read_once(split, rank, world_size))

    def _plan(self, split: Split, share: Share) -> EpochPlan:
        return EpochPlan(
            num_rows=self.num_rows(split),
            rest=self._files.rest,
            num_epochs=self._files.epochs if split is Split.TRAIN else 1,
            **vars(share),
        )

    def _stream(self, batches: Iterator[Batch]) -> Batches:
        return prefetched(batches, self._files.num_ahead)


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
        self.fingerprint = {
            **self._source.fingerprint,
            "training rows": str(count_rows(trained)),
            **self._encoder.fingerprint,
        }
        self._shuffled_blocks = {Split.TRAIN: config.shuffled_blocks, Split.EVAL: 0}
        self._seed = config.seed
        self.features = self._encoder.features
        self.num_dense = len(config.dense)
        self.held_out = config.held_out
        """The rule that selects held-out rows."""

    def num_rows(self, split: Split) -> int:
        """Return a split's number of rows."""
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
