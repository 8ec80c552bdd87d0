"""`PlantedInteractions`: the part of a planted logit that no sum of row effects can explain.

Every row of every table has a latent vector, and a sample's features interact by the dot products
of theirs, as in a factorisation machine.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from torchrec_2dsp.programs.data.counters import normals
from torchrec_2dsp.programs.data.zipf import Zipf

_MAX_HEAD_ROWS = 10_000
"""So many of a table's most frequent rows are added up; each other one is too rare to matter."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LatentVectors:
    """The latent vectors of a feature's rows: normal numbers, less their mean over the ids.

    Without the mean, a feature's vector times another's mean would be an effect of its rows alone.
    """

    ids: Zipf
    """The distribution of the feature's ids."""

    feature_index: int
    """The place of the feature among the features of the batch."""

    rank: int
    """How many numbers a vector has."""

    seed: int
    """The seed of the numbers."""

    def of_rows(self, rows: NDArray[np.int64]) -> _Floats:
        """The vectors of some rows, one per row."""
        return self._uncentred(rows) - _moments(self)[0]

    @property
    def covariance(self) -> _Floats:
        """The covariance of the vector of one id, a matrix of ``rank`` times ``rank`` numbers."""
        return _moments(self)[1]

    def _uncentred(self, rows: NDArray[np.int64]) -> _Floats:
        return normals(self.seed, self.feature_index, rows[:, None], np.arange(self.rank))

    def _mean_and_covariance(self) -> tuple[_Floats, _Floats]:
        ranks = np.arange(1, min(self.ids.num_rows, _MAX_HEAD_ROWS) + 1)
        share = self.ids.probability(ranks)[:, None]
        vectors = self._uncentred(self.ids.row_of_rank(ranks))
        mean = (share * vectors).sum(axis=0)
        # The rare rows are so many that their numbers have the moments of the normal distribution.
        tail = max(0.0, 1.0 - share.sum()) if self.ids.num_rows > ranks.size else 0.0
        second_moment = (share * vectors).T @ vectors + tail * np.eye(self.rank)
        return mean, second_moment - np.outer(mean, mean)


@lru_cache(maxsize=1024)
def _moments(vectors: LatentVectors) -> tuple[_Floats, _Floats]:
    return vectors._mean_and_covariance()


@dataclass(frozen=True)
class PlantedInteractions:
    """The interactions of all pairs of features, with a variance of 1 over the samples.

    A feature's bag is the mean of its rows' latent vectors, zero if the bag is empty. Bags of two
    features give the dot product of the two.

    Example:
        >>> import numpy as np
        >>> from torchrec_2dsp.programs.data.interactions import LatentVectors, PlantedInteractions
        >>> from torchrec_2dsp.programs.data.zipf import Zipf
        >>> features = tuple(LatentVectors(Zipf(1_000, 1.0), i, rank=8, seed=0) for i in range(2))
        >>> planted = PlantedInteractions(features, mean_inverse_lengths=(1.0, 1.0))
        >>> bags = [(np.array([3, 5]), np.array([1, 1])), (np.array([7, 3]), np.array([2, 0]))]
        >>> planted.logits(bags).round(2)[1]
        np.float64(0.0)
    """

    features: tuple[LatentVectors, ...]
    """The latent vectors of each feature."""

    mean_inverse_lengths: tuple[float, ...]
    """The mean over the bags of one over the number of ids, by feature; empty bags count as 0."""

    def logits(self, bags: list[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> _Floats:
        """The interactions of each sample.

        Args:
            bags: the ids of all samples and how many each sample has, by feature.
        """
        pooled = [
            _mean_of_bags(vectors.of_rows(rows), lengths)
            for vectors, (rows, lengths) in zip(self.features, bags, strict=True)
        ]
        # Twice the sum over pairs is the square of the sum, less the sum of squares.
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
    """The mean of the vectors of each bag; zeros for one without ids."""
    sample = np.repeat(np.arange(lengths.size), lengths)
    sums = [
        np.bincount(sample, weights=vectors[:, place], minlength=lengths.size)
        for place in range(vectors.shape[1])
    ]
    return np.stack(sums, axis=1) / np.maximum(lengths, 1)[:, None]
