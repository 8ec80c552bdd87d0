"""`Dataset`: what a training program is told of its data, wherever the data comes from."""

import enum
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import torch.distributed as dist
from torchrec.datasets.utils import Batch

from torchrec_2dsp.comms.alarm import agreeing


class Split(enum.Enum):
    """Streams of the same distribution that share no sample."""

    TRAIN = 0
    """The batches to train on."""

    EVAL = 1
    """The batches that are held out."""


class DatasetFeature(Protocol):
    """One sparse feature, which has a table of its own."""

    @property
    def name(self) -> str:
        """The feature's name in the batch."""
        ...

    @property
    def num_rows(self) -> int:
        """How many different ids there are."""
        ...

    @property
    def mean_ids(self) -> float:
        """The mean number of ids of a sample."""
        ...


class BatchShape(Protocol):
    """The features of a batch, which say what tables and dense layers a model needs."""

    @property
    def features(self) -> Sequence[DatasetFeature]:
        """The sparse features, in the order of the batch."""
        ...

    @property
    def num_dense(self) -> int:
        """How many dense features there are."""
        ...


class Dataset(BatchShape, Protocol):
    """Batches of samples, equal on all ranks and for every number of ranks.

    A sample has dense features, ids of sparse features, and a label. Global batch ``n`` of a split
    holds the same samples whatever the number of ranks; each rank reads its own part of it.
    """

    def num_train_batches(self, global_batch_size: int) -> int | None:
        """How many global batches there are to train on, those of all epochs together.

        `None` if they never end.
        """
        ...

    def batches(
        self, split: Split, *, global_batch_size: int, rank: int, world_size: int, start: int = 0
    ) -> Iterator[Batch]:
        """This rank's part of the global batches of a split, from number ``start`` on.

        Args:
            split: which samples.
            global_batch_size: samples of all ranks together; a multiple of ``world_size``.
            rank: which part of each batch.
            world_size: how many parts there are.
            start: how many global batches were read before, by this run or by the one that it
                continues. Batches are numbered through all epochs.
        """
        ...


Opened = TypeVar("Opened", bound=Dataset, covariant=True)


class DataSection(Protocol[Opened]):
    """A section ``[data]`` of a config."""

    def dataset(self) -> Opened:
        """The batches that the section describes."""
        ...


def open_together(section: DataSection[Opened], group: dist.ProcessGroup) -> Opened:
    """The batches that a section describes, on every rank.

    Rank 0 opens them first, so that a pass over the files is made once where the section keeps what
    the pass finds.

    Args:
        section: equal on all ranks.
        group: all ranks.

    Raises:
        TwoDError: a rank can't open the files, or they differ between ranks; all ranks raise it.

    Collectives:
        Two all-gathers of objects.
    """
    opened = None
    with agreeing(group):
        if dist.get_rank(group) == 0:
            opened = section.dataset()
    with agreeing(group) as facts:
        if opened is None:
            opened = section.dataset()
        features = [f"{feature.name}: {feature.num_rows} rows" for feature in opened.features]
        facts["the log"] = "\n".join(features)
    assert opened is not None
    return opened
