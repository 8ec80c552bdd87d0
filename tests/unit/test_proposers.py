"""This package's proposers inside TorchRec's own planner."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    ShardingOption,
    Stats,
)
from torchrec.distributed.types import ShardingPlan, ShardingType

import torchrec_2dsp as tdsp
from tests.support.planning import (
    ROWS,
    SHARDERS,
    STOCK_SHARDERS,
    bags,
    bytes_by_rank,
    calibration,
    constrained,
    nothing_reserved,
    planner,
    skewed,
    slow_fetch,
    tables,
    tables_in,
    torchrecs_planner,
    ways_in,
    world,
)
from torchrec_2dsp.cost.model import CostModel
from torchrec_2dsp.cost.step_cost import StepCost, rated
from torchrec_2dsp.cost.table_loads import message_type
from torchrec_2dsp.cost.workload import ASSUMED_SKEW, DenseWork, Workload
from torchrec_2dsp.errors import ConfigError, MeshError, PlanError
from torchrec_2dsp.plan.parameter_sharding import Pipeline, ProposedType, base_type
from torchrec_2dsp.plan.plan2d import is_proposed
from torchrec_2dsp.planner.search.space import Room
from torchrec_2dsp.planner.torchrec.adapters import Stats2D
from torchrec_2dsp.planner.torchrec.options import Draft
from torchrec_2dsp.planner.torchrec.proposers import Loaded

BATCH = 512


def stock_planner(
    proposer: tdsp.ExchangeProposer | tdsp.HotRowProposer,
    topology: Topology | None = None,
    **given: Any,
) -> EmbeddingShardingPlanner:
    given = {"batch_size": BATCH, "stats": Stats2D()} | given
    return torchrecs_planner(
        topology or world(4, 2),
        proposer=proposer,
        partitioner=tdsp.BalancedPartitioner(),
        **given,
    )


def plan_of(proposer: Any, topology: Topology | None = None, rows: Any = ROWS) -> tdsp.Plan2D:
    stock = stock_planner(proposer, topology).plan(tables(rows), SHARDERS)
    assert type(stock) is ShardingPlan
    assert is_proposed(stock)
    return tdsp.Plan2D.from_stock(stock)


def cost_of(
    plan: tdsp.Plan2D,
    link: str,
    access: tdsp.AccessStats | None = None,
    rows: tuple[int, ...] = ROWS,
) -> StepCost:
    model, machines = tables(rows), calibration(link)
    workload = Workload.of_model(model, batch_size=BATCH, access=access, skew=ASSUMED_SKEW)
    dense = DenseWork.of_model(model, workload, machines.kernels)
    return CostModel(machines, 2).step_cost(plan, replace(workload, dense=dense))


@pytest.mark.dealt_file
@pytest.mark.parametrize(
    ("link", "mesh"),
    [
        ("200mbit", tdsp.Mesh2D(2, 2)),
        ("1gbit", tdsp.Mesh2D(1, 4)),
        ("1gbit", None),
    ],
)
def test_the_stock_planner_finds_what_the_search_finds(link: str, mesh: tdsp.Mesh2D | None) -> None:
    """They agree within 1 %: the stock planner rates imbalance by shards, not by steps."""
    known: dict[str, Any] = {"access": skewed()}
    topology = world(4, 2)
    if mesh is None:
        proposer = tdsp.GroupSizeProposer(topology, calibration(link), **known)
    else:
        proposer = tdsp.ExchangeProposer(topology, calibration(link), mesh=mesh, **known)
    plan = plan_of(proposer)
    best = planner(link=link, mesh=mesh, **known).search(tables(), SHARDERS).placements[0]
    assert plan.mesh == best.setting.mesh
    types = {
        message_type(ShardingType(base_type(table.sharding_type)), table.exchange)
        for table in tables_in(plan).values()
    }
    assert rated(cost_of(plan, link, skewed()), types) <= 1.01 * best.rated_s


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise"])
def test_a_rating_is_what_the_cost_model_says(kind: str) -> None:
    """Four ranks share four equal tables evenly, however they are sharded."""
    rows = (1_000,) * 4
    asked = tdsp.ParameterConstraints2D(sharding_types=[kind], exchange="pooled", min_partition=8)
    constraints = {f"t{number}": asked for number in range(4)}
    proposer = tdsp.ExchangeProposer(world(4, 2), calibration("200mbit"), constraints=constraints)
    result = stock_planner(proposer, constraints=dict(constraints))
    plan = tdsp.Plan2D.from_stock(result.plan(tables(rows), SHARDERS))
    assert set(ways_in(plan).values()) == {(f"2d_{kind}", "pooled")}
    assert result._best_plan is not None
    rating = result._perf_model.rate(result._best_plan)
    assert rating == pytest.approx(1e3 * cost_of(plan, "200mbit", rows=rows).tables_s)
    perfs = [shard.perf for option in result._best_plan for shard in option.shards]
    assert all(entry.fwd_comms > 0 < entry.bwd_comms for entry in perfs if entry)


def test_a_constraint_is_kept() -> None:
    constraints = {
        "t0": tdsp.ParameterConstraints2D(sharding_types=["table_wise"], exchange="nonempty"),
        "t2": tdsp.ParameterConstraints2D(exchange="row", hot_rows=7),
    }
    proposer = tdsp.ExchangeProposer(
        world(4, 2), calibration(), constraints=constraints, access=skewed()
    )
    plan = plan_of(proposer)
    ways, of_tables = ways_in(plan), tables_in(plan)
    assert ways["t0"] == ("2d_table_wise", "nonempty")
    assert ways["t2"][1] == "row"
    assert of_tables["t2"].hot_set == tdsp.HotSet.of(range(7))
    assert of_tables["t1"].hot_set is None


def test_hot_rows_are_those_that_the_search_finds() -> None:
    rows = (20_000,)
    asked = {"t0": tdsp.ParameterConstraints2D(exchange="row")}
    known: dict[str, Any] = {"constraints": asked, "access": skewed(rows)}
    mesh = tdsp.Mesh2D(1, 4)
    inner = tdsp.ExchangeProposer(world(4, 2), slow_fetch(), mesh=mesh, **known)
    plan = plan_of(tdsp.HotRowProposer(inner), rows=rows)
    searching = planner(slow_fetch(), mesh=mesh, **known)
    searching._search = replace(
        searching._search, pipelines=(Pipeline.SPARSE_DIST,), full_duplex=(False,)
    )
    assert plan == searching.plan(tables(rows), SHARDERS)
    assert tables_in(plan)["t0"].hot_set is not None
    assert plan_of(inner, rows=rows) != plan, "without its wrapper there are none"


@pytest.mark.dealt_file
@pytest.mark.parametrize(("memory", "largest"), [(4.0, 1), (0.6, 2), (0.3, 4)])
def test_the_first_answer_says_how_much_fits(memory: float, largest: int) -> None:
    """Groups are only as large as memory requires, because never synced copies are best."""
    rows = (200_000,) * 4
    whole_bytes = 4 * 200_000 * (32 * 4 + 4)
    topology = world(4, 2, ddr_cap=int(memory * whole_bytes))
    sync = tdsp.WeightSync(policy=tdsp.never())
    proposer = tdsp.GroupSizeProposer(topology, calibration(), sync=sync)
    assert plan_of(proposer, topology, rows).mesh.group_size == largest


class RoomsSeen(tdsp.ExchangeProposer):
    """Records the memory limits for which plans are drafted."""

    def drafts(self, loaded: Loaded, room: Room) -> Iterator[Draft]:
        self.rooms = [*getattr(self, "rooms", []), room]
        return super().drafts(loaded, room)


def test_drafts_are_made_again_once_when_it_is_known_how_much_fits() -> None:
    topology = world(4, 2, ddr_cap=10**9)
    proposer = RoomsSeen(topology, calibration())
    stock_planner(proposer, topology).plan(tables(), SHARDERS)
    assert proposer.rooms == [Room(float("inf")), Room(1e9)]


def test_optimizers_need_memory_as_well() -> None:
    def num_bytes(optimizer: EmbOptimType) -> int:
        sharder: list[Any] = [tdsp.EmbeddingBagCollectionSharder2D(optimizer)]
        asked = {"t0": ParameterConstraints(sharding_types=["row_wise"])}
        proposer = tdsp.ExchangeProposer(world(4, 2), calibration(), constraints=asked)
        enumerator = stock_planner(proposer)._enumerator
        proposer.load(enumerator.enumerate(tables((9_000,)), sharder), enumerator)
        (option,) = proposer.propose() or []
        return option.total_storage.ddr

    more = num_bytes(EmbOptimType.ADAM) - num_bytes(EmbOptimType.EXACT_SGD)
    assert more == pytest.approx(2 * 9_000 * 32 * 4, abs=4)


class TopologySeen(Stats):
    """Records the number of ranks for which a plan is reported."""

    world_size = 0

    def log(self, sharding_plan: ShardingPlan, topology: Topology, *args: Any, **more: Any) -> None:
        self.world_size = topology.world_size


def test_what_is_reported_is_one_group_and_its_sync(caplog: pytest.LogCaptureFixture) -> None:
    seen = TopologySeen()
    proposer = tdsp.ExchangeProposer(
        world(4, 2), calibration(), mesh=tdsp.Mesh2D(2, 2), sync=tdsp.WeightSync()
    )
    with caplog.at_level("INFO", logger="torchrec_2dsp"):
        stock_planner(proposer, stats=Stats2D(seen)).plan(tables(), SHARDERS)
    assert seen.world_size == 2
    assert "one of 2 sharding groups of Mesh2D(2x2, strided), synced by WeightSync" in caplog.text


def test_what_fits_nowhere_is_the_planners_error() -> None:
    topology = world(4, 2, ddr_cap=100_000)
    with pytest.raises(PlannerError, match="Unable to find a plan"):
        plan_of(tdsp.GroupSizeProposer(topology, calibration()), topology, (200_000,))


def test_what_was_enumerated_stays_as_it_is() -> None:
    result = stock_planner(tdsp.GroupSizeProposer(world(4, 2), calibration()))
    options = result._enumerator.enumerate(tables(), SHARDERS)
    before = copy.deepcopy(options)
    proposer = tdsp.GroupSizeProposer(world(4, 2), calibration())
    proposer.load(options, result._enumerator)
    assert proposer.propose()
    assert [hash(entry) for entry in options] == [hash(entry) for entry in before]


def test_data_parallel_keeps_the_name_that_the_stock_planner_knows() -> None:
    asked = {"t0": ParameterConstraints(sharding_types=["data_parallel"])}
    topology = world(4, 2)
    proposer = tdsp.GroupSizeProposer(topology, calibration(), constraints=asked)
    assert ways_in(plan_of(proposer, rows=(40,))) == {"t0": ("2d_data_parallel", "pooled")}


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda entry: pickle.loads(pickle.dumps(entry))])
def test_a_proposed_type_travels_with_all_that_was_chosen(travel: Any) -> None:
    result = ProposedType.of(
        ShardingType.ROW_WISE,
        tdsp.Mesh2D(2, 2),
        tdsp.WeightSync(),
        exchange=tdsp.Exchange.ROW,
        owners=tdsp.RowOwners.HASH,
        hot_set=tdsp.HotSet.of([3, 5]),
    )
    there = travel(result)
    assert (
        there
        == result
        == "2d_row_wise, row exchange, hash owners, 2 hot rows, 2 groups of 2 strided"
    )
    assert vars(there) == vars(result)


def test_a_plan_that_was_proposed_knows_its_mesh_and_its_sync() -> None:
    sync = tdsp.WeightSync()
    proposer = tdsp.ExchangeProposer(world(4, 2), calibration(), mesh=tdsp.Mesh2D(2, 2), sync=sync)
    stock = stock_planner(proposer).plan(tables(), SHARDERS)
    result = tdsp.Plan2D.from_stock(stock)
    assert (result.mesh, result.sync) == (tdsp.Mesh2D(2, 2), sync)
    with pytest.raises(PlanError, match=r"a plan has one mesh, not Mesh2D\(1x4.*2x2"):
        tdsp.Plan2D.from_stock(stock, tdsp.Mesh2D(1, 4))
    plain = torchrecs_planner(world(2)).plan(tables(), SHARDERS)
    with pytest.raises(PlanError, match="nothing says which ranks repeat the plan"):
        tdsp.Plan2D.from_stock(plain)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing says which rows are hot"):
        tdsp.HotRowProposer(tdsp.ExchangeProposer(world(4, 2)))
    with pytest.raises(MeshError, match="has 8 ranks but the world has 4"):
        tdsp.ExchangeProposer(world(4, 2), mesh=tdsp.Mesh2D(2, 4))
    proposer = tdsp.ExchangeProposer(world(8, 2), calibration())
    with pytest.raises(ConfigError, match="the topology has world_size=4"):
        plan_of(proposer)
    once = {"t1": tdsp.ParameterConstraints2D(num_groups=1)}
    proposer = tdsp.ExchangeProposer(world(4, 2), calibration(), constraints=once)
    with pytest.raises(ConfigError, match="'t1' has num_groups=1, but TorchRec's planner"):
        plan_of(proposer)


TWO_GROUPS = tdsp.Mesh2D(num_groups=2, group_size=2)


def geometry(option: ShardingOption) -> list[tuple[int | None, list[int], list[int]]]:
    return [(shard.rank, list(shard.offset), list(shard.size)) for shard in option.shards]


def planned(plan: tdsp.Plan2D, table: str) -> tuple[str, list[tuple[int, list[int], list[int]]]]:
    """Return a table's sharding type and shards in the plan."""
    sharding = tables_in(plan)[table]
    spec: Any = sharding.sharding_spec
    shards = [
        (shard.placement.rank(), list(shard.shard_offsets), list(shard.shard_sizes))
        for shard in spec.shards
    ]
    return sharding.sharding_type, shards


def test_a_model_without_tables_has_no_options() -> None:
    empty = planner()
    assert empty.plan(nn.Linear(2, 2), STOCK_SHARDERS).plan == {}
    assert empty.get_selected_options() == empty.get_search_space() == []


def test_nothing_is_shown_before_a_plan() -> None:
    before = planner(mesh=TWO_GROUPS)
    assert before.get_selected_options() == []
    assert before.get_search_space() is None


@pytest.mark.parametrize(
    "kind",
    ["table_wise", "column_wise", "row_wise", "table_row_wise"],
)
def test_selected_options_are_the_plan(kind: str) -> None:
    mesh = tdsp.Mesh2D(num_groups=1, group_size=4)
    chosen = planner(mesh=mesh, constraints=constrained(kind))
    plan = chosen.plan(bags(), STOCK_SHARDERS)

    options = chosen.get_selected_options()
    assert [option.name for option in options] == ["t0", "t1"]
    for option in options:
        assert planned(plan, option.name) == (f"2d_{kind}", geometry(option))
        assert option.sharding_type.startswith(f"2d_{kind}")
        assert option.fqn == f".{option.name}"
        assert option.batch_size == BATCH
        assert option.total_perf > 0
    assert sum(bytes_by_rank(options, 4)) >= 2 * 40 * 64 * 4


def test_ranks_store_what_the_search_counted() -> None:
    chosen = planner(mesh=TWO_GROUPS)
    chosen.plan(bags(num_tables=5, rows=4_000), STOCK_SHARDERS)
    expected = (
        chosen.search(bags(num_tables=5, rows=4_000), STOCK_SHARDERS).placements[0].bytes_by_rank
    )
    stored = bytes_by_rank(chosen.get_selected_options(), TWO_GROUPS.group_size)
    # Each shard's bytes are rounded up.
    assert np.allclose(stored, expected, atol=5)


def test_tables_with_one_copy_are_shown_on_the_ranks_of_the_world() -> None:
    once = {"t0": tdsp.ParameterConstraints2D(num_groups=1, sharding_types=["row_wise"])}
    each = {"t1": tdsp.ParameterConstraints2D(num_groups=2, sharding_types=["row_wise"])}
    chosen = planner(mesh=TWO_GROUPS, constraints=once | each)
    chosen.plan(bags(rows=4_000), STOCK_SHARDERS)

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
    actual = chosen.search(bags(rows=4_000), STOCK_SHARDERS).placements[0]
    assert np.allclose(stored, actual.bytes_by_rank.max(), atol=5)


def test_the_search_space_by_cost_has_all_ways_of_every_table() -> None:
    chosen = planner(mesh=TWO_GROUPS)
    chosen.plan(bags(rows=4_000), STOCK_SHARDERS)

    space = chosen.get_search_space()
    assert space is not None
    ways = {name: [entry for entry in space if entry.name == name] for name in ("t0", "t1")}
    assert len(ways["t0"]) == len(ways["t1"]) > 3
    types = {option.sharding_type for option in ways["t0"]}
    assert any("row exchange" in kind for kind in types)
    assert "data_parallel" in types
    for option in space:
        assert all(shard.rank is None and shard.storage is not None for shard in option.shards)
    selected = {option.sharding_type for option in chosen.get_selected_options()}
    assert selected <= types


def test_a_plan_that_failed_leaves_nothing_of_the_one_before() -> None:
    chosen = planner(mesh=TWO_GROUPS)
    chosen.plan(bags(), STOCK_SHARDERS)
    assert chosen.get_selected_options()
    with pytest.raises(PlanError):
        chosen.plan(bags(rows=10**12), STOCK_SHARDERS)
    assert chosen.get_selected_options() == []
    assert chosen.get_search_space() is None


def test_torchrecs_executor_reports_the_plan() -> None:
    # TorchRec has these since 1.9.
    executor: Any = pytest.importorskip("torchrec.distributed.planner.executor")
    provider: Any = import_module("torchrec.distributed.planner.provider")
    types: Any = import_module("torchrec.distributed.planner.types")
    used = planner(mesh=TWO_GROUPS)

    class Provider(provider.DefaultPlannerProvider):
        def build_planner(self, *_: object, **__: object) -> tdsp.Planner2D:
            return used

    request = types.ShardingPlanRequest(
        model=bags(rows=4_000),
        sharders=STOCK_SHARDERS,
        world_size=4,
        local_world_size=2,
        batch_size=BATCH,
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
