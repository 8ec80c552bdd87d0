"""Bag and row exchanges train like the unsharded model, and send no more than needed."""

from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.devices import KERNEL_ROUNDING, ranks_per_host
from tests.support.loops import (
    all_to_all_bytes,
    largest_gap,
    logged,
    make_stream,
    plain_loop,
    shard,
    train,
)
from tests.support.models import (
    HOT_ROWS,
    MIXED,
    ONE_TABLE,
    SEQUENCES,
    ModelSpec,
    build,
)
from tests.support.parity import (
    FOUR,
    LR,
    ONE,
    TOLERANCE,
    TWO,
    Cell,
    check_cells,
    group_plan,
    make_optimizer,
    make_sharder,
    run_cell,
)
from tests.support.ranks import RankPool
from tests.support.slices import Deal
from tests.support.trips import Trip, check_arrivals, stock
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.shard.row_exchange import lookup

ROWS = Cell(ONE, exchange="row")
NONEMPTY = Cell(ONE, exchange="nonempty")
HASH = replace(ROWS, owners="hash")
PER_HOST = Cell(ONE, exchange="row_per_host")


def gap_of_even_bags(rank: int, world_size: int, cell: Cell) -> float:
    """Return the worst gap to the oracle if rows are looked up as on GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "is_on_gpu", lambda tbe: True)
        return run_cell(rank, world_size, cell, 4).worst


@pytest.mark.parametrize("spec", [MIXED, ONE_TABLE, SEQUENCES])
def test_rows_in_even_bags_train_as_the_unsharded_model(ranks4: RankPool, spec: ModelSpec) -> None:
    assert max(ranks4.run(gap_of_even_bags, replace(ROWS, spec=spec))) <= TOLERANCE


HOT = replace(ROWS, mesh=TWO, hot_rows=HOT_ROWS)


def as_pooled(rank: int, world_size: int, cell: Cell) -> float:
    """Return the gap to TorchRec's own exchange."""
    stream = make_stream(cell, 4)
    whole = train(replace(cell, exchange="pooled"), rank, stream)
    return largest_gap(train(cell, rank, stream), whole)


@pytest.mark.dealt_file
def test_whole_bags_have_the_bits_of_the_pooled_exchange(ranks4: RankPool) -> None:
    for mesh, kind in product((ONE, TWO), ("table_wise", "column_wise")):
        cell = replace(NONEMPTY, mesh=mesh, sharding=kind)
        assert max(ranks4.run(as_pooled, cell)) <= KERNEL_ROUNDING, cell


ADAGRAD = replace(ROWS, optimizer="adagrad")
TRIPS = [
    Trip(replace(HOT, exchange="nonempty", sharding="table_wise"), stock("row_wise")),
    Trip(stock("table_wise"), NONEMPTY),
    Trip(replace(NONEMPTY, sharding="column_wise"), stock("column_wise")),
    Trip(HOT, stock("table_wise")),
    Trip(stock("row_wise"), ROWS),
    Trip(ADAGRAD, Cell(TWO, "column_wise", optimizer="adagrad", hot_rows=HOT_ROWS)),
    Trip(replace(ROWS, spec=SEQUENCES), stock("row_wise", spec=SEQUENCES)),
    Trip(replace(HOT, owners="hash"), stock("table_wise")),
    Trip(stock("row_wise"), HASH),
    Trip(replace(ADAGRAD, owners="hash"), Cell(TWO, "column_wise", optimizer="adagrad")),
    Trip(replace(HASH, spec=SEQUENCES), stock("row_wise", spec=SEQUENCES)),
    Trip(Cell(TWO), replace(HASH, mesh=TWO)),
    Trip(Cell(ONE, "table_wise", SEQUENCES, hot_rows=HOT_ROWS), stock("row_wise", spec=SEQUENCES)),
]


def test_checkpoints_are_those_of_the_sharding_type(
    ranks4: RankPool, tmp_path: Path, dealt: Deal
) -> None:
    check_arrivals(ranks4, dealt(TRIPS), tmp_path)


IDS = [
    [[0, 0, 1, 15], [], [0, 39], [3]],
    [[7, 7, 7, 7], [2], [], []],
    [[], [], [], []],
    [[9, 10, 19, 20, 29, 30], [], [0], [38, 39]],
]
"""The ids in each rank's bags: two samples of the first feature, then of the second. Row-wise, the
owners have the rows 0-9, 10-19, 20-29 and 30-39."""
DISTINCT = [set(chain(*bags)) for bags in IDS]


def batch_of(rank: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(
        keys=["f0", "f1"],
        values=torch.tensor([row for bag in IDS[rank] for row in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in IDS[rank]]),
    )


def bytes_of_a_step(rank: int, world_size: int, cell: Cell) -> list[int]:
    """Return the bytes that each of a step's all-to-alls sends."""
    parallel = shard(replace(cell, spec=ONE_TABLE))
    optimizer = make_optimizer(parallel)
    plain_loop(parallel, optimizer, [batch_of(rank)])
    with count_collectives() as seen:
        plain_loop(parallel, optimizer, [batch_of(rank)])
    return all_to_all_bytes(seen)


def test_only_bags_with_ids_travel(ranks4: RankPool) -> None:
    filled = [sum(bool(bag) for bag in bags) for bags in IDS]
    sent = ranks4.run(bytes_of_a_step, replace(NONEMPTY, sharding="table_wise"))
    assert sorted(embeddings for _, _, _, embeddings, _ in sent) == [0, 0, 0, sum(filled) * 8 * 4]
    assert [gradients for *_, gradients in sent] == [entry * 8 * 4 for entry in filled]


def test_only_parts_of_bags_with_ids_travel(ranks4: RankPool) -> None:
    """Each owner that has any row in a bag sends a partial bag."""
    parts = [
        [sum(any(row // 10 == owner for row in bag) for bag in bags) for owner in range(4)]
        for bags in IDS
    ]
    for rank, sent in enumerate(ranks4.run(bytes_of_a_step, NONEMPTY)):
        assert sent[3:] == [sum(of[rank] for of in parts) * 8 * 4, sum(parts[rank]) * 8 * 4]


def test_each_distinct_row_travels_once(ranks4: RankPool) -> None:
    """The messages are sizes, then distinct ids, rows from their owners, and their gradients."""
    asked = [[sum(row // 10 == owner for row in rows) for owner in range(4)] for rows in DISTINCT]
    for rank, sent in enumerate(ranks4.run(bytes_of_a_step, ROWS)):
        splits, lengths, ids, rows, gradients = sent
        # For each owner: how many lengths, ids and samples come, 8 bytes each; one length.
        # Rows of a shard of ten have a byte each.
        assert (splits, lengths) == (4 * 3 * 8, 4 * 8)
        assert ids == sum(asked[rank])
        assert rows == sum(of_rank[rank] for of_rank in asked) * 8 * 4
        assert gradients == sum(asked[rank]) * 8 * 4


@pytest.mark.skipif(
    ranks_per_host(2) < 2, reason="ranks that share a GPU are on hosts of their own"
)
@pytest.mark.dealt_file
def test_a_row_comes_to_a_host_once(two_hosts: RankPool) -> None:
    """Ranks 0 and 2 ask owners 0 and 2; the other ranks ask owners 1 and 3."""
    asks = [
        [{row for row in own if row // 10 % 2 == place} for place in (0, 1)] for own in DISTINCT
    ]
    together = [
        asks[rank // 2 * 2][rank % 2] | asks[rank // 2 * 2 + 1][rank % 2] for rank in range(4)
    ]
    answers = two_hosts.run(bytes_of_a_step, PER_HOST)
    for rank, (counts, keys, splits, lengths, ids, fetched, given, back, gradients) in enumerate(
        answers
    ):
        host, place = divmod(rank, 2)
        num_given = sum(len(asks[2 * host + other][place]) for other in (0, 1))
        num_owned = sum(
            sum(row // 10 == rank for row in together[2 * other + place]) for other in (0, 1)
        )
        assert (counts, keys) == (2 * 8, len(DISTINCT[rank]) * 4)
        # For each host: how many lengths, ids and samples come, 8 bytes each; one length.
        # Rows of a shard of ten have a byte each.
        assert (splits, lengths, ids) == (2 * 3 * 8, 2 * 8, len(together[rank]))
        assert (fetched, given) == (num_owned * 8 * 4, num_given * 8 * 4)
        assert (back, gradients) == (len(DISTINCT[rank]) * 8 * 4, len(together[rank]) * 8 * 4)


@pytest.mark.dealt_file
def test_inside_one_host_nothing_is_asked_twice(ranks4: RankPool) -> None:
    assert ranks4.run(bytes_of_a_step, ROWS) == ranks4.run(bytes_of_a_step, PER_HOST)


@pytest.mark.parametrize(
    "cell", [ROWS, NONEMPTY, replace(NONEMPTY, sharding="table_wise")], ids=str
)
def test_nothing_travels_if_all_rows_are_hot(ranks4: RankPool, cell: Cell) -> None:
    cell = replace(cell, hot_rows=(("t0", tuple(range(40))),))
    for _, _, ids, rows, gradients, *hot in ranks4.run(bytes_of_a_step, cell):
        assert (ids, rows, gradients) == (0, 0, 0)
        assert len(hot) == 2


def quantised(rank: int, world_size: int, cell: Cell, qcomms: CommType) -> tuple[float, int, int]:
    """Return the gap to fp32 after some steps, and the row or bag bytes in fp32 and encoded."""
    batches = [step[rank] for step in make_stream(cell, 4)]
    losses, sent = [], []
    for comms in (None, qcomms):
        parallel = shard(cell, make_sharder(cell, comms))
        optimizer = make_optimizer(parallel)
        losses.append(plain_loop(parallel, optimizer, batches[:-1]))
        with count_collectives() as seen:
            plain_loop(parallel, optimizer, batches[-1:])
        sent.append(sum(all_to_all_bytes(seen)[3:]))
    gap = max(abs(loss - other) for loss, other in zip(*losses, strict=True))
    return gap, sent[0], sent[1]


@pytest.mark.dealt_file
@pytest.mark.parametrize(
    ("cell", "qcomms"),
    [
        (replace(NONEMPTY, sharding="table_wise"), CommType.FP16),
        (NONEMPTY, CommType.FP16),
        (ROWS, CommType.FP16),
        (ROWS, CommType.BF16),
        (ROWS, CommType.FP32),
        (PER_HOST, CommType.FP16),
    ],
    ids=str,
)
def test_quantised_communication_halves_the_bytes(
    two_hosts: RankPool, cell: Cell, qcomms: CommType
) -> None:
    for gap, full, short in two_hosts.run(quantised, cell, qcomms):
        if qcomms is CommType.FP32:
            assert gap <= KERNEL_ROUNDING
            assert short == full
            continue
        assert 0.0 < gap < 10 * LR * 2**-8
        # What hosts do among themselves stays as it is.
        assert short * 2 == full > 0 or (cell is PER_HOST and full / 2 < short < full)


def warnings_of(rank: int, world_size: int, cell: Cell) -> list[str]:
    """Shard a cell; return the log messages."""
    with logged("torchrec_2dsp.shard.sharders") as messages:
        shard(cell)
    return messages


def test_hot_rows_that_save_no_bytes_are_told(ranks4: RankPool) -> None:
    stock_exchange = Cell(TWO, hot_rows=HOT_ROWS)
    (message,), *others = ranks4.run(warnings_of, stock_exchange)
    assert message.startswith("hot rows of t0, t1 save no bytes: TorchRec's output exchange ships")
    assert others == [[]] * 3
    quiet = [replace(ROWS, hot_rows=HOT_ROWS), Cell(TWO), replace(stock_exchange, mesh=FOUR)]
    # TorchRec's sequence exchange ships a vector per id.
    quiet.append(Cell(ONE, "table_wise", SEQUENCES, hot_rows=HOT_ROWS))
    for cell in quiet:
        assert ranks4.run(warnings_of, cell) == [[]] * 4, cell


LEAVING_OUT = replace(SEQUENCES, leaves_out=True)
PLACED = {
    "rows": tdsp.ParameterConstraints2D(sharding_types=["row_wise"], exchange="row"),
    "vectors": tdsp.ParameterConstraints2D(sharding_types=["table_wise"]),
    "everywhere": tdsp.ParameterConstraints2D(sharding_types=["data_parallel"]),
}
PARTLY_USED = [
    Cell(ONE, spec=LEAVING_OUT, exchange="row", hot_rows=HOT_ROWS[:1]),
    Cell(TWO, "table_wise", spec=LEAVING_OUT, hot_rows=HOT_ROWS[:1]),
    Cell(TWO, spec=LEAVING_OUT, in_world=("t0",), optimizer="adagrad"),
    Cell(TWO, spec=LEAVING_OUT, in_world=("t0",), optimizer="adam"),
    *(
        Cell(mesh, spec=LEAVING_OUT, demands=(("t0", PLACED[first]), ("t1", PLACED[second])))
        for mesh in (ONE, TWO)
        for first, second in (("rows", "vectors"), ("everywhere", "rows"))
    ),
]


def test_ranks_may_leave_different_sequences_out(ranks4: RankPool) -> None:
    check_cells(PARTLY_USED, ranks4)


@pytest.mark.parametrize(
    ("sharding", "pinned", "text"),
    [
        (
            "table_wise",
            {"exchange": "row"},
            "2d_table_wise, but exchange='row' is for tables sharded row_wise: constrain it with",
        ),
        ("table_row_wise", {"exchange": "nonempty"}, "'nonempty' is for tables sharded table_wise"),
        ("row_wise", {"exchange": "rows"}, "'rows' is unknown; use one of 'pooled', 'nonempty'"),
        ("row_wise", {"owners": "hash"}, "owners='hash', which is for row exchange: pin it"),
        (
            "row_wise",
            {"exchange": "row", "owners": "rows"},
            "owners='rows' is unknown; use one of 'block', 'hash'",
        ),
        (
            "row_wise",
            {"exchange": "row", "owners": "hash", "stored_as": "int8"},
            "is owners='hash', where rows can't be stored_as='int8'",
        ),
        ("column_wise", {"stored_as": "int8"}, "2d_column_wise, where rows can't be"),
        ("data_parallel", {"stored_as": "int8"}, "2d_data_parallel, where rows can't be"),
        (
            "row_wise",
            {"stored_as": "int8", "compute_kernel": "fused_uvm"},
            "fused_uvm, where rows can't be",
        ),
    ],
)
def test_a_plan_says_what_it_needs(sharding: str, pinned: dict[str, Any], text: str) -> None:
    cell = Cell(ONE, sharding)
    plan = group_plan(cell, build(cell.spec), make_sharder(cell))
    with pytest.raises((tdsp.errors.PlanError, tdsp.errors.UnsupportedError), match=text):
        tdsp.pin(plan, "t0", **pinned)
