"""Encode requests: a log's raw values become the exported model's inputs.

An export's folder holds the config's data section, and the vocabularies and scales that were
prepared for it.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import tomli_w
import torch

from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.programs.config.config_file import load_config, with_absolute_paths
from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.data.dataset import Dataset
from torchrec_2dsp.programs.data.logs.config import LogConfig
from torchrec_2dsp.programs.data.logs.encoder import Encoder, Prepared, naming_column
from torchrec_2dsp.programs.data.logs.ids import (
    NUM_RESERVED,
    Vocabulary,
    read_vocabulary,
    write_vocabulary,
)
from torchrec_2dsp.programs.data.logs.sections import (
    InteractionsConfig,
    KnownLogConfig,
    LoggedData,
    TableConfig,
)
from torchrec_2dsp.programs.data.logs.sequence_data import SequenceData
from torchrec_2dsp.programs.export.served import (
    FEATURES_FILE,
    ServingInputs,
    is_integer,
    request_of,
)
from torchrec_2dsp.programs.train.config import TrainConfig


class RequestEncoder:
    """Encodes raw values as requests, as training encoded samples.

    Example::

        model = torch.jit.load("served/model.pt")
        encoder = RequestEncoder.load("served")
        columns = {"user": ["u1", "u7"], "tags": ["new|red", ""], "price": [3.5, None]}
        request = encoder.encode(columns)
        scores = model(*request)["scores"]
    """

    def __init__(self, encoder: Encoder, label: str, inputs: ServingInputs) -> None:
        self._encoder, self._label = encoder, label
        self._names = [feature.name for feature in inputs.features]
        self._num_dense = inputs.num_dense
        self.columns = tuple(name for name in encoder.columns if name != label)
        """A request's columns."""

    @classmethod
    def load(cls, folder: str | Path) -> "RequestEncoder":
        """Load the encoder in an export's folder, which needs nothing but the folder.

        Raises:
            ConfigError: the folder has no encoding, or a part of it is missing.
        """
        folder = Path(folder)
        table = read_encoding(folder)
        if not isinstance(table, TableConfig):
            raise ConfigError(
                f"{folder} is the export of a model of sequences, whose requests are histories of "
                "items; use HistoryEncoder"
            )
        inputs = ServingInputs.load(folder / FEATURES_FILE)
        return cls(Encoder(table, *Prepared(table).read()), table.label, inputs)

    def encode(
        self, columns: Mapping[str, Sequence[Any]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the model's three arguments: dense features, ids, and lengths.

        Args:
            columns: the values of each column, one for each sample; ``None`` if missing. A
                feature with several values takes a list, or a text with the log's separator.

        Raises:
            ConfigError: a column is missing or unknown, or columns have different lengths.
            InputError: a column's values are of another kind than in the log.
        """
        wrong = sorted(set(self.columns) ^ set(columns))
        if wrong:
            is_missing = wrong[0] in self.columns
            problem = "is missing" if is_missing else "isn't known"
            raise ConfigError(
                f"the column {wrong[0]!r} {problem}; a request has {', '.join(self.columns)}"
            )
        sizes = {name: len(values) for name, values in columns.items()}
        if len(set(sizes.values())) != 1:
            raise ConfigError(f"columns have different numbers of values: {sizes}")
        (num_samples,) = set(sizes.values())
        arrays = {name: _array(name, values) for name, values in columns.items()}
        labels = pa.array([0.0] * num_samples, pa.float32())
        samples = self._encoder.encode(pa.table(arrays | {self._label: labels}))
        batch = self._encoder.batch(samples)
        dense = batch.dense_features[:, : self._num_dense]
        return request_of(dense, batch.sparse_features, self._names)


def _array(name: str, values: Sequence[Any]) -> pa.Array:
    with naming_column(name):
        array = pa.array(values)
    # A column with only missing values has no type of its own.
    return array.cast(pa.string()) if pa.types.is_null(array.type) else array


class HistoryEncoder:
    """Encodes histories as requests, as training encoded an interaction log's sequences.

    Example::

        model = torch.jit.load("served/model.pt")
        encoder = HistoryEncoder.load("served")
        request = encoder.encode([["i3", "i8"], ["i5"]])
        answer = model.next_items(*request, 10, True)
        print(encoder.names(answer["items"]))
    """

    def __init__(self, values: pa.BinaryArray) -> None:
        """Take the items' names, in the order of their numbers."""
        self._values, self._vocabulary = values, Vocabulary(values)

    @classmethod
    def load(cls, folder: str | Path) -> "HistoryEncoder":
        """Load the encoder in an export's folder, which needs nothing but the folder.

        Raises:
            ConfigError: the model wasn't trained on a log of interactions, or the items are
                missing.
        """
        folder = Path(folder)
        data = read_encoding(folder)
        if not isinstance(data, InteractionsConfig):
            raise ConfigError(
                f"{folder} is the export of a model that was trained on a log of rows; use "
                "RequestEncoder"
            )
        path = _items_path(folder, data.feature)
        if not path.exists():
            raise ConfigError(f"{folder} lacks {path}; copy it whole")
        return cls(read_vocabulary(path, _ITEM_RULES))

    def encode(
        self, histories: Sequence[Sequence[str | bytes | int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the three arguments: no dense features, the items, and how many there are.

        Items that the log didn't have are left out: the table has no row for them. Histories begin
        with the oldest item.
        """
        lengths = torch.tensor([len(history) for history in histories], dtype=torch.int64)
        values = [_bytes_of(item) for history in histories for item in history]
        ids = torch.from_numpy(self._vocabulary.rows(pa.array(values, pa.binary())) - NUM_RESERVED)
        is_known = ids >= 0
        sample_of_item = torch.repeat_interleave(torch.arange(len(histories)), lengths)
        num_known = torch.bincount(sample_of_item[is_known], minlength=len(histories))
        return torch.empty(len(histories), 0), ids[is_known], num_known

    def names(self, items: torch.Tensor) -> list[list[str | None]]:
        """Return the names of answered items, a row for each sample; none for -1.

        Raises:
            InputError: the items aren't rows of the table's.
        """
        num_items = len(self._values)
        if items.dim() != 2 or not is_integer(items) or bool((items >= num_items).any()):
            raise InputError(
                f"items aren't rows of numbers below {num_items}; give those of next_items"
            )
        places = pa.array(items.clamp(min=0).numpy().ravel(), mask=(items < 0).numpy().ravel())
        texts: list[bytes | None] = self._values.take(places).to_pylist()
        names = [None if text is None else text.decode("utf-8", "replace") for text in texts]
        width = items.shape[1]
        return [names[width * row : width * (row + 1)] for row in range(len(items))]


def _bytes_of(item: str | bytes | int) -> bytes:
    # As in a log, an integer counts as its text.
    return item if isinstance(item, bytes) else str(item).encode()


DATA_FILE, PREPARED_FOLDER = "data.toml", "prepared"
"""The encoding of values as ids: the config section, and its prepared files."""
_ENCODING_FILES = ("vocabulary_*.parquet", "vocabulary_*/**/*.parquet", "scales.json")
"""Patterns of the prepared files; a feature's name may have slashes."""
_ITEM_RULES = "the items of a log of interactions, by their numbers from 0 on"


class _ServedData(Section):
    """The content of an export's data.toml."""

    data: LoggedData


def write_encoding(config: TrainConfig, dataset: Dataset, folder: Path) -> None:
    """Write a log's section, and the vocabularies and scales that it uses."""
    data = config.data
    if not isinstance(data, LogConfig | InteractionsConfig):
        return
    section: dict[str, Any] = with_absolute_paths(config)["data"]
    copies = folder / PREPARED_FOLDER
    if isinstance(dataset, SequenceData):
        items = pa.table({"value": dataset.log.item_values})
        write_vocabulary(_items_path(folder, dataset.features[0].name), items, _ITEM_RULES)
    elif isinstance(data, LogConfig) and data.prepared:
        section["prepared"] = PREPARED_FOLDER
        copies.mkdir()
        for pattern in _ENCODING_FILES:
            for path in sorted(Path(data.prepared).glob(pattern)):
                copy = copies / path.relative_to(data.prepared)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    (folder / DATA_FILE).write_text(tomli_w.dumps({"data": section}))


def read_encoding(folder: Path) -> TableConfig | InteractionsConfig:
    """Read the log section whose values an export's folder encodes.

    Raises:
        ConfigError: the folder has none.
    """
    if not (folder / DATA_FILE).exists():
        raise ConfigError(
            f"{folder} has no {DATA_FILE}; only exports of models that were trained on a log say "
            "how values become ids"
        )
    return _as_table(load_config(_ServedData, folder / DATA_FILE).data)


def dense_columns(data: object) -> tuple[str, ...]:
    """Name a log's dense columns, in order; none for data without columns."""
    return tuple(column.column for column in getattr(_as_table(data), "dense", ()))


def _as_table(data: Any) -> Any:
    return data.table() if isinstance(data, KnownLogConfig) else data


def _items_path(folder: Path, feature: str) -> Path:
    return folder / PREPARED_FOLDER / f"vocabulary_{feature}.parquet"
