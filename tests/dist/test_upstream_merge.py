"""TorchRec's merge of the hashed id maps of replica groups loses rows, which one map can't."""

from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torchrec.distributed.mc_embedding_modules import (
    BaseShardedManagedCollisionEmbeddingCollection,
)
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.support.hash_zch import OneThreadHashZch, at_hour, hash_of
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.groups import world_group

ROWS = 24


def merged(rank: int, world_size: int, ids: list[int]) -> dict[int, float]:
    """Let each rank map its id and write it into the id's row; return the rows after the merge."""
    options: Any = {
        "eviction_policy_name": HashZchEvictionPolicyName.LRU_EVICTION,
        "eviction_config": HashZchEvictionConfig(features=["f"], single_ttl=9),
    }
    id_map = OneThreadHashZch(ROWS, torch.device("cpu"), 1, max_probe=4, **options)
    seen = torch.tensor(ids[rank : rank + 1])
    with at_hour(1_000):
        features = {"f": JaggedTensor(seen, lengths=torch.ones_like(seen), weights=torch.ones(1))}
        (row,) = id_map.remap(features)["f"].values()
    weights, state = torch.zeros(ROWS, 1), torch.zeros(ROWS)
    weights[row] = float(ids[rank])
    kernel = SimpleNamespace(
        split_embedding_weights=lambda: [weights], get_optimizer_state=lambda: [{"sum": state}]
    )
    lookup = torch.ops.fbgemm.zero_collision_hash

    def on_a_cpu(**given: Any) -> Any:
        if given.get("readonly"):
            return lookup(**given)
        return id_map._zero_collision_hash(readonly=False, **given)

    def summed(tensors: dict[torch.dtype, list[torch.Tensor]], *_: object) -> None:
        for tensor in (tensor for of_type in tensors.values() for tensor in of_type):
            dist.all_reduce(tensor, group=world_group())

    with patch.object(torch.ops.fbgemm, "zero_collision_hash", on_a_cpu):
        survived, to_merged = id_map.sync_identities(
            rank == 0, world_size, list(range(world_size)), world_group()
        )
    merge: Any = BaseShardedManagedCollisionEmbeddingCollection.sync_hash_zch_weights
    module = SimpleNamespace(_table_to_tbe_and_index={"t": (kernel, 0)})
    merge(module, "t", to_merged, survived, True, summed)
    slots = id_map._hash_zch_identities[:, 0]
    return {id_: float(weights[slots == id_]) for id_ in ids}


def home(id_: int) -> int:
    return hash_of(id_) % ROWS


SAME_HOME = [3, next(id_ for id_ in count(4) if home(id_) == home(3))]
OTHER_HOME = [3, next(id_ for id_ in count(4) if abs(home(id_) - home(3)) > 4)]


def test_torchrec_merges_ids_of_different_homes(ranks2: RankPool) -> None:
    assert ranks2.run(merged, OTHER_HOME) == [{id_: float(id_) for id_ in OTHER_HOME}] * 2


def test_torchrec_loses_an_id_that_moves(ranks2: RankPool) -> None:
    """One id gets the sum of both rows, the other one none: both had one of the two copies."""
    first, moved = SAME_HOME
    assert ranks2.run(merged, SAME_HOME) == [{first: float(first + moved), moved: 0.0}] * 2
