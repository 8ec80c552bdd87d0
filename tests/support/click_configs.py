"""The sections of a config about clicks, for whoever needs to know that they are that."""

from typing import Any

from torchrec_2dsp.programs.config.sections import ModelConfig
from torchrec_2dsp.programs.data.synthetic import SyntheticData


def click_data(config: Any) -> SyntheticData:
    """The synthetic clicks of a training or benchmark config."""
    assert isinstance(config.data, SyntheticData)
    return config.data


def click_model(config: Any) -> ModelConfig:
    """The DLRM or DCN of a training or benchmark config."""
    assert isinstance(config.model, ModelConfig)
    return config.model
