"""All kinds of models that a config may name: how each is built, fed and evaluated."""

from typing import Annotated

import torch
from torch import nn

from torchrec_2dsp.cost.dense import Transformer
from torchrec_2dsp.programs.config.section import Kinds
from torchrec_2dsp.programs.config.sections import ModelConfig
from torchrec_2dsp.programs.data.dataset import Dataset
from torchrec_2dsp.programs.data.negatives import WithNegatives, feature_of
from torchrec_2dsp.programs.models.dense import Layered
from torchrec_2dsp.programs.models.model import PlannedSection, build_model
from torchrec_2dsp.programs.models.own_model import OwnModelConfig, build_own_model
from torchrec_2dsp.programs.models.ranking import RankingConfig
from torchrec_2dsp.programs.models.sequence import NextItemModel, SequenceModelConfig
from torchrec_2dsp.programs.models.sequence_layers import (
    SEQUENCE_TENSOR_PLAN,
    TransformerBlock,
)
from torchrec_2dsp.programs.models.two_tower import TwoTowerConfig, TwoTowerModel
from torchrec_2dsp.shard.initial_tables import draw_whole_tables_


class PlannedModelConfig(ModelConfig, PlannedSection):
    """TorchRec's DLRM or DCN, with planner options."""


TrainedModelConfig = Annotated[
    PlannedModelConfig | SequenceModelConfig | TwoTowerConfig | OwnModelConfig, Kinds()
]
"""The section ``[model]`` of a training program's config."""

ModelSection = ModelConfig | SequenceModelConfig | TwoTowerConfig | OwnModelConfig
"""The section ``[model]`` of a config, told apart by its `kind`."""


def build_any_model(data: Dataset, model: ModelSection, *, tables_device: str = "cpu") -> nn.Module:
    """Build the unsharded model; equal configs give equal weights on every rank.

    Tables are drawn as sharders with ``init_seed=model.seed`` draw them; a user's own factory draws
    its own. ``tables_device="meta"`` leaves tables without weights, for models that no rank can
    hold.

    Raises:
        ConfigError: the data lacks a feature that the model names, or a factory can't be called.
    """
    if isinstance(model, ModelConfig):
        return build_model(data, model, tables_device=tables_device)
    if isinstance(model, OwnModelConfig):
        return build_own_model(model, data.features, data.num_dense)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        if isinstance(model, SequenceModelConfig):
            num_items = feature_of(data.features, model.feature).num_rows
            unsharded = NextItemModel(model, num_items, tables_device)
        else:
            unsharded = TwoTowerModel(model, data.features, data.num_dense, tables_device)
        if tables_device != "meta":
            draw_whole_tables_(unsharded, model.seed)
        return unsharded


def dataset_for(model: ModelSection, dataset: Dataset) -> Dataset:
    """Wrap a dataset with negatives, where a model needs them."""
    if not isinstance(model, SequenceModelConfig):
        return dataset
    return WithNegatives(
        dataset,
        model.feature,
        num_negatives=model.num_negatives,
        eval_negatives=model.eval_negatives,
        kind=model.negatives,
        seed=model.seed,
    )


def layered_of(model: nn.Module) -> Layered | None:
    """Return the layers that a model's ranks may share; `None` for a model without a stack."""
    if not isinstance(model, NextItemModel):
        return None
    return Layered(
        stack=model.dense,
        name="dense",
        units=(TransformerBlock,),
        tensor_plan=SEQUENCE_TENSOR_PLAN,
        sample=model.random_examples,
    )


def transformer_of(model: ModelSection) -> Transformer | None:
    """Describe the layers that a model's ranks may share; `None` for a model without them."""
    if not isinstance(model, SequenceModelConfig):
        return None
    length = model.max_length - 1
    return Transformer(
        num_blocks=model.num_blocks,
        dim=model.dim,
        length=length,
        expansion=model.hidden_factor,
        num_targets=1 + round(model.num_negatives / length),
    )


def ranking_of(model: ModelSection) -> RankingConfig:
    """Return the ranking section; "none" for a model that predicts clicks."""
    if isinstance(model, SequenceModelConfig | TwoTowerConfig):
        return model.ranking
    return RankingConfig(among="none")


def metrics_of(model: ModelSection) -> tuple[str, ...]:
    """Name a model's evaluation metrics, the usual one last."""
    ranking = ranking_of(model)
    of_rankings = () if ranking.among == "none" else ranking.names
    return ("loss", *of_rankings, *(("auc", "ne") if has_clicks(model) else ()))


def has_clicks(model: ModelSection) -> bool:
    """Return whether evaluation scores are click logits, which have AUC and NE."""
    return not (
        isinstance(model, SequenceModelConfig)
        or (isinstance(model, TwoTowerConfig) and model.loss == "in_batch")
    )
