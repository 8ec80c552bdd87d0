"""TorchRec's modules around a collection: with an id map for each table, or feature processors."""

from typing import Any, cast

import torch
from torch import nn
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollectionSharder,
)
from torchrec.distributed.utils import init_parameters
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessorDictWrapper,
    apply_feature_processors_to_kjt,
)
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

MAP_NAMES = "_managed_collision_modules"
"""The maps' name in their collection."""

TABLES = "_embedding_bag_collection"
"""TorchRec's name for the collection, with which its tables' names begin in a state dict."""


def collection_inside(module: Any) -> Any:
    """Return the collection behind id maps or feature processors, or the module itself."""
    if isinstance(module, BaseManagedCollisionEmbeddingCollection):
        return _behind_maps(module)
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        return _behind_processors(module)
    return module


def _behind_maps(module: BaseManagedCollisionEmbeddingCollection) -> Any:
    return module._embedding_module


def _behind_processors(module: FeatureProcessedEmbeddingBagCollection) -> Any:
    return module._embedding_bag_collection


def id_maps_of(module: BaseManagedCollisionEmbeddingCollection) -> dict[str, Any]:
    """Return each table's managed collision module."""
    return _maps_in(module._managed_collision_collection)


def _maps_in(collection: ManagedCollisionCollection) -> dict[str, Any]:
    return dict(collection._managed_collision_modules.items())


def table_configs(module: BaseManagedCollisionEmbeddingCollection) -> list[Any]:
    """Return the tables' configs."""
    return list(module._managed_collision_collection.embedding_configs())


def returns_features(module: BaseManagedCollisionEmbeddingCollection) -> bool:
    """Return whether the features with mapped ids are a second output."""
    return module._return_remapped_features


def table_sharder_of(sharder: BaseManagedCollisionEmbeddingCollectionSharder) -> Any:  # type: ignore[type-arg]
    """Return the sharder of the inner collection."""
    return sharder._e_sharder


def processors_in(module: FeatureProcessedEmbeddingBagCollection) -> nn.Module:
    """Return the feature processors: a collection, or a `ModuleDict` by feature."""
    return module._feature_processors


def trains_processors(module: Any) -> bool:
    """Return whether any of a module's feature processors is trained."""
    return any(weight.requires_grad for weight in processors_in(module).parameters())


def bag_sharder_of(sharder: FeatureProcessedEmbeddingBagCollectionSharder) -> Any:
    """Return the sharder of the inner collection."""
    return sharder._ebc_sharder


def position_weights(processors: nn.Module) -> dict[str, nn.Parameter] | None:
    """Return each feature's weights by position; `None` for processors that do anything else."""
    if isinstance(processors, FeatureProcessorDictWrapper):
        processors = _in_wrapper(processors)
    if type(processors) is PositionWeightedModuleCollection:
        return dict(processors.position_weights.items())
    if type(processors) is not nn.ModuleDict:
        return None
    by_feature: dict[str, nn.Parameter] = {}
    for feature, processor in processors.items():
        if type(processor) is not PositionWeightedModule:
            return None
        by_feature[feature] = processor.position_weight
    return by_feature


def _in_wrapper(processors: FeatureProcessorDictWrapper) -> nn.Module:
    return processors._feature_processors


def on_device(processors: nn.Module, device: torch.device) -> nn.Module:
    """Return the processors on a device; those on the meta device get initial weights."""
    if any(tensor.is_meta for tensor in processors.parameters()):
        init_parameters(processors, device)
    return processors.to(device)


def processed(features: KeyedJaggedTensor, processors: nn.Module) -> KeyedJaggedTensor:
    """Return features with the weights that their processors give them."""
    if isinstance(processors, nn.ModuleDict):
        return apply_feature_processors_to_kjt(features, cast(Any, processors))
    return processors(features)
