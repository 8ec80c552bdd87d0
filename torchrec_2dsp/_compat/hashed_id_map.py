"""Id maps that hash: `HashedIdMap` gives slots as a single thread of FBGEMM's kernel would.

A `HashZchManagedCollisionModule` has a slot for each id near the id's hash, and evicts ids unseen
for some hours. FBGEMM has a kernel that finds slots, and one that also gives slots to new ids, but
only on GPUs, where threads race for slots, so that copies of a map would differ. Here the first one
finds hashes and slots.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torchrec.modules.hash_mc_evictions import HashZchEvictionPolicyName as Policy
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule, TrainInputMapper

from torchrec_2dsp._compat.id_map_base import (
    IdMapBase,
    Memory,
    Message,
    Overwritten,
    Tally,
    WorldBatch,
)

_IDS = HashZchManagedCollisionModule.IDENTITY_BUFFER
_ENDS = HashZchManagedCollisionModule.METADATA_BUFFER
_FREE = -1
"""The number in a slot without an id, as TorchRec writes it."""
_FOREVER = 2**30
"""More hours than have passed, and few enough for TorchRec's numbers."""
_Numbers = np.ndarray[Any, Any]


def hour_now() -> int:
    """Return the hours since 1970, by which hashed maps evict."""
    return int(time.time() / 3600)


class HashedIdMap(IdMapBase):
    """A map based on `HashZchManagedCollisionModule`."""

    module: HashZchManagedCollisionModule

    def __init__(self, module: HashZchManagedCollisionModule) -> None:
        super().__init__(module)
        self._print: int | None = None

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

    def see(self, batch: WorldBatch, *, keeps_before: bool = False) -> torch.Tensor:
        """Give slots to new ids in turn: free ones, and those of ids unseen for too long.

        It keeps the few slots that it overwrites in any case.
        """
        memory, self.memory = self.memory, Memory(self.batches_seen + 1)
        hour, of_features = batch.hour, batch.ids
        all_ids = torch.cat(of_features)
        ids, firsts, places = np.unique(
            all_ids.cpu().numpy(), return_index=True, return_inverse=True
        )
        of_each = [hour + ttl for ttl in self._ttls(len(of_features))]
        ends = np.full(len(ids), hour)
        np.maximum.at(ends, places, np.repeat(of_each, [len(of) for of in of_features]))
        rows = self.rows_of(all_ids.new_tensor(ids), {})
        held, held_until = self._slots(rows)
        is_kept = (held == ids) & (held_until >= hour)
        new = firsts.argsort()
        new = new[~is_kept[new]]
        given = rows.cpu().numpy()
        windows = self._windows(all_ids.new_tensor(ids[new]))
        given[new] = _given_in_turn(
            ids[new],
            windows.cpu().numpy(),
            *self._slots(windows),
            hour,
            takes_oldest=self.module._eviction_policy_name is Policy.LRU_EVICTION,
            num_slots=self.module.output_size(),
        )
        has_row = given != _FREE
        given, ids, ends, is_kept = given[has_row], ids[has_row], ends[has_row], is_kept[has_row]
        rows = all_ids.new_tensor(given)
        held, held_until = self._slots(rows)
        # Computing a whole map's fingerprint would take longer than the batch.
        others = self.fingerprint() - _print_of(given, held, held_until)
        buffers = self.module.state_dict()
        slots = {name: buffers[name][rows] for name in (_IDS, _ENDS) if name in buffers}
        self.overwritten = Overwritten(memory, slots, rows)
        self._write(rows, ids, np.where(is_kept, np.maximum(ends, held_until), ends))
        self._print = (others + _print_of(given, *self._slots(rows))) % 2**64
        return all_ids.new_tensor(np.sort(given[(held != ids) & (held != _FREE)]))

    def _slots(self, rows: torch.Tensor) -> tuple[_Numbers, _Numbers]:
        """Return the ids in slots, and the last hours in which these can't be evicted."""
        ends = self.module._hash_zch_metadata
        ids = self.module._hash_zch_identities.data[:, 0].index_select(0, rows.view(-1))
        ids = ids.view_as(rows).cpu().numpy()
        if ends is None:
            return ids, np.full(1, _FOREVER)
        return ids, ends[:, 0].index_select(0, rows.view(-1)).view_as(rows).cpu().numpy()

    def _write(self, rows: torch.Tensor, ids: _Numbers, ends: _Numbers) -> None:
        module = self.module
        module._hash_zch_identities.data[rows, 0] = rows.new_tensor(ids)
        if module._hash_zch_metadata is not None:
            dtype = module._hash_zch_metadata.dtype
            module._hash_zch_metadata[rows, 0] = rows.new_tensor(ends).to(dtype)

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

    def _windows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the slots in which each id is searched, in order."""
        _, sizes, starts = self.module.input_mapper(ids)
        sizes = sizes - max(self.module.get_reserved_slots_per_bucket(), 0)
        # Without probes, all ids have the row of their hash.
        homes = self._found(ids, self.module._hash_zch_identities, sizes, starts, -1, 0)
        steps = torch.arange(self.module.max_probe, dtype=torch.int32, device=ids.device)
        first, sizes, starts = (homes - starts).int(), sizes.int(), starts.int()
        return starts[:, None] + (first[:, None] + steps) % sizes[:, None]

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
        if self._print is None:
            rows = torch.arange(self.module.output_size(), device=self.module.device)
            self._print = _print_of(rows.cpu().numpy(), *self._slots(rows))
        return self._print

    def forget(self) -> None:
        """Forget the state besides the buffers, which were replaced."""
        super().forget()
        self._print = None

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


def _given_in_turn(
    ids: _Numbers,
    windows: _Numbers,
    held: _Numbers,
    held_until: _Numbers,
    hour: int,
    *,
    takes_oldest: bool,
    num_slots: int,
) -> _Numbers:
    """Give each id in turn a slot of its window; `_FREE` to an id without one.

    Args:
        ids: distinct ids.
        windows: each one's slots, in the order in which they are searched.
        held: the ids in these slots.
        held_until: the last hour in which each of those can't be evicted.
        hour: the present one.
        takes_oldest: True to evict the id with the earliest end, false to evict the first
            evictable one.
        num_slots: the map's number of slots.
    """
    is_free = held == _FREE
    order = np.where(is_free, -1, held_until) if takes_oldest else np.int32(0)
    order = np.where(is_free | (held_until < hour), order, np.int32(_FOREVER))
    # An id whose time is over may still be there.
    order[held == ids[:, None]] = -2
    every, places = np.arange(len(ids)), order.argmin(axis=1)
    slots = np.where(order[every, places] < _FOREVER, windows[every, places], _FREE)
    is_given = np.zeros(num_slots, dtype=bool)
    for number, slot in enumerate(slots.tolist()):
        if slot != _FREE and is_given[slot]:
            own, window = order[number], windows[number]
            own[is_given[window]] = _FOREVER
            place = own.argmin()
            slots[number] = slot = window[place] if own[place] < _FOREVER else _FREE
        if slot != _FREE:
            is_given[slot] = True
    return slots


def _print_of(rows: _Numbers, ids: _Numbers, ends: _Numbers) -> int:
    """Sum numbers that stand for slots, their ids and the hours until which they keep them."""
    numbers = ids * 0x9E3779B1 ^ rows * 0x85EBCA6B ^ ends.astype(np.int64) * 0xC2B2AE35
    # Squared, since a plain sum wouldn't depend on which slot has which id.
    return int((numbers * numbers).sum()) % 2**64
