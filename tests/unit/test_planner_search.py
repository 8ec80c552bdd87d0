"""The parts of `Planner2D`, each of them in TorchRec's own planner."""

import copy
import logging

import pytest
from hypothesis import given, strategies as st
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import PlannerError, ShardingOption
from torchrec.distributed.types import ShardingPlan, ShardingType

import torchrec_2dsp as tdsp
from tests.unit.test_planner import (
    ALL_2D,
    SHARDERS,
    bags,
    constrained,
    nothing_reserved,
    planner_for,
    world,
)
from torchrec_2dsp.planner.topology import group_topology
from torchrec_2dsp.planner.torchrec.adapters import Partitioner2D, Stats2D, searched_type
from torchrec_2dsp.planner.torchrec.enumerator import Enumerator2D

MESH = tdsp.Mesh2D(num_groups=2, group_size=2)
WORLD = world(4)
SEARCHED = {name for name in ALL_2D if name != "2d_data_parallel"} | {"data_parallel"}


def stock_planner(
    constraints: dict[str, ParameterConstraints] | None = None,
    sync: tdsp.GradientSync | tdsp.WeightSync | None = None,
    mesh: tdsp.Mesh2D = MESH,
    **settings: object,
) -> EmbeddingShardingPlanner:
    """TorchRec's planner with our parts."""
    sync = sync or tdsp.GradientSync()
    given = {
        "partitioner": Partitioner2D(),
        "stats": Stats2D(mesh=mesh, sync=sync),
        **settings,
    }
    return EmbeddingShardingPlanner(
        topology=group_topology(world(mesh.world_size), mesh),
        batch_size=8,
        enumerator=Enumerator2D(world(mesh.world_size), 8, constraints, mesh=mesh, sync=sync),
        storage_reservation=nothing_reserved(),
        **given,  # pyright: ignore[reportArgumentType]
    )


def types_of(plan: ShardingPlan, path: str = "") -> dict[str, str]:
    module_plan = plan.plan[path]
    assert isinstance(module_plan, dict)
    return {name: table.sharding_type for name, table in module_plan.items()}


def test_the_stock_planner_chooses_among_2d_types() -> None:
    plan = stock_planner().plan(bags(), SHARDERS)

    assert type(plan) is ShardingPlan
    assert set(types_of(plan)) == {"t0", "t1"}
    assert set(types_of(plan).values()) <= SEARCHED
    made = tdsp.Plan2D.from_stock(plan, MESH, tdsp.GradientSync())
    assert made == planner_for(MESH).plan(bags(), SHARDERS)


@pytest.mark.parametrize("type_2d", ALL_2D)
def test_the_stock_planner_plans_every_2d_type(type_2d: str) -> None:
    plan = stock_planner(constrained(type_2d)).plan(bags(), SHARDERS)

    assert set(types_of(plan).values()) == {searched_type(type_2d)}
    made = tdsp.Plan2D.from_stock(plan, MESH, tdsp.GradientSync())
    assert set(types_of(made).values()) == {type_2d}


def test_the_stock_partitioner_alone_knows_no_2d_host_types() -> None:
    """Why `Partitioner2D` is a part."""
    planner = stock_planner(constrained("2d_table_row_wise"), partitioner=GreedyPerfPartitioner())

    with pytest.raises(PlannerError, match="can't find a host"):
        planner.plan(bags(), SHARDERS)


def test_the_cost_of_the_sync_decides_between_types() -> None:
    """Averaging a whole table takes two ranks half the time, if they share it by rows."""
    model = nn.ModuleDict({"large": bags(1, rows=100_000), "small": bags(1, rows=10)})
    constraints = {"t0": ParameterConstraints(sharding_types=["table_wise", "row_wise"])}

    def chosen(sync: tdsp.GradientSync | tdsp.WeightSync, num_groups: int) -> str:
        planner = stock_planner(constraints, sync, tdsp.Mesh2D(num_groups, 2))
        return types_of(planner.plan(model, SHARDERS), "large")["t0"]

    whole = tdsp.WeightSync(rows=tdsp.SyncedRows.ALL)
    assert chosen(whole, 1) == "2d_table_wise"
    assert chosen(whole, 4) == "2d_row_wise"
    assert chosen(tdsp.WeightSync(), 4) == "2d_table_wise"
    assert chosen(tdsp.GradientSync(), 4) == "2d_table_wise"


def options_of(
    enumerator: EmbeddingEnumerator,
) -> dict[tuple[str, str, str], ShardingOption]:
    return {
        (option.fqn, option.sharding_type.removeprefix("2d_"), option.compute_kernel): option
        for option in enumerator.enumerate(bags(), SHARDERS)
    }


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("sync", [tdsp.GradientSync(), tdsp.WeightSync()])
def test_an_option_is_the_stock_option_and_its_sync(
    num_groups: int, sync: tdsp.GradientSync | tdsp.WeightSync
) -> None:
    mesh = tdsp.Mesh2D(num_groups, 2)
    stock = options_of(EmbeddingEnumerator(topology=world(2), batch_size=8))
    ours = options_of(Enumerator2D(world(2 * num_groups), 8, mesh=mesh, sync=sync))

    assert set(ours) == set(stock)
    assert len(ours) == 2 * 6  # grid sharding only where a constraint asks for it
    for key, option in ours.items():
        for shard, stock_shard in zip(option.shards, stock[key].shards, strict=True):
            assert shard.perf is not None
            assert stock_shard.perf is not None
            assert (shard.size, shard.offset) == (stock_shard.size, stock_shard.offset)
            assert shard.storage == stock_shard.storage
            extra_ms = shard.perf.total - stock_shard.perf.total
            assert extra_ms == pytest.approx(shard.perf.bwd_comms - stock_shard.perf.bwd_comms)
            if num_groups == 1:
                assert shard.perf == stock_shard.perf
            else:
                assert extra_ms > 0


def test_options_come_in_one_order() -> None:
    asked = [member.value for member in reversed(ShardingType)]
    constraints = {
        name: ParameterConstraints(sharding_types=asked, min_partition=32) for name in ("t0", "t1")
    }
    enumerator = Enumerator2D(WORLD, 8, constraints, mesh=MESH)

    model = bags()
    first = [
        (option.name, option.sharding_type) for option in enumerator.enumerate(model, SHARDERS)
    ]
    again = [
        (option.name, option.sharding_type) for option in enumerator.enumerate(model, SHARDERS)
    ]
    stored = enumerator.last_stored_search_space

    in_order = [searched_type(member.value) for member in ShardingType]
    assert first == [(name, kind) for name in ("t0", "t1") for kind in in_order]
    assert again == first
    assert stored is not None
    assert [(option.name, option.sharding_type) for option in stored] == first


def test_options_can_be_estimated_again_under_their_2d_names() -> None:
    enumerator = Enumerator2D(WORLD, 8, mesh=MESH, sync=tdsp.WeightSync())
    options = enumerator.enumerate(bags(), SHARDERS)
    before = copy.deepcopy(options)

    enumerator.populate_estimates(options)

    assert [option.shards for option in options] == [option.shards for option in before]
    assert [option.sharding_type for option in options] == [
        option.sharding_type for option in before
    ]


def test_a_users_estimators_get_the_sync_added() -> None:
    group = group_topology(WORLD, MESH)
    estimators = [EmbeddingPerfEstimator(group), EmbeddingStorageEstimator(group)]
    stock = options_of(Enumerator2D(WORLD, 8, mesh=MESH))

    given = options_of(Enumerator2D(WORLD, 8, estimator=[*estimators], mesh=MESH))

    assert [option.shards for option in given.values()] == [
        option.shards for option in stock.values()
    ]


def test_a_proposer_that_estimates_anew_works() -> None:
    planner = planner_for(MESH, proposer=EmbeddingOffloadScaleupProposer())

    assert set(types_of(planner.plan(bags(), SHARDERS)).values()) <= set(ALL_2D)


def test_a_stock_enumerator_of_a_group_works_without_sync_costs() -> None:
    enumerator = EmbeddingEnumerator(
        topology=group_topology(WORLD, MESH), batch_size=8, constraints=constrained("row_wise")
    )

    plan = planner_for(MESH, enumerator=enumerator).plan(bags(), SHARDERS)

    assert set(types_of(plan).values()) == {"2d_row_wise"}


def test_stats_report_the_plan_and_the_mesh(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    plan = planner_for(
        MESH, stats=EmbeddingStats(), sync=tdsp.WeightSync(), constraints=constrained("row_wise")
    ).plan(bags(), SHARDERS)

    lines = [record.getMessage() for record in caplog.records]
    assert any("RW: 2" in line for line in lines)
    assert sum("2 sharding groups of Mesh2D(2x2, strided)" in line for line in lines) == 1
    assert any("kept equal by WeightSync()" in line for line in lines)
    assert set(types_of(plan).values()) == {"2d_row_wise"}


def test_a_failed_partition_leaves_the_names() -> None:
    options = Enumerator2D(world(4, ddr_cap=10), 8, constrained("row_wise"), mesh=MESH).enumerate(
        bags(), SHARDERS
    )
    tiny = group_topology(world(4, ddr_cap=10), MESH)

    with pytest.raises(PlannerError, match="does not fit on any rank"):
        Partitioner2D().partition(options, tiny)

    assert {option.sharding_type for option in options} == {"2d_row_wise"}


def test_the_sharders_own_types_are_enough() -> None:
    """On the CPU TorchRec's own sharder allows neither row-wise nor grid shards."""
    sharders = [EmbeddingBagCollectionSharder()]

    plan = planner_for(MESH).plan(bags(), sharders)  # pyright: ignore[reportArgumentType]

    assert set(types_of(plan).values()) <= {
        "2d_data_parallel",
        "2d_table_wise",
        "2d_column_wise",
        "2d_table_column_wise",
    }


@given(st.sampled_from([*ALL_2D, *(name.removeprefix("2d_") for name in ALL_2D)]))
def test_the_name_in_a_search_is_stable(name: str) -> None:
    assert searched_type(name) in SEARCHED
    assert searched_type(searched_type(name)) == searched_type(name)
