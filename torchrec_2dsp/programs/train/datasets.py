"""The kinds of data and of models that a training config may name."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from torchrec_2dsp.programs.config.sections import ModelConfig
from torchrec_2dsp.programs.data.dataset import BatchShape, Dataset
from torchrec_2dsp.programs.data.logs.sections import (
    AvazuConfig,
    CriteoConfig,
    InteractionsConfig,
    TableConfig,
)
from torchrec_2dsp.programs.data.synthetic_dataset import SyntheticData
from torchrec_2dsp.programs.data.synthetic_sequences import SyntheticSequencesConfig
from torchrec_2dsp.programs.models.own_model import OwnModelConfig
from torchrec_2dsp.programs.models.planned_section import ShardingTypes
from torchrec_2dsp.programs.models.sequence.config import SequenceModelConfig
from torchrec_2dsp.programs.models.two_tower import TwoTowerConfig


class PlannedModelConfig(ModelConfig):
    """TorchRec's DLRM or DCN, and what its planner may do."""

    sharding_types: ShardingTypes = ("table_wise", "row_wise")
    """The types that the planner may choose from. Column-wise shards have a row-wise moment each,
    and data-parallel tables are trained by the dense optimizer: with those, runs on different
    meshes train by different rules."""

    @field_validator("sharding_types")
    @classmethod
    def _check_types(cls, types: tuple[str, ...]) -> tuple[str, ...]:
        if not types:
            raise ValueError("it is empty; name at least one sharding type")
        return types


DataConfig = Annotated[
    SyntheticData
    | SyntheticSequencesConfig
    | TableConfig
    | CriteoConfig
    | AvazuConfig
    | InteractionsConfig,
    Field(discriminator="kind"),
]
"""A section ``[data]``: of one kind, with a method ``dataset()`` that makes the `Dataset`."""

TrainedModelConfig = Annotated[
    PlannedModelConfig | SequenceModelConfig | TwoTowerConfig | OwnModelConfig,
    Field(discriminator="kind"),
]
"""A section ``[model]``, of one kind."""

ENDLESS = ("synthetic", "synthetic_sequences")
"""The kinds whose batches never end."""


def shape_of(config: Any, dataset: Dataset) -> BatchShape:
    """The features that a model is built and planned for.

    Synthetic clicks describe them themselves, and with them which rows are used most.
    """
    return config if isinstance(config, SyntheticData) else dataset
