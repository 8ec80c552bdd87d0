"""`IdsOfWorld`: the ids of all ranks' batches, as seen by each rank's id maps."""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import compress, islice
from operator import and_, or_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.hashed_id_map import hour_now
from torchrec_2dsp._compat.id_map_base import History, Memory, Message, WorldBatch
from torchrec_2dsp._compat.id_maps import IdMap, SortedIdMap
from torchrec_2dsp.comms.alarm import on_all_ranks
from torchrec_2dsp.comms.collectives import start_all_to_all_ragged
from torchrec_2dsp.comms.failure_detection import naming_faults
from torchrec_2dsp.comms.groups import MeshGroups, WorldGroups, own_group
from torchrec_2dsp.errors import ConfigError, InputError, SyncError, TwoDError

MAX_IN_FLIGHT = 62
"""The number of batches in flight that ranks can name, one bit of an int64 each."""
Mark = tuple[bool, bool]
"""A rank's flags for a batch in flight: a new batch is equal to it; it is gone."""


class Contents(NamedTuple):
    """A copy of a batch as bytes, because a NaN weight is unequal to itself."""

    form: tuple[Any, ...]
    as_bytes: list[torch.Tensor]

    @classmethod
    def of(cls, features: KeyedJaggedTensor) -> "Contents":
        """Copy a batch."""
        names, indices = features.inverse_indices_or_none() or (None, None)
        optional = features.values(), features.lengths(), features.weights_or_none(), indices
        parts = [part.detach() for part in optional if part is not None]
        kinds = [(part.dtype, part.shape) for part in parts]
        form = features.keys(), features.stride_per_key_per_rank(), names, kinds
        copies = [part.flatten().clone(memory_format=torch.contiguous_format) for part in parts]
        return cls(form, [part.view(torch.uint8) for part in copies])

    def equals(self, other: "Contents | None") -> bool:
        """Tell whether another batch has the same contents."""
        others = other.as_bytes if other and other.form == self.form else []
        return bool(others) and all(map(torch.equal, self.as_bytes, others))


class Gathered(NamedTuple):
    """What ranks have told each other about their batches."""

    batches: Mapping[str, WorldBatch]
    """All ranks' batches, by table; empty if the model is evaluated, if a rank's batch is invalid,
    or if the maps have seen them."""
    again: int | None
    """The batch in flight that equals the new one on all ranks, the oldest if there are several."""
    gone: int
    """A bit for each batch in flight, set if it is gone on some rank."""


class IdsOfWorld:
    """Sends ids between all ranks, in its own group.

    A map that gives rows at intervals has an owner: the rank to which the others send their ids,
    and from which they learn which ids have got rows. All ranks change the other maps.
    """

    def __init__(
        self,
        groups: MeshGroups,
        device: torch.device,
        maps: Mapping[str, IdMap],
        features: Mapping[str, Sequence[str]],
    ) -> None:
        """Send ids for these maps, of which each is for some features."""
        self._board, self._device = groups.board, device
        self._maps, self._features = maps, features
        shared = WorldGroups.current().shared
        if "id_maps" not in shared:
            shared["id_maps"] = own_group(groups.world, device, "id_maps")
        self.group: dist.ProcessGroup = shared["id_maps"]
        self._rank, self._num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._owned = {name: of for name, of in maps.items() if isinstance(of, SortedIdMap)}
        # Other modules' maps have owners, too.
        self._owners = _spread(
            {table: of.module.output_size() for table, of in self._owned.items()},
            shared.setdefault("rows_of_id_map_owners", [0] * self._num_ranks),
        )

    def gathered(
        self,
        own: Mapping[str, torch.Tensor],
        *,
        is_training: bool,
        is_right: bool,
        in_flight: Sequence[Mark],
        fingerprint: int,
        hour: int | None = None,
    ) -> Gathered:
        """Gather what the maps must know of all ranks' batches, unless they have seen them.

        Args:
            own: each feature's ids on this rank.
            is_training: True if the model is trained.
            is_right: True if the tables won't refuse this rank's batch.
            in_flight: marks of the batches in flight, oldest first, in the same order on all ranks.
            fingerprint: a fingerprint of all maps.
            hour: the hour that all ranks have agreed on; by default the rank's own.

        Raises:
            ConfigError: some ranks train while others evaluate.
            InputError: a map can't take an id.
            SyncError: the maps differ.

        Collectives:
            An all-gather of 16 bytes per feature, 24 per map and 56 more, waited for, and another
            if the ranks' hours differ; in training, if maps must know any ids, an all-to-all of
            these, waited for.
        """
        own_hour = hour_now() if hour is None else hour
        refused = next((n for n, name in enumerate(own) if not self._takes(name, own[name])), -1)
        asks, parts, readers = is_training and refused < 0, [], []
        for table, names in self._features.items():
            ids = [own[name] if asks else own[name][:0] for name in names]
            # What must be known depends on the hour.
            message = self._maps[table].message(ids, own_hour)
            parts += message.parts
            readers += [self._owners.get(table)] * len(message.parts)
        marks = (sum(mark[n] << k for k, mark in enumerate(in_flight)) for n in range(2))
        facts = [*map(int, (is_training, is_right, *marks, fingerprint, own_hour, refused))]
        counts = _sizes([own[name] for names in self._features.values() for name in names])
        with naming_faults(self._board):
            by_rank = self._rows([*facts, *counts, *_sizes(parts)])
            modes, are_right, equal, gone, fingerprints, hours, refusals, *others = zip(
                *by_rank, strict=True
            )
            _check_alike(modes, fingerprints)
            if max(refusals) >= 0:
                raise on_all_ranks(_refusal(refusals, list(own)))
            candidates = reduce(and_, equal)
            again = (candidates & -candidates).bit_length() - 1 if candidates else None
            if candidates or not (is_training and all(are_right)):
                return Gathered({}, again, reduce(or_, gone))
            if len(set(hours)) > 1:
                given = {"is_training": is_training, "is_right": is_right, "in_flight": in_flight}
                return self.gathered(own, **given, fingerprint=fingerprint, hour=hours[0])
            sizes = [row[len(facts) + len(counts) :] for row in by_rank]
            arrived = self._exchanged(parts, sizes, readers)
        batches, by_feature = {}, iter(others)
        for table, names in self._features.items():
            batches[table] = WorldBatch(
                own=[own[name] for name in names],
                messages=[Message.of(parts, len(names)) for parts in arrived],
                counts=list(islice(by_feature, len(names))),
                rank=self._rank,
                is_owner=self._owners.get(table, self._rank) == self._rank,
                hour=own_hour,
            )
        return Gathered(batches, None, reduce(or_, gone))

    def settled(self, evicted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Change maps as their owners did.

        Args:
            evicted: the rows that each changed map has taken from other ids; no rows if this rank
                doesn't own the map.

        Returns:
            The rows that the changed maps have taken on all ranks.

        Collectives:
            If owned maps have changed, an all-gather of 16 bytes for each and, if rows have
            changed, an all-to-all of these and their ids; both waited for.
        """
        owned, settled = evicted.keys() & self._owned.keys(), dict(evicted)
        if not owned:
            return settled
        changes = {
            table: (evicted[table], self._owned[table].ids_of(evicted[table]))
            for table in sorted(owned)
        }
        arrived = self._shared([part for change in changes.values() for part in change])
        for table in changes:
            by_rank = [(next(parts), next(parts)) for parts in arrived]
            if self._owners[table] != self._rank:
                settled[table], ids = by_rank[self._owners[table]]
                self._owned[table].follow(settled[table], ids)
        return settled

    def fill_in(self, state: Mapping[str, torch.Tensor], path: str) -> None:
        """Write what only maps' owners keep up to date into a state with maps at ``path``.

        Collectives:
            A broadcast of each such buffer, waited for.
        """
        with naming_faults(self._board):
            for table, owner in self._owners.items():
                for name in self._owned[table].owned_buffers:
                    buffer = state[f"{path}{table}.{name}"]
                    dist.broadcast(buffer, group_src=owner, group=self.group)

    def histories(self, memories: Mapping[str, Memory]) -> dict[str, History]:
        """Return what to save of maps' memories, with all ranks' ids.

        Collectives:
            An all-gather of 24 bytes per map, and, if a rank has ids, an all-to-all; both waited
            for.
        """
        own = [part for memory in memories.values() for part in memory.tally(self._device)]
        arrived = self._shared(own)
        return {
            table: memory.history([Message.of(parts, 0).tally for parts in arrived])
            for table, memory in memories.items()
        }

    def _takes(self, feature: str, ids: torch.Tensor) -> bool:
        (table,) = (table for table, names in self._features.items() if feature in names)
        return self._maps[table].takes(ids)

    def _rows(self, own: Sequence[int]) -> list[list[int]]:
        """Gather as many numbers from each rank."""
        row = torch.tensor(own, dtype=torch.int64, device=self._device)
        by_rank = [torch.empty_like(row) for _ in range(self._num_ranks)]
        dist.all_gather(by_rank, row, group=self.group)
        return torch.stack(by_rank).tolist()

    def _shared(self, own: Sequence[torch.Tensor]) -> list[Iterator[torch.Tensor]]:
        """Send numbers to all ranks; return each rank's parts in order."""
        with naming_faults(self._board):
            return self._exchanged(own, self._rows(_sizes(own)), [None] * len(own))

    def _exchanged(
        self,
        own: Sequence[torch.Tensor],
        sizes: Sequence[Sequence[int]],
        readers: Sequence[int | None],
    ) -> list[Iterator[torch.Tensor]]:
        """Send numbers to their readers; return each rank's parts in order, the others' empty.

        Args:
            own: this rank's parts.
            sizes: each rank's `_sizes`.
            readers: the rank that reads each part; `None` if all do.
        """
        if self._num_ranks == 1 or not any(map(any, sizes)):
            return [iter(own) for _ in sizes]
        are_read = [
            [reader in (None, rank) for reader in readers] for rank in range(self._num_ranks)
        ]
        sent = [torch.cat([own[0][:0], *compress(own, are)]) for are in are_read]
        counts = [
            [size * is_read for size, is_read in zip(of_rank, are_read[self._rank], strict=True)]
            for of_rank in sizes
        ]
        arrived = start_all_to_all_ragged(sent, [*map(sum, counts)], self.group).by_rank()
        return [
            iter(values.split(of_rank)) for values, of_rank in zip(arrived, counts, strict=True)
        ]


def _spread(num_rows: Mapping[str, int], rows_of_ranks: list[int]) -> dict[str, int]:
    """Give each map to the rank with the fewest rows so far, the largest map first."""
    owners = {}
    for table in sorted(num_rows, key=lambda table: (-num_rows[table], table)):
        owners[table] = rows_of_ranks.index(min(rows_of_ranks))
        rows_of_ranks[owners[table]] += num_rows[table]
    return owners


def _sizes(parts: Sequence[torch.Tensor]) -> list[int]:
    return [part.numel() for part in parts]


def _refusal(refusals: Sequence[int], features: Sequence[str]) -> InputError:
    rank, feature = refusals.index(max(refusals)), features[max(refusals)]
    return InputError(
        f"the batch of rank {rank} has an id of feature {feature!r} that is -1 or out of range "
        "(input_hash_size), which TorchRec's HashZchManagedCollisionModule can't map; correct the "
        "id or the size"
    )


def _check_alike(modes: Sequence[int], fingerprints: Sequence[int]) -> None:
    if len(set(modes)) > 1:
        error: TwoDError = ConfigError(
            f"the model trains on rank {modes.index(1)} and is evaluated on rank "
            f"{modes.index(0)}, which changes id maps on one of them alone; call train() or "
            "eval() on all ranks"
        )
        raise on_all_ranks(error)
    if len(set(fingerprints)) > 1:
        error = SyncError(
            "the id maps differ between ranks, after they saw the same ids; a hash function or an "
            "admission filter must give the same on all ranks, and all must load the same state"
        )
        raise on_all_ranks(error)
