"""Replicas that exchange gradients or changes in fewer bits."""

from dataclasses import replace

import pytest

import torchrec_2dsp as tdsp
from tests.support.loops import Tensors, largest_gap, make_stream, plain_loop, shard, snapshot
from tests.support.models import HOT_ROWS, ModelSpec, TableSpec
from tests.support.parity import FOUR, LR, TWO, Cell, make_optimizer
from tests.support.ranks import RankPool

pytestmark = pytest.mark.dealt_file

LARGE = ModelSpec((TableSpec("t0", 1600, 8, ("f0",)), TableSpec("t1", 960, 16, ("f1", "f2"))))
"""Few of its rows are in a batch, so that they travel alone under `WeightSync`, too."""

SHORT = [transport for transport in tdsp.Transport if transport is not tdsp.Transport.FP32]
STEP_ROUNDING = {
    tdsp.Transport.BF16: 2**-8,
    tdsp.Transport.FP16: 2**-11,
    tdsp.Transport.INT8: 0.51 / 127,
    tdsp.Transport.INT4: 0.51 / 7,
}
"""Errors from rounding to nearest, relative to the number, or for integers to the row's largest."""
NUM_STEPS = 4


def train(rank: int, world_size: int, cell: Cell) -> tuple[list[Tensors], int]:
    """Return this rank's state after every second step, and its sent bytes."""
    parallel, seen = shard(cell), []
    assert isinstance(parallel, tdsp.ModelParallel2D)
    optimizer = make_optimizer(parallel)
    batches = [step[rank] for step in make_stream(cell, NUM_STEPS)]
    for pair in zip(batches[::2], batches[1::2], strict=True):
        plain_loop(parallel, optimizer, pair)
        seen.append(snapshot(parallel))
    return seen, parallel.sync_total.num_bytes


def weights_of(state: Tensors) -> Tensors:
    return {name: value for name, value in state.items() if "/" not in name}


def check(ranks4: RankPool, cell: Cell, exact: Cell, transport: tdsp.Transport) -> None:
    """Check that replicas are bitwise equal, near the exact ones, and that less was sent."""
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
