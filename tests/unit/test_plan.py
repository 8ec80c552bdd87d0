"""`Plan2D`: built from stock plans, pinned, checked, remapped like TorchRec's; sync policies."""

import copy
import os
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, strategies as st
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import ModuleShardingPlan, ShardingPlan, ShardingType

import torchrec_2dsp as tdsp
from tests.support.plans import meshes, plan_2d, plans, policies, sharding, stock_plans
from torchrec_2dsp import (
    GradientSync,
    HotSet,
    Mesh2D,
    ParameterSharding2D,
    Plan2D,
    RankLayout,
    WeightSync,
    pin,
)
from torchrec_2dsp.errors import ConfigError, PlanError, UnsupportedError
from torchrec_2dsp.plan.parameter_sharding import (
    MAX_ROWS,
    RowSpread,
    ShardingType2D,
    base_type,
    num_rows,
    type_2d,
)
from torchrec_2dsp.plan.plan2d import ModulePlan2D, plan_for_rank
from torchrec_2dsp.plan.sync import SyncPolicy, parse_policy


def plan_of(
    sharding_type: ShardingType, ranks: list[int], mesh: Mesh2D, num_rows: int = 10
) -> Plan2D:
    return plan_2d({"t": sharding(sharding_type, ranks, num_rows)}, mesh)


def table_of(plan: ShardingPlan, path: str = "ebc", name: str = "t") -> ParameterSharding2D:
    module_plan = plan.plan[path]
    assert isinstance(module_plan, ModulePlan2D)
    table = module_plan[name]
    assert isinstance(table, ParameterSharding2D)
    return table


@st.composite
def meshes_with_plans(draw: st.DrawFn) -> tuple[Mesh2D, ShardingPlan]:
    mesh = draw(meshes)
    return mesh, draw(stock_plans(mesh.group_size))


@given(meshes_with_plans())
def test_from_stock_keeps_every_field_and_its_input(
    mesh_with_plan: tuple[Mesh2D, ShardingPlan],
) -> None:
    mesh, stock = mesh_with_plan
    before = copy.deepcopy(stock)
    plan = Plan2D.from_stock(stock, mesh)
    assert stock == before
    assert (plan.mesh, plan.sync) == (mesh, GradientSync())
    assert list(plan.plan) == list(stock.plan)
    for path, module_plan in plan.modules():
        assert (module_plan.mesh, module_plan.sync) == (plan.mesh, plan.sync)
        assert list(module_plan) == list(stock.plan[path])  # type: ignore[call-overload]
        for name, table in module_plan.tables():
            stock_table = stock.plan[path][name]  # type: ignore[index]
            assert base_type(table.sharding_type) == stock_table.sharding_type
            for field in set(vars(stock_table)) - {"sharding_type"}:
                assert getattr(table, field) == getattr(stock_table, field)


@given(plans(), meshes)
def test_a_changed_mesh_or_sync_reaches_every_module(plan: Plan2D, mesh: Mesh2D) -> None:
    before = copy.deepcopy(plan)
    assigned = copy.deepcopy(plan)
    assigned.sync, assigned.mesh = WeightSync(), mesh
    for changed in (replace(plan, sync=WeightSync(), mesh=mesh), assigned):
        assert list(changed.plan) == list(plan.plan)
        for path, module in changed.modules():
            assert (module.mesh, module.sync) == (mesh, WeightSync())
            assert dict(module) == dict(before.plan[path])  # type: ignore[call-overload]
    assert plan == before
    assert all(module.sync == before.sync for _, module in plan.modules())


@given(plans())
def test_from_stock_keeps_a_2d_plans_mesh_and_sync(plan: Plan2D) -> None:
    averaged = replace(plan, sync=WeightSync())
    for again in (Plan2D.from_stock(averaged), Plan2D.from_stock(averaged, plan.mesh)):
        assert again == averaged
        assert all(module.sync == WeightSync() for _, module in again.modules())
    assert Plan2D.from_stock(averaged, sync=GradientSync()).sync == GradientSync()


def test_only_embedding_plans_have_a_2d_form() -> None:
    class Other(ModuleShardingPlan):
        pass

    with pytest.raises(PlanError, match="module 'head' has a Other; only plans of embedding"):
        Plan2D.from_stock(ShardingPlan({"head": Other()}), Mesh2D(2, 2))


@pytest.mark.parametrize("member", ShardingType2D)
def test_sharding_types_have_one_2d_form(member: ShardingType2D) -> None:
    stock = member.base.value
    assert type_2d(stock) == member.value
    assert base_type(member.value) == base_type(stock) == stock
    assert type_2d(member.value) == member.value
    # A stock sharder has to refuse it, and does so by looking it up.
    with pytest.raises(ValueError, match=member.value):
        ShardingType(member.value)


def test_validate_names_table_rank_and_remedy() -> None:
    with pytest.raises(
        PlanError,
        match=r"table ebc\.t has a shard on rank 2, but a sharding group of "
        r"Mesh2D\(2x2, strided\) has ranks 0\.\.1; make the plan for world_size=2$",
    ):
        plan_of(ShardingType.TABLE_WISE, [2], Mesh2D(2, 2))
    with pytest.raises(PlanError, match=r"table ebc\.t has a shard on rank 3"):
        plan_of(ShardingType.ROW_WISE, [0, 1, 3], Mesh2D(2, 3))


def test_validate_wants_shards() -> None:
    table = sharding(ShardingType.TABLE_WISE, [0], 10)
    table.sharding_spec = None
    with pytest.raises(PlanError, match=r"^table t \(2d_table_wise\) has no shards; plan it with"):
        plan_2d({"t": table}, Mesh2D(1, 1), path="")


def test_validate_looks_at_ranks_beside_shards() -> None:
    table = sharding(ShardingType.TABLE_WISE, [0], 10)
    table.ranks = [7]
    with pytest.raises(PlanError, match="a shard on rank 7"):
        plan_2d({"t": table}, Mesh2D(2, 2), path="")


@pytest.mark.parametrize("hot_rows", [[7, 3, 7], torch.tensor([3, 7]), HotSet((3, 7)), {3, 7}])
def test_pin_returns_a_copy_with_the_hot_rows(hot_rows: object) -> None:
    plan = plan_of(ShardingType.ROW_WISE, [0, 1], Mesh2D(2, 2))
    before = copy.deepcopy(plan)
    pinned = pin(plan, "t", hot_rows=hot_rows)  # type: ignore[arg-type]
    assert plan == before
    assert table_of(pinned).hot_set == HotSet((3, 7))
    assert table_of(plan).hot_set is None
    assert replace(pinned, plan=plan.plan) == plan


@pytest.mark.parametrize("nothing", [[], torch.empty(0, dtype=torch.int64)])
def test_pin_of_no_rows_removes_the_hot_set(nothing: object) -> None:
    plan = plan_of(ShardingType.ROW_WISE, [0, 1], Mesh2D(2, 2))
    assert pin(pin(plan, "t", hot_rows=[1]), "t", hot_rows=nothing) == plan  # type: ignore[arg-type]


@given(plans(), st.data())
def test_pin_leaves_the_other_tables_alone(plan: Plan2D, data: st.DataObject) -> None:
    tables = sorted({name for _, module in plan.modules() for name in module})
    if not tables:
        return
    chosen = data.draw(st.sampled_from(tables))
    pinned = pin(plan, chosen, hot_rows=[])
    for path, module_plan in plan.modules():
        for name, table in module_plan.tables():
            if name != chosen:
                assert table_of(pinned, path, name) == table


def test_pin_refuses_what_does_not_fit() -> None:
    plan = plan_of(ShardingType.ROW_WISE, [0, 1], Mesh2D(2, 2), num_rows=10)
    assert num_rows(table_of(plan)) == 20
    pin(plan, "t", hot_rows=range(20))
    with pytest.raises(PlanError, match=r"table ebc\.t has 20 rows, and 21 of them can't be hot"):
        pin(plan, "t", hot_rows=range(21))
    with pytest.raises(PlanError, match=r"^the plan has no table 'other'; it has t$"):
        pin(plan, "other", hot_rows=[1])
    data_parallel = plan_of(ShardingType.DATA_PARALLEL, [0, 1], Mesh2D(2, 2))
    with pytest.raises(
        PlanError, match=r"table ebc\.t is data parallel, .* remove its hot set, or"
    ):
        pin(data_parallel, "t", hot_rows=[1])


def remapped_by_torchrec(
    stock: ShardingPlan, mesh: Mesh2D, rank: int, device_type: str, local_world_size: int
) -> ShardingPlan:
    plan = copy.deepcopy(stock)
    wrapper = SimpleNamespace(_device=torch.device(device_type))
    with (
        patch.dict(os.environ, LOCAL_WORLD_SIZE=str(local_world_size)),
        patch("torch.distributed.get_world_size", return_value=mesh.world_size),
    ):
        DMPCollection._remap_sharding_plan(
            wrapper,  # type: ignore[arg-type]
            plan=plan,
            rank=rank,
            step=mesh.num_groups,
            sharding_group_size=mesh.group_size,
            use_inter_host_allreduce=mesh.layout is RankLayout.CONTIGUOUS,
        )
    return plan


@given(meshes_with_plans(), st.data(), st.sampled_from(["cpu", "cuda"]))
def test_a_rank_runs_what_torchrec_would(
    mesh_with_plan: tuple[Mesh2D, ShardingPlan], data: st.DataObject, device_type: str
) -> None:
    mesh, stock = mesh_with_plan
    world = range(mesh.world_size)
    rank = data.draw(st.sampled_from(world))
    # TorchRec ignores a host size that doesn't divide the world.
    divisors = [size for size in range(1, mesh.world_size + 1) if mesh.world_size % size == 0]
    local_world_size = data.draw(st.sampled_from(divisors))
    plan = Plan2D.from_stock(stock, mesh)
    before = copy.deepcopy(plan)
    result = plan_for_rank(plan, rank, device_type=device_type, local_world_size=local_world_size)
    assert plan == before
    expected = remapped_by_torchrec(stock, mesh, rank, device_type, local_world_size)
    for path, module_plan in expected.plan.items():
        for name, table in module_plan.items():  # type: ignore[attr-defined]
            own = table_of(result, path, name)
            assert (own.sharding_type, own.ranks) == (table.sharding_type, table.ranks)
            shards = getattr(table.sharding_spec, "shards", [])
            my_shards = getattr(own.sharding_spec, "shards", [])
            assert len(my_shards) == len(shards)
            for my_shard, shard in zip(my_shards, shards, strict=True):
                assert my_shard.shard_offsets == shard.shard_offsets
                assert my_shard.shard_sizes == shard.shard_sizes
                assert my_shard.placement.rank() == shard.placement.rank()
                if device_type == "cuda":
                    assert my_shard.placement == shard.placement
                else:
                    assert my_shard.placement.device() == torch.device("cpu")


@given(plans(), st.data())
def test_the_ranks_of_a_group_run_one_plan(plan: Plan2D, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from(range(plan.mesh.world_size)))
    result = plan_for_rank(plan, rank)
    group = plan.mesh.sharding_group(rank)
    assert all(plan_for_rank(plan, peer) == result for peer in group)
    for path, module_plan in plan.modules():
        for name, table in module_plan.tables():
            own = table_of(result, path, name)
            assert set(own.ranks or []) <= set(group)
            assert (own.hot_set, own.exchange) == (table.hot_set, table.exchange)
            assert own.bounds_check_mode == table.bounds_check_mode


@given(plans())
def test_plans_survive_pickle(plan: Plan2D) -> None:
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert type(again) is Plan2D
    for (path, module_plan), (_, original) in zip(again.modules(), plan.modules(), strict=True):
        assert type(module_plan) is ModulePlan2D
        assert (module_plan.mesh, module_plan.sync) == (plan.mesh, plan.sync)
        assert module_plan.full_duplex == plan.full_duplex
        for name, table in module_plan.tables():
            assert type(table) is ParameterSharding2D
            assert table == table_of(plan, path, name)
        assert module_plan == original


def test_a_plan_prints_its_mesh_and_sync() -> None:
    text = str(plan_of(ShardingType.ROW_WISE, [0, 1], Mesh2D(2, 2)))
    assert text.startswith("Mesh2D(2x2, strided), GradientSync(), sparse dist\n")
    assert "row_wise" in text


@given(plans())
def test_what_is_made_from_a_plan_keeps_its_pipeline_and_full_duplex(plan: Plan2D) -> None:
    tables = [name for _, module in plan.modules() for name in module]
    for other in [pin(plan, name, hot_rows=[]) for name in tables[:1]]:
        assert (other.pipeline, other.full_duplex) == (plan.pipeline, plan.full_duplex)
        assert all(module.full_duplex == plan.full_duplex for _, module in other.modules())
    of_rank = plan_for_rank(plan, 0).plan.values()
    assert [module.full_duplex for module in of_rank] == [plan.full_duplex] * len(of_rank)  # type: ignore[attr-defined]
    for _, module in plan.modules():
        assert all(part.full_duplex == plan.full_duplex for part in module.parts())
    assert ("full-duplex" in str(plan)) == plan.full_duplex
    assert f", {plan.pipeline}" in str(plan)


@given(st.integers(1, 3_000))
def test_every_row_has_a_position_of_its_own(num_rows: int) -> None:
    spread = RowSpread(num_rows)
    rows = torch.arange(num_rows, dtype=torch.int32)
    positions = spread.positions(rows)
    assert positions.sort().values.tolist() == rows.tolist()
    assert spread.rows(positions).tolist() == rows.tolist()


@given(st.integers(1, MAX_ROWS), st.floats(0, 1))
def test_the_largest_tables_don_t_overflow(num_rows: int, share: float) -> None:
    row = min(num_rows - 1, int(share * num_rows))
    spread = RowSpread(num_rows)
    (position,) = spread.positions(torch.tensor([row])).tolist()
    assert position == row * spread.step % num_rows
    assert spread.rows(torch.tensor([position])).tolist() == [row]


@given(st.integers(1_000, 2_000_000), st.integers(2, 64), st.integers(100, 10_000), st.floats(0, 1))
def test_neighbours_are_shared_evenly(
    num_rows: int, num_owners: int, run: int, start: float
) -> None:
    """Each owner has its share of any run of rows, with a few more or less."""
    first = int(start * (num_rows - 1))
    rows = torch.arange(first, min(first + run, num_rows))
    rows_per_owner = -(-num_rows // num_owners)
    owners = RowSpread(num_rows).positions(rows) // rows_per_owner
    counts = torch.bincount(owners, minlength=num_owners)
    shares = (num_rows - rows_per_owner * torch.arange(num_owners)).clamp(0, rows_per_owner)
    assert (counts - shares / num_rows * rows.numel()).abs().max() <= 12


def test_more_rows_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="3,037,000,499 at most; use owners='block'"):
        RowSpread(MAX_ROWS + 1)


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (tdsp.every(1), [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (tdsp.every(4), [4, 8]),
        (tdsp.after(0, tdsp.every(4)), [4, 8]),
        (tdsp.after(3, tdsp.every(2)), [5, 7, 9]),
        (tdsp.after(1, tdsp.after(2, tdsp.every(3))), [6, 9]),
        (tdsp.after(2, tdsp.never()), []),
        (tdsp.never(), []),
    ],
    ids=str,
)
def test_due_steps(policy: SyncPolicy, steps: list[int]) -> None:
    assert [step for step in range(1, 10) if policy.is_due(step)] == steps


@given(policies)
def test_the_mean_distance_of_syncs(policy: SyncPolicy) -> None:
    num_steps = 50_000
    due = sum(policy.is_due(step) for step in range(1, num_steps + 1))

    assert due == pytest.approx(num_steps / policy.steps_per_sync, abs=20)


@given(policies)
def test_a_policy_survives_its_text(policy: SyncPolicy) -> None:
    assert parse_policy(str(policy)) == policy


def test_texts_may_be_written_with_care() -> None:
    assert parse_policy(" after( 1_000,every(4) ) ") == tdsp.after(1000, tdsp.every(4))


@pytest.mark.parametrize("text", ["", "4", "every()", "every(-1)", "after(3)", "never", "every(x)"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no sync policy; use every"):
        parse_policy(text)


@pytest.mark.parametrize("n", [0, -3, 1.5, True, 10**39])
def test_an_interval_is_a_positive_number(n: int) -> None:
    with pytest.raises(ConfigError, match=rf"every\({n}\) is no interval; use every\(1\)"):
        tdsp.every(n)


@pytest.mark.parametrize("step", [-1, True, 10**39])
def test_a_start_is_a_number_and_has_a_policy(step: int) -> None:
    with pytest.raises(ConfigError, match=rf"after\({step}, ...\) is no number of steps"):
        tdsp.after(step, tdsp.every(1))
    with pytest.raises(ConfigError, match=r"after\(5, 3\) needs a policy"):
        tdsp.after(5, 3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": 3}, r"policy=3\) is no policy; use every\(4\)"),
        ({"policy": None}, r"policy=None\) is no policy"),
        ({"moments_policy": "every(2)"}, r"moments_policy='every\(2\)'\) is no policy"),
        ({"rows": "most"}, "rows='most'. is unknown; use one of 'touched', 'all'"),
        (
            {"transport": "int3"},
            "transport='int3'. is unknown; use one of 'fp32', 'bf16', 'fp16', 'int8'",
        ),
        ({"dense_above": 1.5}, r"dense_above=1.5\) is no share of rows; use 0 to 1"),
        ({"dense_above": -0.1}, "is no share of rows"),
        ({"rows": "all", "dense_above": 0.5}, "all rows are averaged anyway"),
        ({"rows": "all", "transport": "bf16"}, "whole shards are all-reduced as they are"),
    ],
)
def test_a_config_says_what_is_wrong(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tdsp.WeightSync(**fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("sync", [tdsp.GradientSync, tdsp.WeightSync])
@pytest.mark.parametrize("drift_every", [-1, True, 1.5, 10**39])
def test_a_drift_interval_is_a_number_of_syncs(sync: Any, drift_every: object) -> None:
    message = rf"Sync\(drift_every={drift_every}\) is no number of syncs"
    with pytest.raises(ConfigError, match=message):
        sync(drift_every=drift_every)


@pytest.mark.parametrize("fields", [{"transport": "int3"}, {"delay": 2}, {"delay": -1}])
def test_an_exact_config_says_what_is_wrong(fields: dict[str, object]) -> None:
    ((name, value),) = fields.items()
    with pytest.raises(ConfigError, match=rf"^GradientSync\({name}={value!r}\) is (n|unk)"):
        tdsp.GradientSync(**fields)  # pyright: ignore[reportArgumentType]


@given(st.sampled_from(tdsp.SyncedRows))
def test_rows_may_be_given_as_text(rows: tdsp.SyncedRows) -> None:
    assert tdsp.WeightSync(rows=rows.value) == tdsp.WeightSync(rows=rows)  # pyright: ignore


def test_a_config_in_words_has_what_was_changed() -> None:
    assert str(tdsp.WeightSync()) == "WeightSync()"
    changed = tdsp.WeightSync(policy=tdsp.every(4), rows=tdsp.SyncedRows.ALL)
    assert str(changed) == "WeightSync(policy=every(4), rows=all)"
