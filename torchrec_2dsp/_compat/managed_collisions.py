"""TorchRec's managed collision modules: what is inside them, and the state that they don't save.

An *id map* gives rows to ids, by what it has seen. TorchRec has two kinds: one keeps its ids sorted
and gives rows at intervals (`MCHManagedCollisionModule`), the other has a slot for each id near the
id's hash, and evicts ids that weren't seen for some hours (`HashZchManagedCollisionModule`).
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
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


def rows_per_batch(id_map: Any) -> float:
    """Return how many rows of a managed collision module a batch goes through, in the mean.

    One that keeps its ids sorted does so at intervals; of others ranks compare all with each batch.
    """
    return id_map.output_size() / getattr(id_map, "_eviction_interval", 1)


def table_configs(module: BaseManagedCollisionEmbeddingCollection) -> list[Any]:
    """Return the tables' configs."""
    return list(module._managed_collision_collection.embedding_configs())


def returns_features(module: BaseManagedCollisionEmbeddingCollection) -> bool:
    """Return whether the features with mapped ids are a second output."""
    return module._return_remapped_features


def table_sharder_of(sharder: BaseManagedCollisionEmbeddingCollectionSharder) -> Any:  # type: ignore[type-arg]
    """Return the sharder for the collection inside."""
    return sharder._e_sharder


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


NO_HISTORY = History(-1, -1, -1, torch.empty(0, dtype=torch.int64), {})
"""A map's history before its first batch, or after its buffers were loaded."""

MAP_NAMES = "_managed_collision_modules"
"""The name of the maps in their collection."""


def hour_now() -> int:
    """Return the hours since 1970, by which hashed maps evict."""
    return int(time.time() / 3600)


class IdMapBase:
    """What both kinds of maps have, which are TorchRec's modules and what ranks do with them."""

    module: Any
    """TorchRec's module."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def hashed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids as the map sees them."""
        return ids

    def takes(self, ids: torch.Tensor) -> bool:
        """Return whether the map can have all ids."""
        return True

    def changing(self) -> Sequence[str]:
        """Return the buffers that the next batch may change."""
        return list(self.module.state_dict())

    def described(self: Any) -> str:
        """Return all that must be equal on all ranks, as a text."""
        digest = hashlib.blake2b(digest_size=8)
        state = dict(sorted(self.module.state_dict().items())) | {"ids": self.history().ids}
        if not any(value.is_meta for value in state.values()):
            for value in state.values():
                digest.update(value.cpu().numpy().tobytes())
        return f"{self.options()}, state {digest.hexdigest()}"

    def copied_to(self: Any, device: torch.device) -> Any:
        """Return a map with the same state on a device; one on the meta device has none."""
        copied = type(self)(self.empty_on(device).train(self.module.training))
        state = self.module.state_dict()
        if not any(value.is_meta for value in state.values()):
            copied.module.load_state_dict(state)
            copied.set_history(self.history())
        return copied


class SortedIdMap(IdMapBase):
    """A map by `MCHManagedCollisionModule`, which keeps its ids sorted."""

    module: MCHManagedCollisionModule

    def unequal(self, config: Any) -> str | None:
        """Return why copies might differ: unknown policies, and filters that draw numbers."""
        policy: MCHEvictionPolicy = self._policy
        if type(policy) not in _POLICIES:
            return f"evicts by {type(policy).__name__}, of which copies on all ranks may differ"
        admit: Any = policy._threshold_filtering_func
        if (admit.func if isinstance(admit, partial) else admit) is probabilistic_threshold_filter:
            return "admits ids by numbers that each rank draws for itself (probabilistic_...)"
        return None

    @property
    def _policy(self) -> MCHEvictionPolicy:
        return self.module._eviction_policy

    def hashed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids by the map's hash function."""
        return self.module.preprocess({"": _jagged([ids])})[""].values()

    def see(self, ids_by_feature: Sequence[torch.Tensor], hour: int) -> torch.Tensor | None:
        """Let TorchRec remember the ids, and give rows to ids if an interval has ended."""
        self.module.profile({"": _jagged(ids_by_feature)})
        return self.module.evict()

    def rows_of(self, ids: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the ids' rows; the last row has those that the map doesn't know."""
        module = self.module
        raw = buffers.get("_mch_sorted_raw_ids", module._mch_sorted_raw_ids)
        rows = buffers.get("_mch_remapped_ids_mapping", module._mch_remapped_ids_mapping)
        return _mch_remap({"": _jagged([ids])}, raw, rows, self._last_row)[""].values()

    @property
    def _last_row(self) -> int:
        return self.module._output_global_offset + self.module.output_size() - 1

    def owned_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows that belong to some ids, ascending; the last row belongs to none."""
        rows = self.rows_of(ids, {}).unique()
        return rows[rows != self._last_row]

    @property
    def batches_seen(self) -> int:
        """The number of batches, which is part of the saved state."""
        return int(cast(Any, self.module._current_iter_tensor))

    def changing(self) -> Sequence[str]:
        """Return all buffers if an interval ends, and else the counter of batches."""
        iteration, last = self.module._current_iter, self.module._last_eviction_iter
        if iteration < 0:
            iteration = last = self.batches_seen
        ends = iteration + 1 - last == self.module._eviction_interval
        return super().changing() if ends else ["_current_iter_tensor"]

    def history(self) -> History:
        """Copy the ids that were seen since the last interval."""
        module = self.module
        num_ids = module._current_history_buffer_offset
        no_ids = torch.empty(0, dtype=torch.int64)
        return History(
            module._current_iter,
            module._last_eviction_iter,
            module._input_history_buffer_size,
            module._history_accumulator[:num_ids].clone() if num_ids else no_ids,
            {name: value[:num_ids].clone() for name, value in module._history_metadata.items()},
        )

    def set_history(self, history: History) -> None:
        """Continue from another map's history."""
        module = self.module
        module._current_iter = history.iteration
        module._last_eviction_iter = history.last_eviction
        module._input_history_buffer_size = history.size
        module._current_history_buffer_offset = num_ids = history.ids.numel()
        if history.size < 0:
            return
        module._history_accumulator = _filled(history.ids, history.size, module.device)
        for name in history.metadata:
            values = _filled(history.metadata[name], history.size, module.device)
            module.register_buffer(f"_history_{name}", values, persistent=False)
            module._history_metadata[name] = values
        assert num_ids <= history.size

    def fingerprint(self) -> int:
        """Return a number that depends on each id's row."""
        rows = self.module._mch_remapped_ids_mapping
        return mixed(self.module._mch_sorted_raw_ids * 0x9E3779B1 ^ rows * 0x85EBCA6B)

    def empty_on(self, device: torch.device) -> MCHManagedCollisionModule:
        """Return a module of the same rows and options."""
        module = self.module
        first = module._output_global_offset
        ends = [first, first + module.output_size()]
        if not module._mch_sorted_raw_ids.is_meta:
            ends = [end for end in module._output_segments_tensor.tolist() if end >= 0]
        rows = (first, first + module.output_size())
        return module.rebuild_with_output_id_range(rows, ends, device)

    def options(self) -> str:
        """Return policy, interval, sizes and hash function."""
        hashed = self.module._input_hash_func
        return (
            f"{type(self._policy).__name__}, every {self.module._eviction_interval} batches, "
            f"{self.module.output_size()} rows, ids below {self.module.input_size()}, "
            f"{getattr(hashed, '__qualname__', type(hashed).__name__)}"
        )


def _jagged(ids_by_feature: Sequence[torch.Tensor]) -> JaggedTensor:
    """Return a table's ids as TorchRec hands them to its map, which looks at values alone."""
    lengths = [ids.numel() for ids in ids_by_feature]
    values = torch.cat(list(ids_by_feature))
    return JaggedTensor(values, lengths=torch.tensor(lengths, device=values.device))


def _filled(values: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
    filled = torch.zeros(size, dtype=torch.int64, device=device)
    filled[: values.numel()] = values
    return filled


def mixed(numbers: torch.Tensor) -> int:
    """Sum up numbers, one for each id and its row."""
    # Squared, since a plain sum wouldn't tell which id has which row.
    return int((numbers * numbers).sum())
