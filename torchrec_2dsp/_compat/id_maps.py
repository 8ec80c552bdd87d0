"""Id maps: TorchRec's modules that give rows to ids, and the state that they don't save.

TorchRec has two kinds. `MCHManagedCollisionModule` keeps its ids sorted and gives rows at
intervals. `HashZchManagedCollisionModule` has a slot for each id near the id's hash, and evicts ids
unseen for some hours. FBGEMM has a kernel that finds slots, and one that also gives slots to new
ids, but only on GPUs, where threads race for slots, so that copies of a map would differ. Here the
first one finds hashes and slots, and `HashedIdMap.see` gives slots as a single thread would.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torchrec.modules.hash_mc_evictions import HashZchEvictionPolicyName as Policy
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule, TrainInputMapper
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionModule,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
    probabilistic_threshold_filter,
)

from torchrec_2dsp._compat.id_map_base import (
    LAST_BATCH,
    History,
    IdMapBase,
    Memory,
    Message,
    Tally,
    WorldBatch,
)
from torchrec_2dsp.errors import UnsupportedError

_POLICIES = (LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy)
_IDS = HashZchManagedCollisionModule.IDENTITY_BUFFER
_FREE = -1
"""The number in a slot without an id, as TorchRec writes it."""
_FOREVER = 2**30
"""More hours than have passed, and few enough for TorchRec's numbers."""


def hour_now() -> int:
    """Return the hours since 1970, by which hashed maps evict."""
    return int(time.time() / 3600)


class SortedIdMap(IdMapBase):
    """A map based on `MCHManagedCollisionModule`, which keeps its ids sorted."""

    module: MCHManagedCollisionModule

    def __init__(self, module: MCHManagedCollisionModule) -> None:
        super().__init__(module)
        num_ids = module._current_history_buffer_offset
        history = History(
            module._current_iter,
            module._last_eviction_iter,
            module._input_history_buffer_size,
            module._history_accumulator[:num_ids] if num_ids else torch.empty(0).long(),
            {name: value[:num_ids] for name, value in module._history_metadata.items()},
        )
        self.memory = Memory.of(history, module.device)

    def unequal(self, config: Any) -> str | None:
        """Return why copies might differ: unknown policies, or filters that draw numbers."""
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
        """Return ids after the map's hash function."""
        hash_func = self.module._input_hash_func
        return ids if hash_func is None else hash_func(ids, self.module._input_hash_size)

    @property
    def _next_batch(self) -> tuple[int, bool]:
        """The next batch's number, and whether ids get rows after it."""
        batch, last = self.memory.batch, self.memory.last_eviction
        if batch < 0:
            batch = last = self.batches_seen
        return batch + 1, batch + 1 - last == self.module._eviction_interval

    def message(self, own: Sequence[torch.Tensor], hour: int) -> Message:
        """Return the rank's ids since the last eviction if the next batch ends an interval."""
        if self._next_batch[1]:
            return Message(self.memory.tally(self.module.device), own)
        none = own[0][:0]
        return Message(Tally(none, none, none), [none] * len(own))

    def see(self, batch: WorldBatch) -> torch.Tensor | None:
        """Remember the batch; if it ends an interval, return the rows that the owner reassigns.

        Other ranks return no rows until they `follow`; all return `None` within an interval.
        """
        module, memory = self.module, self.memory
        number, is_due = self._next_batch
        module._current_iter = number
        cast(Any, module._current_iter_tensor).data += 1
        num_ids, size = sum(map(sum, batch.counts)), memory.size
        if size < 0:
            size = int(num_ids * module._eviction_interval * 1.25)
        if is_due:
            self.memory = Memory(number, number, size)
            if not batch.is_owner:
                return batch.own[0].new_empty(0)
            new = torch.cat(batch.ids)[: size - memory.num_ids]
            tallies = [memory.loaded] if memory.loaded else []
            tallies += [message.tally for message in batch.messages]
            self._give_rows(Tally.summed([*tallies, Tally.of(new, number)]))
            return module.evict()
        remembered, place = [], memory.num_ids
        for ids, counts in zip(batch.own, batch.counts, strict=True):
            room = size - place - sum(counts[: batch.rank])
            remembered.append(ids[: max(room, 0)])
            place += sum(counts)
        self.memory = replace(
            memory,
            batch=number,
            last_eviction=memory.last_eviction if memory.batch >= 0 else number - 1,
            size=size,
            num_ids=min(place, size),
            own=(*memory.own, (number, torch.cat(remembered))),
        )
        return None

    def _give_rows(self, tally: Tally) -> None:
        """Give rows to ids, as TorchRec's `_coalesce_history` does."""
        policy: MCHEvictionPolicy = self._policy
        admit: Any = policy._threshold_filtering_func
        admitted = None if admit is None else admit(tally.counts)[0]
        metadata = policy.coalesce_history_metadata(
            self.module._current_iter,
            {LAST_BATCH: tally.last_batches},
            tally.counts,
            torch.arange(len(tally.ids), device=tally.ids.device),
            threshold_mask=admitted,
        )
        which = slice(None) if admitted is None else admitted
        self.module._update_and_evict(tally.ids[which], tally.counts[which], metadata)

    def ids_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the ids that have rows."""
        by_row = torch.empty_like(self.module._mch_sorted_raw_ids)
        by_row[self._slots] = self.module._mch_sorted_raw_ids
        return by_row[rows - self.module._output_global_offset]

    def follow(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """Give rows to ids, as the owner did; as if TorchRec had sorted all ids again."""
        all_ids, all_rows = self.module._mch_sorted_raw_ids, self.module._mch_remapped_ids_mapping
        is_taken, is_new = torch.zeros(2, len(all_ids), dtype=torch.bool, device=ids.device)
        is_taken[rows - self.module._output_global_offset] = True
        stays = ~is_taken.index_select(0, self._slots)
        ids, order = ids.sort()
        before = torch.searchsorted(all_ids.masked_select(stays), ids)
        is_new[before + torch.arange(len(ids), device=ids.device)] = True
        for buffer, new in ((all_ids, ids), (all_rows, rows[order])):
            others = buffer.masked_select(stays)
            buffer.masked_scatter_(~is_new, others).masked_scatter_(is_new, new)

    @property
    def _slots(self) -> torch.Tensor:
        """The sorted ids' rows, counted from the first."""
        return self.module._mch_remapped_ids_mapping - self.module._output_global_offset

    @property
    def owned_buffers(self) -> Sequence[str]:
        """The policy's facts, which only the owner needs."""
        return [f"_mch_{name}" for name in self.module._mch_metadata]

    def rows_of(self, ids: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the ids' rows; unknown ids get the last row."""
        module = self.module
        raw = buffers.get("_mch_sorted_raw_ids", module._mch_sorted_raw_ids)
        rows = buffers.get("_mch_remapped_ids_mapping", module._mch_remapped_ids_mapping)
        places = torch.searchsorted(raw[:-1], ids)
        return torch.where(raw[places] == ids, rows[places], self._last_row)

    @property
    def _last_row(self) -> int:
        return self.module._output_global_offset + self.module.output_size() - 1

    def owned_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows that belong to the ids, ascending; the last row belongs to no id."""
        rows = self.rows_of(ids, {}).unique()
        return rows[rows != self._last_row]

    @property
    def rows_per_batch(self) -> float:
        """The mean number of rows that a batch goes through: all of them at intervals."""
        return self.module.output_size() / self.module._eviction_interval

    @property
    def batches_seen(self) -> int:
        """The number of batches, which is part of the saved state."""
        return int(cast(Any, self.module._current_iter_tensor))

    def changing(self) -> Sequence[str]:
        """Return all buffers if an interval ends, else the batch counter."""
        return super().changing() if self._next_batch[1] else ["_current_iter_tensor"]

    def fingerprint(self) -> int:
        """Return a number that depends on each id's row."""
        rows = self.module._mch_remapped_ids_mapping
        return _mixed(self.module._mch_sorted_raw_ids * 0x9E3779B1 ^ rows * 0x85EBCA6B)

    def empty_on(self, device: torch.device) -> MCHManagedCollisionModule:
        """Return a module with the same rows and options."""
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


def _mixed(numbers: torch.Tensor) -> int:
    """Sum numbers that stand for each id and its row."""
    # Squared, since a plain sum wouldn't depend on which id has which row.
    return int((numbers * numbers).sum())


class HashedIdMap(IdMapBase):
    """A map based on `HashZchManagedCollisionModule`."""

    module: HashZchManagedCollisionModule

    def unequal(self, config: Any) -> str | None:
        """Return why copies might differ, or why results would differ from TorchRec's."""
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

    def message(self, own: Sequence[torch.Tensor], hour: int) -> Message:
        """Return the ids that have no slot, or would keep it longer after this hour."""
        module, unsettled = self.module, []
        for ids, ttl in zip(own, self._ttls(len(own)), strict=True):
            rows = self.rows_of(ids, {})
            is_settled = module._hash_zch_identities[rows, 0] == ids
            if module._hash_zch_metadata is not None:
                is_settled &= module._hash_zch_metadata[rows, 0] >= hour + ttl
            unsettled.append(ids[~is_settled])
        return Message(Tally.of(own[0][:0]), unsettled)

    def see(self, batch: WorldBatch) -> torch.Tensor:
        """Give slots to new ids in turn: free ones, and those of ids unseen for too long."""
        self.memory = Memory(self.batches_seen + 1)
        hour, of_features = batch.hour, batch.ids
        ttls = self._ttls(len(of_features))
        ends = np.repeat([hour + ttl for ttl in ttls], [len(of) for of in of_features])
        ids = torch.cat(of_features)
        distinct, firsts, places = np.unique(
            ids.cpu().numpy(), return_index=True, return_inverse=True
        )
        slots = _Slots.of(self.module, hour)
        rows = self.rows_of(ids.new_tensor(distinct), {}).cpu().numpy()
        rows[~slots.keeps(distinct, rows)] = _FREE
        in_turn = firsts.argsort()
        in_turn = in_turn[rows[in_turn] == _FREE]
        windows = self._windows(ids.new_tensor(distinct[in_turn]))
        # A full window stays full: until the next hour, takeable slots only become fewer.
        has_room = slots.are_takeable(windows).any(axis=1)
        for n, window in zip(in_turn[has_room], windows[has_room], strict=True):
            rows[n] = slots.give(int(distinct[n]), window)
        slots.extend(rows[places], ends)
        slots.write_to(self.module)
        return ids.new_tensor(sorted(slots.evicted))

    def rows_of(self, ids: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the ids' rows; an id without a slot has the row of its hash, or a reserved one."""
        _, sizes, starts = self.module.input_mapper(ids)
        reserved = self.module.get_reserved_slots_per_bucket()
        identities = buffers.get(_IDS, self.module._hash_zch_identities)
        return self._found(ids, identities, sizes, starts, reserved, self.module.max_probe)

    def owned_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows that belong to the ids, ascending: those whose slots hold them."""
        end = self.module.input_size()
        ids = ids[ids < end] if end else ids
        rows = self.rows_of(ids, {})
        return rows[self.module._hash_zch_identities[rows, 0] == ids].unique()

    def _windows(self, ids: torch.Tensor) -> np.ndarray[Any, Any]:
        """Return the slots in which each id is searched, in order."""
        _, sizes, starts = self.module.input_mapper(ids)
        sizes = sizes - max(self.module.get_reserved_slots_per_bucket(), 0)
        # Without probes, all ids have the row of their hash.
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
        """Return the places where FBGEMM finds ids."""
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
        """The number of batches since the map was created or loaded."""
        return max(self.memory.batch, 0)

    def fingerprint(self) -> int:
        """Return a number that depends on each slot's id and the hour until which it keeps it."""
        ids, ends = self.module._hash_zch_identities, self.module._hash_zch_metadata
        slots = torch.arange(len(ids), device=ids.device)[:, None]
        numbers = ids * 0x9E3779B1 ^ slots * 0x85EBCA6B
        return _mixed(numbers if ends is None else numbers ^ ends.long() * 0xC2B2AE35)

    def empty_on(self, device: torch.device) -> HashZchManagedCollisionModule:
        """Return a module with the same rows and options."""
        rows, rebuild = (0, self.module.output_size()), self.module.rebuild_with_output_id_range
        copied: HashZchManagedCollisionModule = rebuild(rows, device=device)
        # A buffer, as in the other maps: a parameter would be among the dense part's.
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
    """True to evict the id with the earliest end, false to evict the first evictable one."""
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
        """Return which slots are free or have an evictable id."""
        return (self.ids[slots] == _FREE) | (self.ends[slots] < self.hour)

    def give(self, id_: int, window: np.ndarray[Any, Any]) -> int:
        """Give an id a slot in a window, and return the slot; `_FREE` if there is none."""
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
        """Let ids keep their slots until the latest of some hours."""
        np.maximum.at(self.ends, rows[rows != _FREE], ends[rows != _FREE])

    def write_to(self, module: HashZchManagedCollisionModule) -> None:
        """Write the changes, unless the map itself is on the host."""
        module._hash_zch_identities[:, 0] = torch.from_numpy(self.ids)
        if module._hash_zch_metadata is not None:
            module._hash_zch_metadata[:, 0] = torch.from_numpy(self.ends)


IdMap = SortedIdMap | HashedIdMap
_KINDS: dict[type, type[IdMap]] = {
    MCHManagedCollisionModule: SortedIdMap,
    HashZchManagedCollisionModule: HashedIdMap,
}


def id_map_of(module: Any) -> IdMap:
    """Return a managed collision module's id map; raise `UnsupportedError` for an unknown one."""
    if type(module) not in _KINDS:
        raise UnsupportedError(f"{type(module).__name__} isn't an id map that is known here")
    return _KINDS[type(module)](module)


def unequal_on_ranks(module: ManagedCollisionModule, config: Any) -> str | None:
    """Return why a map may differ between ranks after the same ids; `None` if it can't."""
    if type(module) not in _KINDS:
        return f"is a {type(module).__name__}, of which copies on all ranks may differ"
    return id_map_of(module).unequal(config)
