"""The arithmetic of batches: which rows of a stream a rank's part of a batch is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.counters import uniforms
from torchrec_2dsp.programs.data.logs.selection import LogPiece

Rest = Literal["drop", "pad"]


def check_batch(global_batch_size: int, rank: int, world_size: int, start: int) -> None:
    """Raise `ConfigError` unless each rank gets as many samples of a batch."""
    if world_size < 1 or global_batch_size < 1 or global_batch_size % world_size:
        raise ConfigError(
            f"global_batch_size={global_batch_size} must be a positive multiple of the "
            f"{world_size} ranks, so that each gets as many samples"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} is not in 0..{world_size - 1}")
    if start < 0:
        raise ConfigError(f"start={start} is not the number of a batch")


@dataclass(frozen=True)
class EpochPlan:
    """How the rows of an epoch become batches.

    Example:
        >>> from torchrec_2dsp.programs.data.logs.epochs import EpochPlan
        >>> plan = EpochPlan(num_rows=10, global_batch_size=4, rest="pad")
        >>> plan.num_batches, plan.place(7)
        (3, (2, 1))
    """

    num_rows: int
    """How many rows an epoch has."""

    global_batch_size: int
    """Samples of all ranks together in a batch."""

    rest: Rest
    """What becomes of the last rows, if they don't fill a batch: they are dropped, or the batch is
    filled with rows from the beginning of the epoch."""

    @property
    def num_batches(self) -> int:
        """How many batches an epoch has."""
        num_batches, rest = divmod(self.num_rows, self.global_batch_size)
        return num_batches + (self.rest == "pad" and rest > 0)

    @property
    def num_samples(self) -> int:
        """How many samples the batches of an epoch have."""
        return self.num_batches * self.global_batch_size

    def place(self, batch: int) -> tuple[int, int]:
        """The epoch of a batch, and the batch's number in it."""
        return divmod(batch, self.num_batches)

    def check(self, what: str) -> None:
        """Raise `ConfigError` if an epoch has no batch.

        Args:
            what: the name of the rows, for the error.
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
        """The positions of ``start..stop-1`` that belong to a rank, from a batch on."""
        positions = np.arange(
            max(start, first_batch * self.global_batch_size), min(stop, self.num_samples)
        )
        owner = positions % self.global_batch_size // (self.global_batch_size // world_size)
        return positions[owner == rank]


def windows(
    pieces: Sequence[LogPiece], *, epoch: int, shuffled_blocks: int, seed: int
) -> list[tuple[LogPiece, ...]]:
    """The order in which an epoch reads pieces; those of one window are read together.

    Without shuffling, each piece is a window. With it, the units of the log come in a random order,
    and as many pieces as ``shuffled_blocks`` make a window. It depends on nothing but the
    arguments.
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
    """The random order of the rows of a window."""
    draws = uniforms(seed, epoch, window, np.arange(num_rows))
    return np.argsort(draws, kind="stable")


def placed(
    order: Sequence[tuple[LogPiece, ...]], num_samples: int
) -> Iterator[tuple[int, int, tuple[LogPiece, ...]]]:
    """The windows of an epoch with their numbers and first positions, again from the first one on
    where the last batch has to be filled."""
    start = 0
    for number, window in cycle(enumerate(order)):
        if start >= num_samples:
            return
        yield number, start, window
        start += sum(piece.num_rows for piece in window)
