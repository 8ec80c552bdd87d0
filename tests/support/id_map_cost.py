"""Measure a step with id maps beside the same step without, in two exact copies.

    torchrec-2dsp cluster --hosts 2 --ranks-per-host 2 --link 200mbit --processor-per-rank -- \
      -m tests.support.id_map_cost [INTERVAL] [hashed]

Eight one-hot features by row exchange; the model without maps gets row ids. Both train the same
batches alternately. There are as many ids as rows, and most ids have a row when the clock starts.
Maps give rows every 10 batches, or every INTERVAL. Hashed ones give them in each batch; an hour
lasts as many batches, and ids unseen for eight hours are evicted. Prints each model's milliseconds
and the rounds' ratios.
"""

import statistics
import sys
import time
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.drifting_ids import Stream
from tests.support.hash_zch import set_clock
from tests.support.managed_collisions import FAR, Head, behind_maps, sorting_map
from tests.support.models import BagModel, ModelSpec, TableSpec
from tests.support.parity import Cell, group_plan, make_optimizer, make_sharder
from torchrec_2dsp.programs.launch import launched_world, quiet_upstream

NUM_FEATURES, NUM_ROWS, DIM, SIZE = 8, 50_000, 64, 512
INTERVAL = next((int(word) for word in sys.argv[1:] if word.isdecimal()), 10)
IS_HASHED = "hashed" in sys.argv
ROUNDS, WARM_UP = 5, max(2, 80 // INTERVAL)
STREAM = Stream(10_000, NUM_ROWS // 2, INTERVAL)
SPEC = ModelSpec(tuple(TableSpec(f"t{n}", NUM_ROWS, DIM, (f"f{n}",)) for n in range(NUM_FEATURES)))


def hashing_map(config: Any) -> HashZchManagedCollisionModule:
    return HashZchManagedCollisionModule(
        config.num_embeddings,
        torch.device("cpu"),
        total_num_buckets=1,
        max_probe=128,
        eviction_policy_name=HashZchEvictionPolicyName.SINGLE_TTL_EVICTION,
        eviction_config=HashZchEvictionConfig(features=config.feature_names, single_ttl=8),
    )


class Bags(nn.Module):
    """Bags and one dense layer, with id maps or without."""

    def __init__(self, *, has_maps: bool) -> None:
        super().__init__()
        self.sparse: Any = BagModel(SPEC).ebc
        self.has_maps = has_maps
        if has_maps:
            id_map = partial(sorting_map, interval=INTERVAL)
            self.sparse = behind_maps(self.sparse, hashing_map if IS_HASHED else id_map)
        self.head = Head(SPEC)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.sparse(features)
        return self.head(rows[0] if self.has_maps else rows).tanh().mean()


def sharded(cell: Cell, *, has_maps: bool) -> tdsp.ModelParallel2D:
    torch.manual_seed(0)
    tables = make_sharder(cell)
    behind = tdsp.ManagedCollisionEmbeddingBagCollectionSharder2D(tables)
    plan = group_plan(cell, nn.ModuleDict({"sparse": BagModel(SPEC).ebc}), tables)
    return tdsp.ModelParallel2D(
        Bags(has_maps=has_maps), plan=plan, sharders=[behind if has_maps else tables]
    )


def batch(step: int, rank: int, *, has_maps: bool) -> KeyedJaggedTensor:
    ids = STREAM.ids(step, 64 * step + rank, NUM_FEATURES * SIZE)
    return KeyedJaggedTensor(
        [f"f{n}" for n in range(NUM_FEATURES)],
        ids * FAR if has_maps else ids % NUM_ROWS,
        lengths=torch.ones(NUM_FEATURES * SIZE, dtype=torch.int64),
    )


def main() -> None:
    quiet_upstream()
    with launched_world("cpu", "id_map_cost", 600.0) as rank:
        cell = Cell(tdsp.Mesh2D(2, 2), spec=SPEC, exchange="row", owners="hash")
        models = {has_maps: sharded(cell, has_maps=has_maps) for has_maps in (False, True)}
        optimizers = {has_maps: make_optimizer(model) for has_maps, model in models.items()}
        times: dict[bool, list[float]] = {False: [], True: []}
        steps = count()
        set_clock(lambda: numbers[0] // INTERVAL)
        for _ in range(WARM_UP + ROUNDS):
            numbers = [next(steps) for _ in range(INTERVAL)]
            for has_maps, model in models.items():
                batches = [batch(step, rank, has_maps=has_maps) for step in numbers]
                dist.barrier()
                start_s = time.perf_counter()
                for features in batches:
                    optimizers[has_maps].zero_grad()
                    model(features).backward()
                    optimizers[has_maps].step()
                dist.barrier()
                times[has_maps].append((time.perf_counter() - start_s) / INTERVAL * 1e3)
        if rank == 0:
            for has_maps, name in ((False, "without"), (True, "with id maps")):
                print(f"{name}: {statistics.median(times[has_maps][WARM_UP:]):.1f} ms a step")
            ratios = [ours / theirs for ours, theirs in zip(times[True], times[False], strict=True)]
            ratios = ratios[WARM_UP:]
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            print(f"with id maps it takes {middle:.2f} times as long ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
