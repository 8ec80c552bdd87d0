"""Numbers that travel in fewer bits, and updates that travel behind a whole step."""

from dataclasses import replace

import pytest
from torchrec.modules.embedding_configs import DataType

import torchrec_2dsp as tdsp
from tests.support.loop_oracles import DelayedOracle
from tests.support.loops import Tensors, largest_gap, make_stream, shard, snapshot
from tests.support.models import ModelSpec, TableSpec
from tests.support.oracle import local_loss
from tests.support.parity import LR, Cell, compare, make_optimizer
from tests.support.ranks import RankPool, RanksFailed

pytestmark = pytest.mark.dealt_file

LARGE = ModelSpec((TableSpec("t0", 1600, 8, ("f0",)), TableSpec("t1", 960, 16, ("f1", "f2"))))
"""Few of its rows are in a batch, so that they travel alone under `WeightSync`, too."""
HOT_ROWS = (("t0", (0, 1, 5)), ("t1", (0, 2)))
ROUNDING = 1e-6

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
    """This rank's state after every second step, and what it has sent."""
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


def shard_half_precision(rank: int, world_size: int, sync: tdsp.WeightSync) -> None:
    shard(Cell(TWO, spec=ModelSpec(data_type=DataType.FP16), sync=sync))


def test_a_table_that_is_as_short_already(ranks4: RankPool) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks4.run(shard_half_precision, tdsp.WeightSync(transport=tdsp.Transport.BF16))
    said = "table 't0' has torch.float16 values, which transport='bf16' wouldn't make smaller"
    assert all(said in report for report in failed.value.reports.values())


def train_late(rank: int, world_size: int, cells: list[Cell]) -> list[tuple[float, float, float]]:
    """Gaps to the late oracle, of losses and at the end; and how far tables have moved."""
    gaps = []
    for cell in cells:
        parallel, stream = shard(cell), make_stream(cell, 6)
        oracle = DelayedOracle(cell.spec, optimizer=cell.optimizer, lr=LR, eps=cell.eps)
        optimizer, loss_gap = make_optimizer(parallel), 0.0
        for batches in stream:
            optimizer.zero_grad()
            loss = local_loss(parallel(batches[rank]))
            loss.backward()
            optimizer.step()
            expected = oracle.step(batches)[rank]
            loss_gap = max(loss_gap, abs(loss.item() - expected) / (1 + expected))
        oracle.finish()
        gaps.append((loss_gap, compare(parallel, oracle).worst, largest_change(cell, oracle)))
    return gaps


def largest_change(cell: Cell, oracle: DelayedOracle) -> float:
    """How far training has moved any table."""
    start = DelayedOracle(cell.spec, optimizer=cell.optimizer, lr=LR)
    return max(
        (weight - start.weights[name]).abs().max().item() for name, weight in oracle.weights.items()
    )


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
