"""Tables with one copy in the world, in plans for several groups: what plans and costs say."""

from dataclasses import replace

import pytest
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType

import torchrec_2dsp as tdsp
from tests.support.planning import calibration, skewed, tables
from tests.support.plans import sharding
from torchrec_2dsp.cost.model import CostModel
from torchrec_2dsp.cost.workload import DenseWork, Workload
from torchrec_2dsp.plan.plan2d import ModulePlan2D, plan_for_rank
from torchrec_2dsp.plan.serialize import from_json, to_json

ROWS_OF_SHARD = 5
MESH = tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS)


def plan_of(
    kind: ShardingType, rows_of_shard: int = ROWS_OF_SHARD, mesh: tdsp.Mesh2D = MESH
) -> tdsp.Plan2D:
    ranks = [0] if kind is ShardingType.TABLE_WISE else list(range(mesh.group_size))
    both = {name: sharding(kind, ranks, rows_of_shard) for name in ("t", "other")}
    return tdsp.Plan2D.from_stock(
        ShardingPlan({"ebc": EmbeddingModuleShardingPlan(both)}),
        mesh,  # type: ignore[arg-type]
    )


def shards_of(plan: ShardingPlan, name: str = "t") -> list[tuple[int | None, int, int]]:
    """Rank, first row and number of rows of each shard."""
    module = plan.plan["ebc"]
    assert isinstance(module, ModulePlan2D)
    (table,) = [one for its_name, one in module.tables() if its_name == name]
    return [
        (shard.placement.rank(), shard.shard_offsets[0], shard.shard_sizes[0])
        for shard in table.sharding_spec.shards  # type: ignore[union-attr]
    ]


def test_rows_are_dealt_to_all_ranks_of_the_world_and_back() -> None:
    plan = plan_of(ShardingType.ROW_WISE)
    once = tdsp.pin(plan, "t", num_groups=1)
    assert shards_of(once) == [(0, 0, 3), (1, 3, 3), (2, 6, 3), (3, 9, 1)]
    assert shards_of(once, "other") == shards_of(plan, "other") == [(0, 0, 5), (1, 5, 5)]
    assert tdsp.pin(once, "t", num_groups=2) == plan
    assert from_json(to_json(once)) == once


def test_last_ranks_may_have_no_rows() -> None:
    once = tdsp.pin(plan_of(ShardingType.ROW_WISE, rows_of_shard=1), "t", num_groups=1)
    assert shards_of(once) == [(0, 0, 1), (1, 1, 1), (2, 2, 0), (3, 2, 0)]


def test_positions_in_the_world_are_the_ranks_of_all_groups() -> None:
    once = tdsp.pin(plan_of(ShardingType.ROW_WISE), "t", num_groups=1)
    for rank in range(4):
        runs = plan_for_rank(once, rank)
        assert [owner for owner, *_ in shards_of(runs)] == [0, 1, 2, 3]
        assert [owner for owner, *_ in shards_of(runs, "other")] == list(MESH.sharding_group(rank))


def test_a_module_has_a_plan_for_each_mesh() -> None:
    plan = plan_of(ShardingType.ROW_WISE)
    (module,) = (module for _, module in tdsp.pin(plan, "t", num_groups=1).modules())
    in_groups, in_world = module.parts()
    assert (in_groups.mesh, list(in_groups)) == (MESH, ["other"])
    assert (in_world.mesh, list(in_world)) == (tdsp.Mesh2D(1, 4), ["t"])
    assert [part.mesh for _, module in plan.modules() for part in module.parts()] == [MESH]
    # Where there is one group, it is the world, in its order of ranks.
    alone = plan_of(ShardingType.ROW_WISE, mesh=tdsp.Mesh2D(1, 2))
    (module,) = (module for _, module in tdsp.pin(alone, "t", num_groups=1).modules())
    assert len(module.parts()) == 1


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(
        tdsp.errors.PlanError, match=r"'t' is 2d_table_wise, and only .* row-wise tables"
    ):
        tdsp.pin(plan_of(ShardingType.TABLE_WISE), "t", num_groups=1)
    row_wise = plan_of(ShardingType.ROW_WISE)
    with pytest.raises(tdsp.errors.PlanError, match=r"num_groups=3 for table 't'.*: use 1, or 2"):
        tdsp.pin(row_wise, "t", num_groups=3)
    with pytest.raises(
        tdsp.errors.PlanError, match=r"ebc\.t has num_groups=4: a table has one copy in"
    ):
        _with(row_wise, num_groups=4).validate()
    with pytest.raises(tdsp.errors.PlanError, match="shard on rank 2, but a sharding group of"):
        _with(tdsp.pin(row_wise, "t", num_groups=1), num_groups=None).validate()
    short = _with(
        row_wise,
        sharding_type="2d_data_parallel",
        sharding_spec=None,
        transport=tdsp.Transport.INT8,
    )
    with pytest.raises(tdsp.errors.PlanError, match=r"has transport='int8': no rows of it travel"):
        short.validate()
    with pytest.raises(tdsp.errors.PlanError, match=r"transport='int3' is unknown; use one of"):
        tdsp.pin(row_wise, "t", transport="int3")
    copied = _with(row_wise, sharding_type="2d_data_parallel", num_groups=1)
    with pytest.raises(tdsp.errors.PlanError, match="data parallel, which is a copy on every rank"):
        copied.validate()


def _with(plan: tdsp.Plan2D, **changes: object) -> tdsp.Plan2D:
    (module,) = (module for _, module in plan.modules())
    changed = {
        name: replace(one, **changes) if name == "t" else one  # type: ignore[arg-type]
        for name, one in module.tables()
    }
    return replace(plan, plan={"ebc": ModulePlan2D(changed, mesh=plan.mesh, sync=plan.sync)})


def test_tables_with_one_copy_cost_what_they_cost_in_one_group() -> None:
    rows = (4_000, 9_000)
    workload = Workload.of_model(tables(rows), batch_size=512, access=skewed(rows))
    workload = replace(workload, dense=DenseWork(forward_s=0.01, gradient_bytes=1e6))
    costs = CostModel(calibration(), local_world_size=2)

    def plan_for(mesh: tdsp.Mesh2D, in_world: tuple[str, ...] = ()) -> tdsp.Plan2D:
        both = {
            f"t{number}": sharding(
                ShardingType.ROW_WISE, list(range(mesh.group_size)), num_rows // mesh.group_size
            )
            for number, num_rows in enumerate(rows)
        }
        plan = tdsp.Plan2D.from_stock(
            ShardingPlan({"": EmbeddingModuleShardingPlan(both)}),
            mesh,  # type: ignore[arg-type]
        )
        for name in both:
            plan = tdsp.pin(plan, name, exchange="row")
        for name in in_world:
            plan = tdsp.pin(plan, name, num_groups=1)
        return plan

    everything = costs.step_cost(plan_for(MESH, ("t0", "t1")), workload)
    one_group = costs.step_cost(plan_for(tdsp.Mesh2D(1, 4)), workload)
    assert everything.as_dict() == pytest.approx(one_group.as_dict())
    mixed = costs.step_cost(plan_for(MESH, ("t1",)), workload)
    in_groups = costs.step_cost(plan_for(MESH), workload)
    assert 0 < mixed.sync_s < in_groups.sync_s
    assert mixed.dense_s == in_groups.dense_s
    assert mixed.dense_exchange_s == in_groups.dense_exchange_s
    assert mixed.forward_exchange_s > in_groups.forward_exchange_s
