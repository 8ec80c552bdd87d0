"""Numbers that travel in fewer bits, and updates that travel behind a whole step."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import torchrec_2dsp as tdsp
from tests.support.loops import Tensors, largest_gap, make_stream, shard, snapshot
from tests.support.models import SEQUENCES, ModelSpec, TableSpec, build
from tests.support.oracle import batches_of, local_loss
from tests.support.parity import (
    LR,
    Cell,
    group_plan,
    local_shards,
    local_world_size,
    make_optimizer,
    make_oracle,
    make_sharder,
)
from tests.support.ranks import RankPool
from tests.support.rounding import HOT_ROWS, ROUNDING, RoundingOracle, train_late

pytestmark = pytest.mark.dealt_file

LARGE = ModelSpec((TableSpec("t0", 1600, 8, ("f0",)), TableSpec("t1", 960, 16, ("f1", "f2"))))
"""Few of its rows are in a batch, so that they travel alone under `WeightSync`, too."""

TWO, FOUR = tdsp.Mesh2D(2, 2), tdsp.Mesh2D(4, 1)
SHORT = [transport for transport in tdsp.Transport if transport is not tdsp.Transport.FP32]
STEP_ROUNDING = {
    tdsp.Transport.BF16: 2**-8,
    tdsp.Transport.FP16: 2**-11,
    tdsp.Transport.INT8: 0.51 / 127,
    tdsp.Transport.INT4: 0.51 / 7,
}
"""Of a rounding to nearest, relative to the number, or of integers to a row's largest one."""
NUM_STEPS = 4


def train(rank: int, world_size: int, cell: Cell) -> tuple[list[Tensors], int]:
    """Return this rank's state after every second step, and its sent bytes."""
    parallel, seen = shard(cell), []
    assert isinstance(parallel, tdsp.ModelParallel2D)
    optimizer = make_optimizer(parallel)
    for step, batches in enumerate(make_stream(cell, NUM_STEPS)):
        optimizer.zero_grad()
        local_loss(parallel(batches[rank])).backward()
        optimizer.step()
        if step % 2:
            seen.append(snapshot(parallel))
    return seen, parallel.sync_total.num_bytes


def weights_of(state: Tensors) -> Tensors:
    return {name: value for name, value in state.items() if "/" not in name}


def check(ranks4: RankPool, cell: Cell, exact: Cell, transport: tdsp.Transport) -> None:
    """Replicas are equal bit for bit, near the exact ones, and less was sent."""
    short, full = ranks4.run(train, cell), ranks4.run(train, exact)
    for rank, (states, _) in enumerate(short):
        first = cell.mesh.replica_peers(rank)[0]
        for state, other in zip(states, short[first][0], strict=True):
            assert largest_gap(state, other) == 0.0
    # Each step moves a weight by less than lr, with a relative error of one rounding or two.
    bound = 4 * NUM_STEPS * LR * STEP_ROUNDING[transport]
    for (states, sent), (expected, fully_sent) in zip(short, full, strict=True):
        gap = largest_gap(*(weights_of(state[-1]) for state in (states, expected)))
        assert 0.0 < gap < bound
        assert 0 < sent < 0.75 * fully_sent


@pytest.mark.parametrize("transport", SHORT)
def test_short_gradients(ranks4: RankPool, transport: tdsp.Transport) -> None:
    sync = tdsp.GradientSync(transport=transport)
    for exact in (Cell(FOUR, "table_wise", LARGE), Cell(TWO, spec=LARGE, hot_rows=HOT_ROWS)):
        check(ranks4, replace(exact, sync=sync), exact, transport)


@pytest.mark.parametrize("transport", SHORT)
def test_short_changes(ranks4: RankPool, transport: tdsp.Transport) -> None:
    sync = tdsp.WeightSync(transport=transport, policy=tdsp.every(2), dense_above=0.5)
    for mesh in (FOUR, TWO):
        exact = Cell(mesh, spec=LARGE, sync=tdsp.WeightSync(policy=tdsp.every(2)))
        check(ranks4, replace(exact, sync=sync), exact, transport)


def test_late_updates_equal_the_late_oracle(ranks4: RankPool) -> None:
    late = tdsp.GradientSync(delay=1)
    cells = [
        Cell(mesh, sharding, hot_rows=hot_rows, optimizer=optimizer, sync=late)
        for mesh, sharding in ((TWO, "row_wise"), (FOUR, "table_wise"))
        for hot_rows in ((), HOT_ROWS)
        for optimizer in ("sgd", "rowwise_adagrad")
    ]
    for gaps in ranks4.run(train_late, cells):
        for loss_gap, gap, change in gaps:
            assert loss_gap < ROUNDING
            assert gap < ROUNDING
            assert change > 1e-2
    in_time = [replace(cell, sync=tdsp.GradientSync()) for cell in cells]
    for gaps in ranks4.run(train_late, in_time):
        assert min(gap for _, gap, _ in gaps) > 1e-4


ONE, TWO_GROUPS = tdsp.Mesh2D(1, 4), tdsp.Mesh2D(2, 2)
CONTIGUOUS = tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS)
WEIGHTED = ModelSpec(weighted=True)
MEAN = ModelSpec(pooling="mean")
TOLERANCE = 2e-6
"""Of sums of the same rounded numbers in another order."""
FLIPPED = 0.01
"""The share of weights that may be off by a unit: where a number is half way between two, another
order of additions decides which it becomes."""
ROUNDED = [transport.value for transport in tdsp.Transport if transport.value != "fp32"]


def gaps(rank: int, world_size: int, cells: Sequence[Cell]) -> list[tuple[float, float, float]]:
    """Measure each cell's gaps to oracles with and without rounding.

    Returns:
        For each cell, the first loss's gap, the share of wrong weights, and the share that would be
        wrong by an oracle without rounding.
    """
    results = []
    for cell in cells:
        sizes = cell.batch_sizes or (6,) * world_size
        stream = [batches_of(cell.spec, 0, sizes, cell.max_length, step) for step in range(2)]
        parallel = shard(cell)
        plan = group_plan(cell, build(cell.spec), make_sharder(cell), local_world_size())
        oracle = RoundingOracle(
            cell,
            plan,
            local_world_size=local_world_size(),
            optimizer=cell.optimizer,
            lr=LR,
            eps=cell.eps,
        )
        exact, optimizer = make_oracle(cell), make_optimizer(parallel)
        loss_gaps = []
        for batches in stream:
            optimizer.zero_grad()
            loss = local_loss(parallel(batches[rank]))
            loss.backward()
            optimizer.step()
            wanted = oracle.step(batches)[rank]
            exact.step(batches)
            loss_gaps.append(abs(loss.item() - wanted) / (1 + wanted))
        off = [share_off(parallel, weights.weights) for weights in (oracle, exact)]
        results.append((loss_gaps[0], *off))
    return results


def share_off(parallel: torch.nn.Module, expected: dict[str, torch.Tensor]) -> float:
    """Return the share of unexpected weights on this rank, which has at least one."""
    num_off = num_seen = 0
    for name, value in parallel.state_dict().items():
        if not name.startswith(("ebc", "ec")):
            continue
        for part, (row, column) in local_shards(value):
            wanted = expected[name.split(".")[-2]]
            wanted = wanted[row : row + part.shape[0], column : column + part.shape[1]]
            num_off += int(((part - wanted).abs() > TOLERANCE).sum())
            num_seen += part.numel()
    return num_off / max(1, num_seen)


def check_gaps(ranks: RankPool, cells: Sequence[Cell]) -> None:
    by_rank = ranks.run(gaps, list(cells), timeout_s=200)
    for of_cell in zip(cells, *by_rank, strict=True):
        cell, *of_ranks = of_cell
        assert max(loss_gap for loss_gap, _, _ in of_ranks) <= TOLERANCE, str(cell)
        assert max(off for _, off, _ in of_ranks) <= FLIPPED, f"{cell}: {of_ranks}"
        # Rounding is seen: an oracle without it has other weights.
        unrounded = max(off for _, _, off in of_ranks)
        assert unrounded > max(off for _, off, _ in of_ranks), f"{cell}: {of_ranks}"


@pytest.mark.parametrize("transport", ROUNDED)
def test_rows_are_rounded_once_each_way(ranks4: RankPool, transport: str) -> None:
    row = Cell(ONE, exchange="row", optimizer="sgd", transport=transport)
    check_gaps(
        ranks4,
        [
            row,
            replace(row, mesh=TWO_GROUPS),
            replace(row, spec=WEIGHTED),
            replace(row, spec=MEAN),
            replace(row, spec=SEQUENCES),
            replace(row, hot_rows=HOT_ROWS),
            replace(row, owners="hash"),
            replace(row, exchange="row_per_host"),
            replace(row, optimizer="adagrad"),
        ],
    )


@pytest.mark.parametrize("transport", ROUNDED)
def test_bags_are_rounded_once_each_way(ranks4: RankPool, transport: str) -> None:
    table_wise = Cell(ONE, "table_wise", optimizer="sgd", transport=transport)
    check_gaps(
        ranks4,
        [
            replace(table_wise, mesh=mesh, sharding=sharding, exchange=exchange)
            for mesh in (ONE, TWO_GROUPS)
            for sharding in ("table_wise", "column_wise", "row_wise")
            for exchange in ("pooled", "nonempty")
        ]
        + [
            replace(table_wise, spec=WEIGHTED),
            replace(table_wise, spec=SEQUENCES),
            replace(table_wise, spec=SEQUENCES, sharding="row_wise"),
            replace(table_wise, spec=SEQUENCES, sharding="column_wise"),
            replace(table_wise, batch_sizes=(5, 0, 2, 1)),
            replace(table_wise, sharding="row_wise", batch_sizes=(5, 0, 2, 1)),
        ],
    )


@pytest.mark.parametrize("transport", ROUNDED)
def test_bags_are_rounded_again_between_hosts(two_hosts: RankPool, transport: str) -> None:
    """A host's sums travel to the other one, and gradients from host to host, then inside."""
    table_row_wise = Cell(ONE, "table_row_wise", optimizer="sgd", transport=transport)
    check_gaps(
        two_hosts,
        [
            replace(table_row_wise, mesh=mesh, sharding=sharding)
            for mesh in (ONE, CONTIGUOUS)
            for sharding in ("table_row_wise", "grid_shard", "table_column_wise")
        ]
        + [replace(table_row_wise, sharding="grid_shard", spec=WEIGHTED)],
    )
