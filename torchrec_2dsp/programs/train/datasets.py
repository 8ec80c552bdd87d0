"""The kinds of data that a training config may name."""

from torchrec_2dsp.programs.data.dataset import BatchShape, Dataset
from torchrec_2dsp.programs.data.synthetic_dataset import SyntheticData

DataConfig = SyntheticData
"""A section ``[data]``: of one kind, with a method ``dataset()`` that makes the `Dataset`."""

ENDLESS = ("synthetic",)
"""The kinds whose batches never end."""


def shape_of(config: DataConfig, dataset: Dataset) -> BatchShape:
    """The features that a model is built and planned for.

    Synthetic data describes them itself, and with them which rows are used most.
    """
    return config if isinstance(config, SyntheticData) else dataset
