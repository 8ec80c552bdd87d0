"""`PartReader`: one rank's part of the batches of a split."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from torchrec_2dsp.programs.data.logs.encoder import Encoder
from torchrec_2dsp.programs.data.logs.epochs import EpochPlan, placed, row_order, windows
from torchrec_2dsp.programs.data.logs.samples import Samples, join
from torchrec_2dsp.programs.data.logs.selection import LogPiece, Selection


@dataclass(frozen=True, kw_only=True)
class PartReader:
    """Reads the rows that belong to a rank, and makes batches of them."""

    selection: Selection
    """The rows of the split."""

    encoder: Encoder
    """What makes samples of rows."""

    plan: EpochPlan
    """How rows become batches."""

    rank: int
    """The rank whose part is read."""

    world_size: int
    """How many parts a batch has."""

    epochs: int
    """After how many epochs the batches end; 0 for never."""

    shuffled_blocks: int
    """How many blocks are mixed with each other; 0 keeps the rows in order."""

    seed: int
    """Another seed is another order, if rows are mixed."""

    def batches(self, start: int) -> Iterator[Batch]:
        """The batches from number ``start`` on."""
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
        """The rank's samples of an epoch in their order, from a batch on."""
        order = windows(
            self.selection.pieces,
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
        """The samples of some rows of a window, in the order of the rows."""
        order = np.argsort(rows, kind="stable") if self.shuffled_blocks else None
        ascending = rows if order is None else rows[order]
        ends = np.cumsum([piece.num_rows for piece in window])
        bounds = np.searchsorted(ascending, ends)
        parts, first = [], 0
        for piece, bound, end in zip(window, bounds, ends, strict=True):
            if bound > first:
                inside = ascending[first:bound] - (end - piece.num_rows)
                all_of_it = len(inside) == piece.num_rows
                table = self.selection.read(
                    piece, self.encoder.columns, None if all_of_it else inside
                )
                parts.append(self.encoder.encode(table))
            first = bound
        samples = join(parts)
        if order is None:
            return samples
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return samples.ordered(back)
