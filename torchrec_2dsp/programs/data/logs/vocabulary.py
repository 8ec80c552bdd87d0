"""`Vocabulary`: the values of a feature that have rows of their own, the most frequent first."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.logs.arrow import compute
from torchrec_2dsp.programs.data.logs.hashing import MISSING, hash_texts
from torchrec_2dsp.programs.data.logs.row_index import write_prepared

MISSING_ROW, UNKNOWN_ROW, NUM_RESERVED = 0, 1, 2
"""The rows of values that are missing, or that the vocabulary lacks, and how many these are."""
_MAX_PENDING = 4_000_000


class Vocabulary:
    """Finds the rows of values. A value is told by its 64-bit hash: that one of the values it lacks
    has the hash of one that it has, happens once in 10^13 values for a million rows.

    Example:
        >>> import pyarrow as pa
        >>> from torchrec_2dsp.programs.data.logs.vocabulary import Vocabulary
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
