"""How much averaging after local updates inflates the second moment of AdaGrad.

With M sharding groups, a group's gradient is divided by a batch that is M times smaller. The
squares of these gradients are added up, and their average over the groups is larger than the
square of the global batch's gradient, because noise that would have cancelled is squared first.

A row's gradients in one batch are modelled as ``mean + noise``, one draw for each time that the
row is looked up; ``rho`` is the squared mean over the variance of the noise.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from torchrec_2dsp.errors import ConfigError

_Hits = TypeVar("_Hits", float, NDArray[np.floating])


def moment_inflation(*, num_groups: int, hits: float, rho: float) -> float:
    """The ratio of the averaged moment to one group's, for a row that is looked up ``hits`` times.

    ``1 + (M - 1) (1 + rho) / (1 + hits * rho)``: M for a row that is looked up once, 1 for one that
    is looked up so often that nothing but the mean is left.

    Args:
        num_groups: M.
        hits: lookups of the row in a global batch, the same in every batch.
        rho: the squared mean over the variance of a lookup's gradient.

    Example:
        >>> from torchrec_2dsp.optim.inflation import moment_inflation
        >>> [moment_inflation(num_groups=4, hits=hits, rho=1.0) for hits in (1, 2, 5)]
        [4.0, 3.0, 2.0]
    """
    return 1 + (num_groups - 1) * (1 + rho) / (1 + hits * rho)


def expected_moment_inflation(*, num_groups: int, hits: _Hits, rho: float) -> _Hits:
    """The inflation of rows that are looked up ``hits`` times in the mean, by a Poisson law.

    ``1 + (M - 1) (1 + rho) / (1 + rho + hits * rho)``

    As the ``moment_scale`` of `MomentScaledRowWiseAdaGrad` it undoes the inflation of such rows.

    Args:
        num_groups: M.
        hits: lookups of the row in a global batch, in the mean; of one row, or of many.
        rho: the squared mean over the variance of a lookup's gradient.

    Example:
        >>> from torchrec_2dsp.optim.inflation import expected_moment_inflation
        >>> expected_moment_inflation(num_groups=4, hits=4.0, rho=1.0)
        2.0
    """
    return 1 + (num_groups - 1) * (1 + rho) / (1 + rho + hits * rho)


def expected_moment_scale(
    hits: Sequence[float] | NDArray[np.floating], *, num_groups: int, rho: float
) -> float:
    """One ``moment_scale`` for all rows of a table: their expected inflation, by lookups.

    A row counts as often as it is looked up, because so often its learning rate matters.

    Args:
        hits: for each row, its lookups in a global batch in the mean.
        num_groups: M.
        rho: the squared mean over the variance of a lookup's gradient.

    Raises:
        ConfigError: a number is negative, or none.

    Example:
        >>> from torchrec_2dsp.optim.inflation import expected_moment_scale
        >>> round(expected_moment_scale([100.0, 1.0, 1.0], num_groups=4, rho=1.0), 2)
        1.1
    """
    lookups = np.asarray(hits, dtype=np.float64)
    if not (np.isfinite(lookups).all() and (lookups >= 0).all() and rho >= 0):
        raise ConfigError(f"hits and rho={rho} must be numbers >= 0; see optim.inflation")
    if not lookups.sum() > 0:
        return float(num_groups)
    inflation = expected_moment_inflation(num_groups=num_groups, hits=lookups, rho=rho)
    return float((lookups * inflation).sum() / lookups.sum())
