"""Placements with copies in the world, single changes, and hot rows."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingType

import torchrec_2dsp as tdsp
from tests.support.planning import (
    ENOUGH,
    SHARDERS,
    best_of_all,
    calibration,
    constrained,
    only_the_link,
    plan_of,
    planner,
    problem,
    skewed,
    slow_fetch,
    tables,
    tables_in,
)
from torchrec_2dsp.codecs.rows import transports_of
from torchrec_2dsp.cost.loads import LOADS
from torchrec_2dsp.cost.model import CostModel, CostSetting
from torchrec_2dsp.cost.workload import DenseWork, Workload
from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.planner.search.best_placements import search, search_copies
from torchrec_2dsp.planner.search.candidates import candidates_of
from torchrec_2dsp.planner.search.choices import Candidate
from torchrec_2dsp.planner.search.cost_search import meshes_of
from torchrec_2dsp.planner.search.placement import (
    Descent,
    MeshPlacement,
    Placement,
    Runs,
    concave_runs,
    rows_by_byte,
)
from torchrec_2dsp.planner.search.space import Room, Space

pytestmark = pytest.mark.dealt_file

TWO_GROUPS = tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS)
ROWS = (300, 9_000, 200_000)


@pytest.mark.parametrize(("link", "dims"), [("no_limit", (64, 64, 64)), ("200mbit", (64, 64, 128))])
def test_parts_of_tables_stay_on_hosts_where_their_types_say_so(
    link: str, dims: tuple[int, ...]
) -> None:
    """Each grid column is on all of a host's ranks; table-column-wise parts share one host."""
    mesh, rows = tdsp.Mesh2D(1, 4), (200_000, 90_000, 3_000)
    types = ("grid_shard", "table_column_wise", "column_wise")
    constraints = {f"t{number}": constrained(kind)["t0"] for number, kind in enumerate(types)}
    model, access = tables(rows, dims), skewed(rows)
    by_cost = planner(link=link, access=access, constraints=constraints, mesh=mesh)
    plan = by_cost.plan(model, SHARDERS)
    specs: dict[str, Any] = {name: table.sharding_spec for name, table in tables_in(plan).items()}
    shards = {
        name: [(*shard.shard_offsets, shard.placement.rank()) for shard in spec.shards]
        for name, spec in specs.items()
    }
    first, *_, last = shards["t0"]
    host = first[2]
    assert shards["t0"][:2] == [(0, 0, host), (100_000, 0, host + 1)]
    assert len(shards["t0"]) == 4
    assert last[:2] == (100_000, 32)
    assert host % 2 == 0
    assert [offsets for *offsets, _ in shards["t1"]] == [[0, 0], [0, 32]]
    assert len({rank // 2 for *_, rank in shards["t1"]}) == 1
    assert len({rank for *_, rank in shards["t1"]}) == 2
    best = by_cost.search(model, SHARDERS).placements[0]
    again = CostModel(calibration(link), local_world_size=2).step_cost(plan, best.setting.workload)
    assert vars(again) == pytest.approx(vars(best.cost), rel=1e-6, abs=1e-9)
    # The best moves two tables to other hosts at once.
    assert best.rated_s <= 1.12 * best_of_all(list(best.candidates), best.setting)


def copies_problem(
    constraints: dict[str, ParameterConstraints] | None = None,
) -> tuple[list[Candidate], CostSetting]:
    return problem(TWO_GROUPS, ROWS, constraints, access=skewed(ROWS))


def names_once(outcome: MeshPlacement) -> set[str]:
    return set() if outcome.once is None else {entry.name for entry in outcome.once.candidates}


def demand(*names: str, num_groups: Any = 1, **more: Any) -> dict[str, ParameterConstraints]:
    entry = tdsp.ParameterConstraints2D(num_groups=num_groups, **more)
    return dict.fromkeys(names, entry)


def test_no_set_of_tables_is_much_better_than_what_is_found() -> None:
    """The result is compared with every set of tables that are forced to have one copy."""
    some_types: dict[str, Any] = {
        "sharding_types": ["row_wise", "table_wise"],
        "exchange": ["row", "pooled"],
    }
    best = np.inf
    for size in range(len(ROWS)):
        for subset in itertools.combinations(range(len(ROWS)), size):
            rest = (f"t{number}" for number in range(len(ROWS)) if number not in subset)
            asked = demand(*rest, num_groups=2, **some_types)
            asked |= demand(*(f"t{number}" for number in subset), **some_types)
            candidates, setting = copies_problem(constraints=asked)
            (outcome, *_) = search_copies(candidates, [setting], ENOUGH).placements
            assert names_once(outcome) == {f"t{number}" for number in subset}
            best = min(best, outcome.rated_s)
    free = tdsp.ParameterConstraints2D(**some_types)
    candidates, setting = copies_problem(constraints=dict.fromkeys(("t0", "t1", "t2"), free))
    assert search_copies(candidates, [setting], ENOUGH).placements[0].rated_s <= 1.02 * best


@pytest.mark.slow
def test_huge_tables_have_one_copy_where_groups_have_no_room_for_them() -> None:
    """The other tables are looked up so often that a single group would be slower for them."""
    model = tables((1_000_000,) * 24 + (3_000_000_000,) * 2)
    workload = Workload.of_model(model, batch_size=4_096)
    often = {
        name: replace(work, ids_per_sample=80.0 if work.num_rows == 1_000_000 else 1.0)
        for name, work in workload.tables.items()
    }
    dense = DenseWork(forward_s=0.005, backward_s=0.01, gradient_bytes=1e8)
    workload = replace(workload, tables=often, dense=dense)
    candidates = candidates_of(model, SHARDERS, None, workload, "cuda")
    hardware = tdsp.Calibration.load("configs/hardware/h100_8_datasheet.toml")
    settings = [
        CostSetting(hardware, workload, mesh, tdsp.GradientSync(), 8) for mesh in meshes_of(64, 8)
    ]
    alike = search(candidates, settings, Room(20e9)).placements[0]
    (outcome, *_) = search_copies(candidates, settings, Room(20e9)).placements
    assert alike.setting.mesh.num_groups == 1
    assert outcome.setting.mesh.num_groups > 1
    assert names_once(outcome) == {"t24", "t25"}
    assert outcome.rated_s < 0.95 * alike.rated_s


def too_little(candidates: list[Candidate], setting: CostSetting) -> Room:
    """Return a little less room than a group needs for all tables."""
    (roomy,) = search(candidates, [setting], ENOUGH).placements
    rooms = (Room(share * float(roomy.bytes_by_rank.max())) for share in (0.8, 0.7, 0.6, 0.5))
    return next(room for room in rooms if not search(candidates, [setting], room).placements)


def test_what_fits_no_group_fits_the_world() -> None:
    candidates, setting = copies_problem()
    room = too_little(candidates, setting)
    (outcome, *_) = search_copies(candidates, [setting], room).placements
    assert names_once(outcome)
    assert outcome.bytes_by_rank.max() <= room.device


def test_what_is_found_costs_what_its_plan_costs() -> None:
    candidates, setting = copies_problem(demand("t2"))
    (outcome, *_) = search_copies(candidates, [setting], ENOUGH).placements
    plan = outcome.plan("cpu")
    cost = CostModel(setting.calibration, 2).step_cost(plan, setting.workload)
    assert vars(cost) == pytest.approx(vars(outcome.cost), rel=1e-6, abs=1e-9)
    kept = CostModel(setting.calibration, 2).memory_cost(plan, setting.workload)
    assert kept.total_bytes == pytest.approx(float(outcome.bytes_by_rank.max()))
    once = {name for name, table in tables_in(plan).items() if table.num_groups == 1}
    assert once == names_once(outcome)


def test_demands_are_met_or_refused_by_name() -> None:
    model = tables(ROWS)
    asked = demand("t0") | demand("t1", num_groups=2)
    plan = plan_of(model, mesh=TWO_GROUPS, constraints=asked | demand("t2", num_groups=2))
    num_groups = {name: table.num_groups for name, table in tables_in(plan).items()}
    assert num_groups == {"t0": 1, "t1": None, "t2": None}
    free = plan_of(model, constraints=demand("t0", "t1", "t2", num_groups=2))
    assert free.mesh.num_groups == 2
    with pytest.raises(PlanError, match=r"num_groups=3 for 't1'.*there may be 1, 2, 4 here"):
        plan_of(model, constraints=demand("t1", num_groups=3))
    with pytest.raises(PlanError, match="'t1' has num_groups=1, and nothing but data_paral"):
        plan_of(
            model,
            mesh=TWO_GROUPS,
            constraints=demand("t1", sharding_types=["data_parallel"]),
        )
    with pytest.raises(PlanError, match=r"all tables have num_groups=1, which is a plan for"):
        plan_of(model, mesh=TWO_GROUPS, constraints=demand("t0", "t1", "t2"))
    assert plan_of(model, constraints=demand("t0", "t1", "t2")).mesh.num_groups == 1


def test_one_in_each_group_is_no_demand_on_the_mesh() -> None:
    """The demand excludes single copies in the world, so tables that don't fit a group fail."""
    asked = demand("t0", "t1", "t2", num_groups="each")
    candidates, setting = copies_problem(asked)
    assert not search_copies(candidates, [setting], too_little(candidates, setting)).placements
    assert plan_of(tables(ROWS), constraints=asked).mesh in meshes_of(4, 2)


def test_in_one_group_every_table_has_one_copy() -> None:
    plan = plan_of(tables(ROWS), mesh=tdsp.Mesh2D(1, 4), constraints=demand("t2"))
    assert all(table.num_groups is None for table in tables_in(plan).values())


def test_an_explanation_tells_copies_apart() -> None:
    constraints = demand("t1") | demand("t0", "t2", num_groups=2)
    by_cost = planner(mesh=TWO_GROUPS, constraints=constraints, access=skewed(ROWS))
    by_cost.plan(tables(ROWS), SHARDERS)
    explained = by_cost.explain()
    assert {line.name: line.is_once for line in explained.tables} == {
        "t0": False,
        "t1": True,
        "t2": False,
    }
    text = str(explained)
    assert "one copy" in text
    where = f"{TWO_GROUPS}, row prefetch, full duplex, 1 in the world"
    assert text.startswith(f"{where} on two_hosts_1gbit")
    assert f"{where}, placed" not in text
    lost = [line.lost_by_s for line in explained.tables if line.runner_up is not None]
    assert lost
    assert min(lost) > -1e-9
    seconds = sum(line.seconds for line in explained.tables)
    assert 0 < seconds < explained.cost.total_s


def space_of(rows: tuple[int, ...], sync: tdsp.WeightSync, dense_s: float = 0.0) -> Space:
    """Return table- or row-wise choices, in two groups of four ranks on two-rank hosts."""
    pooled = tdsp.ParameterConstraints2D(
        sharding_types=["table_wise", "row_wise"], exchange=["pooled"]
    )
    constraints = {f"t{number}": pooled for number in range(len(rows))}
    dense = DenseWork(forward_s=dense_s)
    return Space.of(
        *problem(tdsp.Mesh2D(2, 4), rows, constraints, sync=sync, dense=dense, batch_size=16)
    )


@pytest.mark.parametrize("dense_s", [0.0, 5.0])
def test_large_tables_of_few_ranks_are_spread_together(dense_s: float) -> None:
    """All large tables are spread together, as spreading one alone doesn't help.

    Replica peers average whole shards, so all ranks wait for the largest.
    """
    space = space_of((300_000,) * 3 + (50,), tdsp.WeightSync(rows=tdsp.SyncedRows.ALL), dense_s)
    (outcome,) = search(space.candidates, [space.setting], ENOUGH).placements
    assert {entry.kind for entry in outcome.placement.choices[:3]} == {ShardingType.ROW_WISE}

    descent = Descent(space, space.prices(np.zeros(len(LOADS))), ENOUGH)
    whole, in_rows = (
        next(entry for entry in space.choices[0] if entry.kind is kind)
        for kind in (ShardingType.TABLE_WISE, ShardingType.ROW_WISE)
    )
    start = Placement((whole,) * 4, ((0,), (1,), (2,), (3,)))
    for table in range(3):
        assert descent.rated_s(start.replaced(table, in_rows)) > descent.rated_s(start)
    better, _ = descent.improved(start, max_tries=100)
    assert descent.rated_s(better) <= descent.rated_s(start) * 0.9 + 0.1 * dense_s
    assert outcome.rated_s <= descent.rated_s(better) * (1 + 1e-6)


def test_a_long_dense_part_is_no_reason_for_one_type() -> None:
    """Another type must gain a share of the tables' time, not of the whole step's."""
    rows = (10,) * 12 + (200_000,)
    constraints = constrained("table_wise", "data_parallel", num_tables=len(rows))
    outcome = []
    for dense_s in (0.0, 100.0):
        dense = DenseWork(forward_s=dense_s)
        candidates, setting = problem(
            tdsp.Mesh2D(1, 4), rows, constraints, link="200mbit", dense=dense
        )
        outcome.append(search(candidates, [setting], ENOUGH).placements[0].placement)
    without, beside = outcome
    assert {entry.kind for entry in without.choices} == {
        ShardingType.TABLE_WISE,
        ShardingType.DATA_PARALLEL,
    }
    assert beside.choices == without.choices


def test_no_more_is_tried_than_may_be() -> None:
    space = space_of((300_000,) * 3, tdsp.WeightSync(rows=tdsp.SyncedRows.ALL))
    whole = next(entry for entry in space.choices[0] if entry.is_free)
    start = Placement((whole,) * 3, ((0,), (1,), (2,)))
    descent = Descent(space, space.prices(np.zeros(len(LOADS))), ENOUGH)
    assert descent.improved(start, max_tries=0) == (start, 0)


ONE_TABLE = (20_000,)


def runs_of(runs: list[tuple[int, int, int]]) -> Runs:
    """Build runs from each one's number of rows, benefit and bytes."""
    num_rows, benefits, num_bytes = np.array(runs, dtype=np.float64).T
    return Runs(np.arange(len(runs)), num_rows, benefits, num_bytes)


def best_of_runs(runs: Runs, room: float) -> float:
    """Return the largest benefit from rows that fit the room."""
    every = itertools.product(*(range(int(count) + 1) for count in runs.num_rows))
    return max(
        float(runs.benefits @ np.array(subset))
        for subset in every
        if runs.num_bytes @ np.array(subset) <= room
    )


RUNS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(-3, 9), st.integers(1, 5)), min_size=1, max_size=4
)


@given(RUNS, st.integers(0, 30))
def test_greed_misses_less_than_one_row(runs: list[tuple[int, int, int]], room: int) -> None:
    subset = runs_of(runs)
    taken = rows_by_byte(subset, room)
    assert subset.num_bytes @ taken <= room
    assert (taken <= subset.num_rows).all()
    best = best_of_runs(subset, room)
    assert best - max(subset.benefits.max(), 0) <= subset.benefits @ taken <= best


@given(RUNS, st.integers(0, 12))
def test_among_rows_of_one_size_greed_is_best(runs: list[tuple[int, int, int]], room: int) -> None:
    subset = replace(runs_of(runs), num_bytes=np.full(len(runs), 2.0))
    assert subset.benefits @ rows_by_byte(subset, room) == best_of_runs(subset, room)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8))
def test_runs_save_less_and_less_and_all_that_there_is_to_save(costs: list[float]) -> None:
    sizes = np.cumsum(np.arange(len(costs)), dtype=np.float64)
    runs = list(concave_runs(sizes, np.array(costs)))
    benefits = [benefit for _, benefit in runs]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(benefits))
    assert sum(num_rows for num_rows, _ in runs) == sizes[-1]
    saved = sum(num_rows * benefit for num_rows, benefit in runs)
    assert saved == pytest.approx(costs[0] - costs[-1], abs=1e-9)


def searched(
    room: float = 1e12, hot_rows: int | None = None, calibration: tdsp.Calibration | None = None
) -> MeshPlacement:
    constraint = {"t0": tdsp.ParameterConstraints2D(exchange="row", hot_rows=hot_rows)}
    candidates, setting = problem(
        tdsp.Mesh2D(1, 4),
        ONE_TABLE,
        constraint,
        link=calibration or slow_fetch(),
        batch_size=256,
        access=skewed(ONE_TABLE),
    )
    (outcome,) = search(candidates, [setting], Room(room)).placements
    return outcome


def num_hot(outcome: MeshPlacement) -> int:
    return outcome.placement.choices[0].num_hot


def test_the_number_of_hot_rows_is_near_the_best_one() -> None:
    outcome = searched()
    scanned = {
        count: searched(hot_rows=count).cost.total_s
        for count in (0, 8, 32, 128, 512, 2_048, 8_192, 20_000)
    }
    assert num_hot(outcome) > 0
    assert outcome.cost.total_s < 0.85 * scanned[0]
    assert outcome.cost.total_s <= 1.02 * min(scanned.values())


def test_hot_rows_fit_beside_the_rest() -> None:
    roomy = searched()
    without = searched(hot_rows=0)
    room = float(without.bytes_by_rank.max()) + 200_000
    tight = searched(room)
    assert 0 < num_hot(tight) < num_hot(roomy)
    assert float(tight.bytes_by_rank.max()) <= room
    assert roomy.cost.total_s < tight.cost.total_s < without.cost.total_s


@pytest.mark.parametrize("asked", [0, 7])
def test_a_number_that_is_asked_for_is_kept(asked: int) -> None:
    assert num_hot(searched(hot_rows=asked)) == asked


def test_a_small_gain_is_none() -> None:
    """Hot rows' predicted time is too short, so small gains aren't reliable."""
    assert num_hot(searched(calibration=only_the_link())) == 0


def used_transports(plan: tdsp.Plan2D) -> set[tdsp.Transport]:
    return {table.transport for table in tables_in(plan).values()}


def sharded_planner(link: str, **settings: Any) -> tdsp.Planner2D:
    """Return a planner for one group with no table copied to every rank."""
    demands = constrained("table_wise", "row_wise", num_tables=3)
    mesh = tdsp.Mesh2D(1, 4)
    return planner(link=link, access=skewed(), mesh=mesh, constraints=demands, **settings)


def test_tables_travel_as_the_user_allows_and_the_network_wants() -> None:
    model, either = tables(), ["fp32", "int8"]
    exact, short = (
        sharded_planner("200mbit", batch_size=1_024, precision=precision)
        for precision in ("exact", either)
    )
    assert used_transports(exact.plan(model, SHARDERS)) == {tdsp.Transport.FP32}
    assert used_transports(short.plan(model, SHARDERS)) == {tdsp.Transport.INT8}
    exact_s, short_s = (
        each.search(model, SHARDERS).placements[0].cost.tables_s for each in (exact, short)
    )
    assert short_s < 0.7 * exact_s
    assert "int8" in str(short.explain())
    free = sharded_planner("no_limit", precision=either)
    assert used_transports(free.plan(model, SHARDERS)) == {tdsp.Transport.FP32}


def test_a_table_may_be_kept_exact() -> None:
    demands = {"t0": tdsp.ParameterConstraints2D(transport=["fp32"])}
    planned = planner(
        link="200mbit",
        access=skewed(),
        mesh=tdsp.Mesh2D(1, 4),
        precision=["int4"],
        constraints=demands,
    )
    plan = planned.plan(tables(), SHARDERS)
    ways = {name: table.transport.value for name, table in tables_in(plan).items()}
    assert ways["t0"] == "fp32"
    assert {way for name, way in ways.items() if name != "t0"} <= {"int4", "fp32"}
    assert "int4" in ways.values()


@pytest.mark.parametrize(
    ("precision", "transports"),
    [
        ("exact", ["fp32"]),
        ("any", ["fp32", "bf16", "fp16", "int8", "int4"]),
        ("int8", ["int8"]),
        (tdsp.Transport.INT4, ["int4"]),
        (["fp16", tdsp.Transport.FP32, "fp16"], ["fp16", "fp32"]),
    ],
)
def test_a_precision_names_transports(precision: Any, transports: list[str]) -> None:
    assert [way.value for way in transports_of(precision)] == transports
