"""Random numbers as a function of where they are used, so that any rank can make any part.

A stateful generator would have to make the whole global batch on every rank. Here each number is
a hash (the finaliser of splitmix64) of its coordinates: a seed and a few integers.
"""

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

Coordinate = int | NDArray[np.integer]


def uniforms(seed: int, *coordinates: Coordinate) -> NDArray[np.float64]:
    """Numbers in the open interval (0, 1), one per element of the broadcast coordinates.

    Example:
        >>> import numpy as np
        >>> from torchrec_2dsp.programs.data.counters import uniforms
        >>> samples = np.arange(4)
        >>> (uniforms(7, samples)[2:] == uniforms(7, samples[2:])).all()
        np.True_
    """
    state = np.asarray(_mixed_int(seed & _MASK), dtype=np.uint64)
    for coordinate in coordinates:
        step = np.asarray(coordinate).astype(np.uint64) * np.uint64(_GOLDEN)
        state = _mixed(np.atleast_1d(state + step))
    # 53 bits are what a double holds; the half keeps 0 out.
    return ((np.atleast_1d(state) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normals(seed: int, *coordinates: Coordinate) -> NDArray[np.float64]:
    """Standard normal numbers, by Box and Muller's transform of two uniform ones."""
    radius = np.sqrt(-2.0 * np.log(uniforms(seed, *coordinates, 0)))
    return radius * np.cos(2.0 * np.pi * uniforms(seed, *coordinates, 1))


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_FACTORS[0])
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return state ^ (state >> np.uint64(31))


def _mixed_int(value: int) -> int:
    # numpy warns when a scalar wraps around, which is what is wanted here.
    return int(_mixed(np.array([value], dtype=np.uint64))[0])
