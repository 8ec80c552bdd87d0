"""A synthetic click stream like Criteo's, with a planted model behind the labels.

Everything is a pure function of (config, step, rank, world size): nothing is stored, any step can
be generated on its own, and a step's global batch is the same for every world size.
"""

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.programs.config.section import Section, Seed
from torchrec_2dsp.programs.data.dataset import DatasetFeature, DrawnDataset, Progress, Split
from torchrec_2dsp.programs.data.draws import Zipf, normals, uniforms

_MAX_HEAD_ROWS = 10_000
"""The number of a table's most frequent rows to sum exactly; each other row is too rare to
matter."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LatentVectors:
    """A feature's latent row vectors: normal numbers, less their mean over the ids.

    Without centring, a feature's vector times another's mean would act as a main effect of its
    rows.
    """

    ids: Zipf
    """The distribution of the feature's ids."""

    feature_index: int
    """The feature's index in the batch."""

    rank: int
    """The dimension of the vectors."""

    seed: int

    def of_rows(self, rows: NDArray[np.int64]) -> _Floats:
        """Return the rows' vectors, one per row."""
        return self._uncentred(rows) - _moments(self)[0]

    @property
    def covariance(self) -> _Floats:
        """The covariance of one id's vector, ``[rank, rank]``."""
        return _moments(self)[1]

    def _uncentred(self, rows: NDArray[np.int64]) -> _Floats:
        return normals(self.seed, self.feature_index, rows[:, None], np.arange(self.rank))


@lru_cache(maxsize=1024)
def _moments(latent: LatentVectors) -> tuple[_Floats, _Floats]:
    """Return the mean of one id's vector before centring, and the covariance."""
    ranks = np.arange(1, min(latent.ids.num_rows, _MAX_HEAD_ROWS) + 1)
    share = latent.ids.probability(ranks)[:, None]
    vectors = latent._uncentred(latent.ids.row_of_rank(ranks))
    mean = (share * vectors).sum(axis=0)
    # There are so many rare rows that their numbers have the normal distribution's moments.
    tail = max(0.0, 1.0 - share.sum()) if latent.ids.num_rows > ranks.size else 0.0
    second_moment = (share * vectors).T @ vectors + tail * np.eye(latent.rank)
    return mean, second_moment - np.outer(mean, mean)


@dataclass(frozen=True)
class PlantedInteractions:
    """Pairwise feature interactions, scaled to a variance of 1 over the samples.

    A feature's bag is the mean of its rows' latent vectors, zero if the bag is empty. Two features
    interact through their bags' dot product.

    Example:
        >>> import numpy as np
        >>> from torchrec_2dsp.programs.data.synthetic import LatentVectors, PlantedInteractions
        >>> from torchrec_2dsp.programs.data.draws import Zipf
        >>> features = tuple(LatentVectors(Zipf(1_000, 1.0), i, rank=8, seed=0) for i in range(2))
        >>> planted = PlantedInteractions(features, mean_inverse_lengths=(1.0, 1.0))
        >>> bags = [(np.array([3, 5]), np.array([1, 1])), (np.array([7, 3]), np.array([2, 0]))]
        >>> planted.logits(bags).round(2)[1]
        np.float64(0.0)
    """

    features: tuple[LatentVectors, ...]
    """Each feature's latent vectors."""

    mean_inverse_lengths: tuple[float, ...]
    """The mean inverse bag length, by feature; empty bags count as 0."""

    def logits(self, bags: list[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> _Floats:
        """Return each sample's interactions.

        Args:
            bags: all samples' ids and bag lengths, by feature.
        """
        pooled = [
            _mean_of_bags(vectors.of_rows(rows), lengths)
            for vectors, (rows, lengths) in zip(self.features, bags, strict=True)
        ]
        # Twice the sum over pairs is the squared sum, less the sum of squares.
        of_sums = np.square(sum(pooled)).sum(axis=1)
        of_features = sum(np.square(vectors).sum(axis=1) for vectors in pooled)
        return (of_sums - of_features) / 2 / self._standard_deviation

    @cached_property
    def _standard_deviation(self) -> float:
        # Features are independent and bags have a mean of zero, so the pairs are uncorrelated.
        covariances = [
            vectors.covariance * inverse_length
            for vectors, inverse_length in zip(
                self.features, self.mean_inverse_lengths, strict=True
            )
        ]
        total = sum(covariances)
        of_features = sum(float(np.square(covariance).sum()) for covariance in covariances)
        return math.sqrt((float(np.square(total).sum()) - of_features) / 2)


def _mean_of_bags(vectors: _Floats, lengths: NDArray[np.int64]) -> _Floats:
    """Return each bag's mean vector; zeros for a bag without ids."""
    sample = np.repeat(np.arange(lengths.size), lengths)
    sums = [
        np.bincount(sample, weights=vectors[:, place], minlength=lengths.size)
        for place in range(vectors.shape[1])
    ]
    return np.stack(sums, axis=1) / np.maximum(lengths, 1)[:, None]


class SparseFeature(Section):
    """A sparse feature, with its own table."""

    name: str = Field(min_length=1)
    """The feature's name in the batch."""

    num_rows: int = Field(ge=1, le=2**31)
    """The number of distinct ids."""

    skew: float = Field(default=1.05, ge=0, allow_inf_nan=False)
    """The Zipf exponent of the ids: 0 is uniform, click logs are near 1."""

    min_ids: int = Field(default=1, ge=0)
    """The fewest ids per sample."""

    max_ids: int = Field(default=1, ge=1)
    """The most ids per sample; the number of ids is uniform between the two."""

    @model_validator(mode="after")
    def _check_lengths(self) -> "SparseFeature":
        if self.min_ids > self.max_ids:
            raise ValueError(f"min_ids={self.min_ids} is above max_ids={self.max_ids}")
        return self

    @property
    def mean_ids(self) -> float:
        """The mean number of ids per sample."""
        return (self.min_ids + self.max_ids) / 2

    @property
    def mean_inverse_ids(self) -> float:
        """The mean of one over a sample's number of ids; samples without ids count as 0."""
        lengths = range(self.min_ids, self.max_ids + 1)
        return sum(1 / length for length in lengths if length) / len(lengths)


class SyntheticConfig(Section):
    """The config section ``[data]`` for a synthetic click stream, and the model behind its labels.

    A sample is clicked with probability ``sigmoid(bias + dense @ w + sum of row effects)``, where
    the weights ``w`` and one effect per table row are fixed normal numbers. An
    ``interaction_share`` adds the features' `PlantedInteractions` to the logit.

    Example:
        >>> from torchrec_2dsp.programs.data import synthetic
        >>> from torchrec_2dsp.programs.data.synthetic import SparseFeature, SyntheticConfig
        >>> config = SyntheticConfig(features=(SparseFeature(name="user", num_rows=1_000),))
        >>> batch = synthetic.make_batch(config, step=0, global_batch_size=8, rank=1, world_size=2)
        >>> batch.labels.shape, batch.sparse_features.keys()
        (torch.Size([4]), ['user'])
    """

    kind: Literal["synthetic"] = "synthetic"
    """The kind of data, which defaults to synthetic."""

    features: tuple[SparseFeature, ...] = Field(min_length=1)
    """The sparse features, in batch order. In a file, a feature with ``count = 20`` stands for
    twenty: ``click`` becomes ``click1`` to ``click20``."""

    num_dense: int = Field(default=13, ge=1)
    """The number of dense features, which are standard normal."""

    sorted_ids: bool = False
    """Number ids by frequency, as vocabularies often do: the most frequent is 0. Otherwise frequent
    ids are spread over the table."""

    seed: Seed = 0
    """The seed of the stream and of its planted model."""

    base_rate: float = Field(default=0.25, gt=0, lt=1)
    """The approximate share of clicked samples."""

    signal: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """The approximate standard deviation of the planted logit: 0 leaves nothing to learn."""

    dense_share: float = Field(default=0.2, ge=0, le=1)
    """The share of the logit's variance that the dense features explain."""

    interaction_share: float = Field(default=0.0, ge=0, le=1)
    """The share of the logit's variance that pairs of sparse features explain; row effects explain
    the remainder."""

    interaction_rank: int = Field(default=8, ge=1, le=256)
    """The dimension of the interactions' latent vectors."""

    def distribution(self, feature: SparseFeature) -> Zipf:
        """Return the feature's id distribution."""
        return Zipf(feature.num_rows, feature.skew, self.sorted_ids)

    def dataset(self, progress: Progress | None = None) -> "SyntheticDataset":
        """Return the section's dataset, at once: there is no progress."""
        return SyntheticDataset(self)

    @field_validator("features", mode="before")
    @classmethod
    def _repeat(cls, features: Any) -> Any:
        if not isinstance(features, list | tuple):
            return features
        return [feature for described in features for feature in _repeated(described)]

    @model_validator(mode="after")
    def _check_names_and_shares(self) -> "SyntheticConfig":
        names = [feature.name for feature in self.features]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"the feature name {repeated[0]!r} is used twice; rename one")
        if not self.interaction_share:
            self.refuse_unread(["interaction_rank"], "is for interaction_share; set it above 0")
        if self.dense_share + self.interaction_share > 1 + 1e-9:
            raise ValueError(
                f"dense_share={self.dense_share} and interaction_share={self.interaction_share} "
                "are parts of one variance; let them add up to at most 1"
            )
        num_varying = sum(feature.num_rows > 1 for feature in self.features)
        if self.interaction_share and num_varying < 2:
            raise ValueError(
                f"interaction_share={self.interaction_share} needs two features with several rows "
                f"each, and there are {num_varying}; add one, or set interaction_share=0"
            )
        return self


class _Purpose(enum.Enum):
    """The purposes of random numbers; each has an independent stream."""

    LENGTH, ROW, DENSE, LABEL, ROW_EFFECT, DENSE_WEIGHT = range(6)


def _repeated(feature: Any) -> Iterator[Any]:
    """Yield a file's feature ``count`` times; pass on anything else, valid or not."""
    count = feature.get("count") if isinstance(feature, dict) else None
    if not isinstance(count, int) or count < 1:
        yield feature
        return
    rest = {key: value for key, value in feature.items() if key != "count"}
    for number in range(1, count + 1):
        yield {**rest, "name": f"{rest.get('name', '')}{number}"}


def make_batch(
    config: SyntheticConfig,
    *,
    step: int,
    global_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    split: Split = Split.TRAIN,
) -> Batch:
    """Return rank ``rank``'s part of a step's global batch.

    Args:
        config: the stream.
        step: the global batch's number, from 0.
        global_batch_size: samples over all ranks; a multiple of ``world_size``.
        rank: the part to make.
        world_size: the number of equal parts.
        split: the stream's split.
    """
    batches = config.dataset().batches(
        split,
        global_batch_size=global_batch_size,
        rank=rank,
        world_size=world_size,
        start=step,
    )
    return next(batches)


def click_probability(config: SyntheticConfig, batch: Batch) -> torch.Tensor:
    """Return each sample's click probability by the planted model, the best possible prediction."""
    # The logistic function compresses the normal logit's spread; this bias compensates for it.
    odds = math.log(config.base_rate / (1.0 - config.base_rate))
    logit = np.full(
        batch.dense_features.shape[0], odds * math.sqrt(1 + config.signal**2 * math.pi / 8)
    )
    weights = normals(_seed(config, _Purpose.DENSE_WEIGHT), np.arange(config.num_dense))
    weights *= math.sqrt(config.dense_share) / np.linalg.norm(weights)
    logit += config.signal * (batch.dense_features.double().numpy() @ weights)
    for index, feature in enumerate(config.features):
        bags = batch.sparse_features[feature.name]
        effects = row_effects(config, index, bags.values().numpy())
        sample = np.repeat(np.arange(logit.size), bags.lengths().numpy())
        logit += np.bincount(sample, weights=effects, minlength=logit.size)
    if config.interaction_share:
        bags = [batch.sparse_features[feature.name] for feature in config.features]
        interactions = _interactions(config).logits(
            [(jagged.values().numpy(), jagged.lengths().numpy()) for jagged in bags]
        )
        logit += config.signal * math.sqrt(config.interaction_share) * interactions
    return torch.from_numpy(1.0 / (1.0 + np.exp(-logit)))


def row_effects(
    config: SyntheticConfig, feature_index: int, rows: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return each row's contribution to the planted logit."""
    feature = config.features[feature_index]
    share = max(0.0, 1.0 - config.dense_share - config.interaction_share)
    variance = share / (len(config.features) * max(feature.mean_ids, 1.0))
    seed = _seed(config, _Purpose.ROW_EFFECT)
    return config.signal * math.sqrt(variance) * normals(seed, feature_index, rows)


def _interactions(config: SyntheticConfig) -> PlantedInteractions:
    # These seeds count down from zero, so that no `_Purpose` seed changes.
    seed = -1 - config.seed
    return PlantedInteractions(
        features=tuple(
            LatentVectors(config.distribution(feature), index, config.interaction_rank, seed)
            for index, feature in enumerate(config.features)
        ),
        mean_inverse_lengths=tuple(feature.mean_inverse_ids for feature in config.features),
    )


def _sparse(
    config: SyntheticConfig, index: int, split: Split, samples: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw a feature's ids and bag lengths."""
    feature = config.features[index]
    spread = feature.max_ids - feature.min_ids + 1
    draws = uniforms(_seed(config, _Purpose.LENGTH, split), samples, index)
    lengths = feature.min_ids + np.floor(draws * spread).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    position = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    zipf = config.distribution(feature)
    seed = _seed(config, _Purpose.ROW, split)
    return zipf.sample(seed, np.repeat(samples, lengths), position, np.array([index])), lengths


def _seed(config: SyntheticConfig, purpose: _Purpose, split: Split = Split.TRAIN) -> int:
    return (config.seed * len(Split) + split.value) * len(_Purpose) + purpose.value


class SyntheticDataset(DrawnDataset):
    """Endless synthetic clicks, where each batch is computed from its number."""

    def __init__(self, config: SyntheticConfig) -> None:
        self._config = config
        self.num_dense = config.num_dense
        self.features = tuple(
            DatasetFeature(part.name, part.num_rows, part.mean_ids, config.distribution(part))
            for part in config.features
        )

    def batch(self, split: Split, samples: NDArray[np.int64]) -> Batch:
        """Return the samples with these numbers."""
        config = self._config
        dense = normals(
            _seed(config, _Purpose.DENSE, split), samples[:, None], np.arange(config.num_dense)
        )
        values, lengths = [], []
        for index in range(len(config.features)):
            rows, num_ids = _sparse(config, index, split, samples)
            values.append(rows)
            lengths.append(num_ids)
        sparse = KeyedJaggedTensor(
            keys=[feature.name for feature in config.features],
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
        )
        unlabelled = Batch(torch.from_numpy(dense.astype(np.float32)), sparse, torch.empty(0))
        draws = uniforms(_seed(config, _Purpose.LABEL, split), samples)
        clicked = draws < click_probability(config, unlabelled).numpy()
        labels = torch.from_numpy(clicked.astype(np.float32))
        return Batch(unlabelled.dense_features, sparse, labels)
