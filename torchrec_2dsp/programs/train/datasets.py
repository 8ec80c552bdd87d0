"""The kinds of data and of models that a training config may name."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from torchrec_2dsp.programs.config.sections import ModelConfig
from torchrec_2dsp.programs.data.dataset import BatchShape, Dataset, Split
from torchrec_2dsp.programs.data.logs.sections import (
    AvazuConfig,
    CriteoConfig,
    InteractionsConfig,
    TableConfig,
)
from torchrec_2dsp.programs.data.logs.sequence_data import SequenceData
from torchrec_2dsp.programs.data.logs.table_data import TableData
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


def splits_of(dataset: Dataset) -> str:
    """What of a log is trained on, and what is held out, in words; empty for data without files."""
    if isinstance(dataset, TableData):
        rows, held_out = (dataset.num_rows(split) for split in (Split.TRAIN, Split.EVAL))
        return f"{rows:,} rows to train on, {held_out:,} rows held out: {dataset.held_out.words}"
    if isinstance(dataset, SequenceData):
        log = dataset.log
        left_out = f", {log.num_left_out:,} others have too few" if log.num_left_out else ""
        return (
            f"{log.num_users:,} users with {len(log.items):,} uses of {len(log.item_names):,} "
            f"items{left_out}; held out: the last of each user"
        )
    return ""
