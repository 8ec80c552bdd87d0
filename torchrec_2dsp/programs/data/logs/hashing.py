"""A hash of texts, equal on every platform, and the rows that it gives.

Every eight bytes of a text are one number, read as little-endian, and are mixed into the state by
the finaliser of splitmix64. Nothing loops over values: the loop runs over the words of the longest.
"""

import math

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_LENGTH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_WORD_BYTES = 8
_MASKS = np.array(
    [(1 << (8 * num_bytes)) - 1 for num_bytes in range(_WORD_BYTES + 1)], dtype=np.uint64
)

MISSING = np.uint64(0)
"""The hash of an empty text, and, once in 2**64 times, of another one."""
Hashes = NDArray[np.uint64]


def hash_texts(texts: pa.BinaryArray) -> Hashes:
    """One 64-bit hash for each text, `MISSING` for an empty one; none may be null.

    Example:
        >>> import pyarrow as pa
        >>> from torchrec_2dsp.programs.data.logs.hashing import hash_texts
        >>> [hex(value) for value in hash_texts(pa.array([b"68fd1e64", b""]))]
        ['0x9ee448ff0b64d69b', '0x0']
    """
    offsets = _offsets(texts)
    starts, lengths = offsets[:-1], offsets[1:] - offsets[:-1]
    state = lengths.astype(np.uint64) * _LENGTH_FACTOR
    longest = int(lengths.max(initial=0))
    if not longest:
        return state
    words = _words(texts)
    first = words[starts]
    shorter = np.flatnonzero(lengths < _WORD_BYTES)
    first[shorter] &= _MASKS[lengths[shorter]]
    state ^= first
    _mix_(state)
    for begin in range(_WORD_BYTES, longest, _WORD_BYTES):
        longer = np.flatnonzero(lengths > begin)
        word = words[starts[longer] + begin]
        word &= _MASKS[np.minimum(lengths[longer] - begin, _WORD_BYTES)]
        word ^= state[longer]
        _mix_(word)
        state[longer] = word
    return state


def rows_of(hashes: Hashes, num_rows: int) -> NDArray[np.int64]:
    """A row in 0..num_rows-1 for each hash; ``num_rows`` is at most 2**31.

    The upper half of the hash is a fraction, of which ``num_rows`` is taken: that is as even as a
    remainder, and faster.
    """
    rows = hashes >> np.uint64(32)
    rows *= np.uint64(num_rows)
    rows >>= np.uint64(32)
    return rows.view(np.int64)


def fractions_of(hashes: Hashes) -> NDArray[np.float64]:
    """A number in [0, 1) for each hash, independent of its row in any table."""
    mixed = hashes ^ _LENGTH_FACTOR
    _mix_(mixed)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def collision_rate(num_values: float, num_rows: int) -> float:
    """The expected share of values that share their row with another value.

    Example:
        >>> from torchrec_2dsp.programs.data.logs.hashing import collision_rate
        >>> round(collision_rate(100_000, 1_000_000), 3)
        0.095
    """
    if num_values <= 1:
        return 0.0
    if num_rows <= 1:
        return 1.0
    return -math.expm1((num_values - 1) * math.log1p(-1.0 / num_rows))


def values_behind(rows_used: float, num_rows: int) -> float:
    """How many values were hashed, if that many of the rows were hit; infinite if all were.

    Example:
        >>> from torchrec_2dsp.programs.data.logs.hashing import values_behind
        >>> round(values_behind(95_163, 1_000_000))
        100000
    """
    if rows_used >= num_rows:
        return math.inf
    if num_rows == 1:
        return 0.0
    return math.log1p(-rows_used / num_rows) / math.log1p(-1.0 / num_rows)


def _mix_(state: Hashes) -> None:
    """Mix every number, in place."""
    shifted = state >> np.uint64(30)
    state ^= shifted
    state *= _FACTORS[0]
    np.right_shift(state, np.uint64(27), out=shifted)
    state ^= shifted
    state *= _FACTORS[1]
    np.right_shift(state, np.uint64(31), out=shifted)
    state ^= shifted


def _offsets(texts: pa.BinaryArray) -> NDArray[np.int64]:
    _, offsets, _ = texts.buffers()
    if offsets is None:
        return np.zeros(len(texts) + 1, dtype=np.int64)
    numbers = np.frombuffer(offsets, dtype=np.int32)
    return numbers[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)


def _words(texts: pa.BinaryArray) -> Hashes:
    """The eight bytes from each place of the texts on, zeros behind their end."""
    data = texts.buffers()[2]
    num_bytes = 0 if data is None else data.size
    padded = np.zeros(num_bytes + _WORD_BYTES, dtype=np.uint8)
    if data is not None:
        padded[:num_bytes] = np.frombuffer(data, dtype=np.uint8)
    return np.ndarray((num_bytes + 1,), dtype="<u8", buffer=padded, strides=(1,))
