"""`RequestEncoder`: values of a log become what an exported model takes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.logs.encoder import Encoder
from torchrec_2dsp.programs.data.logs.sections import TableConfig
from torchrec_2dsp.programs.data.logs.table_data import prepared_encoder
from torchrec_2dsp.programs.export.encoding import read_encoding
from torchrec_2dsp.programs.export.folder import FEATURES_FILE, ServingInputs
from torchrec_2dsp.programs.export.served import request_of


class RequestEncoder:
    """Makes requests of raw values, as training made samples of them.

    Example::

        model = torch.jit.load("served/model.pt")
        encoder = RequestEncoder.load("served")
        columns = {"user": ["u1", "u7"], "tags": ["new|red", ""], "price": [3.5, None]}
        request = encoder.encode(columns)
        scores = model(*request)["scores"]
    """

    def __init__(self, encoder: Encoder, label: str, inputs: ServingInputs) -> None:
        """
        Args:
            encoder: makes samples of rows.
            label: the column of the labels, which requests lack.
            inputs: what the model takes.
        """
        self._encoder, self._label = encoder, label
        self._names = [feature.name for feature in inputs.features]
        self._num_dense = inputs.num_dense
        self.columns = tuple(name for name in encoder.columns if name != label)
        """The columns of a request."""

    @classmethod
    def load(cls, folder: str | Path) -> "RequestEncoder":
        """The encoder of an export's folder, which needs nothing but the folder.

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
        return cls(prepared_encoder(table), table.label, inputs)

    def encode(
        self, columns: Mapping[str, Sequence[Any]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three arguments of the model: dense features, ids, and lengths.

        Args:
            columns: the values of each column, one for each sample; ``None`` for what is missing. A
                feature with several values takes a list, or a text with the log's separator.

        Raises:
            ConfigError: a column is missing or unknown, or columns have different lengths.
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
        arrays = {name: _array(values) for name, values in columns.items()}
        labels = pa.array([0.0] * num_samples, pa.float32())
        samples = self._encoder.encode(pa.table(arrays | {self._label: labels}))
        batch = samples.batch([feature.name for feature in self._encoder.features])
        dense = batch.dense_features[:, : self._num_dense]
        return request_of(dense, batch.sparse_features, self._names)


def _array(values: Sequence[Any]) -> pa.Array:
    array = pa.array(values)
    # Nothing but missing values has no type of its own.
    return array.cast(pa.string()) if pa.types.is_null(array.type) else array
