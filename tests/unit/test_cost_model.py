"""A step's cost, against sums by hand, and what must hold whatever the constants."""

import math
from dataclasses import replace

import numpy as np
import pytest
from torchrec.distributed.types import ShardingType

import torchrec_2dsp as tdsp
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.coefficients import CollectiveCost, KernelCost
from torchrec_2dsp.cost.model import Setting
from torchrec_2dsp.cost.placed import Placed, Shards
from torchrec_2dsp.cost.step_cost import StepCost

LINK = 1e-8
DIM, BATCH, ROWS = 64, 100, 10_000
NOTHING = KernelCost(base_s=0, per_item_s=0, per_byte_s=0)
WIRE = CollectiveCost(base_s=0, per_peer_s=0, local_s_per_byte=0, link_s_per_byte=LINK)
ONE, TWO = tdsp.Mesh2D(1, 4), tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS)
EXACT = tdsp.GradientSync()


def only_the_link(**kernels: KernelCost) -> Calibration:
    """Nothing costs anything but bytes between hosts, and what is named."""
    known = Calibration.load("configs/hardware/emulated_1gbit.toml")
    collectives = dict.fromkeys(type(known.collectives).model_fields, WIRE)
    work = dict.fromkeys(type(known.kernels).model_fields, NOTHING) | kernels
    return known.model_copy(
        update={
            "collectives": known.collectives.model_copy(update=collectives),
            "kernels": known.kernels.model_copy(update=work),
            "turn_s": 0.0,
        }
    )


def counted(skew: float = 1.0) -> tdsp.TableAccess:
    return tdsp.TableAccess.of_counts(1e6 / np.arange(1, ROWS + 1) ** skew, num_samples=1e6)


def table(kind: ShardingType, ranks: list[int], **more: object) -> Placed:
    rows_each = ROWS // len(ranks) if kind is ShardingType.ROW_WISE else ROWS
    columns = DIM // len(ranks) if kind is ShardingType.COLUMN_WISE else DIM
    work = tdsp.TableWork(name="t", num_rows=ROWS, dim=DIM, ids_per_sample=1.0)
    known = {"exchange": tdsp.Exchange.POOLED, "owners": tdsp.RowOwners.BLOCK, "work": work}
    is_everywhere = kind is ShardingType.DATA_PARALLEL
    shards = Shards.of([] if is_everywhere else [(rank, rows_each, columns) for rank in ranks])
    return Placed(kind=kind, shards=shards, **(known | more))  # type: ignore[arg-type]


ROW = table(ShardingType.ROW_WISE, [0, 1, 2, 3], exchange=tdsp.Exchange.ROW)
TABLE_WISE = table(ShardingType.TABLE_WISE, [0])
VECTORS = BATCH * DIM * 4
"""Bytes of the vectors that one rank gets."""


def cost(
    *tables: Placed,
    mesh: tdsp.Mesh2D = ONE,
    sync: "tdsp.GradientSync | tdsp.WeightSync" = EXACT,
    calibration: Calibration | None = None,
    **workload: object,
) -> StepCost:
    known = {"batch_size": BATCH, "tables": {}, "is_pipelined": False}
    known_workload = tdsp.Workload(**(known | workload))  # type: ignore[arg-type]
    setting = Setting(calibration or only_the_link(), known_workload, mesh, sync, 2)
    return setting.step_cost(setting.loads(tables))


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


def test_late_gradients_are_hidden_behind_the_step() -> None:
    group = table(ShardingType.ROW_WISE, [0, 1], exchange=tdsp.Exchange.ROW)
    dense = tdsp.DenseWork(forward_s=1.0, backward_s=1.0)
    late = cost(group, mesh=TWO, sync=tdsp.GradientSync(delay=1), dense=dense)
    assert late.hidden_s == pytest.approx(-late.sync_s)
    assert cost(group, mesh=TWO, dense=dense).hidden_s == 0.0


def test_a_pipeline_hides_ids_behind_compute() -> None:
    dense = tdsp.DenseWork(forward_s=1.0)
    found = cost(ROW, dense=dense, is_pipelined=True)
    assert found.hidden_s == pytest.approx(-found.input_exchange_s)
    # Nothing hides behind nothing.
    assert cost(ROW, is_pipelined=True).hidden_s == 0.0


@pytest.mark.parametrize(("gradient_mib", "hidden_share"), [(20, 0.0), (99, 0.75)])
def test_dense_gradients_hide_behind_the_backward_bucket_by_bucket(
    gradient_mib: int, hidden_share: float
) -> None:
    dense = tdsp.DenseWork(backward_s=100.0, gradient_bytes=gradient_mib * 2.0**20)
    found = cost(dense=dense)
    assert found.dense_exchange_s == pytest.approx(1.5 * dense.gradient_bytes * LINK)
    assert found.hidden_s == pytest.approx(-hidden_share * found.dense_exchange_s)


def test_data_parallel_tables_have_an_all_reduce_of_their_own() -> None:
    """Ranks come to both from computing, and that of the tables hides behind nothing."""
    dense = tdsp.DenseWork(backward_s=100.0, gradient_bytes=99 * 2.0**20)
    copied = table(ShardingType.DATA_PARALLEL, [0])
    slow = only_the_link().model_copy(update={"turn_s": 1e-3})
    alone, beside, both = (
        cost(*tables, calibration=slow, dense=part)
        for tables, part in (((), dense), ((copied,), tdsp.DenseWork()), ((copied,), dense))
    )
    assert both.dense_exchange_s == pytest.approx(alone.dense_exchange_s + beside.dense_exchange_s)
    assert alone.dense_exchange_s == pytest.approx(1.5 * dense.gradient_bytes * LINK + 1e-3)
    assert both.hidden_s == pytest.approx(alone.hidden_s, rel=1e-3)
    assert beside.hidden_s == 0.0


@pytest.mark.parametrize("placed", [ROW, TABLE_WISE], ids=["rows", "table-wise"])
def test_work_is_counted_for_every_rank(placed: Placed) -> None:
    lookup = KernelCost(base_s=0, per_item_s=1e-6, per_byte_s=0)
    found = cost(placed, calibration=only_the_link(lookup=lookup))
    if placed is TABLE_WISE:
        assert found.lookup_s == pytest.approx(BATCH * 1e-6)
    else:
        distinct = ROWS * (1 - (1 - 1 / ROWS) ** BATCH)
        assert found.lookup_s == pytest.approx(distinct * 1e-6)


def test_parts_add_up_and_larger_batches_cost_more() -> None:
    calibration = Calibration.load("configs/hardware/emulated_200mbit.toml")
    small = cost(ROW, TABLE_WISE, calibration=calibration)
    large = cost(ROW, TABLE_WISE, calibration=calibration, batch_size=4 * BATCH)
    assert math.isclose(small.total_s, sum(seconds for _, seconds in small.parts()))
    assert all(seconds >= 0 for name, seconds in small.parts() if name != "hidden")
    assert small.total_s < large.total_s < 4 * small.total_s


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(tdsp.ConfigError, match="batch_size=0 leaves nothing to do; use 1 or more"):
        tdsp.Workload(batch_size=0, tables={})


def test_a_table_without_its_workload_is_named() -> None:
    with pytest.raises(tdsp.ConfigError, match="the workload has no table 'x'; it has none"):
        tdsp.Workload(batch_size=1, tables={}).table("x")


def rows_beside(skew: float, num_batches: int) -> tuple[float, float]:
    """Drawn: how many distinct rows a rank's batch has, and how many of them aren't in so many
    batches of all ranks."""
    draw = np.random.default_rng(0)
    shares = 1 / np.arange(1, ROWS + 1) ** skew
    distinct, beside = 0, 0
    for _ in range(200):
        own = np.unique(draw.choice(ROWS, BATCH, p=shares / shares.sum()))
        others = draw.choice(ROWS, 4 * BATCH * num_batches, p=shares / shares.sum())
        distinct += own.size
        beside += np.setdiff1d(own, others).size
    return distinct / 200, beside / 200


def test_rows_that_others_leave_alone_hide_behind_the_dense_part() -> None:
    work = replace(ROW.work, access=counted())
    rows, dense = replace(ROW, work=work), tdsp.DenseWork(forward_s=1.0)
    found = cost(rows, dense=dense, prefetches_rows=True)
    distinct, early = rows_beside(1.0, num_batches=2)
    _, lagging = rows_beside(1.0, num_batches=1)
    visible = cost(rows, dense=dense)
    moved_s = visible.forward_exchange_s + visible.backward_exchange_s + visible.imbalance_s
    expected = (early + lagging) / distinct * moved_s / 2
    assert visible.hidden_s == 0.0
    assert found.hidden_s == pytest.approx(-expected, rel=0.05)
    assert replace(found, hidden_s=0.0) == visible
    # Nothing hides behind nothing, nor where replicas change the rows, too.
    assert cost(rows, prefetches_rows=True).hidden_s == 0.0
    in_groups = table(ShardingType.ROW_WISE, [0, 1], exchange=tdsp.Exchange.ROW)
    assert cost(in_groups, mesh=TWO, dense=dense, prefetches_rows=True).hidden_s == 0.0
