"""DLRM and DCN over a dataset's features, and what all model sections share."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import AfterValidator, Field
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mlp import Perceptron

from torchrec_2dsp.dense.thresholded import Thresholded, ThresholdKind
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.parameter_sharding import type_2d
from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.config.sections import ModelConfig, SplitPlace
from torchrec_2dsp.programs.data.dataset import Dataset, DatasetFeature
from torchrec_2dsp.shard.initial_tables import configs_of, draw_whole_tables_


def _check_types(types: tuple[str, ...]) -> tuple[str, ...]:
    for name in types:
        type_2d(name)
    return types


Output = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""The result of `DLRMTrain`: the loss, then the detached loss, scores and labels."""

ShardingTypes = Annotated[tuple[str, ...], AfterValidator(_check_types)]
"""Names of sharding types, TorchRec's or their 2D forms."""


class PlannedSection(Section):
    """A model, and its tables' sharding types."""

    sharding_types: ShardingTypes = Field(default=("table_wise", "row_wise"), min_length=1)
    """Sharding types that the planner may choose from. Column-wise shards have separate row-wise
    moments, so that different meshes train by different rules; and TorchRec alone leaves
    data-parallel tables to the dense optimizer."""


def build_model(data: Dataset, model: ModelConfig, *, tables_device: str = "cpu") -> DLRMTrain:
    """Build the unsharded model; equal configs give equal weights on every rank.

    Tables are drawn as sharders with ``init_seed=model.seed`` draw them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        tables = bags_of(data.features, model.dim, tables_device, model.data_type)
        if tables_device != "meta":
            draw_whole_tables_(tables, model.seed)
        # Drawing the tables depends on their device, so the stream starts over.
        torch.manual_seed(model.seed + 1)
        sizes: dict[str, Any] = {
            "dense_in_features": data.num_dense,
            "dense_arch_layer_sizes": [*model.dense_layers, model.dim],
            "over_arch_layer_sizes": [*model.over_layers, 1],
        }
        if model.kind == "dlrm":
            return DLRMTrain(DLRM(tables, **sizes))
        cross_layers = DLRM_DCN(
            tables,
            **sizes,
            dcn_num_layers=model.dcn_layers,
            dcn_low_rank_dim=model.dcn_low_rank,
        )
        return DLRMTrain(cross_layers)


def bags_of(
    features: Sequence[DatasetFeature],
    dim: int,
    tables_device: str,
    data_type: DataType = DataType.FP32,
) -> EmbeddingBagCollection:
    """Build a collection with a table for each feature."""
    tables = [
        EmbeddingBagConfig(
            name=table_name(feature.name),
            num_embeddings=feature.num_rows,
            embedding_dim=dim,
            feature_names=[feature.name],
            data_type=data_type,
        )
        for feature in features
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device(tables_device))


def table_name(feature: str) -> str:
    """Name a feature's table."""
    if "." in feature:
        raise ConfigError(
            f"the feature {feature!r} has a dot, which no table's name may have; give it another "
            "name, and name the log's column with column="
        )
    return f"t_{feature}"


def rank_device(device: str) -> torch.device:
    """Return the device on which this rank computes."""
    if device == "cpu":
        return torch.device("cpu")
    return torch.device(device, dist.get_node_local_rank(fallback_rank=0))


def tables_of(model: nn.Module) -> list[BaseEmbeddingConfig]:
    """List an unsharded model's table configs, in its order."""
    return [
        config
        for module in model.modules()
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection)
        for config in configs_of(module)
    ]


_CHILD = "split"


def split_(model: nn.Module, splits: Mapping[SplitPlace, float], threshold: ThresholdKind) -> None:
    """Let a DLRM or a DCN threshold its activations at its splits, in place.

    Parameters keep their names. A hook does the work, on modules that survive sharding: the
    lookup's is around the collection of tables.

    Raises:
        ConfigError: the model is of another kind, and there are splits.
    """
    if splits and not isinstance(model, DLRMTrain):
        raise ConfigError(
            f"splits={dict(splits)} are places of a DLRM or a DCN, and the model is a "
            f"{type(model).__name__}; leave them out, or set kind='dlrm' or 'dcn'"
        )
    for place, density in splits.items():
        module = _module_at(model, place)
        # As a child it is copied, moved, saved and switched to evaluation with the model.
        module.add_module(_CHILD, Thresholded(density, threshold))
        module.register_forward_hook(_thresholded)


def _module_at(model: nn.Module, place: SplitPlace) -> nn.Module:
    dlrm: Any = model.model
    if place == "embeddings":
        return dlrm.sparse_arch
    arch = dlrm.dense_arch if place == "dense" else dlrm.over_arch
    # A perceptron is a linear layer and its ReLU.
    return next(module for module in arch.modules() if isinstance(module, Perceptron))


def _thresholded(module: nn.Module, inputs: Any, activations: torch.Tensor) -> torch.Tensor:
    return module.get_submodule(_CHILD)(activations)
