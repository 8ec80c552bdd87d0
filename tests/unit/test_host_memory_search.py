"""The search by cost puts only tables that don't fit GPUs into the hosts' memory.

Planning for GPUs needs no GPU.
"""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType

import torchrec_2dsp as tdsp
from tests.support.planning import (
    BATCH,
    DIM,
    EXACT,
    NOTHING,
    ROW,
    SHARDERS,
    TABLE_WISE,
    TWO,
    cost,
    nothing_reserved,
    only_the_link,
    skewed,
    table,
    tables,
    tables_in,
    with_part,
)
from torchrec_2dsp.cost.calibration import Calibration, KernelCost
from torchrec_2dsp.cost.loads import LOADS
from torchrec_2dsp.cost.model import CostModel, CostSetting, kept_bytes
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.errors import ConfigError, PlanError
from torchrec_2dsp.planner.planner2d import Planner2D
from torchrec_2dsp.planner.search.best_placements import search
from torchrec_2dsp.planner.search.candidates import ANYWHERE, candidates_of
from torchrec_2dsp.planner.search.choices import Choice
from torchrec_2dsp.planner.search.placement import Descent, Placement
from torchrec_2dsp.planner.search.space import Room, Selected, Space, selections
from torchrec_2dsp.programs.config.machines import MachinesConfig
from torchrec_2dsp.programs.plan import torchrec_cost

MESH = tdsp.Mesh2D(1, 4)
ROWS = (1_000_000,) * 4
IDS = (30.0, 1.0, 10.0, 3.0)
WHOLE = sum(ROWS) * (DIM * 4 + 4)
"""The bytes of all tables with their moments."""
BUS_S = 1e-9
"""Seconds for a byte from the host's memory."""


def gpus(**kernels: KernelCost | None) -> Calibration:
    """Return a calibration for GPUs where only bytes cost time."""
    bus = NOTHING.model_copy(update={"per_byte_s": BUS_S})
    return with_part(only_the_link(**({"host_memory": bus} | kernels)), "hardware", device="cuda")


def constraints(**more: Any) -> dict[str, ParameterConstraints]:
    return {
        f"t{number}": ParameterConstraints(
            sharding_types=["row_wise", "table_wise"], pooling_factors=[ids], **more
        )
        for number, ids in enumerate(IDS)
    }


def planner(device_share: float, host_share: float = 4.0, **settings: Any) -> Planner2D:
    """Return a planner for GPUs with room for these shares of all tables, besides buffers."""
    topology = Topology(
        world_size=4,
        local_world_size=4,
        compute_device="cuda",
        hbm_cap=int(device_share * WHOLE / 4 + 5_000_000),
        ddr_cap=int(host_share * WHOLE / 4),
    )
    given = {
        "calibration": gpus(),
        "constraints": constraints(),
        "exchange": "row",
        "batch_size": 64,
        "mesh": MESH,
        "storage_reservation": nothing_reserved(),
    }
    return Planner2D(topology=topology, **(given | settings))


def kernels_in(plan: tdsp.Plan2D) -> dict[str, str]:
    return {name: table.compute_kernel for name, table in tables_in(plan).items()}


def problem(**more: Any) -> tuple[Space, CostSetting]:
    """Return the choices for tables with row exchange in either memory."""
    model = tables(ROWS, DIM)
    workload = Workload.of_model(model, batch_size=64, constraints=constraints(), **more)
    setting = CostSetting(gpus(), workload, MESH, EXACT, 4)
    candidates = candidates_of(
        model,
        SHARDERS,
        constraints(),
        workload,
        "cuda",
        exchanges=(tdsp.Exchange.ROW,),
        kernels=ANYWHERE,
    )
    return Space.of(candidates, setting), setting


def test_what_fits_stays_in_the_memory_of_gpus() -> None:
    plan = planner(1.1).plan(tables(ROWS, DIM), SHARDERS)
    assert set(kernels_in(plan).values()) == {"fused"}


@pytest.mark.parametrize("share", [0.8, 0.55, 0.3, 0.05])
def test_tables_that_are_read_least_are_in_the_hosts_memory(share: float) -> None:
    """The selection is within 0.1 % of the best that fits among all sixteen."""
    space, _ = problem()
    room = Room(all_in_host(space).device + share * WHOLE / 4, WHOLE)
    (first, *_) = selections(space, room)
    assert room.holds(space.bytes_of(first.selection))
    fitting = [
        Selected.of(space, np.array(each))
        for each in itertools.product(*(range(len(of_table)) for of_table in space.choices))
        if room.holds(space.bytes_of(np.array(each)))
    ]
    least = min(each.rated_s for each in fitting)
    in_host = [choice.in_host_memory for choice in space.chosen(first.selection)]
    # Tables are equally large, so their lookups order them as their seconds do.
    assert in_host[0] <= in_host[2] <= in_host[3] <= in_host[1]
    assert any(in_host)
    assert first.rated_s <= 1.001 * least


def all_in_host(space: Space) -> Room:
    """Return the room that all tables need in the hosts' memory, with their buffers on GPUs."""
    numbers = [
        next(number for number, choice in enumerate(of_table) if choice.in_host_memory)
        for of_table in space.choices
    ]
    return space.bytes_of(np.array(numbers))


def test_placed_tables_fit_both_memories_of_each_rank() -> None:
    space, setting = problem()
    room = Room(0.5 * WHOLE / 4 + 5_000_000, 0.7 * WHOLE / 4)
    for placed in search(space.candidates, [setting], room).placements:
        tables_there = [
            candidate.placed(choice, ranks, setting.group)
            for candidate, choice, ranks in zip(
                placed.candidates, placed.placement.choices, placed.placement.ranks, strict=True
            )
        ]
        in_host = sum(kept_bytes(each, 4)[1] for each in tables_there)
        assert 0 < np.max(in_host) <= room.host
        assert placed.bytes_by_rank.max() <= room.device
        assert placed.memory.host_memory_bytes == pytest.approx(np.max(in_host))
        assert placed.memory.total_bytes == pytest.approx(placed.bytes_by_rank.max())


def test_a_plan_costs_what_its_search_says() -> None:
    by_cost = planner(0.3)
    plan = by_cost.plan(tables(ROWS, DIM), SHARDERS)
    explained = by_cost.explain()
    assert sorted(kernels_in(plan).values()) == ["fused", "fused_uvm", "fused_uvm", "fused_uvm"]
    model = CostModel(gpus(), local_world_size=4)
    again = model.step_cost(plan, explained.setting.workload)
    assert again.total_s == pytest.approx(explained.cost.total_s)
    assert again.host_memory_s > 0
    assert model.memory_cost(plan, explained.setting.workload) == explained.memory
    # CPUs have one memory, whatever the kernel is called.
    on_cpus = CostModel(only_the_link(), local_world_size=4)
    assert on_cpus.memory_cost(plan, explained.setting.workload).host_memory_bytes == 0
    text = str(explained)
    assert "row-wise, uvm" in text
    assert "host memory" in text
    assert "all on its GPU" in text


KERNELS = (None, ["fused"], ["fused_uvm"], ["fused", "fused_uvm"])


@pytest.mark.dealt_suite(seconds=5)
@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(100, 1_000_000), st.sampled_from(KERNELS)), min_size=1),
    st.floats(0.02, 1.3),
    st.floats(0.1, 3.0),
    st.sampled_from([EXACT, tdsp.WeightSync()]),
)
def test_drawn_plans_fit_and_cost_what_is_said(
    of_tables: list[tuple[int, list[str] | None]],
    device_share: float,
    host_share: float,
    sync: "tdsp.GradientSync | tdsp.WeightSync",
) -> None:
    demanded = {f"t{number}": kernels for number, (_, kernels) in enumerate(of_tables)}
    by_cost = planner(
        device_share,
        host_share,
        mesh=None,
        sync=sync,
        constraints={
            name: tdsp.ParameterConstraints2D(compute_kernels=kernels)
            for name, kernels in demanded.items()
        },
    )
    model = tables([rows for rows, _ in of_tables], DIM)
    all_bytes = sum(rows for rows, _ in of_tables) * (DIM * 4 + 4)
    is_free = all("fused_uvm" in (kernels or ANYWHERE) for kernels in demanded.values())
    try:
        plan = by_cost.plan(model, SHARDERS)
    except PlanError:
        assert not is_free or host_share * WHOLE < 1.1 * all_bytes, "the hosts alone have room"
        return
    explained = by_cost.explain()
    assert explained.memory.total_bytes <= explained.room.device
    assert explained.memory.host_memory_bytes <= explained.room.host
    for name, kernel in kernels_in(plan).items():
        assert kernel in (demanded[name] or ANYWHERE)
    again = CostModel(gpus(), local_world_size=4).step_cost(plan, explained.setting.workload)
    assert again.total_s == pytest.approx(explained.cost.total_s)


def test_neither_memory_suffices() -> None:
    with pytest.raises(PlanError, match=r"the tables need .* more than the .* there are"):
        planner(0.2, 0.2).plan(tables(ROWS, DIM), SHARDERS)


def test_a_memory_whose_time_is_unknown_is_not_used() -> None:
    with pytest.raises(PlanError, match="no plan fits"):
        planner(0.3, calibration=gpus(host_memory=None)).plan(tables(ROWS, DIM), SHARDERS)


def test_constraints_name_the_memory() -> None:
    host = constraints(compute_kernels=["fused_uvm"])
    plan = planner(1.1, constraints=constraints() | {"t0": host["t0"]}).plan(
        tables(ROWS, DIM), SHARDERS
    )
    assert kernels_in(plan) == {"t0": "fused_uvm", "t1": "fused", "t2": "fused", "t3": "fused"}
    device = constraints(compute_kernels=["fused"])
    with pytest.raises(PlanError, match="no plan fits"):
        planner(0.3, constraints=device).plan(tables(ROWS, DIM), SHARDERS)


def test_the_hottest_rows_of_tables_in_the_hosts_memory_are_in_that_of_gpus() -> None:
    """The planner fills GPU memory that other tables leave free: P2RES's layout."""
    roomy = planner(0.3, access=skewed(ROWS), exchange="pooled")
    plan = roomy.plan(tables(ROWS, DIM), SHARDERS)
    hot = {name: table.hot_set for name, table in tables_in(plan).items() if table.hot_set}
    in_host = {name for name, kernel in kernels_in(plan).items() if kernel == "fused_uvm"}
    assert hot
    assert set(hot) <= in_host
    without = planner(
        0.3,
        exchange="pooled",
        access=skewed(ROWS),
        constraints={
            name: tdsp.ParameterConstraints2D(
                sharding_types=["row_wise", "table_wise"], pooling_factors=[ids], hot_rows=0
            )
            for name, ids in zip(("t0", "t1", "t2", "t3"), IDS, strict=True)
        },
    )
    without.plan(tables(ROWS, DIM), SHARDERS)
    assert roomy.explain().cost.host_memory_s < 0.8 * without.explain().cost.host_memory_s
    assert roomy.explain().cost.tables_s < without.explain().cost.tables_s


def test_options_say_in_which_memory_shards_are() -> None:
    by_cost = planner(0.3)
    plan = by_cost.plan(tables(ROWS, DIM), SHARDERS)
    stored = {
        option.name: [(shard.storage.hbm, shard.storage.ddr) for shard in option.shards]  # type: ignore[union-attr]
        for option in by_cost.get_selected_options()
    }
    for name, kernel in kernels_in(plan).items():
        for hbm, ddr in stored[name]:
            assert ddr == (WHOLE / 16 if kernel == "fused_uvm" else 0)
            assert hbm > 0
            assert (hbm > 1e6) == (kernel == "fused")


# ---- the cost of reading over the bus


@pytest.mark.parametrize("is_frozen", [False, True])
def test_rows_of_row_exchange_are_read_once_and_for_their_update_once_more(
    is_frozen: bool,
) -> None:
    work = replace(ROW.work, is_frozen=is_frozen, state_bytes_per_row=4.0)
    in_host = replace(ROW, work=work, in_host_memory=True)
    bus = NOTHING.model_copy(update={"per_byte_s": 1e-6})
    machines = only_the_link(host_memory=bus)
    read_s = cost(in_host, calibration=machines).host_memory_s
    # Four ranks' batches, whose rows are equally likely, and an owner has a quarter.
    rows = 10_000 * (1 - (1 - 1 / 10_000) ** BATCH)
    passes = 1 if is_frozen else 2 + 4 / (DIM * 4)
    assert read_s == pytest.approx(1e-6 * rows * DIM * 4 * passes, rel=0.01)
    assert cost(replace(ROW, work=work), calibration=machines).host_memory_s == 0


def test_bags_read_rows_for_each_id_and_update_distinct_ones() -> None:
    in_host = replace(TABLE_WISE, in_host_memory=True)
    per_row = only_the_link(host_memory=NOTHING.model_copy(update={"per_item_s": 1e-6}))
    shards = (table(ShardingType.TABLE_WISE, [rank]).shards for rank in range(4))
    on_each = [replace(in_host, shards=there) for there in shards]
    num_ids = 4 * BATCH
    distinct = 10_000 * (1 - (1 - 1 / 10_000) ** num_ids)
    seconds = cost(*on_each, calibration=per_row).host_memory_s
    assert seconds == pytest.approx(1e-6 * (num_ids + distinct), rel=0.01)


@pytest.mark.parametrize(
    ("sync", "rows_read"),
    [
        (EXACT, 2 * BATCH * 2),
        (tdsp.WeightSync(), 2 * BATCH),
        (tdsp.WeightSync(policy=tdsp.every(4)), 2 * BATCH),
        (tdsp.WeightSync(policy=tdsp.never()), 0),
        (tdsp.WeightSync(rows=tdsp.SyncedRows.ALL), 10_000),
    ],
    ids=str,
)
def test_syncs_read_rows_there(
    sync: "tdsp.GradientSync | tdsp.WeightSync", rows_read: float
) -> None:
    """Besides lookups and updates, syncs read all peers' touched rows, this rank's, or all rows."""
    in_host = replace(TABLE_WISE, in_host_memory=True)
    machines = only_the_link(host_memory=NOTHING.model_copy(update={"per_byte_s": 1e-6}))
    first, second = (
        replace(in_host, shards=table(ShardingType.TABLE_WISE, [rank]).shards) for rank in range(2)
    )
    synced, alone = (
        cost(first, second, mesh=TWO, sync=way, calibration=machines).host_memory_s
        for way in (sync, tdsp.WeightSync(policy=tdsp.never()))
    )
    row_s = 1e-6 * DIM * 4
    assert (synced - alone) / row_s == pytest.approx(rows_read, rel=0.05)


def test_memory_is_counted_where_it_is() -> None:
    in_host = replace(TABLE_WISE, in_host_memory=True, num_hot=10)
    row_bytes = DIM * 4 + in_host.work.state_bytes_per_row
    assert kept_bytes(in_host, 4).tolist() == [[10 * row_bytes] * 4, [10_000 * row_bytes, 0, 0, 0]]
    assert not kept_bytes(replace(in_host, in_host_memory=False), 4)[1].any()


# ---- facts about the machines


def test_a_topology_says_how_fast_the_bus_is() -> None:
    topology = Topology(world_size=2, compute_device="cuda", hbm_to_ddr_mem_bw=50e6)
    bus = Calibration.of_topology(topology).kernels.host_memory
    assert bus is not None
    assert bus.seconds(7, 50e9) == pytest.approx(1.0)
    on_cpus = Topology(world_size=2, compute_device="cpu")
    assert Calibration.of_topology(on_cpus).kernels.host_memory is None


def test_a_calibration_gives_its_topology_both_memories() -> None:
    measured = with_part(gpus(), "hardware", memory_bytes=7, host_memory_bytes=11)
    storage = measured.topology(4, 2).devices[0].storage
    assert (storage.hbm, storage.ddr) == (7, 11)
    asked = measured.topology(4, 2, ddr_cap_bytes=13).devices[0].storage
    assert (asked.hbm, asked.ddr) == (7, 13)


def test_the_plan_command_takes_sizes_and_compares_with_no_cache() -> None:
    machines = MachinesConfig(calibration="h100_8_datasheet", num_ranks=4, ranks_per_host=4)
    assert machines.calibrated().hardware.host_memory_bytes == 192e9
    sizes = {"memory_gib": WHOLE / 2**33, "host_memory_gib": 7.0}
    calibration = machines.model_copy(update=sizes).calibrated()
    assert calibration.hardware.host_memory_bytes == 7 * 2**30
    _, setting = problem()
    model = tables(ROWS, DIM)
    roomy, tight = (
        torchrec_cost(setting, model, known.topology(4, 4))
        for known in (machines.calibrated(), calibration)
    )
    on_cpus = MachinesConfig(calibration="emulated_1gbit", num_ranks=4, ranks_per_host=2)
    with pytest.raises(ConfigError, match=r"host_memory_gib=7\.0 is for GPUs"):
        on_cpus.model_copy(update=sizes).calibrated()
    # TorchRec's plan caches host memory's rows, which takes an unknown time.
    assert roomy is not None
    assert tight is None


def test_each_rank_needs_room_in_both_memories() -> None:
    """On average there would be room, but three tables are on one of four ranks."""
    space, _ = problem()
    on_ranks = Choice(ShardingType.TABLE_WISE, tdsp.Exchange.POOLED, kernel="fused_uvm")
    there = Placement((on_ranks,) * 4, ((0,), (0,), (0,), (1,)))
    for tables_of_host, fits in ((2.9, False), (3.1, True)):
        room = Room(1e9, tables_of_host * WHOLE / 4)
        rated_s = Descent(space, np.zeros(len(LOADS)), room).rated_s(there)
        assert np.isfinite(rated_s) == fits
    assert np.isinf(Descent(space, np.zeros(len(LOADS)), Room(10, WHOLE)).rated_s(there))
