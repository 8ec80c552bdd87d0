"""The cost model: a step's parts, hidden messages, and traffic message by message."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from torchrec.distributed.types import ShardingType

import torchrec_2dsp as tdsp
from tests.support.planning import (
    BATCH,
    DIM,
    EXACT,
    LINK,
    NOTHING,
    NUM_ROWS,
    ROW,
    TABLE_WISE,
    TWO,
    VECTORS,
    WIRE,
    calibration,
    cost,
    counted,
    only_the_link,
    table,
    with_part,
)
from torchrec_2dsp import Mesh2D, RankLayout
from torchrec_2dsp.cost.calibration import Calibration, KernelCost
from torchrec_2dsp.cost.collectives import (
    CollectiveCost,
    Span,
    Traffic,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_from,
    places_to_all,
    reduce_scatter,
)
from torchrec_2dsp.cost.loads import LOADS, Loads, Placed
from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.workload import DenseWork, TableWork, Workload, fitted_skew
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.parameter_sharding import Pipeline

IN_GROUP = table(ShardingType.ROW_WISE, [0, 1], exchange=tdsp.Exchange.ROW)
"""On the two ranks of a group in `TWO`."""


@pytest.mark.parametrize("sync", [EXACT, tdsp.WeightSync(policy=tdsp.every(4))])
@pytest.mark.parametrize(
    "mesh", [Mesh2D(1, 8), Mesh2D(4, 2), Mesh2D(2, 6, RankLayout.CONTIGUOUS), Mesh2D(1, 10)]
)
def test_even_loads_cost_what_they_cost_as_arrays(mesh: Mesh2D, sync: "tdsp.GradientSync") -> None:
    """Hosts have four ranks, so some groups have fewer on their last host."""
    types = {"table_wise, pooled, fp32", "row_wise, row, fp32"}
    setting = CostSetting(
        calibration(), Workload(batch_size=BATCH, tables={}), mesh, sync, 4, Pipeline.ROW_PREFETCH
    )
    generator = np.random.default_rng(0)
    for number_of_loads in (1, 4, len(LOADS)):
        of_rank = np.zeros(len(LOADS))
        of_rank[generator.permutation(len(LOADS))[:number_of_loads]] = 1e6
        of_rank[[LOADS.index("rows_from"), LOADS.index("rows_to")]] = 2e6
        arrays = Loads(mesh.group_size, types=types)
        arrays.values += of_rank[:, None]
        even, cost = setting.step_cost(Loads.even(of_rank, types)), setting.step_cost(arrays)
        assert vars(even) == pytest.approx(vars(cost), rel=1e-9, abs=1e-12)
        assert even.total_s > 0


def exchanged(first: StepCost) -> tuple[float, float]:
    """Return forward and backward exchange seconds."""
    return first.forward_exchange_s, first.backward_exchange_s


@pytest.mark.parametrize(
    ("kind", "ranks", "forward", "backward"),
    [
        # Each host sends vectors to the other's two ranks.
        (ShardingType.COLUMN_WISE, [0, 1, 2, 3], VECTORS, VECTORS),
        # A ring that reduces four ranks' vectors, and one that gathers them.
        (ShardingType.ROW_WISE, [0, 1, 2, 3], 3 * VECTORS, 3 * VECTORS),
    ],
)
def test_stock_types_send_what_they_send(
    kind: ShardingType, ranks: list[int], forward: float, backward: float
) -> None:
    predicted = cost(table(kind, ranks))
    assert exchanged(predicted) == pytest.approx((forward * LINK, backward * LINK))


def test_one_owner_is_imbalance() -> None:
    """The owner's host sends twice as much as if all ranks owned a part."""
    predicted = cost(TABLE_WISE)
    assert exchanged(predicted) == pytest.approx((VECTORS * LINK, VECTORS * LINK))
    ids = BATCH * (4 + 2)
    assert predicted.input_exchange_s == pytest.approx(ids * LINK)
    assert predicted.imbalance_s == pytest.approx((2 * VECTORS + ids) * LINK)


def test_data_parallel_tables_are_reduced_whole() -> None:
    predicted = cost(table(ShardingType.DATA_PARALLEL, [0]))
    assert predicted.dense_exchange_s == pytest.approx(1.5 * NUM_ROWS * DIM * 4 * LINK)
    assert exchanged(predicted) == (0.0, 0.0)
    assert predicted.input_exchange_s == 0.0


@pytest.mark.parametrize("num_rows", [3, 500, 2_000_000])
@pytest.mark.parametrize("num_lookups", [100, 20_000])
def test_a_skew_is_found_by_the_distinct_rows(num_rows: int, num_lookups: int) -> None:
    for skew in (0.0, 0.4, 0.85, 1.3, 2.1):
        work = TableWork(name="t", num_rows=num_rows, dim=4, ids_per_sample=1.0, skew=skew)
        distinct = work.expected_distinct(num_lookups)
        fitted = replace(work, skew=fitted_skew(num_rows, num_lookups, distinct))
        for factor in (1, 4):
            expected = work.expected_distinct(factor * num_lookups)
            assert fitted.expected_distinct(factor * num_lookups) == pytest.approx(expected, 0.05)


def test_row_exchange_sends_each_distinct_row_once() -> None:
    distinct = NUM_ROWS * (1 - (1 - 1 / NUM_ROWS) ** BATCH)
    predicted = cost(ROW)
    # Half a rank's rows are on the other host, and a host has two ranks.
    assert exchanged(predicted) == pytest.approx((distinct * DIM * 4 * LINK,) * 2)
    assert predicted.input_exchange_s == pytest.approx(distinct * 2 * LINK)
    assert predicted.imbalance_s == pytest.approx(0.0)


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
    everything = replace(skewed, num_hot=NUM_ROWS)
    assert exchanged(cost(everything)) == (0.0, 0.0)


@pytest.mark.parametrize(
    "sync", [EXACT, tdsp.WeightSync(), tdsp.WeightSync(rows=tdsp.SyncedRows.ALL)]
)
def test_one_group_has_nothing_to_sync(sync: "tdsp.GradientSync | tdsp.WeightSync") -> None:
    assert cost(ROW, sync=sync).sync_s == 0.0
    assert cost(IN_GROUP, mesh=TWO, sync=sync).sync_s > 0.0
    # A group inside a host has nothing to send but to its replica peers.
    assert exchanged(cost(IN_GROUP, mesh=TWO, sync=sync)) == (0.0, 0.0)


def test_rows_that_peers_exchange_are_those_of_a_groups_batch() -> None:
    touched = NUM_ROWS * (1 - (1 - 1 / NUM_ROWS) ** (2 * BATCH))
    # Each of a host's two ranks sends half the rows, with their numbers, to its peer.
    assert cost(IN_GROUP, mesh=TWO).sync_s == pytest.approx(touched * (DIM * 4 + 4) * LINK)


def test_whole_shards_are_reduced_with_their_moments() -> None:
    whole = tdsp.WeightSync(rows=tdsp.SyncedRows.ALL, policy=tdsp.every(4))
    predicted = cost(IN_GROUP, mesh=TWO, sync=whole)
    assert predicted.sync_s == pytest.approx(NUM_ROWS * (DIM * 4 + 4) * LINK / 4)
    never = cost(IN_GROUP, mesh=TWO, sync=tdsp.WeightSync(policy=tdsp.never()))
    assert never.sync_s == 0.0


DISTINCT = NUM_ROWS * (1 - (1 - 1 / NUM_ROWS) ** BATCH)
"""Rows of a rank's batch."""
LOOKED_UP = {"lookup": BATCH, "row_lookup": DISTINCT, "update": BATCH, "row_update": DISTINCT}


@pytest.mark.parametrize("kernel", LOOKED_UP)
def test_work_on_bags_and_on_rows_is_counted_for_every_rank(kernel: str) -> None:
    each = NOTHING.model_copy(update={"base_s": 1e-3, "per_item_s": 1e-6})
    placed, other = (ROW, TABLE_WISE) if kernel.startswith("row") else (TABLE_WISE, ROW)
    calibration = only_the_link(**{kernel: each})
    part = "lookup_s" if kernel.endswith("lookup") else "update_s"
    predicted = getattr(cost(placed, calibration=calibration), part)
    assert predicted == pytest.approx(1e-3 + LOOKED_UP[kernel] * 1e-6)
    assert getattr(cost(other, calibration=calibration), part) == 0.0


@pytest.mark.parametrize("kind", [ShardingType.TABLE_WISE, ShardingType.ROW_WISE])
def test_rows_and_vectors_of_bags_are_counted_besides_ids(kind: ShardingType) -> None:
    """Bags have twenty ids: each bag yields one vector, and repeated ids read the same row."""
    ranks = [0] if kind is ShardingType.TABLE_WISE else [0, 1, 2, 3]
    work = replace(TABLE_WISE.work, ids_per_sample=20.0, access=counted())
    rows = 4 * work.expected_distinct(4 * 20 * BATCH) * DIM
    assert rows < 4 * 4 * 20 * BATCH * DIM / 2
    for unit, in_all in (("per_row_byte_s", rows), ("per_vector_byte_s", 4 * VECTORS * len(ranks))):
        calibration = only_the_link(lookup=NOTHING.model_copy(update={unit: 1e-9}))
        predicted = cost(table(kind, ranks, work=work), calibration=calibration)
        # The busiest rank's time: the mean and imbalance together.
        assert predicted.lookup_s == pytest.approx(in_all / 4 * 1e-9, rel=1e-3), unit


def test_rows_are_found_pooled_and_added_where_the_samples_are() -> None:
    each = KernelCost(base_s=1e-3, per_item_s=1e-6, per_byte_s=1e-9)
    by_id, by_row = 1e-3 + BATCH * 1e-6, 1e-3 + BATCH * 1e-6 + VECTORS * 1e-9
    for kernel, seconds in (("find", by_id), ("pool", by_row), ("add", by_row)):
        calibration = only_the_link(**{kernel: each})
        assert cost(ROW, calibration=calibration).rows_s == pytest.approx(seconds), kernel
        assert cost(TABLE_WISE, calibration=calibration).rows_s == 0.0, kernel


@pytest.mark.parametrize("placed", [ROW, TABLE_WISE], ids=["rows", "vectors"])
def test_encoding_is_counted_there_and_back_by_the_transport(placed: Placed) -> None:
    """Only INT8 pays int8's cost: once to encode and once to decode each row or vector."""
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


def test_a_table_without_its_workload_is_named() -> None:
    with pytest.raises(ConfigError, match="the workload has no table 'x'; it has none"):
        Workload(batch_size=1, tables={}).table("x")


def test_the_slowest_of_all_ranks_is_waited_for() -> None:
    calibration = Calibration.load("configs/hardware/emulated_200mbit.toml")
    late = calibration.model_copy(update={"straggler_share": 0.01})
    dense = DenseWork(forward_s=1.0, backward_s=2.0)
    for mesh, num_ranks in ((Mesh2D(1, 4), 4), (TWO, 4), (Mesh2D(1, 1), 1)):
        placed = table(ShardingType.TABLE_WISE, [0])
        punctual = cost(placed, mesh=mesh, dense=dense, calibration=calibration)
        assert punctual.stragglers_s == 0.0
        compute_s = punctual.lookup_s + punctual.update_s + 3.0
        expected = replace(punctual, stragglers_s=0.01 * math.log(num_ranks) * compute_s)
        actual = cost(placed, mesh=mesh, dense=dense, calibration=late)
        assert vars(actual) == pytest.approx(vars(expected))


@pytest.mark.parametrize(
    ("num_hosts", "factor"), [(2, 1.0), (3, 1 + 0.25 * math.log2(1.5)), (8, 1.5), (128, 2.5)]
)
def test_bytes_between_many_hosts_take_longer(num_hosts: int, factor: float) -> None:
    free = CollectiveCost(base_s=0.0, per_peer_s=0.0, local_s_per_byte=0.0, link_s_per_byte=LINK)
    congested = free.model_copy(update={"congestion": 0.25})
    world = Span.of_world(8 * num_hosts, 8)
    traffic = all_to_all(world, 1_000.0)
    assert congested.seconds(world, traffic) == pytest.approx(factor * free.seconds(world, traffic))
    slow_inside = congested.model_copy(update={"local_s_per_byte": LINK})
    inside = world.inside_hosts()
    inside_s = slow_inside.seconds(inside, all_to_all(inside, 1_000.0))
    assert inside_s == pytest.approx(7_000.0 * LINK)


def test_late_gradients_are_hidden_behind_the_step() -> None:
    dense = DenseWork(forward_s=1.0, backward_s=1.0)
    late = cost(IN_GROUP, mesh=TWO, sync=tdsp.GradientSync(delay=1), dense=dense)
    assert late.hidden_s == pytest.approx(-late.sync_s)
    assert cost(IN_GROUP, mesh=TWO, dense=dense).hidden_s == 0.0
    busy = only_the_link().model_copy(update={"hidden_share": 0.25})
    partly = cost(
        IN_GROUP, mesh=TWO, sync=tdsp.GradientSync(delay=1), dense=dense, calibration=busy
    )
    assert partly == replace(late, hidden_s=late.hidden_s / 4)


def test_a_pipeline_hides_ids_behind_compute() -> None:
    dense = DenseWork(forward_s=1.0)
    predicted = cost(ROW, dense=dense, pipeline=Pipeline.SPARSE_DIST)
    assert predicted.hidden_s == pytest.approx(-predicted.input_exchange_s)
    # Nothing hides behind nothing.
    assert cost(ROW, pipeline=Pipeline.SPARSE_DIST).hidden_s == 0.0


@pytest.mark.parametrize(("mb", "bucket_mb", "share"), [(20, 25, 0), (99, 25, 0.75), (20, 10, 0.5)])
def test_dense_gradients_hide_behind_the_backward_bucket_by_bucket(
    mb: int, bucket_mb: int, share: float
) -> None:
    dense = DenseWork(backward_s=100.0, gradient_bytes=mb * 1e6, bucket_bytes=bucket_mb * 1e6)
    predicted = cost(dense=dense)
    assert predicted.dense_exchange_s == pytest.approx(1.5 * dense.gradient_bytes * LINK)
    assert predicted.hidden_s == pytest.approx(-share * predicted.dense_exchange_s)


def test_data_parallel_tables_have_an_all_reduce_of_their_own() -> None:
    """Ranks reach both all-reduces from computing, and the tables' all-reduce isn't hidden."""
    dense = DenseWork(backward_s=100.0, gradient_bytes=99 * 2.0**20)
    copied = table(ShardingType.DATA_PARALLEL, [0])
    slow = only_the_link().model_copy(update={"turn_s": 1e-3})
    alone, beside, both = (
        cost(*tables, calibration=slow, dense=part)
        for tables, part in (((), dense), ((copied,), DenseWork()), ((copied,), dense))
    )
    assert both.dense_exchange_s == pytest.approx(alone.dense_exchange_s + beside.dense_exchange_s)
    assert alone.dense_exchange_s == pytest.approx(1.5 * dense.gradient_bytes * LINK + 1e-3)
    assert both.hidden_s == pytest.approx(alone.hidden_s, rel=1e-3)
    assert beside.hidden_s == 0.0


def rows_beside(skew: float, num_batches: int) -> tuple[float, float]:
    """Count a drawn batch's distinct rows, and those missing in ``num_batches`` global batches."""
    draw = np.random.default_rng(0)
    shares = 1 / np.arange(1, NUM_ROWS + 1) ** skew
    distinct, beside = 0, 0
    for _ in range(200):
        own = np.unique(draw.choice(NUM_ROWS, BATCH, p=shares / shares.sum()))
        others = draw.choice(NUM_ROWS, 4 * BATCH * num_batches, p=shares / shares.sum())
        distinct += own.size
        beside += np.setdiff1d(own, others).size
    return distinct / 200, beside / 200


def test_rows_that_others_leave_alone_hide_behind_the_dense_part() -> None:
    work = replace(ROW.work, access=counted())
    rows, dense = replace(ROW, work=work), DenseWork(forward_s=1.0)
    predicted = cost(rows, dense=dense, pipeline=Pipeline.ROW_PREFETCH)
    distinct, early = rows_beside(1.0, num_batches=2)
    _, lagging = rows_beside(1.0, num_batches=1)
    visible = cost(rows, dense=dense)
    ids_s = visible.input_exchange_s
    moved_s = visible.forward_exchange_s + visible.backward_exchange_s + visible.imbalance_s
    expected = (early + lagging) / distinct * moved_s / 2
    assert visible.hidden_s == 0.0
    assert predicted.hidden_s == pytest.approx(-expected - ids_s, rel=0.05)
    assert replace(predicted, hidden_s=0.0) == visible
    # Rows and gradients take two messages more each: the other half, and which half a row is in.
    slow = WIRE.model_copy(update={"base_s": 1e-3})
    slow_to_begin = with_part(only_the_link(), "collectives", all_to_all=slow)
    pipelines = Pipeline.SPARSE_DIST, Pipeline.ROW_PREFETCH
    without, beside = (cost(rows, pipeline=kind, calibration=slow_to_begin) for kind in pipelines)
    assert beside.backward_exchange_s == pytest.approx(without.backward_exchange_s + 2e-3)
    assert beside.forward_exchange_s == pytest.approx(without.forward_exchange_s + 2e-3)
    # Nothing hides behind nothing, nor where replicas change the rows, too.
    assert cost(rows, pipeline=Pipeline.ROW_PREFETCH).hidden_s == 0.0
    without, beside = (cost(IN_GROUP, mesh=TWO, dense=dense, pipeline=kind) for kind in pipelines)
    assert beside.hidden_s == without.hidden_s


Messages = list[tuple[int, int, float]]
"""From which world rank to which, and how many bytes."""

SIZES = st.sampled_from([1, 2, 4])
BYTES = st.floats(0, 1e6)
LAYOUTS = st.sampled_from(list(RankLayout))


def traffic_of(messages: Messages, local_world_size: int) -> Traffic:
    """Return the busiest rank's bytes inside its host, and the busiest host's bytes."""
    local: defaultdict[tuple[str, int], float] = defaultdict(float)
    link: defaultdict[tuple[str, int], float] = defaultdict(float)
    for source, target, num_bytes in messages:
        hosts = source // local_world_size, target // local_world_size
        if hosts[0] == hosts[1]:
            local["out", source] += num_bytes
            local["in", target] += num_bytes
        else:
            link["out", hosts[0]] += num_bytes
            link["in", hosts[1]] += num_bytes
    return Traffic(max(local.values(), default=0.0), max(link.values(), default=0.0))


def close(first: Traffic, other: Traffic) -> bool:
    return tuple(first) == pytest.approx(tuple(other), rel=1e-9, abs=1e-6)


@given(SIZES, SIZES, SIZES, LAYOUTS, st.data())
def test_all_to_alls_move_what_their_messages_do(
    num_groups: int, group_size: int, local: int, layout: RankLayout, data: st.DataObject
) -> None:
    mesh = Mesh2D(num_groups, group_size, layout)
    local_world_size = min(local, mesh.world_size)
    span = Span.of(mesh.rank_matrix(), local_world_size)
    to_each = data.draw(st.lists(BYTES, min_size=group_size, max_size=group_size))
    groups = mesh.rank_matrix()
    messages = [
        (group[source], group[target], to_each[source])
        for group in groups
        for source, target in itertools.permutations(range(group_size), 2)
    ]
    assert close(all_to_all_from(span, to_each), traffic_of(messages, local_world_size))
    back = [(target, source, num_bytes) for source, target, num_bytes in messages]
    assert close(all_to_all_from(span, to_each), traffic_of(back, local_world_size))
    even = all_to_all_from(span, [7.0] * group_size)
    assert close(all_to_all(span, 7.0), even)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_places_move_what_their_messages_do(
    num_hosts: int, local: int, data: st.DataObject
) -> None:
    world = num_hosts * local
    to_each = data.draw(st.lists(BYTES, min_size=world, max_size=world))
    messages = [
        (rank, other * local + rank % local, to_each[rank])
        for rank in range(world)
        for other in range(num_hosts)
        if other != rank // local
    ]
    predicted = places_to_all(Span.of_world(world, local), to_each)
    assert close(predicted, traffic_of(messages, local))


@given(SIZES, SIZES, SIZES, BYTES)
def test_rings_move_what_their_messages_do(
    num_groups: int, group_size: int, local: int, num_bytes: float
) -> None:
    # Contiguous groups, so that a ring leaves each host once.
    mesh = Mesh2D(num_groups, group_size, RankLayout.CONTIGUOUS)
    local_world_size = min(local, mesh.world_size)
    span = Span.of(mesh.rank_matrix(), local_world_size)

    def ring(rounds: int, part: float) -> Traffic:
        messages = [
            (group[place], group[(place + 1) % group_size], rounds * part)
            for group in mesh.rank_matrix()
            for place in range(group_size)
            if group_size > 1
        ]
        return traffic_of(messages, local_world_size)

    steps = group_size - 1
    assert close(all_reduce(span, num_bytes), ring(2 * steps, num_bytes / group_size))
    assert close(reduce_scatter(span, num_bytes), ring(steps, num_bytes / group_size))
    assert close(all_gather(span, num_bytes), ring(steps, num_bytes))


@pytest.mark.parametrize(
    ("mesh", "shards", "peers"),
    [
        (Mesh2D(2, 4), Span(4, 2, 2), Span(2, 2, 2)),
        (Mesh2D(2, 4, RankLayout.CONTIGUOUS), Span(4, 4, 1), Span(2, 1, 4)),
        (Mesh2D(1, 8), Span(8, 4, 1), Span(1, 1, 4)),
        (Mesh2D(8, 1), Span(1, 1, 4), Span(8, 4, 1)),
    ],
    ids=str,
)
def test_spans_of_meshes_on_hosts_of_four(mesh: Mesh2D, shards: Span, peers: Span) -> None:
    assert Span.of(mesh.rank_matrix(), 4) == shards
    assert Span.of(list(zip(*mesh.rank_matrix(), strict=True)), 4) == peers


def test_parts_of_a_span() -> None:
    span = Span(8, 4, 1)
    assert (span.num_hosts, span.crosses_hosts) == (2, True)
    assert span.inside_hosts() == Span(4, 4, 1)
    assert span.across_hosts() == Span(2, 1, 4)
    assert not span.inside_hosts().crosses_hosts
