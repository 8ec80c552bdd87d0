"""Synthetic item sequences, with a planted rule for the next item.

Items belong to clusters. With probability `order`, the last two items' clusters determine the next
item's cluster, from which it is drawn by popularity; otherwise it is any item, by popularity. Like
the synthetic clicks, everything is a pure function of (config, step, rank, world size), and a
step's global batch is the same for every world size.
"""

import enum
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.programs.config.section import Section, Seed
from torchrec_2dsp.programs.data.dataset import DatasetFeature, DrawnDataset, Progress, Split
from torchrec_2dsp.programs.data.draws import Zipf, uniforms

_Ids = NDArray[np.int64]


class SyntheticSequencesConfig(Section):
    """The shape of the sequences, and how predictable they are."""

    kind: Literal["synthetic_sequences"] = "synthetic_sequences"
    """The kind of data."""

    num_items: int = Field(ge=2, le=2**31)
    """The number of distinct items."""

    skew: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """The Zipf exponent of item popularity."""

    sorted_ids: bool = False
    """Number items by popularity: the most popular is 0."""

    min_length: int = Field(default=2, ge=1)
    """The fewest items per sequence."""

    max_length: int = Field(default=50, ge=1)
    """The most items per sequence."""

    length_skew: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """The Zipf exponent of sequence lengths: the shortest are the most frequent, with a long tail.
    With 0, all lengths are equally frequent."""

    num_clusters: int = Field(default=20, ge=1)
    """The number of item clusters."""

    order: float = Field(default=0.8, ge=0, le=1)
    """The share of items that follow from the last two; 0 leaves only popularity to learn."""

    seed: Seed = 0
    """The seed of the stream and of its planted rule."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length={self.min_length} is above max_length={self.max_length}")
        if self.num_clusters > self.num_items:
            raise ValueError(
                f"num_clusters={self.num_clusters} is above num_items={self.num_items}, so some "
                "would have no item; use fewer"
            )
        return self

    @property
    def mean_length(self) -> float:
        """The mean number of items per sequence."""
        ranks = np.arange(1, self.lengths.num_rows + 1)
        return float((self.lengths.probability(ranks) * (self.min_length + ranks - 1)).sum())

    @property
    def lengths(self) -> Zipf:
        """The distribution of the lengths beyond the shortest."""
        return Zipf(self.max_length - self.min_length + 1, self.length_skew, is_sorted=True)

    def dataset(self, progress: Progress | None = None) -> "SyntheticSequences":
        """Return the section's dataset, at once: there is no progress."""
        return SyntheticSequences(self)


class _Purpose(enum.Enum):
    """The purposes of random numbers; each has an independent stream."""

    LENGTH, IS_PLANTED, ITEM, RULE = range(4)


class SyntheticSequences(DrawnDataset):
    """Endless sequences, as a `Dataset` with the feature "item".

    All labels are 1: the sequences have happened.
    """

    num_dense = 0

    def __init__(self, config: SyntheticSequencesConfig) -> None:
        self._config = config
        self.features = (DatasetFeature("item", config.num_items, config.mean_length),)
        """The single feature: a sequence's items, in order."""
        self._items = Zipf(config.num_items, config.skew, config.sorted_ids)
        self._in_cluster = Zipf(config.num_items // config.num_clusters, config.skew, True)

    def batch(self, split: Split, samples: _Ids) -> Batch:
        """Return the sequences with these sample numbers."""
        config = self._config
        seed = self._seed(_Purpose.LENGTH, split)
        lengths = config.min_length + config.lengths.sample_ranks(seed, samples) - 1
        ranks = self._ranks(split, samples, int(lengths.max(initial=0)))
        is_inside = np.arange(ranks.shape[1]) < lengths[:, None]
        sparse = KeyedJaggedTensor(
            keys=["item"],
            values=torch.from_numpy(self._items.row_of_rank(ranks[is_inside])),
            lengths=torch.from_numpy(lengths.astype(np.int32)),
        )
        return Batch(torch.empty(samples.size, 0), sparse, torch.ones(samples.size))

    def next_cluster(self, before_last: _Ids, last: _Ids) -> _Ids:
        """Return the cluster that follows two others by the planted rule."""
        draws = uniforms(self._seed(_Purpose.RULE), before_last, last)
        return (draws * self._config.num_clusters).astype(np.int64)

    def cluster_of_rank(self, ranks: _Ids) -> _Ids:
        """Map an item's popularity rank to its cluster; clusters are equally popular."""
        return (ranks - 1) % self._config.num_clusters

    def _ranks(self, split: Split, samples: _Ids, length: int) -> _Ids:
        """Draw items as popularity ranks, ``[samples, positions]``."""
        seed = self._seed(_Purpose.ITEM, split)
        is_planted = self._seed(_Purpose.IS_PLANTED, split)
        ranks = np.empty((samples.size, length), dtype=np.int64)
        before_last = last = np.zeros(samples.size, dtype=np.int64)
        for position in range(length):
            place = np.array([position])
            free = self._items.sample_ranks(seed, samples, place, np.array([0]))
            # The popularity rank within the cluster, converted to the rank among all items.
            inner = self._in_cluster.sample_ranks(seed, samples, place, np.array([1]))
            cluster = self.next_cluster(before_last, last)
            planted = (inner - 1) * self._config.num_clusters + cluster + 1
            follows = uniforms(is_planted, samples, place) < self._config.order
            ranks[:, position] = np.where(follows, planted, free)
            before_last, last = last, self.cluster_of_rank(ranks[:, position])
        return ranks

    def _seed(self, purpose: _Purpose, split: Split = Split.TRAIN) -> int:
        return (self._config.seed * len(Split) + split.value) * len(_Purpose) + purpose.value
