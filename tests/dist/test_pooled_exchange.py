"""Exchange of non-empty bags: training equals the unsharded model, and no zeros travel."""

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
    largest_gap,
    make_stream,
    plain_loop,
    shard,
    train,
)
from tests.support.models import ALL_ROWS, BAGS, HOT_ROWS, MIXED, ONE_TABLE, SEQUENCES, build
from tests.support.parity import (
    LR,
    ONE,
    TWO,
    Cell,
    check_cells,
    group_plan,
    make_optimizer,
    make_sharder,
)
from tests.support.ranks import RankPool, RanksFailed
from tests.support.slices import Deal
from tests.support.trips import Trip, check_arrivals, stock
from torchrec_2dsp.comms.counting import count_collectives

LONG_BAGS_TOLERANCE = 1e-5
"""Sums of many rows round more often, in parts even more."""

KINDS = ("table_wise", "column_wise", "row_wise")
NONEMPTY = Cell(ONE, exchange="nonempty")


@pytest.mark.parametrize("mesh", [ONE, TWO], ids=str)
def test_bags_equal_the_unsharded_model(ranks4: RankPool, mesh: tdsp.Mesh2D, dealt: Deal) -> None:
    cells = [
        replace(NONEMPTY, mesh=mesh, sharding=kind, spec=spec, hot_rows=hot_rows)
        for kind, spec, hot_rows in product(KINDS, BAGS, ((), HOT_ROWS))
    ]
    cells += [
        replace(NONEMPTY, mesh=mesh, sharding=kind, optimizer=optimizer)
        for kind, optimizer in product(KINDS, ("sgd", "adagrad"))
    ]
    cells.append(replace(NONEMPTY, mesh=mesh, sharding="table_column_wise", hot_rows=HOT_ROWS))
    check_cells(dealt(cells), ranks4)


def test_unusual_batches_equal_the_unsharded_model(ranks4: RankPool, dealt: Deal) -> None:
    """Ranks without samples, or with hot rows alone; ids many times in a bag."""
    cells = [
        replace(
            NONEMPTY,
            mesh=mesh,
            sharding=kind,
            hot_rows=hot_rows,
            batch_sizes=sizes,
            max_length=length,
        )
        for mesh, kind, hot_rows, (sizes, length) in product(
            (ONE, TWO),
            ("table_wise", "row_wise"),
            ((), ALL_ROWS),
            (((3, 0, 5, 2), 4), ((0, 0, 1, 0), 4), ((2, 2, 2, 2), 60)),
        )
    ]
    check_cells(dealt(cells), ranks4, 3, long_bags=LONG_BAGS_TOLERANCE)


def test_several_dimensions_equal_the_unsharded_model(ranks2: RankPool) -> None:
    cells = [
        replace(NONEMPTY, mesh=mesh, sharding=kind, spec=MIXED)
        for mesh, kind in product((tdsp.Mesh2D(1, 2), tdsp.Mesh2D(2, 1)), KINDS)
    ]
    check_cells(cells, ranks2)


def test_averaged_replicas_equal_the_unsharded_model(ranks4: RankPool) -> None:
    sync = tdsp.WeightSync(dense_above=1.0)
    cells = [
        replace(NONEMPTY, mesh=TWO, sharding=kind, optimizer="sgd", sync=sync) for kind in KINDS
    ]
    check_cells(cells, ranks4)


@pytest.mark.dealt_file
@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_pipelines_change_nothing(ranks4: RankPool, kind: str) -> None:
    cell = replace(NONEMPTY, mesh=TWO, sharding=kind, hot_rows=HOT_ROWS)
    for gaps in ranks4.run(by_pipelines, cell):
        assert gaps == [0.0] * len(PIPELINES)


def as_pooled(rank: int, world_size: int, cells: list[Cell]) -> list[float]:
    """Return each cell's gap to TorchRec's own exchange."""
    gaps = []
    for cell in cells:
        stream = make_stream(cell, 4)
        whole = train(replace(cell, exchange="pooled"), rank, stream)
        gaps.append(largest_gap(train(cell, rank, stream), whole))
    return gaps


@pytest.mark.dealt_file
def test_whole_bags_have_the_bits_of_the_pooled_exchange(ranks4: RankPool) -> None:
    cells = [
        replace(NONEMPTY, mesh=mesh, sharding=kind) for mesh in (ONE, TWO) for kind in KINDS[:2]
    ]
    assert ranks4.run(as_pooled, cells) == [[0.0] * len(cells)] * 4


TRIPS = [
    Trip(replace(NONEMPTY, mesh=TWO, sharding="table_wise", hot_rows=HOT_ROWS), stock("row_wise")),
    Trip(stock("table_wise"), replace(NONEMPTY, sharding="row_wise")),
    Trip(replace(NONEMPTY, sharding="column_wise"), stock("column_wise")),
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
"""Of each rank's bags: two samples of the first feature, then of the second. Row-wise, the owners
have the rows 0-9, 10-19, 20-29 and 30-39."""


def batch_of(rank: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(
        keys=["f0", "f1"],
        values=torch.tensor([row for bag in IDS[rank] for row in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in IDS[rank]]),
    )


def bytes_of_a_step(rank: int, world_size: int, cell: Cell) -> tuple[int, int]:
    """Return the bytes sent for embeddings and for their gradients."""
    parallel = shard(cell)
    optimizer = make_optimizer(parallel)
    plain_loop(parallel, optimizer, [batch_of(rank)])
    with count_collectives() as seen:
        plain_loop(parallel, optimizer, [batch_of(rank)])
    embeddings, gradients = all_to_all_bytes(seen)[3:5]
    return embeddings, gradients


def test_only_bags_with_ids_travel(ranks4: RankPool) -> None:
    filled = [sum(bool(bag) for bag in bags) for bags in IDS]
    cell = replace(NONEMPTY, spec=ONE_TABLE, sharding="table_wise")
    answers = ranks4.run(bytes_of_a_step, cell)
    owner = [sum(filled) * 8 * 4 if embeddings else 0 for embeddings, _ in answers]
    assert sorted(owner) == [0, 0, 0, sum(filled) * 8 * 4]
    assert [embeddings for embeddings, _ in answers] == owner
    assert [gradients for _, gradients in answers] == [entry * 8 * 4 for entry in filled]


def test_only_parts_of_bags_with_ids_travel(ranks4: RankPool) -> None:
    """Send a partial bag from each owner that has any row in the bag."""
    parts = [
        [sum(any(row // 10 == owner for row in bag) for bag in bags) for owner in range(4)]
        for bags in IDS
    ]
    answers = ranks4.run(bytes_of_a_step, replace(NONEMPTY, spec=ONE_TABLE, sharding="row_wise"))
    for rank, sent in enumerate(answers):
        assert sent == (sum(of[rank] for of in parts) * 8 * 4, sum(parts[rank]) * 8 * 4)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_nothing_travels_if_all_rows_are_hot(ranks4: RankPool, kind: str) -> None:
    hot_rows = (("t0", tuple(range(40))),)
    cell = replace(NONEMPTY, spec=ONE_TABLE, sharding=kind, hot_rows=hot_rows)
    assert ranks4.run(bytes_of_a_step, cell) == [(0, 0)] * 4


def quantised(rank: int, world_size: int, cell: Cell) -> tuple[float, float]:
    """Return the losses' gap to fp32, and the ratio of bag bytes."""
    batches = [step[rank] for step in make_stream(cell, 4)]
    losses, sent = [], []
    for qcomms in (CommType.FP16, None):
        parallel = shard(cell, make_sharder(cell, qcomms))
        optimizer = make_optimizer(parallel)
        losses.append(plain_loop(parallel, optimizer, batches[:-1]))
        with count_collectives() as seen:
            plain_loop(parallel, optimizer, batches[-1:])
        sent.append(sum(all_to_all_bytes(seen)[3:]))
    gap = max(abs(entry - other) for entry, other in zip(*losses, strict=True))
    return gap, sent[1] / sent[0]


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_quantised_communication_halves_the_bytes(ranks4: RankPool, kind: str) -> None:
    for gap, ratio in ranks4.run(quantised, replace(NONEMPTY, sharding=kind)):
        assert 0 < gap < 10 * LR * 2**-8
        assert ratio == 2


def sharded(rank: int, world_size: int, cell: Cell) -> None:
    shard(cell)


def test_what_it_is_not_for_is_refused(ranks4: RankPool) -> None:
    cell = Cell(ONE, "table_row_wise")
    plan = group_plan(cell, build(cell.spec), make_sharder(cell), 4)
    with pytest.raises(
        tdsp.errors.PlanError, match="exchange='nonempty' is for tables sharded table_wise, "
    ):
        tdsp.pin(plan, "t0", exchange="nonempty")
    with pytest.raises(RanksFailed, match="has exchange='nonempty', which is for bags"):
        ranks4.run(sharded, replace(NONEMPTY, sharding="row_wise", spec=SEQUENCES))
