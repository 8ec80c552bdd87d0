"""Convert column values to text, and text to times or, by hash or vocabulary, to ids."""

import hashlib
import logging
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pyarrow.types as pt
import torch.distributed as dist
from numpy.typing import NDArray

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.draws import GOLDEN, mix_
from torchrec_2dsp.programs.data.logs.files import write_prepared

compute: Any = pyarrow.compute
"""pyarrow's compute functions, which are created at import time and so unknown to type checkers."""

MISSING_ROW, UNKNOWN_ROW, NUM_RESERVED = 0, 1, 2
"""The rows for missing and for unknown values, and the number of these rows."""
MISSING = np.uint64(0)
"""The hash of an empty string, and, once in 2**64 times, of another string."""
Hashes = NDArray[np.uint64]

TIMES = pa.timestamp("us")
"""The type of times in converted files."""

_WITHOUT_DAY = {"d": "%V", "e": "%V", "F": "%Y-%m-%V", "D": "%m/%V/%y"}
"""Parts of time formats without the day: a week's number is read, and changes no time."""

logger = logging.getLogger(__name__)

_MAX_PENDING = 4_000_000
_WORD_BYTES = 8
_MASKS = np.array(
    [(1 << (8 * num_bytes)) - 1 for num_bytes in range(_WORD_BYTES + 1)], dtype=np.uint64
)


def texts_of(
    column: pa.ChunkedArray, separator: str = "", max_ids: int = 0
) -> tuple[pa.BinaryArray, NDArray[np.int32] | None]:
    """Return a column's values as strings without nulls, and how many each row has.

    Lengths are `None` if each row has one value. An empty string is a missing value, and a null
    list becomes an empty one. An integer and its decimal string are the same value, so that a log
    has the same ids as CSV and as Parquet.

    Args:
        column: strings, integers or booleans, or lists with such values.
        separator: separates the values in a string; empty if each string is one value. Lists need
            none.
        max_ids: the number of last values to keep from a list; 0 for all.

    Example:
        >>> import pyarrow as pa
        >>> from torchrec_2dsp.programs.data.logs.ids import texts_of
        >>> values, lengths = texts_of(pa.chunked_array([["a|b", "", "c"]]), separator="|")
        >>> values.to_pylist(), lengths.tolist()
        ([b'a', b'b', b'c'], [2, 0, 1])
    """
    array = joined(column)
    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    is_list = pt.is_list(array.type) or pt.is_large_list(array.type)
    is_fixed_list = pt.is_fixed_size_list(array.type)
    if separator and not (is_list or is_fixed_list):
        texts = _as_binary(array)
        # Splitting an empty string would yield one empty value, and a null yields none.
        is_empty = compute.equal(compute.binary_length(texts), 0)
        texts = compute.if_else(is_empty, pa.scalar(None, pa.binary()), texts)
        array = compute.split_pattern(texts, separator.encode())
    elif not is_list:
        if not is_fixed_list:
            return _as_binary(array), None
        array = array.cast(pa.list_(array.type.value_type))
    lengths = np.asarray(compute.list_value_length(array).fill_null(0)).astype(np.int32)
    values = _as_binary(array.flatten())
    if max_ids and (lengths > max_ids).any():
        to_end = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(values))
        values = values.filter(pa.array(to_end <= max_ids))
        lengths = np.minimum(lengths, max_ids).astype(np.int32)
    return values, lengths


def encoded_texts(
    column: pa.ChunkedArray,
    encode: Callable[[pa.BinaryArray], NDArray[Any]],
    separator: str = "",
    max_ids: int = 0,
) -> tuple[NDArray[Any], NDArray[np.int32] | None]:
    """Encode a column's values, each distinct dictionary value once, and return the lengths."""
    num_values = len(column)
    if pt.is_dictionary(column.type):
        num_values = sum(len(chunk.dictionary) for chunk in column.chunks)
    if separator or num_values >= len(column):
        values, lengths = texts_of(column, separator, max_ids)
        return encode(values), lengths
    missing = pa.array([b""])
    parts = []
    for chunk in column.chunks:
        codes = encode(pa.concat_arrays([_as_binary(chunk.dictionary), missing]))
        parts.append(codes[np.asarray(chunk.indices.fill_null(len(chunk.dictionary)))])
    return np.concatenate(parts), None


def joined(column: pa.ChunkedArray) -> pa.Array:
    """Return a column's values as one array."""
    if column.num_chunks == 1:
        return column.chunk(0)
    column = column.unify_dictionaries()
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _as_binary(array: pa.Array) -> pa.BinaryArray:
    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pt.is_integer(array.type) or pt.is_boolean(array.type):
        array = array.cast(pa.string())
    if not pt.is_binary(array.type):
        array = array.cast(pa.binary())
    return array.fill_null(b"") if array.null_count else array


def times_of(
    column: pa.ChunkedArray, time_format: str
) -> tuple[pa.ChunkedArray, NDArray[np.bool_]]:
    """Parse strings as times in UTC, and return a mask of invalid ones.

    Args:
        column: strings or timestamps; an empty string is missing, not invalid.
        time_format: "iso", or a strptime pattern.

    Example:
        >>> import pyarrow as pa
        >>> from torchrec_2dsp.programs.data.logs.ids import times_of
        >>> times, is_wrong = times_of(pa.chunked_array([["2014-10-21T03:00Z", "soon"]]), "iso")
        >>> str(times[0]), is_wrong.tolist()
        ('2014-10-21 03:00:00', [False, True])
    """
    if pt.is_timestamp(column.type) or pt.is_date(column.type):
        times = column.cast(TIMES, safe=False)
        return times, np.zeros(len(column), dtype=bool)
    texts = pa.chunked_array([joined(column)]).cast(pa.string())
    texts = compute.if_else(compute.equal(texts, ""), pa.scalar(None, pa.string()), texts)
    if time_format != "iso":
        times = _parsed(texts, time_format)
        has_no_day = _has_no_day(texts, times, time_format)
        if has_no_day.any():
            times = compute.if_else(pa.array(has_no_day), pa.scalar(None, TIMES), times)
    else:
        try:
            times = texts.cast(TIMES)
        except pa.ArrowInvalid:  # Time zones, or texts that are no times.
            times = pa.chunked_array([pa.array(map(_iso_time, texts.to_pylist()), TIMES)])
    is_wrong = np.asarray(times.is_null()) & np.asarray(texts.is_valid())
    return times, is_wrong


def _parsed(texts: pa.ChunkedArray, time_format: str) -> pa.ChunkedArray:
    times = compute.strptime(texts, format=time_format, unit="us", error_is_null=True)
    return times.cast(TIMES)


def _has_no_day(
    texts: pa.ChunkedArray, times: pa.ChunkedArray, time_format: str
) -> NDArray[np.bool_]:
    """Return a mask of times such as 31 February, which strptime reads as a day in March.

    The same texts, read without their day, are times on the first of their month.
    """
    without_day = re.sub("%(.)", lambda part: _WITHOUT_DAY.get(part[1], part[0]), time_format)
    has_none = np.zeros(len(times), dtype=bool)
    if without_day == time_format or not re.search("%[YyFD]", time_format):
        return has_none
    # Such times are on a month's first three days; in UTC, a day earlier or later.
    days = compute.day(compute.add(times, np.timedelta64(1, "D").astype("timedelta64[us]")))
    rows = np.flatnonzero(compute.less_equal(days, 5).fill_null(False))
    first = _parsed(texts.take(pa.array(rows)), without_day).to_numpy()
    months = (first + np.timedelta64(2, "D")).astype("datetime64[M]")
    num_days = (months + 1).astype("datetime64[D]") - months.astype("datetime64[D]")
    has_none[rows] = times.to_numpy()[rows] - first >= num_days
    return has_none


def _iso_time(text: str | None) -> datetime | None:
    try:
        time = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return time.astimezone(UTC).replace(tzinfo=None) if time.tzinfo else time


def hash_texts(texts: pa.BinaryArray) -> Hashes:
    """Hash each string to 64 bits, equally on every platform; an empty one to `MISSING`.

    Each 8-byte word is read as a little-endian number and mixed into the state by `mix_`. The loop
    runs over the longest string's words, not over values. There are no nulls.

    Example:
        >>> import pyarrow as pa
        >>> from torchrec_2dsp.programs.data.logs.ids import hash_texts
        >>> [hex(value) for value in hash_texts(pa.array([b"68fd1e64", b""]))]
        ['0x9ee448ff0b64d69b', '0x0']
    """
    offsets = _offsets(texts)
    starts, lengths = offsets[:-1], offsets[1:] - offsets[:-1]
    state = lengths.astype(np.uint64) * GOLDEN
    longest = int(lengths.max(initial=0))
    if not longest:
        return state
    words = _words(texts)
    first = words[starts]
    shorter = np.flatnonzero(lengths < _WORD_BYTES)
    first[shorter] &= _MASKS[lengths[shorter]]
    state ^= first
    mix_(state)
    for begin in range(_WORD_BYTES, longest, _WORD_BYTES):
        longer = np.flatnonzero(lengths > begin)
        word = words[starts[longer] + begin]
        word &= _MASKS[np.minimum(lengths[longer] - begin, _WORD_BYTES)]
        word ^= state[longer]
        mix_(word)
        state[longer] = word
    return state


def digest_of(*arrays: NDArray[Any]) -> str:
    """Return a short text that identifies the arrays' numbers."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def rows_of(hashes: Hashes, num_rows: int) -> NDArray[np.int64]:
    """Map each hash to a row in 0..num_rows-1; ``num_rows`` is at most 2**31.

    Multiplies the hash's upper half, as a fraction, by ``num_rows``: as uniform as a remainder, but
    faster.
    """
    rows = hashes >> np.uint64(32)
    rows *= np.uint64(num_rows)
    rows >>= np.uint64(32)
    return rows.view(np.int64)


def fractions_of(hashes: Hashes) -> NDArray[np.float64]:
    """Map each hash to a number in [0, 1) that is independent of its row in any table."""
    mixed = hashes ^ GOLDEN
    mix_(mixed)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def collision_rate(num_values: float, num_rows: int) -> float:
    """Return the expected share of values that share their row with another value.

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
    """Estimate how many values hash to that many rows; infinite if all rows were hit.

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


def _offsets(texts: pa.BinaryArray) -> NDArray[np.int64]:
    _, offsets, _ = texts.buffers()
    if offsets is None:
        return np.zeros(len(texts) + 1, dtype=np.int64)
    numbers = np.frombuffer(offsets, dtype=np.int32)
    return numbers[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)


def _words(texts: pa.BinaryArray) -> Hashes:
    """Return the 8-byte words that start at each position, zero-padded past a string's end."""
    data = texts.buffers()[2]
    num_bytes = 0 if data is None else data.size
    padded = np.zeros(num_bytes + _WORD_BYTES, dtype=np.uint8)
    if data is not None:
        padded[:num_bytes] = np.frombuffer(data, dtype=np.uint8)
    return np.ndarray((num_bytes + 1,), dtype="<u8", buffer=padded, strides=(1,))


class Vocabulary:
    """Maps the most frequent values to rows of their own.

    Values are looked up by their 64-bit hashes: with a million rows, one in about 10^13 unknown
    values collides with a known one.

    Example:
        >>> import pyarrow as pa
        >>> from torchrec_2dsp.programs.data.logs.ids import Vocabulary
        >>> Vocabulary(pa.array([b"news", b"sport"])).rows(pa.array([b"sport", b"", b"art"]))
        array([3, 0, 1])
    """

    def __init__(self, values: pa.BinaryArray) -> None:
        """Sort the values by hash.

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
        """The number of rows that a table needs."""
        return len(self._rows) + NUM_RESERVED

    @property
    def digest(self) -> str:
        """A short text that identifies the values and their order."""
        return digest_of(self._hashes, self._rows)

    def rows(self, values: pa.BinaryArray) -> NDArray[np.int64]:
        """Return each value's row."""
        rows = np.full(len(values), UNKNOWN_ROW, dtype=np.int64)
        hashes = hash_texts(values)
        if len(self._hashes):
            places = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
            np.copyto(rows, self._rows[places], where=self._hashes[places] == hashes)
        rows[hashes == MISSING] = MISSING_ROW
        return rows


class ValueCounter:
    """Counts a feature's distinct values in memory."""

    def __init__(self) -> None:
        self._counted: list[pa.Table] = []
        self._num_pending = 0

    def add(self, values: pa.BinaryArray) -> None:
        """Count values; missing ones don't count."""
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
        """Return the most frequent values with their counts; ties are in lexical order.

        Args:
            min_count: the smallest count to keep.
            max_values: how many values to keep; 0 for all.
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


Origin = Mapping[str, str]
"""The origin of counts: the "log", its "files" in any layout, and the "layout" with which they
were read; older files lack some of these."""


def write_vocabulary(path: Path, table: pa.Table, rules: str, origin: Origin | None = None) -> None:
    """Write a vocabulary.

    Args:
        path: the file.
        table: the column "value", and others that describe values, such as "count".
        rules: the selection rules, which must match when it is read.
        origin: the log whose values they are.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({"rules": rules, **(origin or {})}), sink)
    write_prepared(path, sink.getvalue().to_pybytes())


def vocabulary_origin(path: Path) -> dict[str, str]:
    """Return a vocabulary's rules and origin; empty if it can't be read."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowException):
        return {}
    keys = ("rules", "log", "files", "layout")
    return {key: metadata[key.encode()].decode() for key in keys if key.encode() in metadata}


def is_read_otherwise(before: Origin, origin: Origin) -> bool:
    """Return whether the same files were read with another layout."""
    return before.get("files") == origin["files"] and before.get("layout") != origin["layout"]


def warn_of_other_logs(origins: Mapping[str, Origin], log: str, consequence: str) -> None:
    """Warn on rank 0 about each name whose origin is another log."""
    others = [name for name, origin in origins.items() if origin.get("log", "") not in ("", log)]
    if others and not (dist.is_initialized() and dist.get_rank()):
        logger.warning(
            "%s: made from another log, %s. To count this log instead, delete what was made, or "
            "name another folder (prepared)",
            ", ".join(others),
            consequence,
        )


def read_vocabulary(path: Path, rules: str) -> pa.BinaryArray:
    """Read a vocabulary's values; raise unless it was selected by these rules."""
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
