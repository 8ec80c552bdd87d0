"""What a planner shows of its last plan: the options that it chose, and those it chose from."""

from importlib import import_module
from typing import Any, cast

import numpy as np
import pytest
from torch import nn
from torchrec.distributed.planner.types import ShardingOption

import torchrec_2dsp as tdsp
from tests.unit.test_planner import SHARDERS, bags, constrained, nothing_reserved, world

TWO_GROUPS = tdsp.Mesh2D(num_groups=2, group_size=2)
CALIBRATION = tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml")


def planner(calibration: tdsp.Calibration | None = CALIBRATION, **settings: Any) -> tdsp.Planner2D:
    """A planner for two hosts of two ranks; by cost, unless the calibration is left out."""
    return tdsp.Planner2D(
        topology=world(4, 2),
        batch_size=64,
        storage_reservation=nothing_reserved(),
        calibration=calibration,
        **settings,
    )


def geometry(option: ShardingOption) -> list[tuple[int | None, list[int], list[int]]]:
    return [(shard.rank, list(shard.offset), list(shard.size)) for shard in option.shards]


def planned(plan: tdsp.Plan2D, table: str) -> tuple[str, list[tuple[int, list[int], list[int]]]]:
    """The sharding type of a table and its shards, as the plan has them."""
    sharding = cast(Any, plan.plan[""])[table]
    shards = [
        (shard.placement.rank(), list(shard.shard_offsets), list(shard.shard_sizes))
        for shard in sharding.sharding_spec.shards
    ]
    return sharding.sharding_type, shards


def bytes_by_rank(options: list[ShardingOption], num_ranks: int) -> list[int]:
    stored = [0] * num_ranks
    for option in options:
        for shard in option.shards:
            assert shard.rank is not None
            assert shard.storage is not None
            stored[shard.rank] += shard.storage.ddr
    return stored


def test_a_model_without_tables_has_no_options() -> None:
    empty = planner()
    assert empty.plan(nn.Linear(2, 2), SHARDERS).plan == {}
    assert empty.get_selected_options() == empty.get_search_space() == []


@pytest.mark.parametrize("by_cost", [False, True], ids=["torchrec's search", "by cost"])
def test_nothing_is_shown_before_a_plan(by_cost: bool) -> None:
    before = planner(CALIBRATION if by_cost else None, mesh=TWO_GROUPS)
    assert before.get_selected_options() == []
    assert before.get_search_space() is None


@pytest.mark.parametrize("by_cost", [False, True], ids=["torchrec's search", "by cost"])
@pytest.mark.parametrize(
    "kind",
    ["table_wise", "column_wise", "row_wise", "table_row_wise"],
)
def test_selected_options_are_the_plan(kind: str, by_cost: bool) -> None:
    mesh = tdsp.Mesh2D(num_groups=1, group_size=4)
    chosen = planner(CALIBRATION if by_cost else None, mesh=mesh, constraints=constrained(kind))
    plan = chosen.plan(bags(), SHARDERS)

    options = chosen.get_selected_options()
    assert [option.name for option in options] == ["t0", "t1"]
    for option in options:
        assert planned(plan, option.name) == (f"2d_{kind}", geometry(option))
        assert option.sharding_type.startswith(f"2d_{kind}")
        assert option.fqn == f".{option.name}"
        assert option.batch_size == 64
        assert option.total_perf > 0
    assert sum(bytes_by_rank(options, 4)) >= 2 * 40 * 64 * 4


def test_ranks_store_what_the_search_counted() -> None:
    chosen = planner(mesh=TWO_GROUPS)
    chosen.plan(bags(num_tables=5, rows=4_000), SHARDERS)
    expected = chosen.search(bags(num_tables=5, rows=4_000), SHARDERS).found[0].bytes_by_rank
    stored = bytes_by_rank(chosen.get_selected_options(), TWO_GROUPS.group_size)
    # Each shard's bytes are rounded up.
    assert np.allclose(stored, expected, atol=5)


def test_tables_with_one_copy_are_shown_on_the_ranks_of_the_world() -> None:
    once = {"t0": tdsp.ParameterConstraints2D(num_groups=1, sharding_types=["row_wise"])}
    each = {"t1": tdsp.ParameterConstraints2D(num_groups=2, sharding_types=["row_wise"])}
    chosen = planner(mesh=TWO_GROUPS, constraints=once | each)
    chosen.plan(bags(rows=4_000), SHARDERS)

    options = {option.name: option for option in chosen.get_selected_options()}
    quarters = [(rank, [1_000 * rank, 0], [1_000, 64]) for rank in range(4)]
    assert geometry(options["t0"]) == quarters
    halves = [
        (rank, [2_000 * position, 0], [2_000, 64])
        for group in TWO_GROUPS.rank_matrix()
        for position, rank in enumerate(group)
    ]
    assert geometry(options["t1"]) == halves
    stored = bytes_by_rank(list(options.values()), 4)
    found = chosen.search(bags(rows=4_000), SHARDERS).found[0]
    assert np.allclose(stored, found.bytes_by_rank.max(), atol=5)


def test_the_search_space_by_cost_has_all_ways_of_every_table() -> None:
    chosen = planner(mesh=TWO_GROUPS)
    chosen.plan(bags(rows=4_000), SHARDERS)

    space = chosen.get_search_space()
    assert space is not None
    ways = {name: [one for one in space if one.name == name] for name in ("t0", "t1")}
    assert len(ways["t0"]) == len(ways["t1"]) > 3
    types = {option.sharding_type for option in ways["t0"]}
    assert any("row exchange" in kind for kind in types)
    assert "data_parallel" in types
    for option in space:
        assert all(shard.rank is None and shard.storage is not None for shard in option.shards)
    selected = {option.sharding_type for option in chosen.get_selected_options()}
    assert selected <= types


def test_the_search_space_of_torchrecs_search_is_what_it_enumerated() -> None:
    chosen = planner(None, mesh=TWO_GROUPS)
    chosen.plan(bags(), SHARDERS)
    space = chosen.get_search_space()
    assert space
    assert {option.name for option in space} == {"t0", "t1"}
    assert {option.sharding_type for option in chosen.get_selected_options()} <= {
        option.sharding_type for option in space
    }


@pytest.mark.parametrize("by_cost", [False, True], ids=["torchrec's search", "by cost"])
def test_a_plan_that_failed_leaves_nothing_of_the_one_before(by_cost: bool) -> None:
    chosen = planner(CALIBRATION if by_cost else None, mesh=TWO_GROUPS)
    chosen.plan(bags(), SHARDERS)
    assert chosen.get_selected_options()
    with pytest.raises(tdsp.errors.PlanError):
        chosen.plan(bags(rows=10**12), SHARDERS)
    assert chosen.get_selected_options() == []
    space = chosen.get_search_space()
    assert (
        space is None if by_cost else {option.tensor.shape[0] for option in space or ()} == {10**12}
    )


@pytest.mark.parametrize("by_cost", [False, True], ids=["torchrec's search", "by cost"])
def test_torchrecs_executor_reports_the_plan(by_cost: bool) -> None:
    # TorchRec has these since 1.9.
    executor: Any = pytest.importorskip("torchrec.distributed.planner.executor")
    provider: Any = import_module("torchrec.distributed.planner.provider")
    types: Any = import_module("torchrec.distributed.planner.types")
    used = planner(CALIBRATION if by_cost else None, mesh=TWO_GROUPS)

    class Provider(provider.DefaultPlannerProvider):
        def build_planner(self, *_: object, **__: object) -> tdsp.Planner2D:
            return used

    request = types.ShardingPlanRequest(
        model=bags(rows=4_000),
        sharders=SHARDERS,
        world_size=4,
        local_world_size=2,
        batch_size=64,
        hbm_gb=1.0,
        ddr_gb=1.0,
        compute_device="cpu",
        storage_reservation=nothing_reserved(),
        capture_search_space=True,
    )
    session = types.PlannerSessionContext(request=request, results={})
    result = executor.DefaultPlannerExecutor(Provider()).run("cpu", session)

    assert result.success
    assert {option.fqn for option in result.sharding_options} == {".t0", ".t1"}
    assert result.estimated_max_ddr_bytes == max(bytes_by_rank(used.get_selected_options(), 2))
    assert result.estimated_max_ddr_bytes > 0
    assert result.critical_path_ms is not None
    assert result.critical_path_ms > 0
    assert len(session.search_space["cpu"]) == len(used.get_search_space() or ()) > 2
