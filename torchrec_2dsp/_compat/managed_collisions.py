"""TorchRec's modules with managed collisions: a collection of tables, and an id map for each."""

from typing import Any

from torchrec.distributed.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollectionSharder,
)
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection

MAP_NAMES = "_managed_collision_modules"
"""The name of the maps in their collection."""


def collection_of(module: Any) -> Any:
    """Return the collection inside a module with managed collisions; any other module itself."""
    return (
        _inside(module) if isinstance(module, BaseManagedCollisionEmbeddingCollection) else module
    )


def _inside(module: BaseManagedCollisionEmbeddingCollection) -> Any:
    return module._embedding_module


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
    """Return the sharder for the collection inside."""
    return sharder._e_sharder
