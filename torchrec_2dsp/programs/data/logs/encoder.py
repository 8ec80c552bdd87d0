"""Encode rows of a log as samples, and cut samples into batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.programs.data.logs.blocks import ColumnKind
from torchrec_2dsp.programs.data.logs.config import DenseColumn, SparseColumn
from torchrec_2dsp.programs.data.logs.ids import (
    MISSING,
    MISSING_ROW,
    Vocabulary,
    hash_texts,
    rows_of,
    texts_of,
)
from torchrec_2dsp.programs.data.logs.text_parser import label_numbers


@dataclass(frozen=True)
class FeatureIds:
    """The ids of one feature."""

    ids: NDArray[np.int64]
    """The ids of all samples, one after another."""

    lengths: NDArray[np.int32] | None
    """How many ids each sample has; `None` if each has one."""

    def part(self, start: int, stop: int) -> "FeatureIds":
        """The bags of some samples in a row."""
        if self.lengths is None:
            return FeatureIds(self.ids[start:stop], None)
        before = int(self.lengths[:start].sum())
        inside = int(self.lengths[start:stop].sum())
        return FeatureIds(self.ids[before : before + inside], self.lengths[start:stop])

    def ordered(self, order: NDArray[np.int64]) -> "FeatureIds":
        """The bags of the samples with these numbers, in their order."""
        if self.lengths is None:
            return FeatureIds(self.ids[order], None)
        starts = (np.cumsum(self.lengths) - self.lengths)[order]
        lengths = self.lengths[order]
        before = np.cumsum(lengths) - lengths
        places = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
        return FeatureIds(self.ids[places], lengths)


@dataclass(frozen=True)
class Samples:
    """Some encoded rows."""

    dense: NDArray[np.float32]
    """The dense features, ``[samples, features]``."""

    labels: NDArray[np.float32]
    """The label of each sample."""

    bags: tuple[FeatureIds, ...]
    """The ids, by feature."""

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, start: int, stop: int) -> "Samples":
        """Some samples in a row."""
        if (start, stop) == (0, len(self)):
            return self
        bags = tuple(bags.part(start, stop) for bags in self.bags)
        return Samples(self.dense[start:stop], self.labels[start:stop], bags)

    def ordered(self, order: NDArray[np.int64]) -> "Samples":
        """The samples with these numbers, in their order."""
        bags = tuple(bags.ordered(order) for bags in self.bags)
        return Samples(self.dense[order], self.labels[order], bags)

    def batch(self, keys: Sequence[str]) -> Batch:
        """The samples as TorchRec's batch.

        Args:
            keys: the names of the features, in their order.
        """
        lengths = np.ones((len(self.bags), len(self)), dtype=np.int32)
        for row, bags in zip(lengths, self.bags, strict=True):
            if bags.lengths is not None:
                row[:] = bags.lengths
        ids = [bags.ids for bags in self.bags] or [np.empty(0, dtype=np.int64)]
        sparse = KeyedJaggedTensor(
            keys=list(keys),
            values=torch.from_numpy(np.concatenate(ids)),
            lengths=torch.from_numpy(lengths.reshape(-1)),
        )
        # Parts of larger arrays would keep these in memory.
        return Batch(torch.from_numpy(self.dense.copy()), sparse, torch.tensor(self.labels))


def join(parts: Sequence[Samples]) -> Samples:
    """Samples one after another; there is at least one part."""
    if len(parts) == 1:
        return parts[0]
    return Samples(
        np.concatenate([part.dense for part in parts]),
        np.concatenate([part.labels for part in parts]),
        tuple(_join(bags) for bags in zip(*(part.bags for part in parts), strict=True)),
    )


def _join(bags: Sequence[FeatureIds]) -> FeatureIds:
    ids = np.concatenate([part.ids for part in bags])
    lengths = [part.lengths for part in bags if part.lengths is not None]
    return FeatureIds(ids, np.concatenate(lengths) if lengths else None)


_SECONDS_PER_HOUR, _SECONDS_PER_DAY = 3600, 86400
_FIRST_DAY = 3
"""The weekday of 1970-01-01, a Thursday, counted from Monday."""
_CENTURY = 2000


@dataclass(frozen=True)
class LogFeature:
    """One sparse feature of a log, which has a table of its own."""

    name: str
    """The feature's name in the batch."""

    num_rows: int
    """How many rows its table has."""

    mean_ids: float
    """About how many ids a sample has."""


@dataclass(frozen=True)
class Scale:
    """The mean and the standard deviation of a dense feature."""

    mean: float
    """The number that is subtracted."""

    std: float
    """The number that the difference is divided by."""


class Encoder:
    """Makes samples of rows."""

    def __init__(
        self,
        label: str,
        dense: Sequence[DenseColumn],
        features: Sequence[SparseColumn],
        vocabularies: Mapping[str, Vocabulary],
        scales: Mapping[str, Scale],
    ) -> None:
        """
        Args:
            label: the column of the labels.
            dense: the dense features.
            features: the sparse features.
            vocabularies: those of the features that have one, by feature.
            scales: those of the dense features that are standardised, by column.
        """
        self._label, self._dense, self._features = label, tuple(dense), tuple(features)
        self._vocabularies, self._scales = vocabularies, scales
        self.columns = columns_of(label, dense, features)
        """The columns that are read, and what they are for."""
        self.features = tuple(
            LogFeature(feature.name, self._num_rows(feature), feature.mean_ids)
            for feature in features
        )
        """The features of the samples."""

    def encode(self, table: pa.Table) -> Samples:
        """The samples of some rows."""
        dense = np.empty((table.num_rows, len(self._dense)), dtype=np.float32)
        for number, column in enumerate(self._dense):
            values = transformed(table[column.column], column)
            if column.column in self._scales:
                scale = self._scales[column.column]
                values -= np.float32(scale.mean)
                values /= np.float32(scale.std)
            dense[:, number] = values
        labels = label_numbers(table[self._label])
        return Samples(dense, labels, tuple(self._bags(table, column) for column in self._features))

    def _bags(self, table: pa.Table, feature: SparseColumn) -> FeatureIds:
        if feature.is_time:
            return FeatureIds(time_rows(table[feature.source], feature), None)
        texts = texts_of(table[feature.source], feature.separator, feature.max_ids)
        if feature.encoding == "vocabulary":
            return FeatureIds(self._vocabularies[feature.name].rows(texts.values), texts.lengths)
        hashes = hash_texts(texts.values)
        rows = rows_of(hashes, feature.num_rows - 1)
        # Missing values have hash 0, and with it row 0.
        rows += hashes != MISSING
        return FeatureIds(rows, texts.lengths)

    def _num_rows(self, feature: SparseColumn) -> int:
        if feature.encoding == "vocabulary":
            return self._vocabularies[feature.name].num_rows
        return {"hour": 25, "weekday": 8}.get(feature.encoding, feature.num_rows)


def columns_of(
    label: str, dense: Sequence[DenseColumn], features: Sequence[SparseColumn]
) -> dict[str, ColumnKind]:
    """The columns that are read, and what they are for."""
    columns = {column.column: ColumnKind.NUMBER for column in dense}
    for feature in features:
        kind = ColumnKind.INTEGER if feature.is_time else ColumnKind.TEXT
        # Integers are numbers as well as texts, so they serve several features.
        if columns.setdefault(feature.source, kind) is not kind:
            columns[feature.source] = ColumnKind.INTEGER
    columns[label] = ColumnKind.LABEL
    return columns


def transformed(column: pa.ChunkedArray, rules: DenseColumn) -> NDArray[np.float32]:
    """A dense feature, filled, clipped, and on its logarithmic scale."""
    numbers = column.cast(pa.float32(), safe=False).to_numpy()
    values = np.where(np.isfinite(numbers), numbers, np.float32(rules.fill))
    np.clip(values, np.float32(rules.lowest), np.float32(rules.highest), out=values)
    if rules.log1p:
        np.log1p(values, out=values)
    return values


def time_rows(column: pa.ChunkedArray, feature: SparseColumn) -> NDArray[np.int64]:
    """The rows of a part of a time: 1 for the first hour or day, 0 where it is missing."""
    if pt.is_timestamp(column.type):
        column = column.cast(pa.timestamp("s"), safe=False)
    times = column.cast(pa.int64())
    is_missing = np.asarray(times.is_null())
    numbers = times.fill_null(0).to_numpy()
    if feature.time_format == "yymmddhh" and not pt.is_timestamp(column.type):
        numbers = _seconds(numbers)
    if feature.encoding == "hour":
        parts = numbers // _SECONDS_PER_HOUR % 24
    else:
        parts = (numbers // _SECONDS_PER_DAY + _FIRST_DAY) % 7
    return np.where(is_missing, MISSING_ROW, parts + 1)


def _seconds(digits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Seconds since 1970 of times such as 14102100."""
    days, hours = digits // 100, digits % 100
    months = (days // 10_000 + _CENTURY - 1970) * 12 + np.maximum(days // 100 % 100, 1) - 1
    first_days = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    return (first_days + days % 100 - 1) * _SECONDS_PER_DAY + hours * _SECONDS_PER_HOUR
