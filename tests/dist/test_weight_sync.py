"""Averaging only changed rows equals averaging everything, and writes nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

import torchrec_2dsp as tdsp
from tests.support.devices import KERNEL_ROUNDING
from tests.support.loops import (
    Tensors,
    largest_gap,
    make_stream,
    plain_loop,
    shard,
    snapshot,
    train,
)
from tests.support.models import SEQUENCES, ModelSpec, TableSpec
from tests.support.oracle import local_loss
from tests.support.parity import FOUR, TWO, Cell, make_optimizer, shards_of
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.plan.sync import SyncPolicy
from torchrec_2dsp.replicas import row_average, whole_shard

LARGE = ModelSpec(
    (
        TableSpec("t0", 1600, 8, ("f0",)),
        TableSpec("t1", 960, 16, ("f1", "f2")),
        TableSpec("t2", 1320, 8, ("f3",)),
    )
)
"""A batch has few of its rows. It has most of the default model's, so whole shards travel."""

WHOLE = tdsp.WeightSync(rows=tdsp.SyncedRows.ALL)
TOUCHED = tdsp.WeightSync(dense_above=0.5)
THREE = tdsp.Mesh2D(3, 1)
CONTIGUOUS = tdsp.RankLayout.CONTIGUOUS
ROUNDING = 1e-6
"""Four copies may be added in another order."""


@pytest.fixture(scope="module")
def ranks3() -> Iterator[RankPool]:
    """Yield three ranks: the mean of three equal floats need not be that float."""
    with RankPool(3) as pool:
        yield pool


def touched_and_whole(rank: int, world_size: int, cell: Cell) -> float:
    """Return the distance between averaging touched rows and whole shards after some steps."""
    stream = make_stream(cell, 4)
    assert isinstance(cell.sync, tdsp.WeightSync)
    whole = replace(cell, sync=replace(cell.sync, rows=tdsp.SyncedRows.ALL, dense_above=None))
    return largest_gap(train(cell, rank, stream), train(whole, rank, stream))


@pytest.mark.dealt_file
def test_two_replicas_get_the_dense_result_bit_for_bit(ranks4: RankPool) -> None:
    base = Cell(TWO, spec=LARGE, sync=TOUCHED)
    cells = [replace(base, sharding=kind) for kind in ("row_wise", "table_wise", "column_wise")]
    cells += [replace(base, optimizer=name) for name in ("sgd", "adagrad")]
    cells += [replace(base, spec=ModelSpec()), replace(base, mesh=tdsp.Mesh2D(2, 2, CONTIGUOUS))]
    cells += [replace(base, spec=SEQUENCES), replace(base, variable=True)]
    policies = [tdsp.every(2), tdsp.after(1, tdsp.every(3)), tdsp.never()]
    cells += [replace(base, sync=replace(TOUCHED, policy=policy)) for policy in policies]
    cells += [replace(base, sync=replace(TOUCHED, moments_policy=tdsp.every(2)))]
    cells += [replace(base, sync=tdsp.WeightSync(dense_above=share)) for share in (None, 1.0)]
    for cell in cells:
        assert max(ranks4.run(touched_and_whole, cell)) <= KERNEL_ROUNDING, cell


def in_small_messages(rank: int, world_size: int, cell: Cell) -> float:
    """Run `touched_and_whole` with a few rows per message instead of thousands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_average, "_RANGE_BYTES", 7 * 4 * 8)
        patch.setattr(row_average, "_MESSAGE_BYTES", 3 * 4 * 8)
        return touched_and_whole(rank, world_size, cell)


@pytest.mark.dealt_file
def test_rows_travel_some_at_a_time(ranks4: RankPool) -> None:
    for policy in (tdsp.every(1), tdsp.every(3)):
        cell = Cell(TWO, spec=LARGE, sync=replace(TOUCHED, policy=policy))
        assert max(ranks4.run(in_small_messages, cell)) <= KERNEL_ROUNDING
    cell = Cell(FOUR, "table_wise", LARGE, sync=TOUCHED)
    assert max(ranks4.run(in_small_messages, cell)) < ROUNDING


@pytest.mark.dealt_file
def test_more_replicas_get_it_up_to_the_order_of_additions(ranks4: RankPool) -> None:
    for spec in (LARGE, ModelSpec()):
        cell = Cell(FOUR, "table_wise", spec, sync=TOUCHED)
        assert max(ranks4.run(touched_and_whole, cell)) < ROUNDING


@dataclass(frozen=True)
class Apart:
    """One replica's results."""

    start: Tensors
    end: Tensors
    looked_up: list[set[int]]
    num_bytes: int


def train_apart(rank: int, world_size: int, cell: Cell, num_steps: int) -> Apart:
    parallel, stream = shard(cell), make_stream(cell, num_steps)
    assert isinstance(parallel, tdsp.ModelParallel2D)
    start, batches = snapshot(parallel), [step[rank] for step in stream]
    plain_loop(parallel, make_optimizer(parallel), batches)
    looked_up = [
        {
            row
            for batch in batches
            for feature in table.features
            for row in batch[feature].values().tolist()
        }
        for table in cell.spec.tables
    ]
    return Apart(start, snapshot(parallel), looked_up, parallel.sync_total.num_bytes)


def check_untouched(answers: list[Apart], spec: ModelSpec) -> None:
    for answer in answers:
        assert largest_gap(answer.end, answers[0].end) == 0.0
    start, end = answers[0].start, answers[0].end
    for number, table in enumerate(spec.tables):
        touched = set.union(*(answer.looked_up[number] for answer in answers))
        untouched = sorted(set(range(table.num_rows)) - touched)
        assert untouched
        for name in start:
            if f".{table.name}." in name:
                assert torch.equal(end[name][untouched], start[name][untouched])
                assert not torch.equal(end[name], start[name])


@pytest.mark.dealt_file
def test_rows_that_nobody_looked_up_are_never_written(ranks3: RankPool) -> None:
    cell = Cell(THREE, "table_wise", LARGE, sync=TOUCHED)
    check_untouched(ranks3.run(train_apart, cell, 3), LARGE)


@pytest.mark.dealt_file
def test_nor_are_they_when_whole_shards_are_averaged(ranks3: RankPool) -> None:
    spec = ModelSpec((TableSpec("t0", 48, 4, ("f0", "f1", "f2")),))
    answers = ranks3.run(train_apart, Cell(THREE, "table_wise", spec, sync=tdsp.WeightSync()), 1)
    check_untouched(answers, spec)
    # A ring of three sends all weights and moments, and which rows are touched.
    assert {answer.num_bytes for answer in answers} == {4 * 48 * (4 * 4 + 4 + 1) // 3}


def raw(parallel: torch.nn.Module, name: str) -> torch.Tensor:
    """Return all values with this name on this rank, without triggering a sync."""
    return torch.cat([shard.tensors[name].reshape(-1) for shard in shards_of(parallel)]).clone()


def watch_replicas(
    rank: int, world_size: int, sync: tdsp.WeightSync
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return weights and moments after every step, then after an evaluation and after a read."""
    cell = Cell(FOUR, "table_wise", LARGE, sync=sync)
    parallel, stream, seen = shard(cell), make_stream(cell, 7), []
    optimizer = make_optimizer(parallel)

    def step(number: int) -> None:
        optimizer.zero_grad()
        local_loss(parallel(stream[number][rank])).backward()
        parallel.sync()  # pyright: ignore[reportCallIssue]
        optimizer.step()

    def look() -> None:
        seen.append((raw(parallel, "weight"), raw(parallel, "sum")))

    for number in range(4):
        step(number)
        look()
    with torch.no_grad():
        parallel(stream[4][rank])
    look()
    step(5)
    parallel.state_dict()
    look()
    step(6)
    parallel.eval()
    parallel(stream[4][rank])
    look()
    return seen


@pytest.mark.dealt_file
@pytest.mark.parametrize("rows", tdsp.SyncedRows)
@pytest.mark.parametrize(
    ("policy", "moments_policy", "equal_weights", "equal_moments"),
    [
        (tdsp.every(1), None, [1, 1, 1, 1], [1, 1, 1, 1]),
        (tdsp.every(2), None, [0, 1, 0, 1], [0, 1, 0, 1]),
        (tdsp.after(1, tdsp.every(2)), tdsp.every(4), [0, 0, 1, 0], [0, 0, 0, 1]),
        (tdsp.never(), tdsp.never(), [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
    ids=str,
)
def test_replicas_are_equal_when_the_policy_says_so_and_whenever_someone_looks(
    ranks4: RankPool,
    rows: tdsp.SyncedRows,
    policy: SyncPolicy,
    moments_policy: SyncPolicy | None,
    equal_weights: list[int],
    equal_moments: list[int],
) -> None:
    share = 0.5 if rows is tdsp.SyncedRows.TOUCHED else None
    sync = tdsp.WeightSync(
        policy=policy, moments_policy=moments_policy, rows=rows, dense_above=share
    )
    answers = ranks4.run(watch_replicas, sync)

    def equal(kind: int) -> list[int]:
        by_moment = zip(*answers, strict=True)
        return [
            int(all(torch.equal(entry[kind], ranks[0][kind]) for entry in ranks))
            for ranks in by_moment
        ]

    # Whoever evaluates or reads the state sees equal replicas.
    assert equal(0) == [*equal_weights, 1, 1, 1]
    assert equal(1) == [*equal_moments, 1, 1, 1]


def report_of_a_step(rank: int, world_size: int, cell: Cell) -> tuple[tdsp.SyncReport, set[int]]:
    parallel, (batches,) = shard(cell), make_stream(cell, 1)
    assert isinstance(parallel, tdsp.ModelParallel2D)
    local_loss(parallel(batches[rank])).backward()
    rows = {row for batch in batches for row in batch["f0"].values().tolist()}
    return parallel.sync(), rows


@pytest.mark.dealt_file
def test_a_report_counts_what_was_written_and_sent(ranks4: RankPool) -> None:
    spec = ModelSpec(LARGE.tables[:1])
    for report, rows in ranks4.run(report_of_a_step, Cell(FOUR, "table_wise", spec, sync=TOUCHED)):
        assert report.num_rows == len(rows)
        assert report.num_tensors == 2
        # Its own rows with id, 8 weights and a moment to 3 peers; 8 bytes of padding for each.
        assert 0 < report.num_bytes <= 3 * (len(rows) * 4 * 10 + 24)


@pytest.mark.dealt_file
@pytest.mark.parametrize(("share", "is_whole"), [(0.0, True), (1.0, False), (None, False)])
def test_the_share_decides_what_is_written(
    ranks4: RankPool, share: float | None, is_whole: bool
) -> None:
    spec = ModelSpec((TableSpec("t0", 6_000, 64, ("f0",)),))
    sync = tdsp.WeightSync(dense_above=share)
    for report, rows in ranks4.run(report_of_a_step, Cell(FOUR, "table_wise", spec, sync=sync)):
        assert report.num_rows == (6_000 if is_whole else len(rows))


def step_with(rank: int, world_size: int, cell: Cell, value: float) -> tuple[str, float]:
    """Step after rank 1 got a bad weight; return the error and the rows that the sync wrote."""
    parallel, (batches,) = shard(cell), make_stream(cell, 1)
    local_loss(parallel(batches[rank])).backward()
    (tensor,) = [shard.tensors["weight"] for shard in shards_of(parallel) if shard.table == "t1"]
    if rank == 1:
        tensor[batches[rank]["f1"].values()] = value
    before = raw(parallel, "weight")
    try:
        parallel.sync()  # pyright: ignore[reportCallIssue]
    except tdsp.errors.SyncError as error:
        return str(error), (raw(parallel, "weight") - before).abs().nan_to_num(0.0).max().item()
    return "", 0.0


@pytest.mark.dealt_file
@pytest.mark.parametrize("spec", [LARGE, ModelSpec()], ids=["rows", "whole shards"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_value_stops_all_peers_before_anything_is_written(
    ranks4: RankPool, spec: ModelSpec, value: float
) -> None:
    for message, change in ranks4.run(
        step_with, Cell(FOUR, "table_wise", spec, sync=TOUCHED), value
    ):
        assert message.startswith("table 't1' has weights or optimizer state that are not finite")
        assert message.endswith("(found on rank 1)")
        assert change == 0.0


def whole_in_chunks(rank: int, world_size: int, chunk_bytes: int) -> tuple[Tensors, set[str]]:
    """Average whole shards; return the result, and the collectives used."""
    cell = Cell(tdsp.Mesh2D(2, 2), spec=LARGE, sync=WHOLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_shard, "_CHUNK_BYTES", chunk_bytes)
        with count_collectives() as seen:
            trained = train(cell, rank, make_stream(cell, 2))
    # Each rank has half of each table's rows, and their moments.
    large = {4 * 800 * 8, 4 * 480 * 16, 4 * 660 * 8}
    reduced = [entry for entry in seen.records if entry.op.startswith("all_reduce")]
    return trained, {
        entry.op
        for entry in reduced
        if entry.num_bytes in large or entry.op == "all_reduce_coalesced"
    }


def test_large_shards_are_averaged_where_they_are(ranks4: RankPool) -> None:
    together = ranks4.run(whole_in_chunks, 2**20)
    apart = ranks4.run(whole_in_chunks, 20_000)
    for (expected, joined), (actual, parted) in zip(together, apart, strict=True):
        assert largest_gap(actual, expected) <= KERNEL_ROUNDING
        assert joined == {"all_reduce_coalesced"}
        # Moments are small enough to travel together.
        assert parted == {"all_reduce", "all_reduce_coalesced"}
