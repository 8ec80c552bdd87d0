"""`served_model`: how a model of each kind serves."""

from typing import Any

from torch import nn

from torchrec_2dsp.programs.config.sections import ModelConfig
from torchrec_2dsp.programs.data.dataset import BatchShape
from torchrec_2dsp.programs.export.next_items import ServedNextItems
from torchrec_2dsp.programs.export.own import served_own_model
from torchrec_2dsp.programs.export.scores import served_clicks, served_towers
from torchrec_2dsp.programs.export.served import ServedModel
from torchrec_2dsp.programs.models.kinds import ModelSection
from torchrec_2dsp.programs.models.own_model import OwnModelConfig
from torchrec_2dsp.programs.models.sequence import SequenceModelConfig


def served_model(model: nn.Module, section: ModelSection, data: BatchShape) -> ServedModel:
    """How a trained model serves, by its kind.

    Args:
        model: with the tables as they were trained.
        section: the section of the config that it was built by.
        data: the features of a batch.

    Raises:
        UnsupportedError: a user's own model has tables that can't be quantised.
    """
    built: Any = model
    if isinstance(section, OwnModelConfig):
        return served_own_model(model, data, section.factory)
    if isinstance(section, SequenceModelConfig):
        return ServedNextItems(built, section)
    if isinstance(section, ModelConfig):
        return served_clicks(built)
    return served_towers(built)
