"""`Planner2D`: which plan it makes, and what it says when there is none."""

import copy

import pytest
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardingOption

import torchrec_2dsp as tdsp
from tests.support.planning import (
    STOCK_SHARDERS,
    bags,
    constrained,
    group_plan_of,
    nothing_reserved,
    planner_for,
    tables_in,
    world,
)
from torchrec_2dsp.plan.parameter_sharding import ShardingType2D
from torchrec_2dsp.planner.topology import Shortfall

ALL_2D = [member.value for member in ShardingType2D]
SEARCHED = [name for name in ALL_2D if name not in ("2d_table_column_wise", "2d_grid_shard")]


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("kind", [name.removeprefix("2d_") for name in ALL_2D])
def test_a_group_is_planned_as_torchrec_plans_a_world(kind: str, group_size: int) -> None:
    """Apart from the sync, one group is a world of its own: same shards on same ranks."""
    constraints = constrained("table_wise", num_tables=5) | constrained(kind)
    model = bags(num_tables=5)
    stock = EmbeddingShardingPlanner(
        topology=world(group_size, 2),
        batch_size=8,
        storage_reservation=nothing_reserved(),
        constraints=constraints,
    ).plan(model, STOCK_SHARDERS)

    for mesh in (tdsp.Mesh2D(1, group_size), tdsp.Mesh2D(2, group_size)):
        topology = world(mesh.world_size, 2 * mesh.num_groups)
        plan = group_plan_of(model, mesh, topology, constraints=constraints)
        assert plan == tdsp.Plan2D.from_stock(stock, mesh)
        assert tables_in(plan)["t0"].sharding_type == f"2d_{kind}"


@pytest.mark.parametrize(
    "mesh", [tdsp.Mesh2D(1, 2), tdsp.Mesh2D(2, 1), tdsp.Mesh2D(4, 2, tdsp.RankLayout.CONTIGUOUS)]
)
@pytest.mark.parametrize("type_2d", SEARCHED)
def test_a_constraint_may_name_either_form(mesh: tdsp.Mesh2D, type_2d: str) -> None:
    by_stock_name = planner_for(mesh, constraints=constrained(type_2d.removeprefix("2d_")))
    by_2d_name = planner_for(mesh, constraints=constrained(type_2d))

    plan = by_2d_name.plan(bags(), STOCK_SHARDERS)

    assert by_stock_name.plan(bags(), STOCK_SHARDERS) == plan
    assert {table.sharding_type for table in tables_in(plan).values()} == {type_2d}


def test_an_unknown_type_is_refused_with_the_table() -> None:
    with pytest.raises(
        tdsp.errors.PlanError, match=r"table 't0'.*'diagonal' has no 2D form; use one of"
    ):
        planner_for(tdsp.Mesh2D(2, 2), constraints=constrained("diagonal"))


def test_nothing_given_is_changed() -> None:
    mesh = tdsp.Mesh2D(num_groups=2, group_size=2)
    topology = world(4, 2)
    constraints = constrained("2d_row_wise")
    model = bags()
    before = repr(topology), copy.deepcopy(constraints), dict(model.named_parameters())

    planner_for(mesh, topology, constraints=constraints).plan(model, STOCK_SHARDERS)

    assert (repr(topology), constraints) == before[:2]
    assert all(dict(model.named_parameters())[name] is value for name, value in before[2].items())


@pytest.mark.parametrize("num_groups", [1, 2, 8])
def test_the_memory_of_a_rank_does_not_depend_on_the_number_of_groups(num_groups: int) -> None:
    mesh = tdsp.Mesh2D(num_groups=num_groups, group_size=2)
    model = bags(num_tables=4, rows=1_000)
    needed = stock_bytes_per_rank(model)

    def planned(num_bytes: int) -> tdsp.Plan2D:
        topology = world(2 * num_groups, 2, ddr_cap=num_bytes)
        return group_plan_of(
            model, mesh, topology, constraints=constrained("row_wise", num_tables=4)
        )

    planned(needed)
    with pytest.raises(PlannerError, match="insufficient storage"):
        planned(needed - 1)


def stock_bytes_per_rank(model: nn.Module) -> int:
    """Return the bytes that TorchRec counts on a rank for a row-wise plan on two ranks."""
    seen: list[ShardingOption] = []

    def keep(options: list[ShardingOption]) -> list[ShardingOption]:
        seen.extend(options)
        return options

    EmbeddingShardingPlanner(
        topology=world(2),
        batch_size=8,
        storage_reservation=nothing_reserved(),
        constraints=constrained("row_wise", num_tables=4),
        callbacks=[keep],
    ).plan(model, STOCK_SHARDERS)
    used = [0, 0]
    for option in seen:
        for shard in option.shards:
            assert shard.storage is not None
            assert shard.rank is not None
            used[shard.rank] += shard.storage.ddr
    assert used[0] == used[1] > 0
    return used[0]


def test_a_dense_part_takes_its_share_of_the_memory_as_in_torchrec() -> None:
    model = nn.ModuleDict({"sparse": bags(num_tables=1, rows=1_000), "dense": nn.Linear(512, 512)})
    cap = 3_000_000  # the table alone takes 0.3 MB; six times the dense part 6.3 MB

    planner_for(tdsp.Mesh2D(2, 2), world(4, ddr_cap=cap)).plan(model, STOCK_SHARDERS)
    with pytest.warns(FutureWarning, match="HeuristicalStorageReservation"):
        reservation = HeuristicalStorageReservation(0.15)
    with pytest.raises(tdsp.errors.PlanError, match="no plan fits"):
        planner_for(tdsp.Mesh2D(2, 2), world(4, ddr_cap=cap), storage_reservation=reservation).plan(
            model, STOCK_SHARDERS
        )
    gpus = Topology(world_size=4, compute_device="cuda", hbm_cap=cap)
    with pytest.raises(tdsp.errors.PlanError, match="no plan fits") as raised:
        planner_for(tdsp.Mesh2D(2, 2), gpus, storage_reservation=reservation).plan(
            model, STOCK_SHARDERS
        )
    assert isinstance(raised.value.__cause__, PlannerError)
    assert str(raised.value.__cause__) in str(raised.value)


# ---- nothing fits


def test_the_error_names_the_table_that_fits_no_rank() -> None:
    planner = planner_for(
        tdsp.Mesh2D(2, 2),
        world(4, ddr_cap=1_000_000),
        constraints=constrained("table_wise", num_tables=1),
    )

    with pytest.raises(tdsp.errors.PlanError) as raised:
        planner.plan(bags(num_tables=1, rows=10_000), STOCK_SHARDERS)

    text = str(raised.value)
    # 10,000 rows of 64 floats, and the buffers of the exchange
    assert "Mesh2D(2x2, strided): table 't0' needs 2,5" in text
    assert "more than the 1,000,000 there are" in text
    assert "use a larger group_size, reserve a smaller share of the memory" in text


def test_no_sentence_where_the_sums_explain_nothing() -> None:
    assert Shortfall("t", 10, 10, 20, 20).sentence() == ""
    assert "tables need 21 bytes on a group, 1 more" in Shortfall("t", 10, 10, 21, 20).sentence()
