"""Random numbers as a function of their coordinates, so that any rank can draw any part."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.parameter_sharding import golden_step

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""An odd number without a pattern: 2**64 divided by the golden ratio."""
_MASK = (1 << 64) - 1
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

Coordinate = int | NDArray[np.integer]


def uniforms(seed: int, *coordinates: Coordinate) -> NDArray[np.float64]:
    """Draw numbers in the open interval (0, 1), one per element of the broadcast coordinates.

    Example:
        >>> import numpy as np
        >>> from torchrec_2dsp.programs.data.draws import uniforms
        >>> samples = np.arange(4)
        >>> (uniforms(7, samples)[2:] == uniforms(7, samples[2:])).all()
        np.True_
    """
    state = np.array([seed & _MASK], dtype=np.uint64) + GOLDEN
    mix_(state)
    for coordinate in coordinates:
        state = state + np.atleast_1d(coordinate).astype(np.uint64) * GOLDEN + GOLDEN
        mix_(state)
    # A double holds 53 bits; the half excludes 0.
    return ((state >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normals(seed: int, *coordinates: Coordinate) -> NDArray[np.float64]:
    """Draw standard normal numbers by the Box-Muller transform."""
    radius = np.sqrt(-2.0 * np.log(uniforms(seed, *coordinates, 0)))
    return radius * np.cos(2.0 * np.pi * uniforms(seed, *coordinates, 1))


def mix_(state: NDArray[np.uint64]) -> None:
    """Mix every number's bits in place, by splitmix64's finaliser."""
    shifted = state >> np.uint64(30)
    state ^= shifted
    state *= _FACTORS[0]
    np.right_shift(state, np.uint64(27), out=shifted)
    state ^= shifted
    state *= _FACTORS[1]
    np.right_shift(state, np.uint64(31), out=shifted)
    state ^= shifted


_MAX_NUM_ROWS = 2**31
_ADDED_UP = 1_000_000
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Zipf:
    """A Zipf distribution over row ids: the ``k``-th most frequent has weight ``k**-skew``.

    Samples exactly, by rejection-inversion, without a probability table.

    Reference: W. Hörmann and G. Derflinger, Rejection-inversion to generate variates from
    monotone discrete distributions, ACM TOMACS 6(3), 1996.
    """

    num_rows: int
    """Ids are ``0..num_rows - 1``."""

    skew: float
    """The exponent: 0 is uniform, click logs are near 1."""

    is_sorted: bool = False
    """True if rows are numbered by frequency, the most frequent first."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_rows <= _MAX_NUM_ROWS:
            raise ConfigError(f"num_rows={self.num_rows} is not in 1..{_MAX_NUM_ROWS}")
        if not (math.isfinite(self.skew) and self.skew >= 0):
            raise ConfigError(f"skew={self.skew} must be a finite number >= 0")

    def sample(self, seed: int, *coordinates: NDArray[np.integer]) -> NDArray[np.int64]:
        """Draw row ids, one per element of the broadcast coordinates (see `uniforms`)."""
        return self.row_of_rank(self.sample_ranks(seed, *coordinates))

    def sample_ranks(self, seed: int, *coordinates: NDArray[np.integer]) -> NDArray[np.int64]:
        """Draw popularity ranks ``1..num_rows``; see `sample`."""
        shape = np.broadcast_shapes(*(part.shape for part in coordinates))
        waiting = [np.broadcast_to(part, shape).ravel() for part in coordinates]
        where = np.arange(waiting[0].size)
        ranks = np.zeros(where.size, dtype=np.int64)
        attempt = 0
        while where.size:
            tried, accepted = self._try(uniforms(seed, *waiting, attempt))
            ranks[where[accepted]] = tried[accepted]
            where, waiting = where[~accepted], [part[~accepted] for part in waiting]
            attempt += 1
        return ranks.reshape(shape)

    def row_of_rank(self, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map a popularity rank to its row: rows are spread over the table unless sorted."""
        return (rank - 1) * (1 if self.is_sorted else golden_step(self.num_rows)) % self.num_rows

    def probability(self, rank: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the probability of the ``rank``-th most frequent row."""
        return rank.astype(np.float64) ** -self.skew / self._sum_of_weights()

    def _sum_of_weights(self) -> float:
        """Sum all rows' weights: the first ones directly, the others by an integral.

        The trapezoidal rule errs by less than the slope's change between two integers.
        """
        num_added_up = min(self.num_rows, _ADDED_UP)
        weights = np.arange(1, num_added_up + 1, dtype=np.float64) ** -self.skew
        if num_added_up == self.num_rows:
            return float(weights.sum())
        first, last = self._area(np.array([num_added_up, self.num_rows], dtype=np.float64))
        ends = (float(self.num_rows) ** -self.skew - weights[-1]) / 2
        return float(weights.sum() + last - first + ends)

    def _try(self, draws: _Floats) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Make one attempt per draw: a rank, and whether to accept it."""
        top = self._area(np.array([1.5, self.num_rows + 0.5, 2.5]))
        area = top[1] + draws * (top[0] - 1.0 - top[1])
        x = self._area_inverse(area)
        rank = np.clip(np.rint(x), 1, self.num_rows)
        surely = rank - x <= 2.0 - self._area_inverse(top[2:] - 2.0**-self.skew)
        accepted = surely | (area >= self._area(rank + 0.5) - rank**-self.skew)
        return rank.astype(np.int64), accepted

    def _area(self, x: _Floats) -> _Floats:
        """Return the integral of ``x**-skew`` from 1."""
        exponent = 1.0 - self.skew
        return np.log(x) if exponent == 0.0 else np.expm1(exponent * np.log(x)) / exponent

    def _area_inverse(self, area: _Floats) -> _Floats:
        exponent = 1.0 - self.skew
        if exponent == 0.0:
            return np.exp(area)
        # Rounding must not reach log(0).
        scaled = np.maximum(area * exponent, np.nextafter(-1.0, 0.0))
        return np.exp(np.log1p(scaled) / exponent)
