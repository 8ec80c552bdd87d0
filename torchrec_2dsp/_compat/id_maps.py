"""Id maps: TorchRec's modules that give rows to ids, and the state that they don't save.

TorchRec has two kinds. `MCHManagedCollisionModule` keeps its ids sorted and gives rows at
intervals. `HashZchManagedCollisionModule` has a slot for each id near the id's hash.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionModule,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
    probabilistic_threshold_filter,
)

from torchrec_2dsp._compat.hashed_id_map import HashedIdMap
from torchrec_2dsp._compat.id_map_base import (
    LAST_BATCH,
    History,
    IdMapBase,
    Memory,
    Message,
    Overwritten,
    Tally,
    WorldBatch,
)
from torchrec_2dsp.errors import UnsupportedError

_POLICIES = (LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy)


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

    def see(self, batch: WorldBatch, *, keeps_before: bool = False) -> torch.Tensor | None:
        """Remember the batch; if it ends an interval, return the rows that the owner reassigns.

        Other ranks return no rows until they `follow`; all return `None` within an interval.
        """
        module, memory = self.module, self.memory
        number, is_due = self._next_batch
        self.overwritten = self._overwritten_by_next() if keeps_before else None
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

    def _overwritten_by_next(self) -> Overwritten:
        """Copy all buffers if the next batch ends an interval, else the batch counter."""
        buffers = self.module.state_dict()
        names = buffers if self._next_batch[1] else ["_current_iter_tensor"]
        return Overwritten(self.memory, {name: buffers[name].clone() for name in names})

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
