"""Several lookups or backwards between two syncs, and gradients that are summed over ranks."""

from dataclasses import replace

import pytest
import torch
from torchrec.distributed import comm_ops

import torchrec_2dsp as tdsp
from tests.support.loop_oracles import LoopOracle, TwiceModel, bag_loss, bag_oracle, twice_oracle
from tests.support.loops import counting_syncs, make_stream, plain_loop, shard, sharded_tables
from tests.support.oracle import local_loss
from tests.support.parity import LR, Cell, compare, make_optimizer
from tests.support.ranks import RankPool
from torchrec_2dsp.replicas.sync_report import SyncReason

pytestmark = pytest.mark.dealt_file

MESH = tdsp.Mesh2D(2, 2)
EXACT = Cell(MESH)
HOT = Cell(MESH, sharding="table_wise", hot_rows=(("t0", (0, 1, 5)), ("t1", (0, 2))))

ROUNDING = 1e-6
"""The oracle adds gradients in another order: some float32 roundings of values below 1."""


def twice(rank: int, world_size: int, cell: Cell) -> float:
    torch.manual_seed(0)
    parallel = shard(cell, model=TwiceModel(cell.spec))
    stream = make_stream(cell, 3)
    plain_loop(parallel, make_optimizer(parallel), [step[rank] for step in stream])
    return compare(parallel, twice_oracle(cell, stream)).worst


def test_two_lookups_in_one_forward(ranks4: RankPool) -> None:
    for cell in (EXACT, HOT, replace(EXACT, mesh=tdsp.Mesh2D(1, 4))):
        assert max(ranks4.run(twice, cell)) < ROUNDING


def two_backwards(rank: int, world_size: int, cell: Cell) -> float:
    """Two forwards, two backwards, then one sync, on the sharded module itself."""
    parallel = shard(cell)
    (part,) = sharded_tables(parallel)
    stream = make_stream(cell, 2)
    losses = [bag_loss(cell, part.module(batches[rank])) for batches in stream]
    with counting_syncs(parallel) as reports:
        for loss in losses:
            loss.backward()
        assert not reports
        pending = [action for action in part.sync_point._actions if action.pending]
        part.sync_point.reach(SyncReason.READ)
        assert len(reports) == len(pending) > 0
        assert not part.sync_point.pending
    return compare(parallel, bag_oracle(cell, stream)).worst


def test_two_backwards_between_syncs(ranks4: RankPool) -> None:
    for cell in (EXACT, HOT):
        assert max(ranks4.run(two_backwards, cell)) < ROUNDING


def synced_between(rank: int, world_size: int, cell: Cell) -> str:
    """The error of two backwards with a sync between them; empty if both are trained."""
    parallel, stream = shard(cell), make_stream(cell, 2)
    first, second = (local_loss(parallel(batches[rank])) for batches in stream)
    first.backward()
    assert isinstance(parallel, tdsp.ModelParallel2D)
    parallel.sync()
    try:
        second.backward()
    except tdsp.errors.SyncError as error:
        return str(error)
    parallel.sync()
    return ""


@pytest.mark.parametrize("rows", list(tdsp.SyncedRows), ids=str)
def test_an_average_between_two_backwards_is_refused(
    ranks4: RankPool, rows: tdsp.SyncedRows
) -> None:
    averaged = replace(EXACT, sync=tdsp.WeightSync(rows=rows))
    (raised,) = set(ranks4.run(synced_between, averaged))
    assert raised.startswith("tables were averaged or written between this lookup and its backward")
    assert raised.endswith("call sync() after all backwards of a step")
    # Neither has its backward read the tables, nor does exact sync write them at once.
    for cell in (replace(averaged, exchange="row"), EXACT):
        assert set(ranks4.run(synced_between, cell)) == {""}


def undivided(rank: int, world_size: int, cell: Cell, late: bool) -> float:
    oracle = LoopOracle(cell.spec, optimizer=cell.optimizer, lr=LR, eps=cell.eps)
    oracle.table_factor, stream = float(world_size), make_stream(cell, 3)
    assert comm_ops.get_gradient_division()
    comm_ops.set_gradient_division(late)
    try:
        parallel = shard(cell)
        comm_ops.set_gradient_division(False)
        plain_loop(parallel, make_optimizer(parallel), [step[rank] for step in stream])
    finally:
        comm_ops.set_gradient_division(True)
    for batches in stream:
        oracle.accumulate([batches])
    return compare(parallel, oracle).worst


@pytest.mark.parametrize("late", [False, True])
def test_gradients_that_are_summed_over_ranks(ranks4: RankPool, late: bool) -> None:
    """TorchRec reads the switch in every backward, so it may come after the construction."""
    for cell in (EXACT, HOT):
        # Gradients, and so their roundings, are four times as large as elsewhere.
        assert max(ranks4.run(undivided, cell, late)) < 4 * ROUNDING
