"""The search by cost, against all placements, and with users' demands."""

import itertools
import re
import resource
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import torchrec_2dsp as tdsp
from tests.support.planning import (
    ENOUGH,
    ROWS,
    SHARDERS,
    bags,
    best_of_all,
    calibration,
    constrained,
    plan_of,
    planner,
    planner_for,
    problem,
    sequences,
    skewed,
    tables,
    tables_in,
    ways_in,
    world,
)
from torchrec_2dsp._compat.fbgemm import EmbOptimType
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.cost.model import CostModel
from torchrec_2dsp.cost.workload import DenseWork, Workload
from torchrec_2dsp.errors import ConfigError, PlanError
from torchrec_2dsp.plan.parameter_sharding import IN_8_BITS
from torchrec_2dsp.planner.search.best_placements import placements, search
from torchrec_2dsp.planner.search.candidates import candidates_of
from torchrec_2dsp.planner.search.choices import Choice
from torchrec_2dsp.planner.search.cost_search import meshes_of
from torchrec_2dsp.planner.search.placement import MeshPlacement
from torchrec_2dsp.planner.search.space import Effort, Room, Selected, Space, selections, smallest

pytestmark = pytest.mark.dealt_file


@pytest.mark.parametrize(
    ("link", "mesh"),
    [
        ("200mbit", tdsp.Mesh2D(1, 4)),
        ("1gbit", tdsp.Mesh2D(2, 2)),
        ("no_limit", tdsp.Mesh2D(1, 4)),
    ],
)
def test_nothing_is_much_better_than_what_is_found(link: str, mesh: tdsp.Mesh2D) -> None:
    dense = DenseWork(forward_s=0.01, backward_s=0.01)
    candidates, setting = problem(mesh, link=link, access=skewed(), dense=dense)
    (placed,) = search(candidates, [setting], ENOUGH).placements
    best = best_of_all(candidates, setting)
    assert best <= placed.rated_s * (1 + 1e-9)
    assert placed.rated_s <= 1.06 * best


@pytest.mark.parametrize("sync", [tdsp.GradientSync(), tdsp.WeightSync(policy=tdsp.every(4))])
def test_what_is_found_costs_what_its_plan_costs(sync: "tdsp.GradientSync") -> None:
    planned = planner(link="200mbit", access=skewed(), sync=sync)
    model = tables()
    best = planned.search(model, SHARDERS).placements[0]
    plan = planned.plan(model, SHARDERS)
    costs = CostModel(calibration("200mbit"), local_world_size=2)
    assert plan.mesh == best.setting.mesh
    expected = costs.step_cost(plan, best.setting.workload)
    assert vars(expected) == pytest.approx(vars(best.cost), rel=1e-6, abs=1e-9)
    kept = costs.memory_cost(plan, best.setting.workload)
    assert kept.total_bytes == pytest.approx(float(best.bytes_by_rank.max()))


_TABLE_WISE = "table_wise"
_COPIED = "data_parallel"


def test_small_tables_are_copied_where_large_ones_send_vectors() -> None:
    """Small tables' gradients are smaller than a batch's vectors; large tables' aren't."""
    model = tables((10,) * 12 + (200_000,))
    constraints = constrained(_COPIED, _TABLE_WISE, num_tables=13)
    plan = plan_of(model, link="200mbit", constraints=constraints, mesh=tdsp.Mesh2D(1, 4))
    *small, large = ways_in(plan).values()
    # The host without the large table may have one: its link is free.
    assert small.count(("2d_data_parallel", "pooled")) >= 11
    assert large[0] == "2d_table_wise"


def test_a_small_gain_is_no_reason_for_another_type() -> None:
    """With smaller batches, copies would shorten the step slightly if predictions were exact."""
    rows = (10,) * 6 + (200_000,)
    given = {"link": "200mbit", "batch_size": 128, "access": skewed(rows)}

    def placed(constraints: dict[str, ParameterConstraints]) -> MeshPlacement:
        by_cost = planner(constraints=constraints, mesh=tdsp.Mesh2D(1, 4), **given)
        return by_cost.search(tables(rows), SHARDERS).placements[0]

    free = placed(constrained(_COPIED, _TABLE_WISE, num_tables=7))
    assert {choice.kind for choice in free.placement.choices} == {ShardingType.TABLE_WISE}
    copies, whole = (constrained(kind, num_tables=7) for kind in (_COPIED, _TABLE_WISE))
    mixed = placed(copies | {name: whole[name] for name in ("t0", "t6")})
    assert mixed.cost.total_s < free.cost.total_s < 1.05 * mixed.cost.total_s


def test_tables_that_share_a_link_do_not_lie_on_one_host() -> None:
    constraints = constrained(_TABLE_WISE, num_tables=2)
    by_cost = planner(link="200mbit", constraints=constraints, mesh=tdsp.Mesh2D(1, 4))
    placement = by_cost.search(tables((200_000,) * 2), SHARDERS).placements[0].placement
    assert sorted(rank // 2 for (rank,) in placement.ranks) == [0, 1]


def test_the_mesh_is_what_the_network_makes_of_it() -> None:
    """Several meshes are ranked by cost; where memory is short, only one group fits."""
    model = tables((200_000,) * 4)
    roomy = planner(link="no_limit").search(model, SHARDERS).placements
    assert len({entry.setting.mesh for entry in roomy}) == len(roomy) > 1
    assert [entry.cost.total_s for entry in roomy] == sorted(entry.cost.total_s for entry in roomy)
    whole_bytes = 4 * 200_000 * (32 * 4 + 4)
    tight = plan_of(model, topology=world(4, 2, ddr_cap=0.3 * whole_bytes))
    assert tight.mesh == tdsp.Mesh2D(1, 4)


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (ParameterConstraints(sharding_types=["table_wise"]), ("2d_table_wise", "pooled")),
        (ParameterConstraints(sharding_types=["2d_row_wise"]), ("2d_row_wise", None)),
        (ParameterConstraints(sharding_types=["column_wise"]), ("2d_column_wise", "pooled")),
        (ParameterConstraints(compute_kernels=["dense"]), ("2d_data_parallel", "pooled")),
        (tdsp.ParameterConstraints2D(exchange="row"), ("2d_row_wise", "row")),
        (
            tdsp.ParameterConstraints2D(sharding_types=["row_wise"], exchange=["pooled"]),
            ("2d_row_wise", "pooled"),
        ),
    ],
)
def test_constraints_win(
    constraint: ParameterConstraints, expected: tuple[str, str | None]
) -> None:
    plan = plan_of(
        tables((64, 64)), constraints={"t0": constraint}, mesh=tdsp.Mesh2D(1, 4), access=None
    )
    placed = ways_in(plan)
    assert placed["t0"][0] == expected[0]
    assert expected[1] is None or placed["t0"][1] == expected[1]


def test_rows_travel_where_few_are_used_and_vectors_where_all_are() -> None:
    constraints = {
        f"t{number}": tdsp.ParameterConstraints2D(pooling_factors=[8.0], skew=2.0 * (number % 2))
        for number in range(8)
    }
    model = tables((200_000,) * 8)
    ways = ways_in(plan_of(model, link="200mbit", constraints=constraints, access=None))
    assert [ways[f"t{number}"][1] for number in range(8)] == ["pooled", "row"] * 4


def test_hot_rows_that_are_asked_for_are_the_hottest() -> None:
    asked = tdsp.ParameterConstraints2D(hot_rows=3, exchange=["row"])
    counted = TableAccess.of_counts([1.0] * 4_990 + [9.0] * 10, num_samples=5_000)
    access = tdsp.AccessStats({"t0": counted})
    plan = plan_of(tables((5_000,)), constraints={"t0": asked}, access=access)
    assert tables_in(plan)["t0"].hot_set == tdsp.HotSet((4_990, 4_991, 4_992))


def test_rows_in_8_bits_fit_where_float32_does_not() -> None:
    asked = {
        "t0": tdsp.ParameterConstraints2D(
            sharding_types=["row_wise"], stored_as="int8", exchange=["row"]
        )
    }
    whole, in_8_bits = (
        planner(constraints=constraints, mesh=tdsp.Mesh2D(1, 4)).search(
            tables((200_000,)), SHARDERS
        )
        for constraints in (constrained("row_wise", num_tables=1), asked)
    )
    bytes_of = [result.placements[0].bytes_by_rank.max() for result in (whole, in_8_bits)]
    # A row has 32 numbers and a moment.
    assert bytes_of[0] - bytes_of[1] == pytest.approx(50_000 * (32 * 4 - 40), rel=0.02)
    (table,) = tables_in(plan_of(tables((200_000,)), constraints=asked)).values()
    assert (table.stored_as, table.owners) == (tdsp.RowStorage.INT8, tdsp.RowOwners.BLOCK)
    everything = {"t0": tdsp.ParameterConstraints2D(stored_as="int8")}
    workload = Workload.of_model(tables((3,)), batch_size=512, constraints=everything)
    (candidate,) = candidates_of(tables((3,)), SHARDERS, everything, workload, "cpu")
    assert {choice.kind for choice in candidate.choices} == set(IN_8_BITS)


def test_rows_that_nothing_looked_up_are_never_hot() -> None:
    asked = tdsp.ParameterConstraints2D(hot_rows=100)
    access = tdsp.AccessStats({"t0": TableAccess.of_counts([1.0, 0.0, 2.0], num_samples=5)})
    workload = Workload.of_model(tables((3,)), batch_size=512, access=access)
    (table,) = candidates_of(tables((3,)), SHARDERS, {"t0": asked}, workload, "cpu")
    assert {choice.num_hot for choice in table.choices} == {2}


def test_columns_are_split_only_where_that_is_asked_for() -> None:
    """Each part of a row would have its own moment, and so train differently."""
    candidates, _ = problem(tdsp.Mesh2D(1, 4))
    kinds = {choice.kind for entry in candidates for choice in entry.choices}
    assert ShardingType.COLUMN_WISE not in kinds
    assert ShardingType.DATA_PARALLEL in kinds


def test_sequences_have_no_empty_bags_and_are_copied_if_their_optimizer_allows_it() -> None:
    model = sequences((100,))
    workload = Workload.of_model(model, batch_size=64)
    for optimizer in (tdsp.MomentScaledRowWiseAdaGrad(lr=0.1), EmbOptimType.LARS_SGD):
        sharder: Any = tdsp.EmbeddingCollectionSharder2D(optimizer)
        (entry,) = candidates_of(model, [sharder], None, workload, "cpu")
        exchanges = {choice.exchange.value for choice in entry.choices}
        assert exchanges == {"pooled", "row", "row_per_host"}
        is_copied = ShardingType.DATA_PARALLEL in {choice.kind for choice in entry.choices}
        assert is_copied == (optimizer is not EmbOptimType.LARS_SGD)


def test_groups_with_uneven_parts_on_hosts_have_no_tables_of_one_host() -> None:
    """Six consecutive ranks on four-rank hosts: four on one host and two on the other."""
    rows = (30_000, 20_000)
    asked = {"t0": ParameterConstraints(sharding_types=["table_row_wise"])}
    placed = planner(topology=world(12, 4), constraints=asked).search(
        tables(rows),
        SHARDERS,
    )
    uneven = tdsp.Mesh2D(2, 6, tdsp.RankLayout.CONTIGUOUS)
    assert uneven not in {entry.setting.mesh for entry in placed.tried}
    assert tdsp.Mesh2D(1, 12) in {entry.setting.mesh for entry in placed.tried}
    # Twenty ranks on eight-rank hosts aren't evenly spread over three hosts.
    for mesh, local_world_size in ((uneven, 4), (tdsp.Mesh2D(2, 20, uneven.layout), 8)):
        free = planner(topology=world(mesh.world_size, local_world_size), mesh=mesh)
        assert free.search(tables(rows), SHARDERS).placements


SLOW = world(4, 2, inter_host_bw=1e4, intra_host_bw=1e7)
"""With a thousandth of the bandwidth between hosts."""


def test_without_a_calibration_the_topology_speaks() -> None:
    """The topology's slow links keep bytes inside hosts."""
    chosen = planner_for(None, SLOW, batch_size=4_096).plan(bags(4, rows=1_000_000), SHARDERS)
    assert chosen.mesh.group_size <= 2 or set(ways_in(chosen).values()) <= {
        ("2d_row_wise", "row_per_host"),
        ("2d_row_wise", "row"),
    }


@pytest.mark.parametrize("mesh", [tdsp.Mesh2D(1, 4), tdsp.Mesh2D(2, 2)], ids=str)
def test_a_mesh_without_a_calibration_runs_row_exchange(mesh: tdsp.Mesh2D) -> None:
    """A batch contains each row several times, so row exchange is cheapest."""
    plan = planner_for(mesh, SLOW, batch_size=4_096).plan(bags(2, rows=4_000), SHARDERS)
    assert (plan.mesh, plan.sync) == (mesh, tdsp.GradientSync())
    assert set(ways_in(plan).values()) <= {("2d_row_wise", way) for way in ("row", "row_per_host")}


def on_t0(**fields: Any) -> dict[str, Any]:
    return {"constraints": {"t0": ParameterConstraints(**fields)}}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"access": skewed(), "workload": Workload(batch_size=1, tables={})}, "both workload and"),
        (on_t0(sharding_types=[]), r"is allowed for table 't0': sharding_types=\[\], with a"),
        (
            on_t0(compute_kernels=["key_value"]),
            r"nothing is allowed for table 't0': compute_kernels=\['key_value'\], with a Embedding"
            "BagCollectionSharder2D on cpu",
        ),
        (
            {"constraints": constrained("row_wise", num_tables=9)},
            f"constraints name {re.escape(str([f't{n}' for n in range(len(ROWS), 9)]))}, and the "
            r"tables are \['t0', 't1', ",
        ),
        (on_t0(pooling_factors=[-3.0]), r"table 't0': pooling_factors=\[-3.0\] has a number below"),
        (on_t0(num_poolings=[np.nan]), r"of table 't0': num_poolings=\[nan\] has a number below"),
        ({"batch_size": 0}, "batch_size=0 is no number of samples; use 1 or more"),
        (
            {"precision": ["int3"]},
            r"precision=\['int3'\]: use 'exact', 'any', or some of 'fp32'",
        ),
        ({"precision": []}, r"precision=\[\] allows nothing; use"),
    ],
)
def test_what_cant_be_searched_is_said(settings: dict[str, object], text: str) -> None:
    with pytest.raises(tdsp.TwoDError, match=text):
        plan_of(tables(), **settings)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"exchange": ["rows"]},
            "exchange='rows' is unknown; use one of 'pooled', 'nonempty', 'row'",
        ),
        ({"hot_rows": 5.5}, "hot_rows=5.5 is no number of rows; use 0 or more"),
        ({"num_groups": True}, "num_groups=True is no number of copies; use 1 or more, or 'each'"),
        ({"num_groups": 0}, "num_groups=0 is no number of copies"),
        ({"num_groups": "all"}, "num_groups='all' is no number of copies"),
        ({"transport": "int9"}, "transport='int9' is unknown; use one of"),
        ({"hot_rows": -1}, "hot_rows=-1 is no number of rows; use 0 or more"),
        ({"stored_as": "int4"}, "stored_as='int4' is unknown; use one of 'plain', 'int8'"),
        ({"skew": -0.1}, "skew=-0.1 is no exponent; use 0 or more"),
        ({"skew": float("nan")}, "skew=nan is no exponent; use 0 or more"),
    ],
)
def test_constraints_are_checked(values: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        tdsp.ParameterConstraints2D(**values)  # type: ignore[arg-type]


def test_other_machines_than_the_calibrated_ones_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tables((100,))
    planner(topology=world(4, 2)).plan(model, SHARDERS)
    assert not [
        entry for entry in caplog.records if entry.levelname == "WARNING" and "cali" in entry.msg
    ]
    planner(topology=world(4, 4)).plan(model, SHARDERS)
    assert (
        "calibration two_hosts_1gbit is of other machines than those that are planned for: ranks "
        "per host: 4, and 2 when measured" in caplog.text
    )


def test_bandwidths_that_nobody_measured_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = tables((100,))
    planner(topology=world(4, 2)).plan(model, SHARDERS)
    assert "without a calibration" not in caplog.text
    tdsp.Planner2D(topology=world(4, 2)).plan(model, SHARDERS)
    assert caplog.text.count("planning without a calibration: bandwidths are the topology's") == 1
    assert "measure this cluster by the calibrate command" in caplog.text


@pytest.mark.parametrize("share", [0.9, 0.7, 0.6, 0.2])
def test_memory_that_doesnt_suffice_is_given_where_it_saves_most(share: float) -> None:
    rows = (4_000, 9_000, 60_000)
    pooled = {f"t{number}": tdsp.ParameterConstraints2D(exchange="pooled") for number in range(3)}
    candidates, setting = problem(tdsp.Mesh2D(1, 4), rows, pooled, batch_size=64)
    (roomy,) = search(candidates, [setting], ENOUGH).placements
    room = share * float(roomy.bytes_by_rank.max())
    placed = search(candidates, [setting], Room(room)).placements
    best = best_of_all(candidates, setting, room)
    assert bool(placed) == bool(np.isfinite(best))
    for entry in placed:
        assert entry.bytes_by_rank.max() <= room
        assert roomy.rated_s <= entry.rated_s <= 1.06 * best


@pytest.mark.parametrize("room", [8e6, 15e6, 24e6])
def test_those_tables_get_memory_that_save_most_by_it(room: float) -> None:
    """Against all choices that fit, the result is nearer to the best than to the smallest."""
    rows = (500, 1_000, 2_000, 3_000, 4_000)
    asked = tdsp.ParameterConstraints2D(exchange="pooled", sharding_types=["row_wise"])
    constraints = {f"t{number}": asked for number in range(5)}
    split, setting = problem(tdsp.Mesh2D(1, 4), rows, constraints, batch_size=2_048)
    copied = Choice(ShardingType.DATA_PARALLEL)
    both = [replace(entry, choices=[copied, *entry.choices]) for entry in split]
    # Small tables' copies take most memory, so that the best tables to copy aren't the largest.
    num_bytes = np.array([[9e6, 1e6], [7e6, 1e6], [5e6, 1e6], [3e6, 1e6], [8e6, 1e6]])
    space = replace(Space.of(both, setting), bytes_of_rank=num_bytes, bytes_of_shard=num_bytes)
    every = [np.array(entry) for entry in itertools.product(range(2), repeat=5)]
    best = min(
        Selected.of(space, entry).cost.total_s
        for entry in every
        if space.bytes_of(entry).device <= room
    )
    smallest = Selected.of(space, np.ones(5, dtype=np.int64)).cost.total_s
    placed = selections(space, Room(room))[0]
    assert space.bytes_of(placed.selection).device <= room
    assert best < 0.95 * smallest
    assert best <= placed.cost.total_s <= best + (smallest - best) / 2


def test_what_hardly_fits_is_split() -> None:
    """Each of four ranks has room for less than one of three equal tables."""
    model = tables((30_000,) * 3)
    whole_bytes = 3 * 30_000 * (32 * 4 + 4)
    tight = planner(topology=world(4, 2, ddr_cap=int(0.29 * whole_bytes)), batch_size=16)
    placed = tight.search(model, SHARDERS)
    kinds = {choice.kind for choice in placed.placements[0].placement.choices}
    assert kinds == {ShardingType.ROW_WISE}


def bytes_of(placed: MeshPlacement) -> float:
    return float(placed.bytes_by_rank.max())


@pytest.mark.parametrize("share", [2.0, 0.6, 0.45, 0.34])
def test_no_rank_keeps_more_than_it_has_room_for(share: float) -> None:
    rows = (60_000, 20_000, 20_000, 20_000)
    candidates, setting = problem(tdsp.Mesh2D(1, 4), rows, batch_size=64)
    settings = [replace(setting, mesh=mesh) for mesh in meshes_of(4, 2)]
    room = share * sum(rows) * (32 * 4 + 4)
    placed = search(candidates, settings, Room(room)).placements
    assert placed
    assert max(bytes_of(entry) for entry in placed) <= room
    sizes = {entry.setting.mesh.group_size for entry in placed}
    assert min(sizes) >= 1 / share


def test_what_doesnt_fit_is_named_with_what_is_missing() -> None:
    with pytest.raises(
        PlanError,
        match=r"no plan fits a sharding group of Mesh2D\(1x4, strided\): the tables need "
        "5,386,920 bytes on a group, 1,386,920 more than the 4,000,000 there are",
    ):
        plan_of(tables((30_000, 10_810)), topology=world(4, 2, ddr_cap=1_000_000))


def test_batches_that_dont_fit_beside_their_tables_are_named() -> None:
    with pytest.raises(
        PlanError,
        match=r"the tables need 1,320,000 bytes on a group, and a step's batches and vectors "
        r"[\d,]+, [\d,]+ more than the 4,000,000 there are, which a smaller batch_size changes",
    ):
        plan_of(tables((10_000,)), topology=world(4, 2, ddr_cap=1_000_000), batch_size=8_192)


def test_buffers_of_one_rank_are_counted_where_they_are() -> None:
    """The large table's owner sends to all other ranks; on average, there would be room."""
    rows = (500, 500, 500, 500, 40_000)
    constraints = constrained("data_parallel", "table_wise", num_tables=len(rows))
    candidates, setting = problem(tdsp.Mesh2D(1, 4), rows, constraints, link="no_limit")

    def placed(room: float) -> list[MeshPlacement]:
        return list(search(candidates, [setting], Room(room)).placements)

    (roomy,) = placed(ENOUGH.device)
    needed = bytes_of(roomy)
    assert placed(needed)
    for share in (1.0, 0.95, 0.9, 0.85, 0.8):
        assert all(bytes_of(entry) <= share * needed for entry in placed(share * needed))


def test_where_shards_cannot_be_dealt_tables_are_chosen_for_less_memory() -> None:
    """Forty tables with enough room on average don't all get their smallest choices."""
    rows = np.exp(np.random.default_rng(0).uniform(np.log(100), np.log(2e7), 40)).astype(int)
    mesh = tdsp.Mesh2D(1, 8)
    candidates, setting = problem(mesh, rows.tolist(), batch_size=1_024, local_world_size=8)
    space = Space.of(candidates, setting)
    least = smallest(space)
    room = 1.7 * space.bytes_of(least.selection).device
    effort = Effort(meshes=1, selections=1, tries=0)
    placed = list(placements(space, selections(space, Room(room)), Room(room), effort))
    assert all(descent.bytes_by_rank(entry).max() <= room for entry, descent in placed)
    assert min(descent.rated_s(entry) for entry, descent in placed) < 0.8 * least.rated_s


def random_tables(num_tables: int) -> EmbeddingBagCollection:
    """Draw tables with 100 to 20 million rows; most are small."""
    generator = np.random.default_rng(0)
    rows = np.exp(generator.uniform(np.log(100), np.log(2e7), num_tables))
    dims = generator.choice([32, 64, 128], num_tables)
    return tables(rows.astype(int).tolist(), dims.tolist())


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("num_tables", "num_ranks", "most_s"), [(1_000, 1_024, 10.0), (10_000, 4_096, 120.0)]
)
def test_large_plans_take_seconds(num_tables: int, num_ranks: int, most_s: float) -> None:
    model = random_tables(num_tables)
    calibration = tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml")
    start = time.perf_counter()
    planner = tdsp.Planner2D(
        topology=calibration.topology(num_ranks, 8, ddr_cap_bytes=80 * 2**30),
        batch_size=512,
        storage_reservation=FixedPercentageStorageReservation(0.15),
        calibration=calibration,
    )
    plan = planner.plan(model, SHARDERS)
    seconds = time.perf_counter() - start
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{num_tables:,} tables, {num_ranks:,} ranks: {seconds:.1f} s, {peak_gib:.1f} GiB at the "
        f"peak, {plan.mesh}"
    )
    assert len(tables_in(plan)) == num_tables
    assert seconds <= most_s
    assert peak_gib <= 4
