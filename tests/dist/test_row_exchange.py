"""Row exchange: training equals the unsharded model, and what travels are the distinct rows."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import (
    PIPELINES,
    all_to_all_bytes,
    by_pipelines,
    make_stream,
    plain_loop,
    shard,
    warnings_of,
)
from tests.support.models import (
    ALL_ROWS,
    BAGS,
    HOT_ROWS,
    MIXED,
    ONE_TABLE,
    SEQUENCES,
    ModelSpec,
    TableSpec,
    build,
)
from tests.support.parity import (
    FOUR,
    LR,
    ONE,
    TWO,
    Cell,
    check_cells,
    group_plan,
    make_optimizer,
    make_sharder,
)
from tests.support.ranks import RankPool
from tests.support.slices import Deal
from tests.support.trips import Trip, check_arrivals, stock
from torchrec_2dsp.comms.counting import count_collectives

LONG_BAGS_TOLERANCE = 4e-6
"""Sums of many rows round more often."""

INSIDE = tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS)
ROWS = Cell(ONE, exchange="row")


@pytest.mark.parametrize("mesh", [ONE, TWO, pytest.param(INSIDE, marks=pytest.mark.slow)], ids=str)
def test_bags_equal_the_unsharded_model(ranks4: RankPool, mesh: tdsp.Mesh2D, dealt: Deal) -> None:
    cells = [
        replace(ROWS, mesh=mesh, spec=spec, optimizer=optimizer, hot_rows=hot_rows)
        for spec, optimizer, hot_rows in product(
            BAGS, ("sgd", "adagrad", "rowwise_adagrad"), ((), HOT_ROWS)
        )
    ]
    check_cells(dealt(cells), ranks4)


def test_unusual_batches_equal_the_unsharded_model(ranks4: RankPool, dealt: Deal) -> None:
    """Ranks without samples, or with hot rows alone; ids many times in a bag."""
    cells = [
        replace(ROWS, mesh=mesh, hot_rows=hot_rows, batch_sizes=sizes, max_length=length)
        for mesh, hot_rows, (sizes, length) in product(
            (ONE, TWO),
            ((), (("t0", (3,)),), ALL_ROWS),
            (((3, 0, 5, 2), 4), ((0, 0, 1, 0), 4), ((2, 2, 2, 2), 60)),
        )
    ]
    check_cells(dealt(cells), ranks4, 3, long_bags=LONG_BAGS_TOLERANCE)


@pytest.mark.dealt_file
def test_sequences_equal_the_unsharded_model(ranks4: RankPool) -> None:
    cells = [
        replace(ROWS, mesh=mesh, spec=SEQUENCES, optimizer=optimizer)
        for mesh, optimizer in product((ONE, TWO), ("sgd", "adagrad", "rowwise_adagrad"))
    ]
    check_cells(cells, ranks4)


@pytest.mark.dealt_file
def test_averaged_replicas_equal_the_unsharded_model(ranks4: RankPool) -> None:
    """With SGD an average of replicas is exact, and it needs to know which rows change."""
    sync = tdsp.WeightSync(dense_above=1.0)
    cells = [
        replace(ROWS, mesh=TWO, optimizer="sgd", sync=sync, spec=spec)
        for spec in (*BAGS, SEQUENCES)
    ]
    check_cells(cells, ranks4)


def test_one_rank_and_two_dimensions_equal_the_unsharded_model(ranks2: RankPool) -> None:
    meshes = (tdsp.Mesh2D(1, 2), tdsp.Mesh2D(2, 1))
    check_cells([replace(ROWS, mesh=mesh, spec=MIXED) for mesh in meshes], ranks2)


@pytest.mark.dealt_file
def test_groups_over_hosts_equal_the_unsharded_model(ranks8: RankPool) -> None:
    cells = [replace(ROWS, mesh=mesh) for mesh in (tdsp.Mesh2D(1, 8), tdsp.Mesh2D(2, 4))]
    check_cells(cells, ranks8)


@pytest.mark.dealt_file
@pytest.mark.parametrize("hot_rows", [(), HOT_ROWS], ids=["cold", "hot"])
def test_pipelines_change_nothing(
    ranks4: RankPool, hot_rows: tuple[tuple[str, tuple[int, ...]], ...]
) -> None:
    for gaps in ranks4.run(by_pipelines, replace(ROWS, mesh=TWO, hot_rows=hot_rows)):
        assert gaps == [0.0] * len(PIPELINES)


TRIPS = [
    Trip(replace(ROWS, mesh=TWO, hot_rows=HOT_ROWS), stock("table_wise")),
    Trip(stock("row_wise"), ROWS),
    Trip(
        replace(ROWS, optimizer="adagrad"),
        Cell(TWO, "column_wise", optimizer="adagrad", hot_rows=HOT_ROWS),
    ),
    Trip(replace(ROWS, spec=SEQUENCES), stock("row_wise", spec=SEQUENCES)),
]


def test_checkpoints_are_those_of_row_wise_tables(
    ranks4: RankPool, tmp_path: Path, dealt: Deal
) -> None:
    check_arrivals(ranks4, dealt(TRIPS), tmp_path)


IDS = [
    ([0, 0, 1, 15], [0, 39]),
    ([7, 7, 7, 7], [7, 7]),
    ([], []),
    ([9, 10, 19, 20, 29, 30], [0]),
]
"""Of each rank's two features. The owners have the rows 0-9, 10-19, 20-29 and 30-39."""


def batch_of(rank: int) -> KeyedJaggedTensor:
    """Two samples; all ids of a feature are in the first one's bag."""
    first, second = IDS[rank]
    return KeyedJaggedTensor.from_lengths_sync(
        keys=["f0", "f1"],
        values=torch.tensor(first + second),
        lengths=torch.tensor([len(first), 0, len(second), 0]),
    )


def bytes_of_a_step(rank: int, world_size: int, cell: Cell) -> list[int]:
    parallel = shard(cell)
    optimizer = make_optimizer(parallel)
    plain_loop(parallel, optimizer, [batch_of(rank)])
    with count_collectives() as seen:
        plain_loop(parallel, optimizer, [batch_of(rank)])
    return all_to_all_bytes(seen)


def test_each_distinct_row_travels_once(ranks4: RankPool) -> None:
    """Sizes, then distinct ids; rows from their owners, and gradients to them."""
    asked = [[0] * 4 for _ in IDS]
    for rank, (first, second) in enumerate(IDS):
        for row in {*first, *second}:
            asked[rank][row // 10] += 1
    answers = ranks4.run(bytes_of_a_step, replace(ROWS, spec=ONE_TABLE))
    for rank, sent in enumerate(answers):
        splits, lengths, ids, rows, gradients = sent
        # For each owner: how many lengths, ids and samples come, 8 bytes each; one length.
        # Rows of a shard of ten have a byte each.
        assert (splits, lengths) == (4 * 3 * 8, 4 * 8)
        assert ids == sum(asked[rank])
        assert rows == sum(of_rank[rank] for of_rank in asked) * 8 * 4
        assert gradients == sum(asked[rank]) * 8 * 4


def test_nothing_travels_if_all_rows_are_hot(ranks4: RankPool) -> None:
    cell = replace(ROWS, spec=ONE_TABLE, hot_rows=(("t0", tuple(range(40))),))
    for _, _, ids, rows, gradients, *hot in ranks4.run(bytes_of_a_step, cell):
        assert (ids, rows, gradients) == (0, 0, 0)
        assert len(hot) == 2


def quantised(rank: int, world_size: int, cell: Cell, qcomms: CommType) -> tuple[float, int]:
    """Return the gap to fp32 after some steps, and the bytes of rows in one step."""
    batches = [step[rank] for step in make_stream(cell, 4)]
    parallel, exact = shard(cell, make_sharder(cell, qcomms)), shard(cell)
    losses = plain_loop(parallel, make_optimizer(parallel), batches[:-1])
    expected = plain_loop(exact, make_optimizer(exact), batches[:-1])
    gap = max(abs(loss - other) for loss, other in zip(losses, expected, strict=True))
    with count_collectives() as seen:
        plain_loop(parallel, make_optimizer(parallel), batches[-1:])
    return gap, sum(all_to_all_bytes(seen)[3:])


@pytest.mark.dealt_file
@pytest.mark.parametrize("qcomms", [CommType.FP16, CommType.BF16])
def test_quantised_communication_halves_the_bytes(ranks4: RankPool, qcomms: CommType) -> None:
    short, full = (ranks4.run(quantised, ROWS, entry) for entry in (qcomms, CommType.FP32))
    for (gap, sent), (no_gap, fully_sent) in zip(short, full, strict=True):
        assert no_gap == 0.0 < gap < 10 * LR * 2**-8
        assert sent * 2 == fully_sent > 0


def test_hot_rows_that_save_no_bytes_are_told(ranks4: RankPool) -> None:
    stock_exchange = Cell(TWO, hot_rows=HOT_ROWS)
    quiet = [replace(ROWS, hot_rows=HOT_ROWS), Cell(TWO), replace(stock_exchange, mesh=FOUR)]
    first, *others = ranks4.run(warnings_of, [stock_exchange, *quiet])
    ((message,), *silent) = first
    assert message.startswith("hot rows of t0, t1 save no bytes: TorchRec's output exchange ships")
    assert silent == [[], [], []]
    assert others == [[[], [], [], []]] * 3


def test_a_plan_says_what_it_needs() -> None:
    cell = Cell(ONE, "table_wise")
    plan = group_plan(cell, build(cell.spec), make_sharder(cell), 4)
    needs = r"2d_table_wise, but exchange='row' is for tables sharded row_wise: constrain it with"
    with pytest.raises(tdsp.errors.PlanError, match=needs):
        tdsp.pin(plan, "t0", exchange="row")
    with pytest.raises(
        tdsp.errors.PlanError, match="exchange='rows' is unknown; use one of 'pooled', 'nonempty'"
    ):
        tdsp.pin(plan, "t0", exchange="rows")


TINY = ModelSpec((TableSpec("t0", 3, 8, ("f0", "f1")),))


@pytest.mark.dealt_file
def test_ranks_without_rows_equal_the_unsharded_model(ranks4: RankPool) -> None:
    """FBGEMM can't look up a kernel whose tables have no rows on a rank."""
    one_row = ModelSpec((TableSpec("t0", 1, 8, ("f0",)),))
    cells = [
        Cell(ONE, spec=TINY),
        Cell(ONE, exchange="nonempty", spec=TINY),
        replace(ROWS, spec=TINY, hot_rows=(("t0", (1,)),)),
        replace(ROWS, spec=replace(TINY, sequence=True)),
        # So few ids that the one row doesn't run away.
        replace(ROWS, mesh=TWO, spec=one_row, batch_sizes=(1, 0, 0, 1), max_length=1),
    ]
    check_cells(cells, ranks4)


PER_HOST = Cell(tdsp.Mesh2D(1, 4), exchange="row_per_host")
POOLINGS = (ModelSpec(), ModelSpec(pooling="mean"), ModelSpec(weighted=True), MIXED)


@pytest.mark.dealt_file
def test_bags_over_hosts_equal_the_unsharded_model(two_hosts: RankPool) -> None:
    cells = [
        replace(PER_HOST, spec=spec, optimizer=optimizer)
        for spec, optimizer in product(POOLINGS, ("sgd", "adagrad", "rowwise_adagrad"))
    ]
    check_cells(cells, two_hosts)


@pytest.mark.dealt_file
def test_hot_rows_and_unusual_batches_equal_the_unsharded_model(two_hosts: RankPool) -> None:
    """Ranks and hosts without samples, or with hot rows alone."""
    cells = [
        replace(PER_HOST, hot_rows=hot_rows, batch_sizes=sizes)
        for hot_rows, sizes in product(
            ((), HOT_ROWS, ALL_ROWS), ((3, 0, 5, 2), (0, 0, 1, 0), (2, 2, 2, 2))
        )
    ]
    check_cells(cells, two_hosts)


@pytest.mark.dealt_file
def test_sequences_over_hosts_equal_the_unsharded_model(two_hosts: RankPool) -> None:
    cells = [
        replace(PER_HOST, spec=SEQUENCES, optimizer=optimizer)
        for optimizer in ("sgd", "adagrad", "rowwise_adagrad")
    ]
    check_cells(cells, two_hosts)


@pytest.mark.dealt_file
def test_groups_over_many_hosts_equal_the_unsharded_model(ranks8: RankPool) -> None:
    """Use four hosts with two ranks each as one group, then as two groups over two hosts each."""
    inside = tdsp.Mesh2D(2, 4, tdsp.RankLayout.CONTIGUOUS)
    cells = [
        replace(PER_HOST, mesh=mesh, spec=spec)
        for mesh, spec in product((tdsp.Mesh2D(1, 8), inside), (ModelSpec(), SEQUENCES))
    ]
    check_cells(cells, ranks8)


@pytest.mark.dealt_file
def test_pipelines_over_hosts_change_nothing(two_hosts: RankPool) -> None:
    for gaps in two_hosts.run(by_pipelines, replace(PER_HOST, hot_rows=HOT_ROWS)):
        assert gaps == [0.0] * len(PIPELINES)


@pytest.mark.dealt_file
def test_averaged_replicas_over_hosts_equal_the_unsharded_model(ranks8: RankPool) -> None:
    """With SGD an average of replicas is exact, and it needs to know which rows change."""
    inside = tdsp.Mesh2D(2, 4, tdsp.RankLayout.CONTIGUOUS)
    sync = tdsp.WeightSync(dense_above=1.0)
    check_cells([replace(PER_HOST, mesh=inside, optimizer="sgd", sync=sync)], ranks8)


@pytest.mark.dealt_file
def test_a_row_comes_to_a_host_once(two_hosts: RankPool) -> None:
    """Owners 0 and 2 are asked by ranks 0 and 2, owners 1 and 3 by the others."""
    rows = [{*first, *second} for first, second in IDS]
    asks = [[{row for row in own if row // 10 % 2 == place} for place in (0, 1)] for own in rows]
    together = [
        asks[rank // 2 * 2][rank % 2] | asks[rank // 2 * 2 + 1][rank % 2] for rank in range(4)
    ]
    answers = two_hosts.run(bytes_of_a_step, replace(PER_HOST, spec=ONE_TABLE))
    for rank, (counts, keys, splits, lengths, ids, fetched, given, back, gradients) in enumerate(
        answers
    ):
        host, place = divmod(rank, 2)
        num_given = sum(len(asks[2 * host + other][place]) for other in (0, 1))
        num_owned = sum(
            sum(row // 10 == rank for row in together[2 * other + place]) for other in (0, 1)
        )
        assert (counts, keys) == (2 * 8, len(rows[rank]) * 4)
        # For each host: how many lengths, ids and samples come, 8 bytes each; one length.
        # Rows of a shard of ten have a byte each.
        assert (splits, lengths, ids) == (2 * 3 * 8, 2 * 8, len(together[rank]))
        assert (fetched, given) == (num_owned * 8 * 4, num_given * 8 * 4)
        assert (back, gradients) == (len(rows[rank]) * 8 * 4, len(together[rank]) * 8 * 4)


@pytest.mark.dealt_file
def test_quantised_communication_halves_the_bytes_between_hosts(two_hosts: RankPool) -> None:
    short, full = (
        two_hosts.run(quantised, PER_HOST, entry) for entry in (CommType.FP16, CommType.FP32)
    )
    for (gap, sent), (no_gap, fully_sent) in zip(short, full, strict=True):
        assert no_gap == 0.0 < gap < 10 * LR * 2**-8
        assert fully_sent / 2 < sent < fully_sent


@pytest.mark.dealt_file
def test_inside_one_host_nothing_is_asked_twice(ranks4: RankPool) -> None:
    alone, together = (
        ranks4.run(bytes_of_a_step, replace(PER_HOST, spec=ONE_TABLE, exchange=exchange))
        for exchange in ("row", "row_per_host")
    )
    assert alone == together
