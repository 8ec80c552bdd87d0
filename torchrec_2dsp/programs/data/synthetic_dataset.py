"""`SyntheticDataset`: the synthetic clicks as a `Dataset`, and their section of a config."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Literal

from torchrec.datasets.utils import Batch

from torchrec_2dsp.programs.data.dataset import DatasetFeature, Split
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig, make_batch


class SyntheticDataset:
    """Synthetic clicks without an end: every batch is computed from its number.

    Example:
        >>> from torchrec_2dsp.programs.data.dataset import Split
        >>> from torchrec_2dsp.programs.data.synthetic_dataset import SyntheticData
        >>> data = SyntheticData.model_validate({"features": [{"name": "user", "num_rows": 9}]})
        >>> batches = data.dataset().batches(
        ...     Split.TRAIN, global_batch_size=8, rank=0, world_size=2, start=3
        ... )
        >>> next(batches).labels.shape
        torch.Size([4])
    """

    def __init__(self, config: SyntheticConfig) -> None:
        self._config = config

    @property
    def features(self) -> Sequence[DatasetFeature]:
        """The sparse features, in the order of the batch."""
        return self._config.features

    @property
    def num_dense(self) -> int:
        """How many dense features there are."""
        return self._config.num_dense

    def num_train_batches(self, global_batch_size: int) -> None:
        """Return none: training batches never end."""

    def batches(
        self, split: Split, *, global_batch_size: int, rank: int, world_size: int, start: int = 0
    ) -> Iterator[Batch]:
        """This rank's part of the global batches of a split, from number ``start`` on, endlessly.

        Args:
            split: which samples.
            global_batch_size: samples of all ranks together; a multiple of ``world_size``.
            rank: which part of each batch.
            world_size: how many parts there are.
            start: the number of the first batch.
        """
        for number in count(start):
            yield make_batch(
                self._config,
                step=number,
                global_batch_size=global_batch_size,
                rank=rank,
                world_size=world_size,
                split=split,
            )


class SyntheticData(SyntheticConfig):
    """The section ``[data]`` of a config for synthetic clicks."""

    kind: Literal["synthetic"] = "synthetic"
    """The kind of the data; a section that doesn't say it is synthetic."""

    def dataset(self) -> SyntheticDataset:
        """The batches that the section describes."""
        return SyntheticDataset(self)
