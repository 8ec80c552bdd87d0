"""The data and the models that a benchmark can train."""

from typing import Annotated

from pydantic import Field

from torchrec_2dsp.programs.config.sections import ModelConfig
from torchrec_2dsp.programs.data.dataset import BatchShape
from torchrec_2dsp.programs.data.synthetic import SyntheticData
from torchrec_2dsp.programs.data.synthetic_sequences import SyntheticSequencesConfig
from torchrec_2dsp.programs.models.sequence import SequenceModelConfig

BenchData = Annotated[SyntheticData | SyntheticSequencesConfig, Field(discriminator="kind")]
"""Synthetic clicks or sequences."""

BenchModel = Annotated[ModelConfig | SequenceModelConfig, Field(discriminator="kind")]
"""A model of clicks or of sequences."""


def check_pair(data: BenchData, model: BenchModel) -> None:
    """Raise `ValueError` if a model can't train on the data."""
    if isinstance(data, SyntheticData) is isinstance(model, SequenceModelConfig):
        raise ValueError(
            f"model.kind={model.kind!r} can't train on data.kind={data.kind!r}; use "
            '"sequence" and "synthetic_sequences" together'
        )


def shape_of(data: BenchData) -> BatchShape:
    """The features of a benchmark; synthetic clicks know which rows are used most as well."""
    return data if isinstance(data, SyntheticData) else data.dataset()
