"""`BalancedPartitioner` in TorchRec's planner, and in ours."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import Partitioner, PlannerError, ShardingOption
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import torchrec_2dsp as tdsp
from torchrec_2dsp.planner.search.place import Bins, Items, improved, largest_differencing

pytestmark = pytest.mark.dealt_file

RANKS = 4
GIB = 2**30


def model(seed: int, num_tables: int = 24) -> EmbeddingBagCollection:
    generator = np.random.default_rng(seed)
    dims = 4 * generator.integers(1, 33, num_tables)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{number}",
                num_embeddings=int(generator.integers(1_000, 200_000)),
                embedding_dim=int(dim),
                feature_names=[f"f{number}"],
            )
            for number, dim in enumerate(dims)
        ],
        device=torch.device("meta"),
    )


def topology(memory_bytes: int = GIB) -> Topology:
    """Two hosts."""
    return Topology(
        world_size=RANKS,
        local_world_size=2,
        compute_device="cuda",
        hbm_cap=memory_bytes,
        ddr_cap=memory_bytes,
    )


def options(seed: int, kinds: "dict[str, str]") -> list[ShardingOption]:
    """One option for each table: table-wise, unless ``kinds`` says otherwise."""
    tables = model(seed)
    enumerator = EmbeddingEnumerator(
        topology(),
        batch_size=512,
        constraints={
            config.name: ParameterConstraints(
                sharding_types=[kind := kinds.get(config.name, "table_wise")],
                compute_kernels=["dense" if kind == "data_parallel" else "fused"],
                min_partition=16,
            )
            for config in tables.embedding_bag_configs()
        },
    )
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    found = enumerator.enumerate(tables, sharders)
    names = list(dict.fromkeys(option.name for option in found))
    return [next(option for option in found if option.name == name) for name in names]


def by_rank(placed: list[ShardingOption], of_shard: Callable[[Any], float]) -> list[float]:
    found = [0.0] * RANKS
    for shard in (shard for option in placed for shard in option.shards):
        assert shard.rank is not None
        found[shard.rank] += of_shard(shard)
    return found


def loads(placed: list[ShardingOption]) -> list[float]:
    return by_rank(placed, lambda shard: shard.perf.total)


def memory(placed: list[ShardingOption]) -> list[int]:
    return [int(used) for used in by_rank(placed, lambda shard: shard.storage.hbm)]


ON_ONE_HOST = {f"t{number}": "table_row_wise" for number in range(3)}
"""Shards that stay on the ranks of a host, which have more to do than others then."""


@pytest.mark.parametrize(
    "kinds", [{}, {"t0": "column_wise", "t1": "data_parallel"}, ON_ONE_HOST], ids=len
)
def test_no_less_even_than_greed_and_mostly_more(kinds: dict[str, str]) -> None:
    wins = 0
    for seed in range(8):
        greed = max(loads(GreedyPerfPartitioner().partition(options(seed, kinds), topology())))
        ours = tdsp.BalancedPartitioner().partition(options(seed, kinds), topology())
        assert max(loads(ours)) <= greed * (1 + 1e-9)
        wins += max(loads(ours)) < greed * (1 - 1e-9)
    assert wins >= 6


@pytest.mark.parametrize("kinds", [{}, ON_ONE_HOST], ids=len)
def test_memory_is_kept(kinds: dict[str, str]) -> None:
    """With hardly more room than greed needs."""
    for seed in range(4):
        needed = max(memory(GreedyPerfPartitioner().partition(options(seed, kinds), topology())))
        tight = topology(needed + 1)
        placed = tdsp.BalancedPartitioner().partition(options(seed, kinds), tight)
        assert max(memory(placed)) <= needed + 1
        with pytest.raises(PlannerError):
            tdsp.BalancedPartitioner().partition(options(seed, kinds), topology(needed // 3))


def test_the_better_of_both_ways_is_taken() -> None:
    for seed in range(8):
        greedy = GreedyPerfPartitioner().partition(options(seed, {}), topology())
        shards: list[Any] = [shard for option in greedy for shard in option.shards]
        times = np.array([shard.perf.total for shard in shards])
        items = Items(times, np.zeros((len(times), 1)))
        bins = Bins(np.zeros(RANKS), np.ones((RANKS, 1)))
        starts = [
            np.array([shard.rank for shard in shards]),
            largest_differencing(times, bins.times),
        ]
        best = min(bins.loads(items, improved(items, bins, start)).max() for start in starts)
        ours = tdsp.BalancedPartitioner().partition(options(seed, {}), topology())
        assert max(loads(ours)) == pytest.approx(best)


def planned(partitioner: Partitioner | None, mesh: tdsp.Mesh2D | None) -> tdsp.Plan2D:
    tables = model(3)
    settings: dict[str, Any] = {
        "topology": topology(),
        "partitioner": partitioner,
        "storage_reservation": FixedPercentageStorageReservation(0.15),
        "constraints": {
            config.name: ParameterConstraints(sharding_types=["table_wise"])
            for config in tables.embedding_bag_configs()
        },
    }
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    if mesh is not None:
        return tdsp.Planner2D(**settings, mesh=mesh).plan(tables, sharders)
    plan = EmbeddingShardingPlanner(**settings).plan(tables, sharders)
    return tdsp.Plan2D.from_stock(plan, tdsp.Mesh2D(1, RANKS))


@pytest.mark.parametrize("mesh", [None, tdsp.Mesh2D(1, 4), tdsp.Mesh2D(2, 2)], ids=str)
def test_planners_take_it(mesh: tdsp.Mesh2D | None) -> None:
    ours, greedy = planned(tdsp.BalancedPartitioner(), mesh), planned(None, mesh)
    ranks = [
        [sharding.ranks for _, module in plan.modules() for _, sharding in module.tables()]
        for plan in (ours, greedy)
    ]
    assert ranks[0] != ranks[1]
    assert ours.mesh == greedy.mesh
