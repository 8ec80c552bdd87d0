"""Turn a log's rows into a rank's batches, which a thread prefetches."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, groupby

import numpy as np
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Batches, Split, check_batch
from torchrec_2dsp.programs.data.draws import uniforms
from torchrec_2dsp.programs.data.logs.config import LogFiles, Rest
from torchrec_2dsp.programs.data.logs.source import LogPiece, count_rows
from torchrec_2dsp.programs.data.logs.text import MalformedLines


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """A rank's part of the batches that an epoch's rows make.

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
    """Yield batches that a thread makes ahead, from the first request on; without one for 0.

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


class LogDataset(ABC):
    """A log as a `Dataset`: its rows, cut into batches as its section says.

    Training batches end after the section's epochs, held-out ones after one. Held-out rows are
    never shuffled.
    """

    def __init__(self, config: LogFiles, row_words: Mapping[Split, str]) -> None:
        """Take the section, and what errors call a split's rows."""
        self._files, self._row_words = config, row_words
        self.malformed = MalformedLines(config.malformed_limit)
        """The malformed lines that this process read."""
        self.fingerprint: dict[str, str] = {}
        """The files' sizes, and digests of what was prepared; see `Dataset.fingerprint`."""

    @abstractmethod
    def num_rows(self, split: Split) -> int:
        """Return how many rows a split has."""

    @abstractmethod
    def _read(self, split: Split, plan: EpochPlan, start: int) -> Iterator[Batch]:
        """Make a plan's batches from number ``start`` on."""

    @abstractmethod
    def _read_once(self, split: Split, rank: int, world_size: int) -> Iterator[Batch]:
        """Make a rank's part of all samples, in batches of any size."""

    def num_batches(self, split: Split, global_batch_size: int) -> int:
        """Return how many batches a split's epoch has."""
        return self._plan(split, global_batch_size=global_batch_size).num_batches

    def num_train_batches(self, global_batch_size: int) -> int | None:
        """Return how many global batches all epochs have; `None` if they never end."""
        plan = self._plan(Split.TRAIN, global_batch_size=global_batch_size)
        return plan.num_epochs * plan.num_batches if plan.num_epochs else None

    def batches(
        self,
        split: Split,
        *,
        global_batch_size: int,
        rank: int,
        world_size: int,
        start: int = 0,
        batches_per_step: int = 1,
    ) -> Batches:
        """Read this rank's part of a split's global batches; see `Dataset.batches`.

        An epoch's batch n is the split's rows n*B to (n+1)*B, in their order of that epoch.
        """
        check_batch(global_batch_size, rank, world_size, start)
        plan = self._plan(
            split,
            global_batch_size=global_batch_size,
            rank=rank,
            world_size=world_size,
            batches_per_step=batches_per_step,
        )
        plan.check(self._row_words[split])
        return self._stream(self._read(split, plan, start))

    def check(self, global_batch_size: int) -> None:
        """Raise `ConfigError` if a split has no batch."""
        for split in Split:
            self._plan(split, global_batch_size=global_batch_size).check(self._row_words[split])

    def samples_once(self, split: Split, *, rank: int, world_size: int) -> Batches:
        """Read every sample of a split once, dealt to ranks, in batches of any size."""
        return self._stream(self._read_once(split, rank, world_size))

    def _plan(self, split: Split, **part: int) -> EpochPlan:
        return EpochPlan(
            num_rows=self.num_rows(split),
            rest=self._files.rest,
            num_epochs=self._files.epochs if split is Split.TRAIN else 1,
            **part,
        )

    def _stream(self, batches: Iterator[Batch]) -> Batches:
        return prefetched(batches, self._files.num_ahead)
