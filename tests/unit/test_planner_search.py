"""Components for TorchRec's own planner."""

import copy
import logging

import pytest
import torch
import torchrec.optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given, strategies as st
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
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
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType

import torchrec_2dsp as tdsp
from tests.support.planning import (
    STOCK_SHARDERS,
    AnyTypeSharder,
    bags,
    constrained,
    group_plan_of,
    planner_for,
    sequences,
    torchrecs_planner,
    world,
)
from torchrec_2dsp.cost.workload import state_bytes_per_row
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer
from torchrec_2dsp.plan.parameter_sharding import ShardingType2D
from torchrec_2dsp.planner.topology import group_topology
from torchrec_2dsp.planner.torchrec.adapters import Partitioner2D, Stats2D, searched_type
from torchrec_2dsp.planner.torchrec.enumerator import (
    Enumerator2D,
    search_as_torchrec,
)

MESH = tdsp.Mesh2D(num_groups=2, group_size=2)
WORLD = world(4)
ALL_2D = [member.value for member in ShardingType2D]
SEARCHED = {name for name in ALL_2D if name != "2d_data_parallel"} | {"data_parallel"}


def stock_planner(
    constraints: dict[str, ParameterConstraints] | None = None,
    sync: tdsp.GradientSync | tdsp.WeightSync | None = None,
    mesh: tdsp.Mesh2D = MESH,
    **settings: object,
) -> EmbeddingShardingPlanner:
    sync = sync or tdsp.GradientSync()
    given = {"partitioner": Partitioner2D(), "stats": Stats2D(mesh=mesh, sync=sync)} | settings
    return torchrecs_planner(
        group_topology(world(mesh.world_size), mesh),
        enumerator=Enumerator2D(world(mesh.world_size), 8, constraints, mesh=mesh, sync=sync),
        **given,
    )


def types_of(plan: ShardingPlan, path: str = "") -> dict[str, str]:
    module_plan = plan.plan[path]
    assert isinstance(module_plan, dict)
    return {name: table.sharding_type for name, table in module_plan.items()}


def test_the_stock_planner_chooses_among_2d_types() -> None:
    plan = stock_planner().plan(bags(), STOCK_SHARDERS)

    assert type(plan) is ShardingPlan
    assert set(types_of(plan)) == {"t0", "t1"}
    assert set(types_of(plan).values()) <= SEARCHED
    plan_2d = tdsp.Plan2D.from_stock(plan, MESH, tdsp.GradientSync())
    assert plan_2d == group_plan_of(bags(), MESH, WORLD)


@pytest.mark.parametrize("type_2d", ALL_2D)
def test_the_stock_planner_plans_every_2d_type(type_2d: str) -> None:
    plan = stock_planner(constrained(type_2d)).plan(bags(), STOCK_SHARDERS)

    assert set(types_of(plan).values()) == {searched_type(type_2d)}
    plan_2d = tdsp.Plan2D.from_stock(plan, MESH, tdsp.GradientSync())
    assert set(types_of(plan_2d).values()) == {type_2d}


def test_the_stock_partitioner_alone_knows_no_2d_host_types() -> None:
    """That is why `Partitioner2D` exists."""
    planner = stock_planner(constrained("2d_table_row_wise"), partitioner=GreedyPerfPartitioner())

    with pytest.raises(PlannerError, match="can't find a host"):
        planner.plan(bags(), STOCK_SHARDERS)


def test_the_cost_of_the_sync_decides_between_types() -> None:
    """Averaging a whole table takes half the time if two ranks share it by rows."""
    model = nn.ModuleDict({"large": bags(1, rows=100_000), "small": bags(1, rows=10)})
    constraints = {"t0": ParameterConstraints(sharding_types=["table_wise", "row_wise"])}

    def chosen(sync: tdsp.GradientSync | tdsp.WeightSync, num_groups: int) -> str:
        planner = stock_planner(constraints, sync, tdsp.Mesh2D(num_groups, 2))
        return types_of(planner.plan(model, STOCK_SHARDERS), "large")["t0"]

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
        for option in enumerator.enumerate(bags(), STOCK_SHARDERS)
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
    enumerator = Enumerator2D(WORLD, 8, constrained(*asked), mesh=MESH)

    model = bags()
    first, again = (enumerator.enumerate(model, STOCK_SHARDERS) for _ in range(2))
    stored = enumerator.last_stored_search_space

    in_order = [searched_type(member.value) for member in ShardingType]
    for options in (first, again, stored):
        assert options is not None
        assert [(option.name, option.sharding_type) for option in options] == [
            (name, kind) for name in ("t0", "t1") for kind in in_order
        ]


def test_options_can_be_estimated_again_under_their_2d_names() -> None:
    enumerator = Enumerator2D(WORLD, 8, mesh=MESH, sync=tdsp.WeightSync())
    options = enumerator.enumerate(bags(), STOCK_SHARDERS)
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
    plan = group_plan_of(bags(), MESH, WORLD, proposer=EmbeddingOffloadScaleupProposer())

    assert set(types_of(plan).values()) <= set(ALL_2D)


def test_stats_report_the_plan_and_the_mesh(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    plan = planner_for(
        MESH, stats=EmbeddingStats(), sync=tdsp.WeightSync(), constraints=constrained("row_wise")
    ).plan(bags(), STOCK_SHARDERS)

    lines = [record.getMessage() for record in caplog.records]
    assert any("RW: 2" in line for line in lines)
    assert sum("2 sharding groups of Mesh2D(2x2, strided)" in line for line in lines) == 1
    assert any("synced by WeightSync()" in line for line in lines)
    assert set(types_of(plan).values()) == {"2d_row_wise"}


def test_stats_report_a_table_with_one_copy_on_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    constraints = {
        "t0": tdsp.ParameterConstraints2D(sharding_types=["row_wise"], num_groups=1),
        "t1": tdsp.ParameterConstraints2D(sharding_types=["row_wise"], num_groups=2),
    }

    planner_for(MESH, stats=EmbeddingStats(), constraints=constraints).plan(bags(), STOCK_SHARDERS)

    lines = [record.getMessage() for record in caplog.records]
    assert sum("RW: 2" in line for line in lines) == MESH.world_size
    assert not any("sharding groups" in line for line in lines)


def test_a_failed_partition_leaves_the_names() -> None:
    options = Enumerator2D(world(4, ddr_cap=10), 8, constrained("row_wise"), mesh=MESH).enumerate(
        bags(), STOCK_SHARDERS
    )
    tiny = group_topology(world(4, ddr_cap=10), MESH)

    with pytest.raises(PlannerError, match="does not fit on any rank"):
        Partitioner2D().partition(options, tiny)

    assert {option.sharding_type for option in options} == {"2d_row_wise"}


def test_the_sharders_own_types_are_enough() -> None:
    """On the CPU TorchRec's own sharder allows neither row-wise nor grid shards."""
    sharders = [EmbeddingBagCollectionSharder()]

    plan = search_as_torchrec(bags(), sharders, topology=WORLD, batch_size=8, mesh=MESH)  # pyright: ignore[reportArgumentType]

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


INTRA, INTER = 1_000.0, 10.0
STRIDED, CONTIGUOUS = tdsp.RankLayout.STRIDED, tdsp.RankLayout.CONTIGUOUS


@pytest.mark.parametrize(
    ("optimizer", "expected_bytes"),
    [
        (EmbOptimType.EXACT_SGD, 0),
        (torch.optim.SGD, 0),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, 4),
        (torchrec.optim.RowWiseAdagrad, 4),
        (MomentScaledRowWiseAdaGradOptimizer, 4),
        (EmbOptimType.EXACT_ADAGRAD, 64),
        (torch.optim.Adam, 128),
        (EmbOptimType.PARTIAL_ROWWISE_ADAM, 68),
        (torchrec.optim.PartialRowWiseLAMB, 68),
    ],
)
def test_the_state_of_an_optimizer(optimizer: EmbOptimType | type, expected_bytes: int) -> None:
    assert state_bytes_per_row(optimizer, dim=16) == expected_bytes


# ---- per shard


def sync_ms(
    sharding_type: str,
    *,
    sync: tdsp.GradientSync | tdsp.WeightSync,
    mesh: tdsp.Mesh2D | None = None,
    sharder: ModuleSharder[nn.Module] | None = None,
    model: nn.Module | None = None,
    rows: int = 40,
    batch_size: int = 8,
    **constraint: object,
) -> list[float]:
    """Return the time that the enumerator adds to each t0 shard for several groups."""
    model = bags(1, rows=rows) if model is None else model
    sharders = [sharder or AnyTypeSharder()]
    constraints = {
        "t0": ParameterConstraints(
            sharding_types=[sharding_type],
            min_partition=32,
            **constraint,  # pyright: ignore[reportArgumentType]
        )
    }

    mesh = mesh or tdsp.Mesh2D(4, 2, CONTIGUOUS)
    topology = world(mesh.world_size, 2, intra_host_bw=INTRA, inter_host_bw=INTER)
    stock = EmbeddingEnumerator(group_topology(topology, mesh), batch_size, constraints)
    ours = Enumerator2D(topology, batch_size, constraints, mesh=mesh, sync=sync)

    def backward_ms(enumerator: EmbeddingEnumerator) -> list[float]:
        (option,) = enumerator.enumerate(model, sharders)  # pyright: ignore[reportArgumentType]
        return [shard.perf.bwd_comms for shard in option.shards]  # pyright: ignore

    both = zip(backward_ms(ours), backward_ms(stock), strict=True)
    return [with_sync - without for with_sync, without in both]


def test_the_gradients_of_touched_rows() -> None:
    def cost(touched_rows: float, dim: int, num_bytes: int = 4) -> float:
        return touched_rows * (dim * num_bytes + 4) * 3 / INTER

    def ms(sharding_type: str, **settings: object) -> list[float]:
        return pytest.approx(sync_ms(sharding_type, sync=tdsp.GradientSync(), **settings))  # pyright: ignore

    # 8 samples on 2 ranks look up 16 rows, all on the table's owner
    assert ms("table_wise") == [cost(16, 64)]
    assert ms("column_wise") == [cost(16, 32)] * 2
    assert ms("row_wise") == [cost(8, 64)] * 2
    assert ms("grid_shard") == [cost(8, 32)] * 4
    assert ms("table_wise", rows=10) == [cost(10, 64)]
    assert ms("table_wise", rows=400, pooling_factors=[3.0]) == [cost(48, 64)]
    half = sync_ms("table_wise", sync=tdsp.GradientSync(transport=tdsp.Transport.BF16))
    assert half == pytest.approx([cost(16, 64, num_bytes=2)])
    assert ms("table_wise", rows=400, batch_sizes=[20]) == [cost(40, 64)]
    assert ms("table_wise", rows=400, num_poolings=[2.0]) == [cost(32, 64)]


def test_the_weights_and_their_state() -> None:
    def cost(shard_bytes: int) -> float:
        return 2 * 3 / 4 * shard_bytes / INTER

    adagrad = AnyTypeSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    applied = bags(1)
    for weight in applied.parameters():
        weight._optimizer_classes = [torch.optim.Adam]  # pyright: ignore[reportAttributeAccessIssue]

    def ms(sharding_type: str, **settings: object) -> list[float]:
        sync = tdsp.WeightSync(rows=tdsp.SyncedRows.ALL)
        return pytest.approx(sync_ms(sharding_type, sync=sync, **settings))  # pyright: ignore

    assert ms("table_wise") == [cost(40 * 64 * 4)]
    assert ms("row_wise") == [cost(20 * 64 * 4)] * 2
    assert ms("table_wise", batch_size=80) == [cost(40 * 64 * 4)]
    assert ms("table_wise", sharder=adagrad) == [cost(40 * 64 * 4 + 40 * 4)]
    assert ms("table_wise", model=applied) == [cost(3 * 40 * 64 * 4)]


def test_the_weights_of_touched_rows() -> None:
    def cost(touched_rows: float, row_bytes: int) -> float:
        return touched_rows * (row_bytes + 4) * 3 / INTER

    adagrad = AnyTypeSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})

    def ms(sync: tdsp.WeightSync, **settings: object) -> list[float]:
        return pytest.approx(sync_ms("table_wise", sync=sync, sharder=adagrad, **settings))  # pyright: ignore

    # 8 samples on 2 ranks look up 16 rows in a step
    assert ms(tdsp.WeightSync(), rows=400) == [cost(16, 260)]
    assert ms(tdsp.WeightSync(policy=tdsp.every(5)), rows=400) == [cost(80, 260) / 5]
    assert ms(tdsp.WeightSync(policy=tdsp.after(9, tdsp.every(2))), rows=400) == [cost(32, 260) / 2]
    assert ms(tdsp.WeightSync(policy=tdsp.never()), rows=400) == [0.0]
    rare_moments = tdsp.WeightSync(moments_policy=tdsp.every(4))
    assert ms(rare_moments, rows=400) == [cost(16, 256) + cost(64, 4) / 4]
    # Where more would be sent than the shard has, the shard is averaged.
    assert ms(tdsp.WeightSync(), rows=16) == [2 * 3 / 4 * 16 * 260 / INTER]


@pytest.mark.parametrize("sync", [tdsp.GradientSync(), tdsp.WeightSync()])
def test_a_data_parallel_table_is_reduced_over_the_world(
    sync: tdsp.GradientSync | tdsp.WeightSync,
) -> None:
    table_bytes = 40 * 64 * 4
    expected_ms = 2 * 3 / 4 * table_bytes / 2 / INTER

    assert sync_ms("data_parallel", sync=sync) == pytest.approx([expected_ms] * 2)


def test_sequence_tables_have_a_cost_too() -> None:
    class AnySequenceSharder(EmbeddingCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [member.value for member in ShardingType]

    extra = sync_ms(
        "table_wise",
        sync=tdsp.GradientSync(),
        model=sequences((40,), dim=64),
        sharder=AnySequenceSharder(),  # pyright: ignore[reportArgumentType]
    )

    assert extra == pytest.approx([16 * (64 * 4 + 4) * 3 / INTER])


def test_replica_peers_in_one_host_sync_faster() -> None:
    within = sync_ms("table_wise", sync=tdsp.GradientSync(), mesh=tdsp.Mesh2D(2, 2, STRIDED))
    across = sync_ms("table_wise", sync=tdsp.GradientSync(), mesh=tdsp.Mesh2D(2, 2, CONTIGUOUS))

    assert across == pytest.approx([within[0] * INTRA / INTER])
