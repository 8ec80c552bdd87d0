"""Plans and costs for tables with one copy in the world, and for frozen tables."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
from hypothesis import given, strategies as st
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import ShardingPlan, ShardingType

import torchrec_2dsp as tdsp
from tests.support import planning
from tests.support.planning import calibration, skewed, tables
from tests.support.plans import layouts, meshes, plan_2d, sharding
from torchrec_2dsp import Mesh2D, RankLayout, TwoDError
from torchrec_2dsp.cost.loads import Placed
from torchrec_2dsp.cost.model import CostModel
from torchrec_2dsp.cost.workload import DenseWork, Workload
from torchrec_2dsp.errors import MeshError, PlanError
from torchrec_2dsp.mesh import DenseMesh
from torchrec_2dsp.plan.plan2d import ModulePlan2D, plan_for_rank
from torchrec_2dsp.plan.serialize import from_json, to_json

ROWS_OF_SHARD = 5
MESH = tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS)


def plan_of(
    kind: ShardingType, rows_of_shard: int = ROWS_OF_SHARD, mesh: tdsp.Mesh2D = MESH
) -> tdsp.Plan2D:
    ranks = [0] if kind is ShardingType.TABLE_WISE else list(range(mesh.group_size))
    both = {name: sharding(kind, ranks, rows_of_shard) for name in ("t", "other")}
    return plan_2d(both, mesh)


def shards_of(plan: ShardingPlan, name: str = "t") -> list[tuple[int | None, int, int]]:
    """Return each shard's rank, first row and number of rows."""
    module = plan.plan["ebc"]
    assert isinstance(module, ModulePlan2D)
    (table,) = [entry for its_name, entry in module.tables() if its_name == name]
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
    # A single group is the world, with ranks in the same order.
    alone = plan_of(ShardingType.ROW_WISE, mesh=tdsp.Mesh2D(1, 2))
    (module,) = (module for _, module in tdsp.pin(alone, "t", num_groups=1).modules())
    assert len(module.parts()) == 1


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"'t' is 2d_table_wise, and only .* row-wise tables"):
        tdsp.pin(plan_of(ShardingType.TABLE_WISE), "t", num_groups=1)
    row_wise = plan_of(ShardingType.ROW_WISE)
    with pytest.raises(PlanError, match=r"num_groups=3 for table 't'.*: use 1, or 2"):
        tdsp.pin(row_wise, "t", num_groups=3)
    with pytest.raises(PlanError, match=r"ebc\.t has num_groups=4: a table has one copy in"):
        _with(row_wise, num_groups=4).validate()
    with pytest.raises(PlanError, match="shard on rank 2, but a sharding group of"):
        _with(tdsp.pin(row_wise, "t", num_groups=1), num_groups=None).validate()
    short = _with(
        row_wise,
        sharding_type="2d_data_parallel",
        sharding_spec=None,
        transport=tdsp.Transport.INT8,
    )
    with pytest.raises(PlanError, match=r"no rows travel; leave transport='int8' out"):
        short.validate()
    with pytest.raises(PlanError, match=r"transport='int3' is unknown; use one of"):
        tdsp.pin(row_wise, "t", transport="int3")
    copied = _with(row_wise, sharding_type="2d_data_parallel", num_groups=1)
    with pytest.raises(PlanError, match="data parallel, which is a copy on every rank"):
        copied.validate()


def _with(plan: tdsp.Plan2D, **changes: object) -> tdsp.Plan2D:
    (module,) = (module for _, module in plan.modules())
    changed = {
        name: replace(entry, **changes) if name == "t" else entry  # type: ignore[arg-type]
        for name, entry in module.tables()
    }
    return replace(plan, plan={"ebc": module.with_tables(changed)})


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
        plan = plan_2d(both, mesh, path="")
        for name in both:
            plan = tdsp.pin(plan, name, exchange="row")
        for name in in_world:
            plan = tdsp.pin(plan, name, num_groups=1)
        return plan

    everything = costs.step_cost(plan_for(MESH, ("t0", "t1")), workload)
    one_group = costs.step_cost(plan_for(tdsp.Mesh2D(1, 4)), workload)
    assert vars(everything) == pytest.approx(vars(one_group))
    mixed = costs.step_cost(plan_for(MESH, ("t1",)), workload)
    in_groups = costs.step_cost(plan_for(MESH), workload)
    assert 0 < mixed.sync_s < in_groups.sync_s
    assert mixed.dense_s == in_groups.dense_s
    assert mixed.dense_exchange_s == in_groups.dense_exchange_s
    assert mixed.forward_exchange_s > in_groups.forward_exchange_s


STRIDED, CONTIGUOUS = RankLayout.STRIDED, RankLayout.CONTIGUOUS


@given(meshes)
def test_groups_and_peers_partition_the_world(mesh: Mesh2D) -> None:
    world = list(range(mesh.world_size))
    groups = {mesh.sharding_group(rank) for rank in world}
    peers = {mesh.replica_peers(rank) for rank in world}
    assert sorted(rank for group in groups for rank in group) == world
    assert sorted(rank for group in peers for rank in group) == world
    assert {len(group) for group in groups} == {mesh.group_size}
    assert {len(group) for group in peers} == {mesh.num_groups}
    # A group and one rank's peers share that rank and no other.
    for rank in world:
        assert set(mesh.sharding_group(rank)) & set(mesh.replica_peers(rank)) == {rank}


@given(meshes)
def test_positions_index_groups_and_peers(mesh: Mesh2D) -> None:
    for rank in range(mesh.world_size):
        assert mesh.rank_at(mesh.group_of(rank), mesh.shard_index(rank)) == rank
        assert mesh.sharding_group(rank)[mesh.shard_index(rank)] == rank
        assert mesh.replica_peers(rank)[mesh.group_of(rank)] == rank
        assert tuple(mesh.rank_matrix()[mesh.group_of(rank)]) == mesh.sharding_group(rank)


@given(meshes)
def test_the_groups_are_those_of_torchrec(mesh: Mesh2D) -> None:
    wrapper = SimpleNamespace(_device=torch.device("cpu"))
    with patch("torchrec.distributed.model_parallel.DeviceMesh", MagicMock()) as result:
        DMPCollection._create_process_groups(
            wrapper,  # type: ignore[arg-type]
            global_rank=0,
            world_size=mesh.world_size,
            local_size=mesh.group_size,
            use_inter_host_allreduce=mesh.layout is CONTIGUOUS,
        )
    assert result.call_args.kwargs["mesh"] == mesh.rank_matrix()
    assert result.call_args.kwargs["mesh_dim_names"] == ("replicate", "shard")


@given(st.integers(1, 48), st.integers(1, 48), layouts)
def test_for_world_takes_divisors_only(
    world_size: int, group_size: int, layout: RankLayout
) -> None:
    if world_size % group_size == 0:
        mesh = Mesh2D.for_world(world_size, group_size=group_size, layout=layout)
        assert mesh == Mesh2D(world_size // group_size, group_size, layout)
        mesh.check_world(world_size)
    else:
        with pytest.raises(MeshError, match=f"group_size={group_size} does not divide"):
            Mesh2D.for_world(world_size, group_size=group_size, layout=layout)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Mesh2D.for_world(64, group_size=6),
            "^group_size=6 does not divide world_size=64; use one of 1, 2, 4, 8, 16, 32, 64$",
        ),
        (lambda: Mesh2D.for_world(4, group_size=0), "group_size=0 .* use one of 1, 2, 4$"),
        (lambda: Mesh2D.for_world(0, group_size=1), "world_size=0 is not a positive integer"),
        (
            lambda: Mesh2D(2, 2).check_world(8),
            r"^Mesh2D\(2x2, strided\) has 4 ranks but the world has 8; build it with "
            r"Mesh2D\.for_world\(8, group_size=\.\.\.\)$",
        ),
        (lambda: Mesh2D(2, 2).group_of(4), r"rank=4 is not in 0\.\.3 of Mesh2D\(2x2, strided\)"),
        (lambda: Mesh2D(2, 2).shard_index(-1), "rank=-1 is not in"),
        (lambda: Mesh2D(2, 3).rank_at(0, 3), r"groups are 0\.\.1, shard indices 0\.\.2"),
        (lambda: Mesh2D(2, 2).node_group_size(0), "local_world_size=0 is not a positive integer"),
        (lambda: DenseMesh(2, layout="contiguous"), "layout='contiguous' is not a RankLayout; use"),  # type: ignore[arg-type]
        (lambda: Mesh2D(2, 2, "strided"), "layout='strided' is not a RankLayout; use one of Rank"),  # type: ignore[arg-type]
    ],
)
def test_errors_list_what_is_valid(make: Callable[[], object], text: str) -> None:
    with pytest.raises(MeshError, match=text) as raised:
        make()
    assert isinstance(raised.value, TwoDError)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", None])
@pytest.mark.parametrize("field", ["num_groups", "group_size"])
def test_sizes_are_positive_integers(field: str, size: object) -> None:
    sizes: dict[str, object] = {"num_groups": 2, "group_size": 2, field: size}
    with pytest.raises(MeshError, match=f"{field}={size!r} is not a positive integer"):
        Mesh2D(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mesh", "local_world_size", "expected"),
    [
        (Mesh2D(2, 4, STRIDED), 4, 2),
        (Mesh2D(2, 4, CONTIGUOUS), 4, 4),
        (Mesh2D(2, 4, CONTIGUOUS), 2, 2),
        (Mesh2D(4, 2, STRIDED), 4, 1),
        (Mesh2D(1, 8), 4, 4),
        (Mesh2D(8, 1), 4, 1),
        (Mesh2D(1, 4), 8, 4),
        # With 3 + 3 ranks, group 0 has two ranks on the first host and one on the second.
        (Mesh2D(2, 3, CONTIGUOUS), 2, 1),
    ],
)
def test_node_group_size(mesh: Mesh2D, local_world_size: int, expected: int) -> None:
    assert mesh.node_group_size(local_world_size) == expected


@given(meshes, st.integers(1, 12))
def test_node_groups_tile_a_sharding_group(mesh: Mesh2D, local_world_size: int) -> None:
    size = mesh.node_group_size(local_world_size)
    assert mesh.group_size % size == 0
    if size > 1:
        for group in mesh.rank_matrix():
            hosts = [rank // local_world_size for rank in group]
            assert {hosts.count(host) for host in hosts} == {size}


ROW_IN_GROUP = planning.table(ShardingType.ROW_WISE, [0, 1], exchange=tdsp.Exchange.ROW)


def frozen_of(trained: Placed) -> Placed:
    return replace(trained, work=replace(trained.work, is_frozen=True))


@pytest.mark.parametrize("trained", [planning.TABLE_WISE, planning.ROW], ids=["vectors", "rows"])
def test_frozen_tables_send_nothing_back(trained: Placed) -> None:
    alone, both, predicted = (
        planning.cost(trained),
        planning.cost(trained, frozen_of(trained)),
        planning.cost(frozen_of(trained)),
    )
    assert predicted.forward_exchange_s == alone.forward_exchange_s > 0.0
    assert predicted.backward_exchange_s == 0.0 < alone.backward_exchange_s
    assert both.forward_exchange_s == pytest.approx(2 * alone.forward_exchange_s)
    assert both.backward_exchange_s == alone.backward_exchange_s


def test_copies_of_frozen_tables_have_nothing_to_sync() -> None:
    for sync in (planning.EXACT, tdsp.WeightSync(policy=tdsp.every(4))):
        assert planning.cost(ROW_IN_GROUP, mesh=planning.TWO, sync=sync).sync_s > 0.0
        assert planning.cost(frozen_of(ROW_IN_GROUP), mesh=planning.TWO, sync=sync).sync_s == 0.0
