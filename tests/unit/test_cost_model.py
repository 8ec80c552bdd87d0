"""A step's cost, against sums by hand, and what must hold whatever the constants."""

import math
from dataclasses import replace

import pytest
from torchrec.distributed.types import ShardingType

import torchrec_2dsp as tdsp
from tests.support.costs import (
    BATCH,
    DIM,
    EXACT,
    LINK,
    NOTHING,
    ROW,
    ROWS,
    TABLE_WISE,
    TWO,
    VECTORS,
    cost,
    counted,
    only_the_link,
    table,
)
from torchrec_2dsp.cost.calibration import Calibration, KernelCost
from torchrec_2dsp.cost.loads import Placed
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.workload import Workload


def test_nothing_costs_nothing() -> None:
    assert cost().total_s == 0.0


def exchanged(one: StepCost) -> tuple[float, float]:
    """Forward and backward, with what the slowest rank adds to both."""
    return one.forward_exchange_s, one.backward_exchange_s


@pytest.mark.parametrize(
    ("kind", "ranks", "forward", "backward"),
    [
        # Each host sends vectors to the two ranks of the other.
        (ShardingType.COLUMN_WISE, [0, 1, 2, 3], VECTORS, VECTORS),
        # A ring that reduces four ranks' vectors, and one that gathers them.
        (ShardingType.ROW_WISE, [0, 1, 2, 3], 3 * VECTORS, 3 * VECTORS),
    ],
)
def test_stock_types_send_what_they_send(
    kind: ShardingType, ranks: list[int], forward: float, backward: float
) -> None:
    found = cost(table(kind, ranks))
    assert exchanged(found) == pytest.approx((forward * LINK, backward * LINK))


def test_one_owner_is_imbalance() -> None:
    """The host of the owner sends twice what it would if all ranks owned a part."""
    found = cost(TABLE_WISE)
    assert exchanged(found) == pytest.approx((VECTORS * LINK, VECTORS * LINK))
    ids = BATCH * (4 + 8)
    assert found.input_exchange_s == pytest.approx(ids * LINK)
    assert found.imbalance_s == pytest.approx((2 * VECTORS + ids) * LINK)


def test_data_parallel_tables_are_reduced_whole() -> None:
    found = cost(table(ShardingType.DATA_PARALLEL, [0]))
    assert found.dense_exchange_s == pytest.approx(1.5 * ROWS * DIM * 4 * LINK)
    assert exchanged(found) == (0.0, 0.0)
    assert found.input_exchange_s == 0.0


def test_row_exchange_sends_each_distinct_row_once() -> None:
    distinct = ROWS * (1 - (1 - 1 / ROWS) ** BATCH)
    found = cost(ROW)
    # Half of a rank's rows are on the other host, and a host has two ranks.
    assert exchanged(found) == pytest.approx((distinct * DIM * 4 * LINK,) * 2)
    assert found.input_exchange_s == pytest.approx(distinct * 4 * LINK)
    assert found.imbalance_s == pytest.approx(0.0)


def test_half_precision_halves_what_travels() -> None:
    full, half = cost(ROW), cost(ROW, forward_wire_bytes=2, backward_wire_bytes=2)
    assert exchanged(half) == pytest.approx(tuple(part / 2 for part in exchanged(full)))


def test_skew_saves_row_exchange_bytes_and_only_them() -> None:
    work = replace(ROW.work, access=counted())
    assert cost(replace(ROW, work=work)).forward_exchange_s < 0.9 * cost(ROW).forward_exchange_s
    assert exchanged(cost(replace(TABLE_WISE, work=work))) == exchanged(cost(TABLE_WISE))


def test_hot_rows_in_front_burden_the_first_owner_unless_owners_are_spread() -> None:
    block = replace(ROW, work=replace(ROW.work, access=counted(1.2)))
    spread = replace(block, owners=tdsp.RowOwners.HASH)
    assert cost(block).imbalance_s > 10 * cost(spread).imbalance_s
    assert cost(block).total_s > cost(spread).total_s


def test_requests_per_host_send_less_between_hosts_and_more_inside() -> None:
    skewed = replace(ROW, work=replace(ROW.work, access=counted()))
    per_host = replace(skewed, exchange=tdsp.Exchange.ROW_PER_HOST)
    assert cost(per_host).forward_exchange_s < 0.95 * cost(skewed).forward_exchange_s
    add = KernelCost(base_s=0, per_item_s=0, per_byte_s=1e-9)
    work = only_the_link(add=add)
    assert cost(per_host, calibration=work).rows_s > cost(skewed, calibration=work).rows_s
    inside = table(ShardingType.ROW_WISE, [0, 1], exchange=tdsp.Exchange.ROW, work=skewed.work)
    alike = replace(inside, exchange=tdsp.Exchange.ROW_PER_HOST)
    assert cost(alike, mesh=TWO) == cost(inside, mesh=TWO)


def test_hot_rows_leave_the_fetch_and_are_merged() -> None:
    skewed = replace(ROW, work=replace(ROW.work, access=counted()))
    hot = replace(skewed, num_hot=50)
    assert cost(hot).forward_exchange_s < cost(skewed).forward_exchange_s
    assert cost(hot).hot_rows_s > cost(skewed).hot_rows_s == 0.0
    everything = replace(skewed, num_hot=ROWS)
    assert exchanged(cost(everything)) == (0.0, 0.0)


@pytest.mark.parametrize(
    "sync", [EXACT, tdsp.WeightSync(), tdsp.WeightSync(rows=tdsp.SyncedRows.ALL)]
)
def test_one_group_has_nothing_to_sync(sync: "tdsp.GradientSync | tdsp.WeightSync") -> None:
    assert cost(ROW, sync=sync).sync_s == 0.0
    group = table(ShardingType.ROW_WISE, [0, 1], exchange=tdsp.Exchange.ROW)
    assert cost(group, mesh=TWO, sync=sync).sync_s > 0.0
    # A group inside a host has nothing to send but to its replica peers.
    assert exchanged(cost(group, mesh=TWO, sync=sync)) == (0.0, 0.0)


def test_rows_that_peers_exchange_are_those_of_a_groups_batch() -> None:
    group = table(ShardingType.ROW_WISE, [0, 1], exchange=tdsp.Exchange.ROW)
    touched = ROWS * (1 - (1 - 1 / ROWS) ** (2 * BATCH))
    # Each of a host's two ranks sends its half of the rows, with their numbers, to its peer.
    assert cost(group, mesh=TWO).sync_s == pytest.approx(touched * (DIM * 4 + 4) * LINK)


def test_whole_shards_are_reduced_with_their_moments() -> None:
    group = table(ShardingType.ROW_WISE, [0, 1], exchange=tdsp.Exchange.ROW)
    whole = tdsp.WeightSync(rows=tdsp.SyncedRows.ALL, policy=tdsp.every(4))
    found = cost(group, mesh=TWO, sync=whole)
    assert found.sync_s == pytest.approx(ROWS * (DIM * 4 + 4) * LINK / 4)
    never = cost(group, mesh=TWO, sync=tdsp.WeightSync(policy=tdsp.never()))
    assert never.sync_s == 0.0


DISTINCT = ROWS * (1 - (1 - 1 / ROWS) ** BATCH)
"""Rows of a rank's batch."""
LOOKED_UP = {"lookup": BATCH, "row_lookup": DISTINCT, "update": BATCH, "row_update": DISTINCT}


@pytest.mark.parametrize("kernel", LOOKED_UP)
def test_work_on_bags_and_on_rows_is_counted_for_every_rank(kernel: str) -> None:
    each = NOTHING.model_copy(update={"base_s": 1e-3, "per_item_s": 1e-6})
    placed, other = (ROW, TABLE_WISE) if kernel.startswith("row") else (TABLE_WISE, ROW)
    calibration = only_the_link(**{kernel: each})
    part = "lookup_s" if kernel.endswith("lookup") else "update_s"
    found = getattr(cost(placed, calibration=calibration), part)
    assert found == pytest.approx(1e-3 + LOOKED_UP[kernel] * 1e-6)
    assert getattr(cost(other, calibration=calibration), part) == 0.0


@pytest.mark.parametrize("kind", [ShardingType.TABLE_WISE, ShardingType.ROW_WISE])
def test_rows_and_vectors_of_bags_are_counted_besides_ids(kind: ShardingType) -> None:
    """Twenty ids a bag: what comes of them is a vector, and the hot ones are a row again."""
    ranks = [0] if kind is ShardingType.TABLE_WISE else [0, 1, 2, 3]
    work = replace(TABLE_WISE.work, ids_per_sample=20.0, access=counted())
    rows = 4 * work.expected_distinct(4 * 20 * BATCH) * DIM
    assert rows < 4 * 4 * 20 * BATCH * DIM / 2
    for unit, in_all in (("per_row_byte_s", rows), ("per_vector_byte_s", 4 * VECTORS * len(ranks))):
        calibration = only_the_link(lookup=NOTHING.model_copy(update={unit: 1e-9}))
        found = cost(table(kind, ranks, work=work), calibration=calibration)
        # The busiest rank's, of which the mean is a part and imbalance the rest.
        assert found.lookup_s == pytest.approx(in_all / 4 * 1e-9, rel=1e-3), unit


def test_rows_are_found_pooled_and_added_where_the_samples_are() -> None:
    each = KernelCost(base_s=1e-3, per_item_s=1e-6, per_byte_s=1e-9)
    by_id, by_row = 1e-3 + BATCH * 1e-6, 1e-3 + BATCH * 1e-6 + VECTORS * 1e-9
    for kernel, seconds in (("find", by_id), ("pool", by_row), ("add", by_row)):
        calibration = only_the_link(**{kernel: each})
        assert cost(ROW, calibration=calibration).rows_s == pytest.approx(seconds), kernel
        assert cost(TABLE_WISE, calibration=calibration).rows_s == 0.0, kernel


@pytest.mark.parametrize("placed", [ROW, TABLE_WISE], ids=["rows", "vectors"])
def test_encoding_is_counted_there_and_back_by_the_transport(placed: Placed) -> None:
    """A rank gets a row, or a vector, of each of its ids, or owns as many of others."""
    each = KernelCost(base_s=0, per_item_s=1e-6, per_byte_s=1e-9)
    calibration = only_the_link(encode_int8=each)
    times = {
        transport: cost(replace(placed, transport=transport), calibration=calibration).rows_s
        for transport in tdsp.Transport
    }
    rows = DISTINCT if placed is ROW else BATCH
    in_int8 = times.pop(tdsp.Transport.INT8)
    assert in_int8 == pytest.approx(2 * rows * (1e-6 + 4 * DIM * 1e-9))
    assert set(times.values()) == {0.0}


def test_calibrations_without_times_of_encoding_take_them_for_copies() -> None:
    copied = KernelCost(base_s=1e-3, per_item_s=1e-6, per_byte_s=1e-9)
    kernels = only_the_link(pool=copied, encode_int4=None, encode_bf16=copied).kernels
    assert kernels.codec(tdsp.Transport.FP32).seconds(7, 100) == 0.0
    assert kernels.codec(tdsp.Transport.BF16) == copied
    assert kernels.codec(tdsp.Transport.INT4).seconds(7, 100) > 2 * 100e-9


def test_parts_add_up_and_larger_batches_cost_more() -> None:
    calibration = Calibration.load("configs/hardware/emulated_200mbit.toml")
    small = cost(ROW, TABLE_WISE, calibration=calibration)
    large = cost(ROW, TABLE_WISE, calibration=calibration, batch_size=4 * BATCH)
    assert math.isclose(small.total_s, sum(seconds for _, seconds in small.parts()))
    assert all(seconds >= 0 for name, seconds in small.parts() if name != "hidden")
    assert small.total_s < large.total_s < 4 * small.total_s


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(
        tdsp.errors.ConfigError, match="batch_size=0 leaves nothing to do; use 1 or more"
    ):
        Workload(batch_size=0, tables={})


def test_a_table_without_its_workload_is_named() -> None:
    with pytest.raises(tdsp.errors.ConfigError, match="the workload has no table 'x'; it has none"):
        Workload(batch_size=1, tables={}).table("x")
