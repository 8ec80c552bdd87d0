"""Turn a log's rows into a rank's batches, which a thread prefetches."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, groupby

import numpy as np
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.draws import uniforms
from torchrec_2dsp.programs.data.logs.config import Rest
from torchrec_2dsp.programs.data.logs.encoder import Encoder, Samples, join
from torchrec_2dsp.programs.data.logs.source import LogPiece, LogReader


@dataclass(frozen=True)
class EpochPlan:
    """Maps an epoch's rows to batches.

    Example:
        >>> from torchrec_2dsp.programs.data.logs.batches import EpochPlan
        >>> plan = EpochPlan(num_rows=10, global_batch_size=4, rest="pad")
        >>> plan.num_batches, plan.place(7)
        (3, (2, 1))
    """

    num_rows: int
    """The number of rows in an epoch."""

    global_batch_size: int
    """The number of samples in a batch over all ranks."""

    rest: Rest
    """The treatment of the last, incomplete batch: drop it, or pad it with the epoch's first
    rows."""

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch."""
        num_batches, rest = divmod(self.num_rows, self.global_batch_size)
        return num_batches + (self.rest == "pad" and rest > 0)

    @property
    def num_samples(self) -> int:
        """The number of samples in an epoch's batches."""
        return self.num_batches * self.global_batch_size

    def place(self, batch: int) -> tuple[int, int]:
        """Return a batch's epoch and its number within that epoch."""
        return divmod(batch, self.num_batches)

    def check(self, what: str) -> None:
        """Raise `ConfigError` if an epoch has no batch.

        Args:
            what: names the rows in the error.
        """
        if not self.num_batches:
            raise ConfigError(
                f"the {self.num_rows} {what} rows make no batch of {self.global_batch_size}; use a "
                'smaller global batch, or rest = "pad"'
                if self.num_rows
                else f"there are no {what} rows; name more files, or hold out another share"
            )

    def own(
        self, start: int, stop: int, rank: int, world_size: int, first_batch: int
    ) -> NDArray[np.int64]:
        """Return the positions in ``start..stop-1`` that belong to a rank, from a batch on."""
        positions = np.arange(
            max(start, first_batch * self.global_batch_size), min(stop, self.num_samples)
        )
        owner = positions % self.global_batch_size // (self.global_batch_size // world_size)
        return positions[owner == rank]


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
        start += sum(piece.num_rows for piece in window)


@dataclass(frozen=True, kw_only=True)
class PartReader:
    """Reads a rank's rows and makes batches."""

    pieces: Sequence[LogPiece]
    """The split's pieces."""

    reader: LogReader

    encoder: Encoder
    """Makes samples from rows."""

    plan: EpochPlan
    """Maps rows to batches."""

    rank: int
    """The rank whose share to read."""

    world_size: int
    """The number of ranks that share a batch."""

    epochs: int
    """The number of epochs; 0 for no end."""

    shuffled_blocks: int
    """The number of blocks to shuffle together; 0 keeps the rows in order."""

    seed: int
    """The seed for shuffling."""

    def batches(self, start: int) -> Iterator[Batch]:
        """Make batches from number ``start`` on."""
        size = self.plan.global_batch_size // self.world_size
        keys = [feature.name for feature in self.encoder.features]
        first_epoch, first_batch = self.plan.place(start)
        parts: list[Samples] = []
        for epoch in count(first_epoch):
            if self.epochs and epoch >= self.epochs:
                return
            for samples in self._epoch(epoch, first_batch):
                parts.append(samples)
                if sum(map(len, parts)) < size:
                    continue
                samples = join(parts)
                num_used = len(samples) // size * size
                for begin in range(0, num_used, size):
                    yield samples.part(begin, begin + size).batch(keys)
                parts = [samples.part(num_used, len(samples))] if num_used < len(samples) else []
            first_batch = 0

    def _epoch(self, epoch: int, first_batch: int) -> Iterator[Samples]:
        """Read the rank's samples in an epoch, in order, from a batch on."""
        order = windows(
            self.pieces,
            epoch=epoch,
            shuffled_blocks=self.shuffled_blocks,
            seed=self.seed,
        )
        for number, start, window in placed(order, self.plan.num_samples):
            num_rows = sum(piece.num_rows for piece in window)
            own = self.plan.own(start, start + num_rows, self.rank, self.world_size, first_batch)
            if not len(own):
                continue
            rows = own - start
            if self.shuffled_blocks:
                mixed = row_order(num_rows, epoch=epoch, window=number, seed=self.seed)
                rows = mixed[rows]
            yield self._rows(window, rows)

    def _rows(self, window: Sequence[LogPiece], rows: NDArray[np.int64]) -> Samples:
        """Read a window's rows, in the order of ``rows``."""
        order = np.argsort(rows, kind="stable") if self.shuffled_blocks else None
        ascending = rows if order is None else rows[order]
        ends = np.cumsum([piece.num_rows for piece in window])
        bounds = np.searchsorted(ascending, ends)
        parts, first = [], 0
        for piece, bound, end in zip(window, bounds, ends, strict=True):
            if bound > first:
                inside = ascending[first:bound] - (end - piece.num_rows)
                all_of_it = len(inside) == piece.num_rows
                table = self.reader.read(piece, None if all_of_it else inside)
                parts.append(self.encoder.encode(table))
            first = bound
        samples = join(parts)
        if order is None:
            return samples
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return samples.ordered(back)


_POLL_S = 0.1
"""The interval at which a waiting thread checks whether it is still needed."""


@dataclass
class _Done:
    """The last item in the queue: the end of the batches, or an error."""

    error: BaseException | None


@dataclass
class _Shared:
    """The state that the stream shares with its thread; the stream itself can be collected."""

    ready: "queue.Queue[Batch | _Done]"
    is_closed: threading.Event = field(default_factory=threading.Event)
    num_rows: int = 0
    busy_s: float = 0.0


class BatchStream(Iterator[Batch]):
    """An iterator over prefetched batches.

    The thread ends with the batches, after an error, and when the stream is closed or garbage
    collected. The thread's error is raised in place of its batch.

    Example:
        >>> import torch
        >>> from torchrec.datasets.utils import Batch
        >>> from torchrec_2dsp.programs.data.logs.batches import BatchStream
        >>> with BatchStream(lambda: iter(["a", "b"]), num_ahead=1, count=len) as stream:
        ...     list(stream), stream.num_rows
        (['a', 'b'], 2)
    """

    def __init__(
        self,
        batches: Callable[[], Iterator[Batch]],
        *,
        num_ahead: int,
        count: Callable[[Batch], int] = lambda batch: batch.labels.numel(),
    ) -> None:
        """Start the thread that makes batches.

        Args:
            batches: makes the iterator, on the thread.
            num_ahead: how many batches to prefetch; 0 for none, without a thread.
            count: returns a batch's number of rows.
        """
        self._shared = _Shared(queue.Queue(num_ahead))
        self._local: Iterator[Batch] | None = None
        self._done: _Done | None = None
        self._thread: threading.Thread | None = None
        work = _timed(batches, count, self._shared)
        if num_ahead:
            self._thread = threading.Thread(
                target=_fill, args=(work, self._shared), name="batches", daemon=True
            )
            weakref.finalize(self, self._shared.is_closed.set)
            self._thread.start()
        else:
            self._local = work

    @property
    def num_rows(self) -> int:
        """The number of rows in the batches made so far."""
        return self._shared.num_rows

    @property
    def rows_per_s(self) -> float:
        """The rate of making batches, in rows per second, without time spent on a full queue."""
        return self._shared.num_rows / self._shared.busy_s if self._shared.busy_s else 0.0

    def __next__(self) -> Batch:
        if self._local is not None:
            return next(self._local)
        while self._done is None:
            if self._shared.is_closed.is_set():
                raise StopIteration
            try:
                entry = self._shared.ready.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if not isinstance(entry, _Done):
                return entry
            self._done = entry
        if self._done.error is not None:
            raise self._done.error
        raise StopIteration

    def close(self) -> None:
        """End the thread; no more batches come."""
        self._shared.is_closed.set()
        if self._thread is not None:
            self._thread.join()
        self._local = None
        self._done = self._done or _Done(None)

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _timed(
    batches: Callable[[], Iterator[Batch]], count: Callable[[Batch], int], shared: _Shared
) -> Iterator[Batch]:
    """Yield the batches, and time their making."""
    start = time.perf_counter()
    for batch in batches():
        shared.busy_s += time.perf_counter() - start
        shared.num_rows += count(batch)
        yield batch
        start = time.perf_counter()


def _fill(batches: Iterator[Batch], shared: _Shared) -> None:
    """Put batches into the queue until they end or are no longer needed."""
    done = _Done(None)
    try:
        for batch in batches:
            if not _put(batch, shared):
                return
    except BaseException as error:
        done = _Done(error)
    _put(done, shared)


def _put(entry: Batch | _Done, shared: _Shared) -> bool:
    while not shared.is_closed.is_set():
        try:
            shared.ready.put(entry, timeout=_POLL_S)
        except queue.Full:
            continue
        return True
    return False
