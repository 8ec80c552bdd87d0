"""The values of a column as texts, from which ids are made, whatever the file holds."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from torchrec_2dsp.programs.data.logs.arrow import compute


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
        >>> from torchrec_2dsp.programs.data.logs.values import texts_of
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
