"""TorchRec's map with a slot for each id near the id's hash, which a CPU can't train in TorchRec.

FBGEMM has a kernel that finds ids' slots, and one that gives slots to new ids too. The second one
runs on GPUs alone, where threads race for slots, so that copies of a map would differ. Here the
first one finds hashes and slots, and `HashedIdMap.see` gives slots as the second one does if a
single thread takes all ids in turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torchrec.modules.hash_mc_evictions import HashZchEvictionPolicyName as Policy
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule, TrainInputMapper
from torchrec.modules.mc_modules import ManagedCollisionModule, MCHManagedCollisionModule

from torchrec_2dsp._compat.managed_collisions import (
    NO_HISTORY,
    History,
    IdMapBase,
    SortedIdMap,
    mixed,
)

_IDS = HashZchManagedCollisionModule.IDENTITY_BUFFER
_FREE = -1
"""What TorchRec writes into a slot in place of an id."""
_FOREVER = 2**30
"""More hours than there were, and few enough for TorchRec's numbers."""


class HashedIdMap(IdMapBase):
    """A map by `HashZchManagedCollisionModule`."""

    module: HashZchManagedCollisionModule

    def __init__(self, module: HashZchManagedCollisionModule) -> None:
        super().__init__(module)
        self._num_batches = 0

    def unequal(self, config: Any) -> str | None:
        """Return why copies might differ, or what is done here otherwise than in TorchRec."""
        module, num_features = self.module, len(config.feature_names)
        policy, ttls = module._eviction_policy_name, self._ttls(num_features)
        reserved = module.get_reserved_slots_per_bucket()
        mapper: TrainInputMapper = cast(Any, module.input_mapper)
        divides = mapper._inference_dispatch_div_train_world_size
        serves = module._is_inference or divides
        has_numbers = module._hash_zch_runtime_meta is not None
        reasons = {
            "admits ids by numbers that each rank draws for itself (opt_in_prob)": (
                module._opt_in_prob not in (-1, 100)
            ),
            "has buckets without a reserved row (percent_reserved_slots)": reserved == 0,
            "reserves rows beside LRU_EVICTION, which FBGEMM does on CPUs only": (
                reserved > 0 and policy is Policy.LRU_EVICTION
            ),
            "leaves out ids that get no row (disable_fallback or no_bag)": (
                module._disable_fallback or module._no_bag
            ),
            "keeps numbers for each id, or logs its metrics on each rank": (
                has_numbers or module._tb_logging_frequency > 0
            ),
            "is made for serving, or is a part of a sharded map": serves or module.is_sharded,
            "is read-only by its table's name": (
                config.name.lower().endswith(module._read_only_suffix)
            ),
            "has no hours to live, from 0 to 2**30, for all features or for each of its table": (
                policy is not None
                and (len(ttls) != num_features or not 0 <= min(ttls) <= max(ttls) <= _FOREVER)
            ),
            "has hours to live for other features than its table, or in another order": (
                policy is Policy.PER_FEATURE_TTL_EVICTION
                and getattr(module._eviction_config, "features", None) != config.feature_names
            ),
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def _ttls(self, num_features: int) -> list[int]:
        """Return the hours after which a feature's unseen ids may be evicted; -1 if not given."""
        config = self.module._eviction_config
        if self.module._eviction_policy_name is Policy.PER_FEATURE_TTL_EVICTION:
            return list((config and config.per_feature_ttl) or [-1])
        ttl = -1 if config is None or config.single_ttl is None else config.single_ttl
        return [ttl] * num_features

    def takes(self, ids: torch.Tensor) -> bool:
        """Return whether all ids are in range, and none is -1, which marks free slots."""
        end = self.module.input_size()
        is_wrong = (ids < 0) | (ids >= end) if end else ids == _FREE
        return not bool(is_wrong.any())

    def see(self, ids_by_feature: Sequence[torch.Tensor], hour: int) -> torch.Tensor | None:
        """Give slots to new ids in turn: free ones, and those of ids that weren't seen for long."""
        self._num_batches += 1
        ttls = self._ttls(len(ids_by_feature))
        ends = np.repeat([hour + ttl for ttl in ttls], [len(of) for of in ids_by_feature])
        ids = torch.cat(list(ids_by_feature))
        distinct, firsts, places = np.unique(
            ids.cpu().numpy(), return_index=True, return_inverse=True
        )
        slots = _Slots.of(self.module, hour)
        rows = self.rows_of(ids.new_tensor(distinct), {}).cpu().numpy()
        rows[~slots.keeps(distinct, rows)] = _FREE
        in_turn = firsts.argsort()
        in_turn = in_turn[rows[in_turn] == _FREE]
        windows = self._windows(ids.new_tensor(distinct[in_turn]))
        # A full window stays full: slots only become fewer, until the next hour.
        has_room = slots.are_takeable(windows).any(axis=1)
        for n, window in zip(in_turn[has_room], windows[has_room], strict=True):
            rows[n] = slots.give(int(distinct[n]), window)
        slots.extend(rows[places], ends)
        slots.write_to(self.module)
        return ids.new_tensor(sorted(slots.evicted))

    def rows_of(self, ids: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the ids' rows; one without a slot has the row of its hash, or a reserved one."""
        _, sizes, starts = self.module.input_mapper(ids)
        reserved = self.module.get_reserved_slots_per_bucket()
        identities = buffers.get(_IDS, self.module._hash_zch_identities)
        return self._found(ids, identities, sizes, starts, reserved, self.module.max_probe)

    def owned_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows that belong to some ids, ascending: those whose slots hold them."""
        end = self.module.input_size()
        ids = ids[ids < end] if end else ids
        rows = self.rows_of(ids, {})
        return rows[self.module._hash_zch_identities[rows, 0] == ids].unique()

    def _windows(self, ids: torch.Tensor) -> np.ndarray[Any, Any]:
        """Return the slots in which each id is looked for, in this order."""
        _, sizes, starts = self.module.input_mapper(ids)
        sizes = sizes - max(self.module.get_reserved_slots_per_bucket(), 0)
        # Without probes, all have the row of their hash.
        homes = self._found(ids, self.module._hash_zch_identities, sizes, starts, -1, 0)
        steps = torch.arange(self.module.max_probe, device=ids.device)
        steps = (homes - starts)[:, None] + steps
        return (starts[:, None] + steps % sizes[:, None]).cpu().numpy()

    def _found(
        self,
        ids: torch.Tensor,
        identities: torch.Tensor,
        sizes: torch.Tensor,
        starts: torch.Tensor,
        reserved: int,
        max_probe: int,
    ) -> torch.Tensor:
        """Return where FBGEMM finds ids."""
        rows, _ = torch.ops.fbgemm.zero_collision_hash(
            ids,
            identities,
            max_probe,
            circular_probe=True,
            readonly=True,
            local_sizes=sizes,
            offsets=starts,
            opt_in_prob=-1 if reserved < 0 else self.module._opt_in_prob,
            num_reserved_slots=reserved,
        )
        return rows

    @property
    def batches_seen(self) -> int:
        """The number of batches since the map was made or loaded."""
        return self._num_batches

    def history(self) -> History:
        """Return the number of batches, which TorchRec doesn't count."""
        return History(self._num_batches, -1, -1, NO_HISTORY.ids, {})

    def set_history(self, history: History) -> None:
        """Count batches on."""
        self._num_batches = max(history.iteration, 0)

    def fingerprint(self) -> int:
        """Return a number that depends on each slot's id, and the hour until which it has it."""
        ids, ends = self.module._hash_zch_identities, self.module._hash_zch_metadata
        slots = torch.arange(len(ids), device=ids.device)[:, None]
        numbers = ids * 0x9E3779B1 ^ slots * 0x85EBCA6B
        return mixed(numbers if ends is None else numbers ^ ends.long() * 0xC2B2AE35)

    def empty_on(self, device: torch.device) -> HashZchManagedCollisionModule:
        """Return a module of the same rows and options."""
        rows, rebuild = (0, self.module.output_size()), self.module.rebuild_with_output_id_range
        copied: HashZchManagedCollisionModule = rebuild(rows, device=device)
        # A buffer, as in the other maps: a parameter would be among those of the dense part.
        identities = copied._hash_zch_identities.data
        del copied._hash_zch_identities
        copied.register_buffer(_IDS, identities)
        return copied

    def options(self) -> str:
        """Return policy, hours, probes, sizes and buckets."""
        module, policy = self.module, self.module._eviction_policy_name
        return (
            f"{'no eviction' if policy is None else policy.value} after {self._ttls(1)} hours, "
            f"{module.max_probe} probes, {module.output_size()} rows in {module.buckets()} "
            f"buckets, ids below {module.input_size()}, "
            f"{module.get_reserved_slots_per_bucket()} reserved rows in each bucket"
        )


@dataclass
class _Slots:
    """A map's slots while it sees a batch, on the host."""

    ids: np.ndarray[Any, Any]
    """Each slot's id."""
    ends: np.ndarray[Any, Any]
    """The last hour in which each slot's id can't be evicted."""
    hour: int
    takes_oldest: bool
    """True if the id that was seen first is evicted, and not the first one that may be."""
    evicted: list[int]

    @classmethod
    def of(cls, module: HashZchManagedCollisionModule, hour: int) -> "_Slots":
        ids, ends = module._hash_zch_identities.data[:, 0], module._hash_zch_metadata
        ends = torch.full_like(ids, _FOREVER) if ends is None else ends[:, 0]
        takes_oldest = module._eviction_policy_name is Policy.LRU_EVICTION
        return cls(ids.cpu().numpy(), ends.cpu().numpy(), hour, takes_oldest, [])

    def keeps(self, ids: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return which ids have these rows, whatever other ids come first."""
        return (self.ids[rows] == ids) & (self.ends[rows] >= self.hour)

    def are_takeable(self, slots: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return which slots are free, or their ids may be evicted."""
        return (self.ids[slots] == _FREE) | (self.ends[slots] < self.hour)

    def give(self, id_: int, window: np.ndarray[Any, Any]) -> int:
        """Give an id a slot out of a window, and return it; `_FREE` if there is none."""
        slot = self._slot(id_, window)
        if slot == _FREE:
            return _FREE
        if self.ids[slot] not in (_FREE, id_):
            self.evicted.append(slot)
        self.ids[slot], self.ends[slot] = id_, self.hour
        return slot

    def _slot(self, id_: int, window: np.ndarray[Any, Any]) -> int:
        held = self.ids[window]
        takeable = window[held == id_]
        if not takeable.size:
            takeable = window[self.are_takeable(window)]
            if self.takes_oldest and takeable.size:
                free = window[held == _FREE]
                takeable = free if free.size else window[[self.ends[window].argmin()]]
        return int(takeable[0]) if takeable.size else _FREE

    def extend(self, rows: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> None:
        """Let ids keep their slots until the last of some hours."""
        np.maximum.at(self.ends, rows[rows != _FREE], ends[rows != _FREE])

    def write_to(self, module: HashZchManagedCollisionModule) -> None:
        """Write what was changed, if the map isn't on the host itself."""
        module._hash_zch_identities[:, 0] = torch.from_numpy(self.ids)
        if module._hash_zch_metadata is not None:
            module._hash_zch_metadata[:, 0] = torch.from_numpy(self.ends)


IdMap = SortedIdMap | HashedIdMap
_KINDS: dict[type, type[IdMap]] = {
    MCHManagedCollisionModule: SortedIdMap,
    HashZchManagedCollisionModule: HashedIdMap,
}


def id_map_of(module: Any) -> IdMap:
    """Return a managed collision module as an id map."""
    return _KINDS[type(module)](module)


def unequal_on_ranks(module: ManagedCollisionModule, config: Any) -> str | None:
    """Return why a map may differ between ranks after the same ids; `None` if it can't."""
    if type(module) not in _KINDS:
        return f"is a {type(module).__name__}, of which copies on all ranks may differ"
    return id_map_of(module).unequal(config)
