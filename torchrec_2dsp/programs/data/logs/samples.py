"""`Samples`: encoded rows as arrays, which are cut and joined until they are batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True)
class FeatureIds:
    """The ids of one feature."""

    ids: NDArray[np.int64]
    """The ids of all samples, one after another."""

    lengths: NDArray[np.int32] | None
    """How many ids each sample has; `None` if each has one."""

    def part(self, start: int, stop: int) -> "FeatureIds":
        """The bags of some samples in a row."""
        if self.lengths is None:
            return FeatureIds(self.ids[start:stop], None)
        before = int(self.lengths[:start].sum())
        inside = int(self.lengths[start:stop].sum())
        return FeatureIds(self.ids[before : before + inside], self.lengths[start:stop])

    def ordered(self, order: NDArray[np.int64]) -> "FeatureIds":
        """The bags of the samples with these numbers, in their order."""
        if self.lengths is None:
            return FeatureIds(self.ids[order], None)
        starts = (np.cumsum(self.lengths) - self.lengths)[order]
        lengths = self.lengths[order]
        before = np.cumsum(lengths) - lengths
        places = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
        return FeatureIds(self.ids[places], lengths)


@dataclass(frozen=True)
class Samples:
    """Some encoded rows."""

    dense: NDArray[np.float32]
    """The dense features, ``[samples, features]``."""

    labels: NDArray[np.float32]
    """The label of each sample."""

    bags: tuple[FeatureIds, ...]
    """The ids, by feature."""

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, start: int, stop: int) -> "Samples":
        """Some samples in a row."""
        if (start, stop) == (0, len(self)):
            return self
        bags = tuple(bags.part(start, stop) for bags in self.bags)
        return Samples(self.dense[start:stop], self.labels[start:stop], bags)

    def ordered(self, order: NDArray[np.int64]) -> "Samples":
        """The samples with these numbers, in their order."""
        bags = tuple(bags.ordered(order) for bags in self.bags)
        return Samples(self.dense[order], self.labels[order], bags)

    def batch(self, keys: Sequence[str]) -> Batch:
        """The samples as TorchRec's batch.

        Args:
            keys: the names of the features, in their order.
        """
        lengths = np.ones((len(self.bags), len(self)), dtype=np.int32)
        for row, bags in zip(lengths, self.bags, strict=True):
            if bags.lengths is not None:
                row[:] = bags.lengths
        ids = [bags.ids for bags in self.bags] or [np.empty(0, dtype=np.int64)]
        sparse = KeyedJaggedTensor(
            keys=list(keys),
            values=torch.from_numpy(np.concatenate(ids)),
            lengths=torch.from_numpy(lengths.reshape(-1)),
        )
        # Parts of larger arrays would keep these in memory.
        return Batch(torch.from_numpy(self.dense.copy()), sparse, torch.tensor(self.labels))


def join(parts: Sequence[Samples]) -> Samples:
    """Samples one after another; there is at least one part."""
    if len(parts) == 1:
        return parts[0]
    return Samples(
        np.concatenate([part.dense for part in parts]),
        np.concatenate([part.labels for part in parts]),
        tuple(_join(bags) for bags in zip(*(part.bags for part in parts), strict=True)),
    )


def _join(bags: Sequence[FeatureIds]) -> FeatureIds:
    ids = np.concatenate([part.ids for part in bags])
    lengths = [part.lengths for part in bags if part.lengths is not None]
    return FeatureIds(ids, np.concatenate(lengths) if lengths else None)
