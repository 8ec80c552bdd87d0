"""`IdsOfWorld`: the ids of all ranks' batches, as seen by each rank's id maps."""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_, or_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.id_maps import IdMap, hour_now
from torchrec_2dsp.codecs.ids import pack_ids, unpack_ids
from torchrec_2dsp.comms.alarm import on_all_ranks
from torchrec_2dsp.comms.collectives import all_gather_ragged
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
    """The ranks' facts about their batches, equal on all ranks."""

    hour: int
    """The first rank's hour."""
    ids: Mapping[str, torch.Tensor]
    """Each feature's ids on all ranks, in rank order; empty if the model is evaluated, if a
    rank's batch is invalid, or if the maps have seen them."""
    again: int | None
    """The batch in flight that equals the new one on all ranks, the oldest if there are several."""
    gone: int
    """A bit for each batch in flight, set if it is gone on some rank."""


class IdsOfWorld:
    """Sends ids between all ranks, in its own group."""

    def __init__(self, groups: MeshGroups, device: torch.device) -> None:
        self._board = groups.board
        shared = WorldGroups.current().shared
        if "id_maps" not in shared:
            shared["id_maps"] = own_group(groups.world, device, "id_maps")
        self.group: dist.ProcessGroup = shared["id_maps"]

    def gathered(
        self,
        own: Mapping[str, torch.Tensor],
        maps: Mapping[str, IdMap],
        *,
        is_training: bool,
        is_right: bool,
        in_flight: Sequence[Mark],
        fingerprint: int,
    ) -> Gathered:
        """Gather the ranks' ids, unless the maps have seen all ranks' batches.

        Args:
            own: each feature's ids on this rank.
            maps: each feature's map.
            is_training: True if the model is trained.
            is_right: True if the tables won't refuse this rank's batch.
            in_flight: marks of the batches in flight, oldest first, in the same order on all ranks.
            fingerprint: a fingerprint of all maps.

        Raises:
            ConfigError: some ranks train while others evaluate.
            InputError: a map can't take an id.
            SyncError: the maps differ.

        Collectives:
            An all-gather of 8 bytes per feature and 72 more, waited for; in training an all-to-all
            of ids, in as few bytes as the largest id needs, waited for.
        """
        ids = torch.cat(list(own.values()))
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        numbered = enumerate(own.items())
        refused = next((n for n, (name, of) in numbered if not maps[name].takes(of)), -1)
        marks = (sum(mark[n] << k for k, mark in enumerate(in_flight)) for n in range(2))
        facts = [is_training, is_right, *marks, fingerprint, hour_now(), refused]
        counts = (feature.numel() for feature in own.values())
        own_facts = ids.new_tensor([*map(int, facts), low, high, *counts])
        by_rank = [torch.empty_like(own_facts) for _ in range(dist.get_world_size(self.group))]
        with naming_faults(self._board):
            dist.all_gather(by_rank, own_facts, group=self.group)
            modes, are_right, equal, gone, *others = torch.stack(by_rank, 1).tolist()
            fingerprints, hours, refusals, lows, highs, *counts_there = others
            _check_alike(modes, fingerprints)
            if max(refusals) >= 0:
                rank = refusals.index(max(refusals))
                raise on_all_ranks(
                    InputError(
                        f"the batch of rank {rank} has an id of feature "
                        f"{list(own)[max(refusals)]!r} that is -1 or out of range "
                        "(input_hash_size), which TorchRec's HashZchManagedCollisionModule can't "
                        "map; correct the id or the size"
                    )
                )
            candidates = reduce(and_, equal)
            again = (candidates & -candidates).bit_length() - 1 if candidates else None
            if candidates or not (is_training and all(are_right)):
                return Gathered(hours[0], {}, again, reduce(or_, gone))
            num_bytes = 8 if min(lows) < 0 else max(1, -(-max(highs).bit_length() // 8))
            sizes = [sum(counts) for counts in zip(*counts_there, strict=True)]
            packed = all_gather_ragged(pack_ids(ids, num_bytes), sizes, self.group)
        split = [
            unpack_ids(part).split(list(counts))
            for part, counts in zip(packed, zip(*counts_there, strict=True), strict=True)
        ]
        of_world = map(torch.cat, zip(*split, strict=True))
        return Gathered(hours[0], dict(zip(own, of_world, strict=True)), None, reduce(or_, gone))


def _check_alike(modes: list[int], fingerprints: list[int]) -> None:
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
