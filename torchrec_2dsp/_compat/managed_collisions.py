"""TorchRec's managed collision modules: what is inside them, and the state that they don't save.

An *id map* is TorchRec's `MCHManagedCollisionModule`: it gives rows to ids, by what it has seen.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torchrec.distributed.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollectionSharder,
)
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
    _mch_remap,
    probabilistic_threshold_filter,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

IdMap = MCHManagedCollisionModule
_POLICIES = (LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy)


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


def unequal_on_ranks(id_map: Any) -> str | None:
    """Return why copies of a module might differ after the same ids; `None` if they can't."""
    if type(id_map) is not MCHManagedCollisionModule:
        return f"is a {type(id_map).__name__}, of which copies on all ranks may differ"
    policy = _policy_of(id_map)
    if type(policy) not in _POLICIES:
        return f"evicts by {type(policy).__name__}, of which copies on all ranks may differ"
    admit = _filter_of(policy)
    if (admit.func if isinstance(admit, partial) else admit) is probabilistic_threshold_filter:
        return "admits ids by numbers that each rank draws for itself (probabilistic_...)"
    return None


def _policy_of(id_map: MCHManagedCollisionModule) -> MCHEvictionPolicy:
    return id_map._eviction_policy


def _filter_of(policy: MCHEvictionPolicy) -> Any:
    return policy._threshold_filtering_func


@dataclass(frozen=True)
class History:
    """What an id map remembers beside its buffers, which are all that TorchRec saves."""

    iteration: int
    """The batches so far; -1 if the buffers tell."""
    last_eviction: int
    """The batch after which rows were last given to ids."""
    size: int
    """How many ids are remembered between two of these; -1 before the first batch decides."""
    ids: torch.Tensor
    """The ids since."""
    metadata: Mapping[str, torch.Tensor]
    """What the policy remembers of each."""


def history_of(id_map: MCHManagedCollisionModule) -> History:
    """Copy a map's history."""
    num_ids = id_map._current_history_buffer_offset
    no_ids = torch.empty(0, dtype=torch.int64)
    return History(
        id_map._current_iter,
        id_map._last_eviction_iter,
        id_map._input_history_buffer_size,
        id_map._history_accumulator[:num_ids].clone() if num_ids else no_ids,
        {name: value[:num_ids].clone() for name, value in id_map._history_metadata.items()},
    )


def set_history(id_map: MCHManagedCollisionModule, history: History) -> None:
    """Continue from another map's history."""
    id_map._current_iter = history.iteration
    id_map._last_eviction_iter = history.last_eviction
    id_map._input_history_buffer_size = history.size
    id_map._current_history_buffer_offset = num_ids = history.ids.numel()
    if history.size < 0:
        return
    id_map._history_accumulator = _filled(history.ids, history.size, id_map.device)
    for name in history.metadata:
        values = _filled(history.metadata[name], history.size, id_map.device)
        id_map.register_buffer(f"_history_{name}", values, persistent=False)
        id_map._history_metadata[name] = values
    assert num_ids <= history.size


def _filled(values: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
    filled = torch.zeros(size, dtype=torch.int64, device=device)
    filled[: values.numel()] = values
    return filled


NO_HISTORY = History(-1, -1, -1, torch.empty(0, dtype=torch.int64), {})
"""A map's history before its first batch, or after its buffers were loaded."""


BATCHES_SEEN = "_current_iter_tensor"
"""The buffer that every batch changes."""
MAP_NAMES = "_managed_collision_modules"
"""The name of the maps in their collection."""


def copy_to(id_map: MCHManagedCollisionModule, device: torch.device) -> IdMap:
    """Return a map with the same state on a device; one on the meta device has none."""
    is_meta = id_map._mch_sorted_raw_ids.is_meta
    first = id_map._output_global_offset
    ends = [first, first + id_map.output_size()]
    if not is_meta:
        ends = [end for end in id_map._output_segments_tensor.tolist() if end >= 0]
    copied = id_map.rebuild_with_output_id_range(
        (first, first + id_map.output_size()), ends, device
    )
    copied.train(id_map.training)
    if not is_meta:
        copied.load_state_dict(id_map.state_dict())
        set_history(copied, history_of(id_map))
    return copied


def evicts_next(id_map: MCHManagedCollisionModule) -> bool:
    """Return whether the next batch that is profiled may change the map."""
    iteration, last = id_map._current_iter, id_map._last_eviction_iter
    if iteration < 0:
        iteration = last = batches_seen(id_map)
    return iteration + 1 - last == id_map._eviction_interval


def batches_seen(id_map: MCHManagedCollisionModule) -> int:
    """Return how many batches a map has profiled; it is part of its saved state."""
    return int(cast(Any, id_map._current_iter_tensor))


def fingerprint_of(id_map: MCHManagedCollisionModule) -> int:
    """Return a number that tells maps apart."""
    rows = id_map._mch_remapped_ids_mapping
    # Squared, since a plain sum wouldn't tell which id has which row.
    mixed = id_map._mch_sorted_raw_ids * 0x9E3779B1 ^ rows * 0x85EBCA6B
    return int((mixed * mixed).sum())


def rows_of(
    id_map: MCHManagedCollisionModule, ids: JaggedTensor, buffers: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return the ids' rows, by earlier buffers where some are given."""
    raw = buffers.get("_mch_sorted_raw_ids", id_map._mch_sorted_raw_ids)
    rows = buffers.get("_mch_remapped_ids_mapping", id_map._mch_remapped_ids_mapping)
    last_row = id_map._output_global_offset + id_map.output_size() - 1
    return _mch_remap({"": ids}, raw, rows, last_row)[""].values()


def described(id_map: MCHManagedCollisionModule) -> str:
    """Return all that must be equal on all ranks, as a text."""
    hashed = id_map._input_hash_func
    digest = hashlib.blake2b(digest_size=8)
    if not id_map._mch_sorted_raw_ids.is_meta:
        state = dict(sorted(id_map.state_dict().items())) | {"ids": history_of(id_map).ids}
        for value in state.values():
            digest.update(value.cpu().numpy().tobytes())
    return (
        f"{type(_policy_of(id_map)).__name__}, every {id_map._eviction_interval} batches, "
        f"{id_map.output_size()} rows, ids below {id_map.input_size()}, "
        f"{getattr(hashed, '__qualname__', type(hashed).__name__)}, state {digest.hexdigest()}"
    )
