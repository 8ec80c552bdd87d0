"""What a pass over the training rows finds before a log can be encoded: vocabularies, means."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.logs.blocks import ColumnKind
from torchrec_2dsp.programs.data.logs.config import DenseColumn, SparseColumn
from torchrec_2dsp.programs.data.logs.encoder import Scale, transformed
from torchrec_2dsp.programs.data.logs.ids import (
    NUM_RESERVED,
    ValueCounter,
    Vocabulary,
    read_vocabulary,
    texts_of,
    write_vocabulary,
)
from torchrec_2dsp.programs.data.logs.row_index import write_prepared
from torchrec_2dsp.programs.data.logs.selection import Selection

Progress = Callable[[int, int], None]
"""A function that is told how many rows were read, and of how many."""
_SCALES = "scales.json"


class Moments:
    """The mean and the standard deviation of numbers that come in parts, by Chan's rule."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, numbers: NDArray[np.float32]) -> None:
        """Add some numbers."""
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
        """The mean and the standard deviation of all numbers.

        Args:
            column: where they are from, for the error.
        """
        std = math.sqrt(self._squares / self._count) if self._count else 0.0
        if not std > 0:
            raise ConfigError(
                f"dense column {column!r} has one value in all training rows, so it can't be "
                "standardised; leave it out, or its scale"
            )
        return Scale(self._mean, std)


class Prepared:
    """Vocabularies and scales in a folder. What isn't there is made by one pass; what is there is
    used as it is, also for other files, so that ids stay what they were."""

    def __init__(
        self, folder: str, dense: tuple[DenseColumn, ...], features: tuple[SparseColumn, ...]
    ) -> None:
        """
        Args:
            folder: where they are kept.
            dense: the dense features.
            features: the sparse features.
        """
        self._folder = Path(folder)
        self._features = {
            feature.name: feature for feature in features if feature.encoding == "vocabulary"
        }
        self._dense = {column.column: column for column in dense if column.scale == "measured"}
        if not folder and (self._features or self._dense):
            name = next(iter([*self._features, *self._dense]))
            raise ConfigError(
                f"prepared is empty, and {name!r} needs a vocabulary or a measured scale; name a "
                "folder where they are kept"
            )

    def prepare(
        self,
        selection: Selection,
        columns: Mapping[str, ColumnKind],
        progress: Progress | None = None,
    ) -> tuple[dict[str, Vocabulary], dict[str, Scale]]:
        """The vocabularies by feature and the scales by column.

        Args:
            selection: the training rows.
            columns: the columns that are read, by which a line is judged malformed.
            progress: called after each block, where a pass is needed.
        """
        counters = {
            name: ValueCounter() for name in self._features if not self._file(name).exists()
        }
        scales = self._read_scales()
        moments = {name: Moments() for name in self._dense if name not in scales}
        if counters or moments:
            self._pass(selection, columns, counters, moments, progress)
            for name, counter in counters.items():
                feature = self._features[name]
                most = max(feature.num_rows - NUM_RESERVED, 0)
                table = counter.frequent(feature.min_count, most)
                write_vocabulary(self._file(name), table, _rules(feature))
            scales |= {name: moment.scale(name) for name, moment in moments.items()}
        if moments:
            content = {
                name: {"rules": _dense_rules(self._dense[name]), **asdict(scale)}
                for name, scale in scales.items()
            }
            write_prepared(self._folder / _SCALES, json.dumps(content, indent=2).encode())
        return self._vocabularies(), scales

    def read(self) -> tuple[dict[str, Vocabulary], dict[str, Scale]]:
        """The vocabularies by feature and the scales by column, all of which have to be there.

        Raises:
            ConfigError: one isn't.
        """
        scales = self._read_scales()
        missing = [
            *(self._file(name) for name in self._features if not self._file(name).exists()),
            *(f"the scale of {name}" for name in self._dense if name not in scales),
        ]
        if missing:
            raise ConfigError(f"{self._folder} lacks {missing[0]}; copy it whole")
        return self._vocabularies(), scales

    def _vocabularies(self) -> dict[str, Vocabulary]:
        return {
            name: Vocabulary(read_vocabulary(self._file(name), _rules(feature)))
            for name, feature in self._features.items()
        }

    def _pass(
        self,
        selection: Selection,
        columns: Mapping[str, ColumnKind],
        counters: Mapping[str, ValueCounter],
        moments: Mapping[str, Moments],
        progress: Progress | None,
    ) -> None:
        num_rows = 0
        for piece in selection.pieces:
            table = selection.read(piece, columns)
            for name, counter in counters.items():
                feature = self._features[name]
                texts = texts_of(table[feature.source], feature.separator, feature.max_ids)
                counter.add(texts.values)
            for name, moment in moments.items():
                moment.add(transformed(table[name], self._dense[name]))
            num_rows += piece.num_rows
            if progress is not None:
                progress(num_rows, selection.num_rows)

    def _file(self, feature: str) -> Path:
        return self._folder / f"vocabulary_{feature}.parquet"

    def _read_scales(self) -> dict[str, Scale]:
        path = self._folder / _SCALES
        if not self._dense or not path.exists():
            return {}
        try:
            stored = json.loads(path.read_text())
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
        return scales


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
