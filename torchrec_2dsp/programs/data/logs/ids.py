"""Turn a column's values into ids: as texts, by a hash, or by a vocabulary."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pyarrow.types as pt
from numpy.typing import NDArray

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.logs.row_index import write_prepared

compute: Any = pyarrow.compute
"""The functions, which pyarrow makes when it is imported, so that type checkers don't see them."""


@dataclass(frozen=True)
class Texts:
    """The values of some rows."""

    values: pa.BinaryArray
    """All values one after another, as texts without nulls; an empty text is a missing value."""

    lengths: NDArray[np.int32] | None
    """How many values each row has; `None` if each has one."""


def texts_of(column: pa.ChunkedArray, separator: str = "", max_ids: int = 0) -> Texts:
    """The values of a column as texts.

    An integer and the text of it are the same value, so that a log has the same ids as CSV and as
    Parquet. A row without a list has an empty one.

    Args:
        column: text, integers or booleans, or lists of them.
        separator: what stands between the values of a text; empty where each text is one value.
        max_ids: how many of a list's last values count; 0 for all.

    Example:
        >>> import pyarrow as pa
        >>> from torchrec_2dsp.programs.data.logs.ids import texts_of
        >>> texts = texts_of(pa.chunked_array([["a|b", "", "c"]]), separator="|")
        >>> texts.values.to_pylist(), texts.lengths.tolist()
        ([b'a', b'b', b'c'], [2, 0, 1])
    """
    array = _joined(column)
    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    if separator:
        array = compute.split_pattern(_as_binary(array), separator.encode())
    if not (pt.is_list(array.type) or pt.is_large_list(array.type)):
        if not pt.is_fixed_size_list(array.type):
            return Texts(_as_binary(array), None)
        array = array.cast(pa.list_(array.type.value_type))
    lengths = np.asarray(compute.list_value_length(array).fill_null(0)).astype(np.int32)
    values = _as_binary(array.flatten())
    if separator:
        # A text without values is split into one empty value.
        is_empty = np.zeros(len(lengths), dtype=bool)
        ends = np.cumsum(lengths)
        is_single = np.flatnonzero(lengths == 1)
        sizes = np.asarray(compute.binary_length(values))
        is_empty[is_single] = sizes[ends[is_single] - 1] == 0
        if is_empty.any():
            values = values.filter(pa.array(~np.repeat(is_empty, lengths)))
            lengths[is_empty] = 0
    return _last(Texts(values, lengths), max_ids) if max_ids else Texts(values, lengths)


def _last(texts: Texts, max_ids: int) -> Texts:
    """The last values of each row."""
    assert texts.lengths is not None
    if not (texts.lengths > max_ids).any():
        return texts
    to_end = np.repeat(np.cumsum(texts.lengths), texts.lengths) - np.arange(len(texts.values))
    values = texts.values.filter(pa.array(to_end <= max_ids))
    return Texts(values, np.minimum(texts.lengths, max_ids).astype(np.int32))


def _joined(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _as_binary(array: pa.Array) -> pa.BinaryArray:
    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pt.is_integer(array.type) or pt.is_boolean(array.type):
        array = array.cast(pa.string())
    if not pt.is_binary(array.type):
        array = array.cast(pa.binary())
    return array.fill_null(b"") if array.null_count else array


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
        >>> from torchrec_2dsp.programs.data.logs.ids import hash_texts
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
        >>> from torchrec_2dsp.programs.data.logs.ids import collision_rate
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
        >>> from torchrec_2dsp.programs.data.logs.ids import values_behind
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


MISSING_ROW, UNKNOWN_ROW, NUM_RESERVED = 0, 1, 2
"""The rows of values that are missing, or that the vocabulary lacks, and how many these are."""
_MAX_PENDING = 4_000_000


class Vocabulary:
    """Finds the rows of values. A value is told by its 64-bit hash: that one of the values it lacks
    has the hash of one that it has, happens once in 10^13 values for a million rows.

    Example:
        >>> import pyarrow as pa
        >>> from torchrec_2dsp.programs.data.logs.ids import Vocabulary
        >>> Vocabulary(pa.array([b"news", b"sport"])).rows(pa.array([b"sport", b"", b"art"]))
        array([3, 0, 1])
    """

    def __init__(self, values: pa.BinaryArray) -> None:
        """
        Args:
            values: distinct values, the most frequent first.
        """
        hashes = hash_texts(values)
        order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[order]
        self._rows = order + NUM_RESERVED
        if len(hashes) > 1 and (self._hashes[1:] == self._hashes[:-1]).any():
            raise ConfigError("two values of a vocabulary have the same 64-bit hash; drop one")

    @property
    def num_rows(self) -> int:
        """How many rows a table needs."""
        return len(self._rows) + NUM_RESERVED

    def rows(self, values: pa.BinaryArray) -> NDArray[np.int64]:
        """The row of each value."""
        rows = np.full(len(values), UNKNOWN_ROW, dtype=np.int64)
        hashes = hash_texts(values)
        if len(self._hashes):
            places = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
            np.copyto(rows, self._rows[places], where=self._hashes[places] == hashes)
        rows[hashes == MISSING] = MISSING_ROW
        return rows


class ValueCounter:
    """Counts the different values of a feature; it has all of them in memory."""

    def __init__(self) -> None:
        self._counted: list[pa.Table] = []
        self._num_pending = 0

    def add(self, values: pa.BinaryArray) -> None:
        """Count some values; missing ones don't count."""
        counts = compute.value_counts(
            values.filter(compute.not_equal(compute.binary_length(values), 0))
        )
        self._counted.append(
            pa.table({"value": counts.field("values"), "count": counts.field("counts")})
        )
        self._num_pending += len(counts)
        if self._num_pending > _MAX_PENDING:
            self._counted = [self._merged()]
            self._num_pending = 0

    def frequent(self, min_count: int, max_values: int) -> pa.Table:
        """The most frequent values and how often they are; of equally frequent ones, the smaller
        text is first.

        Args:
            min_count: values that are rarer are left out.
            max_values: the most values; 0 for all.
        """
        table = self._merged()
        table = table.filter(compute.greater_equal(table["count"], min_count))
        table = table.sort_by([("count", "descending"), ("value", "ascending")])
        return table.slice(0, max_values) if max_values else table

    def _merged(self) -> pa.Table:
        empty = pa.table({"value": pa.array([], pa.binary()), "count": pa.array([], pa.int64())})
        grouped = pa.concat_tables([empty, *self._counted]).group_by("value")
        summed = grouped.aggregate([("count", "sum")])
        return pa.table({"value": summed["value"], "count": summed["count_sum"]})


def write_vocabulary(path: Path, table: pa.Table, rules: str) -> None:
    """Write a vocabulary.

    Args:
        path: the file.
        table: the column "value", and others that describe values, such as "count".
        rules: how it was chosen, which a reader has to name again.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({"rules": rules}), sink)
    write_prepared(path, sink.getvalue().to_pybytes())


def read_vocabulary(path: Path, rules: str) -> pa.BinaryArray:
    """The values of a vocabulary that was chosen by these rules."""
    try:
        table = pq.read_table(path)
        values = table["value"].cast(pa.binary())
    except (OSError, pa.ArrowException, KeyError) as error:
        raise ConfigError(
            f"{path} can't be read as a vocabulary: {error}; delete it, and it is made again"
        ) from error
    stored = (table.schema.metadata or {}).get(b"rules", b"").decode()
    if stored != rules:
        raise ConfigError(
            f"{path} was made with {stored or 'other rules'}, and the config says {rules}; delete "
            "the file to make it again, or name another folder"
        )
    return pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], pa.binary())
