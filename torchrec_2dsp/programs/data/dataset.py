"""`Dataset`: the batches that a training program reads, from any source."""

import enum
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.draws import Zipf

Batches = Generator[Batch, None, None]
"""Batches; closing them closes their source."""


class Split(enum.Enum):
    """Streams with the same distribution that share no sample."""

    TRAIN = 0
    """The batches to train on."""

    EVAL = 1
    """The batches that are held out."""


@dataclass(frozen=True)
class Share:
    """A rank's share of each global batch; see `Dataset.batches`."""

    global_batch_size: int
    rank: int = 0
    world_size: int = 1
    batches_per_step: int = 1

    def __post_init__(self) -> None:
        """Raise `ConfigError` unless a batch's samples divide equally among ranks."""
        size, num_ranks = self.global_batch_size, self.world_size
        if num_ranks < 1 or size < 1 or size % num_ranks:
            raise ConfigError(
                f"global_batch_size={size} must be a positive multiple of the {num_ranks} ranks, "
                "so that each gets as many samples"
            )
        if not 0 <= self.rank < num_ranks:
            raise ConfigError(f"rank={self.rank} is not in 0..{num_ranks - 1}")


@dataclass(frozen=True)
class DatasetFeature:
    """A sparse feature, with its own table."""

    name: str
    """The feature's name in the batch."""

    num_rows: int
    """The number of distinct ids."""

    mean_ids: float
    """The mean number of ids per sample."""

    ids: Zipf | None = None
    """The distribution of a drawn feature's ids; `None` if it isn't known."""


class Dataset(ABC):
    """Batches of samples, equal on all ranks and for every number of ranks.

    A sample has dense features, ids of sparse features, and a label. A split's global batch ``n``
    holds the same samples for any number of ranks; each rank reads its own part.
    """

    features: Sequence[DatasetFeature]
    """The sparse features with their own tables, in batch order."""

    num_dense: int
    """The number of dense features."""

    fingerprint: Mapping[str, str] = {}
    """Values that change with the files, or with prepared ones, by name; none for drawn samples.

    They are equal on all hosts, and when a run is resumed.
    """

    def num_train_batches(self, global_batch_size: int) -> int | None:
        """Return the number of global batches in all epochs; `None` if they never end."""
        return None

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
        """Read this rank's part of a split's global batches, from number ``start`` on.

        Args:
            split: the samples' split.
            global_batch_size: samples over all ranks; a multiple of ``world_size``.
            rank: the part to read.
            world_size: the number of parts.
            start: how many global batches were read before, by this run or the one that it
                continues. Batches are numbered through all epochs.
            batches_per_step: how many batches a step takes. An epoch has whole steps, with the
                rows that it would have in batches of a step's size.
        """
        if start < 0:
            raise ConfigError(f"start={start} is not the number of a batch")
        return self.read(split, Share(global_batch_size, rank, world_size, batches_per_step), start)

    @abstractmethod
    def read(self, split: Split, share: Share, start: int) -> Batches:
        """Read a share of a split's global batches, from number ``start`` on."""


class DrawnDataset(Dataset):
    """Endless samples, which any rank can draw from their numbers."""

    @abstractmethod
    def batch(self, split: Split, samples: NDArray[np.int64]) -> Batch:
        """Return the samples with these numbers."""

    def read(self, split: Split, share: Share, start: int) -> Batches:
        """Draw a share of a split's global batches, endlessly, from number ``start`` on."""
        size = share.global_batch_size // share.world_size
        for number in count(start):
            first = number * share.global_batch_size + share.rank * size
            yield self.batch(split, first + np.arange(size))


Progress = Callable[[str, int, int], None]
"""A callback that receives the current activity, the work done, and the total."""
Opened = TypeVar("Opened", bound=Dataset, covariant=True)


class DataSection(Protocol[Opened]):
    """A config section ``[data]``."""

    def dataset(self, progress: Progress | None = None) -> Opened:
        """Open the data; convert a log's files unless that was done before."""
        ...


def open_together(
    section: DataSection[Opened], group: dist.ProcessGroup, progress: Progress | None = None
) -> Opened:
    """Open the data that a section describes, on every rank.

    All ranks convert their share of a log's files; each host's ranks then convert what is still
    missing, which is nothing if hosts share the folder. Rank 0 opens the log first, so that a pass
    over the log is made once if the section caches the results.

    Args:
        section: equal on all ranks.
        group: all ranks.
        progress: called during conversion and passes over the log.

    Raises:
        TwoDError: a rank can't open the files, or they, or what was prepared from them, differ
            between ranks; all ranks raise it.

    Collectives:
        Two all-gathers of objects; four for a log.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    convert = getattr(section, "convert", None)
    if convert is not None:
        with agreeing(group):
            convert(rank, world_size, progress)
        with agreeing(group):
            local_rank = int(os.environ.get("LOCAL_RANK", rank))
            local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
            convert(local_rank, local_size, progress)
    opened = None
    with agreeing(group):
        if rank == 0:
            opened = section.dataset(progress)
    with agreeing(group) as facts:
        if opened is None:
            opened = section.dataset()
        lines = [f"{name}: {value}" for name, value in opened.fingerprint.items()]
        lines += [f"{feature.name}: {feature.num_rows} rows" for feature in opened.features]
        facts["the log"] = "\n".join(lines)
    assert opened is not None
    return opened
