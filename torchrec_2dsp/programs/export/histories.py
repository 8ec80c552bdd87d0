"""`HistoryEncoder`: names of items become what an exported sequence model takes, and come back."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import torch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.logs.ids import NUM_RESERVED, Vocabulary
from torchrec_2dsp.programs.data.logs.sections import InteractionsConfig
from torchrec_2dsp.programs.export.encoding import read_encoding, read_items


class HistoryEncoder:
    """Makes requests of histories, as training made sequences of a log of interactions.

    Example::

        model = torch.jit.load("served/model.pt")
        encoder = HistoryEncoder.load("served")
        request = encoder.encode([["i3", "i8"], ["i5"]])
        answer = model.next_items(*request, 10, True)
        print(encoder.names(answer["items"]))
    """

    def __init__(self, values: pa.BinaryArray) -> None:
        """
        Args:
            values: the names of the items, in the order of their numbers.
        """
        self._values, self._vocabulary = values, Vocabulary(values)

    @classmethod
    def load(cls, folder: str | Path) -> "HistoryEncoder":
        """The encoder of an export's folder, which needs nothing but the folder.

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
        return cls(read_items(folder, data.feature))

    def encode(
        self, histories: Sequence[Sequence[str | bytes | int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three arguments of the model: no dense features, the items, and how many there are.

        Items that the log didn't have are left out, since the table has no row for them.

        Args:
            histories: the items of each sample, oldest first.
        """
        lengths = torch.tensor([len(history) for history in histories], dtype=torch.int64)
        values = [_bytes_of(item) for history in histories for item in history]
        ids = torch.from_numpy(self._vocabulary.rows(pa.array(values, pa.binary())) - NUM_RESERVED)
        is_known = ids >= 0
        sample_of_item = torch.repeat_interleave(torch.arange(len(histories)), lengths)
        num_known = torch.bincount(sample_of_item[is_known], minlength=len(histories))
        return torch.empty(len(histories), 0), ids[is_known], num_known

    def names(self, items: torch.Tensor) -> list[list[str | None]]:
        """The names of the items that the model answered with; none for -1.

        Args:
            items: a row of items for each sample.
        """
        places = pa.array(items.clamp(min=0).numpy().ravel(), mask=(items < 0).numpy().ravel())
        texts: list[bytes | None] = self._values.take(places).to_pylist()
        names = [None if text is None else text.decode("utf-8", "replace") for text in texts]
        width = items.shape[1]
        return [names[width * row : width * (row + 1)] for row in range(len(items))]


def _bytes_of(item: str | bytes | int) -> bytes:
    # As in a log, an integer is the text of it.
    return item if isinstance(item, bytes) else str(item).encode()
