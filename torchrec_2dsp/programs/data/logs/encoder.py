"""Encode a log's rows as samples, with vocabularies and scales from a pass over the rows."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.programs.data.dataset import DatasetFeature, Progress
from torchrec_2dsp.programs.data.logs.config import DenseColumn, SparseColumn, TableLayout
from torchrec_2dsp.programs.data.logs.files import write_prepared
from torchrec_2dsp.programs.data.logs.ids import (
    MISSING,
    MISSING_ROW,
    NUM_RESERVED,
    UNKNOWN_ROW,
    Origin,
    ValueCounter,
    Vocabulary,
    encoded_texts,
    hash_texts,
    is_read_otherwise,
    joined,
    read_vocabulary,
    rows_of,
    texts_of,
    times_of,
    vocabulary_origin,
    warn_of_other_logs,
    write_vocabulary,
)
from torchrec_2dsp.programs.data.logs.source import LogPiece, LogReader, LogSource, count_rows
from torchrec_2dsp.programs.data.logs.text import label_numbers

_SECONDS_PER_HOUR, _SECONDS_PER_DAY = 3600, 86400
_FIRST_DAY = 3
"""The weekday of 1970-01-01, a Thursday, counted from Monday."""
_CENTURY = 2000
_FIRST_SECOND, _END_SECOND = 631_152_000, 4_133_980_800
"""The beginnings of 1990 and of 2101, in seconds since 1970."""
_SCALES = "scales.json"


@contextmanager
def naming_column(name: str) -> Iterator[None]:
    """Turn pyarrow's errors about values into an `InputError` that names the column."""
    try:
        yield
    except (pa.ArrowException, OverflowError) as error:
        raise InputError(
            f"column {name!r} can't be encoded: {error}; give ids as text or integers, others as "
            "numbers, and None for what is missing"
        ) from error


@dataclass(frozen=True)
class Scale:
    """A dense feature's mean and standard deviation."""

    mean: float

    std: float


class Encoder:
    """Encodes rows as samples."""

    def __init__(
        self,
        config: TableLayout,
        vocabularies: Mapping[str, Vocabulary],
        measured: Mapping[str, Scale],
    ) -> None:
        """Set up encoding with these vocabularies and scales.

        Args:
            config: the label, the dense and the sparse features.
            vocabularies: by feature, for features that use one.
            measured: by column, for dense features with a measured scale.
        """
        self._config, self._vocabularies = config, vocabularies
        self._scales = dict(measured)
        for column in config.dense:
            if column.scale == "given":
                self._scales[column.column] = Scale(column.mean, column.std)
        self.columns = config.read_columns()
        """The columns to read, with their purposes."""
        self.features = tuple(
            DatasetFeature(feature.name, self._num_rows(feature), feature.mean_ids)
            for feature in config.features
        )
        """The samples' features."""

    @property
    def fingerprint(self) -> dict[str, str]:
        """The vocabularies' digests, and the scales up to rounding; see `Dataset.fingerprint`."""
        return {
            **{f"vocabulary of {name}": words.digest for name, words in self._vocabularies.items()},
            **{
                f"scale of {name}": f"mean {scale.mean:.6g}, std {scale.std:.6g}"
                for name, scale in self._scales.items()
            },
        }

    def encode(self, table: pa.Table) -> pa.Table:
        """Encode a table's rows: the label, the dense features, and each sparse feature's ids.

        Ids are integers, or lists where rows may have several.
        """
        names = [self._config.label, *(column.column for column in self._config.dense)]
        columns = [pa.array(label_numbers(table[self._config.label]))]
        for column in self._config.dense:
            with naming_column(column.column):
                values = transformed(table[column.column], column)
            if column.column in self._scales:
                scale = self._scales[column.column]
                values -= np.float32(scale.mean)
                values /= np.float32(scale.std)
            columns.append(pa.array(values))
        for feature in self._config.features:
            with naming_column(feature.source):
                columns.append(self._ids(table[feature.source], feature))
        return pa.Table.from_arrays(columns, [*names, *(feature.name for feature in self.features)])

    def batch(self, samples: pa.Table) -> Batch:
        """Return encoded rows as a TorchRec batch."""
        num_dense = len(self._config.dense)
        labels, *others = map(joined, samples.columns)
        dense = np.empty((len(labels), num_dense), dtype=np.float32)
        for number, column in enumerate(others[:num_dense]):
            dense[:, number] = column
        values, lengths = [], []
        for column in others[num_dense:]:
            is_list = pt.is_list(column.type)
            values.append(np.asarray(column.flatten() if is_list else column))
            lengths.append(
                np.asarray(column.value_lengths())
                if is_list
                else np.ones(len(column), dtype=np.int32)
            )
        sparse = KeyedJaggedTensor(
            keys=[feature.name for feature in self.features],
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
        )
        return Batch(torch.from_numpy(dense), sparse, torch.tensor(np.asarray(labels)))

    def _ids(self, column: pa.ChunkedArray, feature: SparseColumn) -> pa.Array:
        if feature.is_time:
            return pa.array(time_rows(column, feature))

        def rows(values: pa.BinaryArray) -> NDArray[np.int64]:
            if feature.encoding == "vocabulary":
                return self._vocabularies[feature.name].rows(values)
            hashes = hash_texts(values)
            # Missing values have hash 0, and so row 0.
            return rows_of(hashes, feature.num_rows - 1) + (hashes != MISSING)

        ids, lengths = encoded_texts(column, rows, feature.separator, feature.max_ids)
        if lengths is None:
            return pa.array(ids)
        offsets = np.append(np.int32(0), lengths.cumsum(dtype=np.int32))
        return pa.ListArray.from_arrays(offsets, ids)

    def _num_rows(self, feature: SparseColumn) -> int:
        if feature.encoding == "vocabulary":
            return self._vocabularies[feature.name].num_rows
        return {"hour": 25, "weekday": 8}.get(feature.encoding, feature.num_rows)


def transformed(column: pa.ChunkedArray, rules: DenseColumn) -> NDArray[np.float32]:
    """Fill and clip a dense feature, and apply its logarithm."""
    numbers = column.cast(pa.float32(), safe=False).to_numpy()
    values = np.where(np.isfinite(numbers), numbers, np.float32(rules.fill))
    np.clip(values, np.float32(rules.lowest), np.float32(rules.highest), out=values)
    if rules.log1p:
        np.log1p(values, out=values)
    return values


def time_rows(column: pa.ChunkedArray, feature: SparseColumn) -> NDArray[np.int64]:
    """Map a time's hour or weekday to rows: 1 for the first hour or day, 0 for a missing time."""
    if feature.time_format not in ("unix", "yymmddhh"):
        texts = column
        column, is_wrong = times_of(texts, feature.time_format)
        if is_wrong.any():
            text = texts[int(np.flatnonzero(is_wrong)[0])].as_py()
            raise InputError(
                f"{feature.source} is {text!r}, which isn't a time ({feature.time_format}); set "
                "its time_format, or mend the file"
            )
    is_timestamp = pt.is_timestamp(column.type)
    if is_timestamp:
        column = column.cast(pa.timestamp("s"), safe=False)
    times = column.cast(pa.int64())
    is_missing = np.asarray(times.is_null())
    numbers = times.fill_null(0).to_numpy()
    if not is_timestamp:
        is_digits = feature.time_format == "yymmddhh"
        seconds, is_right = _seconds(numbers) if is_digits else (numbers, _is_recent(numbers))
        is_wrong = ~(is_right | is_missing)
        if is_wrong.any():
            raise _no_time(feature, int(numbers[is_wrong][0]))
        numbers = seconds
    if feature.encoding == "hour":
        parts = numbers // _SECONDS_PER_HOUR % 24
    else:
        parts = (numbers // _SECONDS_PER_DAY + _FIRST_DAY) % 7
    return np.where(is_missing, MISSING_ROW, parts + 1)


def _seconds(digits: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Convert times such as 14102100 into seconds since 1970, and return a mask of valid ones."""
    is_right = (digits > 0) & (digits < 10**8)
    days, hours = np.where(is_right, digits, 0) // 100, digits % 100
    month, day = days // 100 % 100, days % 100
    months = (days // 10_000 + _CENTURY - 1970) * 12 + month - 1
    first_day, next_first_day = (
        (months + later).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
        for later in (0, 1)
    )
    is_right &= (month >= 1) & (month <= 12) & (hours < 24)
    is_right &= (day >= 1) & (first_day + day <= next_first_day)
    return (first_day + day - 1) * _SECONDS_PER_DAY + hours * _SECONDS_PER_HOUR, is_right


def _is_recent(seconds: NDArray[np.int64]) -> NDArray[np.bool_]:
    return (seconds >= _FIRST_SECOND) & (seconds < _END_SECOND)


def _no_time(feature: SparseColumn, number: int) -> InputError:
    if feature.time_format == "yymmddhh":
        reason = "which isn't a time (yymmddhh)"
    else:
        reason = "which isn't a time from 1990 to 2100 in seconds (unix)"
        for unit, per_second in (("milliseconds", 10**3), ("microseconds", 10**6)):
            if _is_recent(np.array(number // per_second)):
                reason += f", but looks like {unit}: divide it by {per_second:,}"
    return InputError(
        f"{feature.source} is {number}, {reason}; set its time_format, leave missing times empty, "
        "or mend the file"
    )


class Moments:
    """Accumulates the mean and the standard deviation over chunks, by Chan's rule."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, numbers: NDArray[np.float32]) -> None:
        """Add a chunk."""
        if not len(numbers):
            return
        part = numbers.astype(np.float64)
        mean, count = float(part.mean()), self._count + len(part)
        difference = mean - self._mean
        self._squares += float(np.square(part - mean).sum())
        self._squares += difference**2 * self._count * len(part) / count
        self._mean += difference * len(part) / count
        self._count = count

    def scale(self, column: str) -> Scale:
        """Return the moments of all numbers; ``column`` is for the error message."""
        std = math.sqrt(self._squares / self._count) if self._count else 0.0
        if not std > 0:
            raise ConfigError(
                f"dense column {column!r} has one value in all training rows, so it can't be "
                "standardised; leave it out, or its scale"
            )
        return Scale(self._mean, std)


class Prepared:
    """A folder of vocabularies and scales.

    One pass builds the missing ones, and rebuilds those that the same files gave with another
    layout. Others are reused, even for other files, so that ids stay stable.
    """

    def __init__(self, config: TableLayout) -> None:
        """List the features that need a vocabulary or a measured scale."""
        self._folder = Path(config.prepared)
        self._features = {
            feature.name: feature for feature in config.features if feature.encoding == "vocabulary"
        }
        self._dense = {
            column.column: column for column in config.dense if column.scale == "measured"
        }
        if not config.prepared and (self._features or self._dense):
            name = next(iter([*self._features, *self._dense]))
            raise ConfigError(
                f"prepared is empty, and {name!r} needs a vocabulary or a measured scale; name a "
                "folder where they are kept"
            )

    def prepare(
        self, source: LogSource, pieces: Sequence[LogPiece], progress: Progress | None = None
    ) -> tuple[dict[str, Vocabulary], dict[str, Scale]]:
        """Return the vocabularies by feature and the scales by column, built from training rows."""
        log = {
            "log": f"{source.fingerprint}, {count_rows(pieces)} rows",
            "files": source.digest,
        }
        origins = {name: {**log, "layout": source.layout(name)} for name in source.columns}
        counters = {
            name: ValueCounter()
            for name, feature in self._features.items()
            if not self._file(name).exists() or self._is_stale(feature, origins[feature.source])
        }
        scales, stored = self._read_scales()
        moments = {
            name: Moments()
            for name in self._dense
            if name not in scales or is_read_otherwise(stored[name], origins[name])
        }
        if counters or moments:
            self._pass(source, pieces, counters, moments, progress)
            for name, counter in counters.items():
                feature = self._features[name]
                table = counter.frequent(feature.min_count, max(feature.num_rows - NUM_RESERVED, 0))
                write_vocabulary(self._file(name), table, _rules(feature), origins[feature.source])
        if moments:
            stored |= {
                name: {
                    "rules": _dense_rules(self._dense[name]),
                    **asdict(moment.scale(name)),
                    **origins[name],
                }
                for name, moment in moments.items()
            }
            write_prepared(self._folder / _SCALES, json.dumps(stored, indent=2).encode())
        prepared = self.read()
        files = [self._file(name) for name in self._features]
        warn_of_other_logs(
            {str(file): vocabulary_origin(file) for file in files},
            log["log"],
            f"whose values keep their rows; all others have row {UNKNOWN_ROW}",
        )
        warn_of_other_logs(
            {f"{self._folder / _SCALES} ({name!r})": stored[name] for name in self._dense},
            log["log"],
            "and its values are scaled as that log's",
        )
        return prepared

    def read(self) -> tuple[dict[str, Vocabulary], dict[str, Scale]]:
        """Return the existing vocabularies by feature and scales by column.

        Raises:
            ConfigError: one is missing.
        """
        scales, _ = self._read_scales()
        missing = [
            *(self._file(name) for name in self._features if not self._file(name).exists()),
            *(f"the scale of {name}" for name in self._dense if name not in scales),
        ]
        if missing:
            raise ConfigError(f"{self._folder} lacks {missing[0]}; copy it whole")
        vocabularies = {
            name: Vocabulary(read_vocabulary(self._file(name), _rules(feature)))
            for name, feature in self._features.items()
        }
        return vocabularies, scales

    def _pass(
        self,
        source: LogSource,
        pieces: Sequence[LogPiece],
        counters: Mapping[str, ValueCounter],
        moments: Mapping[str, Moments],
        progress: Progress | None,
    ) -> None:
        num_rows, reader = 0, LogReader(source)
        for piece in pieces:
            table = reader.read(piece)
            for name, counter in counters.items():
                feature = self._features[name]
                values, _ = texts_of(table[feature.source], feature.separator, feature.max_ids)
                counter.add(values)
            for name, moment in moments.items():
                moment.add(transformed(table[name], self._dense[name]))
            num_rows += piece.num_rows
            if progress is not None:
                progress("counting values", num_rows, count_rows(pieces))

    def _file(self, feature: str) -> Path:
        return self._folder / f"vocabulary_{feature}.parquet"

    def _is_stale(self, feature: SparseColumn, origin: Origin) -> bool:
        """Return whether a vocabulary was built from the same files with another layout."""
        before = vocabulary_origin(self._file(feature.name))
        return before.get("rules") == _rules(feature) and is_read_otherwise(before, origin)

    def _read_scales(self) -> tuple[dict[str, Scale], dict[str, Any]]:
        """Return this config's scales, and everything stored for any column."""
        path = self._folder / _SCALES
        if not self._dense or not path.exists():
            return {}, {}
        try:
            stored = dict(json.loads(path.read_text()))
            scales = {}
            for name, column in self._dense.items():
                if name in stored:
                    rules = stored[name]["rules"]
                    if rules != _dense_rules(column):
                        raise ConfigError(
                            f"{path}: {name!r} was measured with {rules}, and the config says "
                            f"{_dense_rules(column)}; delete the file to measure again"
                        )
                    scales[name] = Scale(float(stored[name]["mean"]), float(stored[name]["std"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{path} can't be read: {error}; delete it, and it is made again"
            ) from error
        return scales, stored


def _rules(feature: SparseColumn) -> str:
    return (
        f"column={feature.source!r}, min_count={feature.min_count}, num_rows={feature.num_rows}, "
        f"separator={feature.separator!r}, max_ids={feature.max_ids}"
    )


def _dense_rules(column: DenseColumn) -> str:
    return (
        f"fill={column.fill}, lowest={column.lowest}, highest={column.highest}, "
        f"log1p={column.log1p}"
    )
