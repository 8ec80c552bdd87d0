"""The figures in a `SyncReport`."""

import time

import torch

import torchrec_2dsp as tdsp
from tests.support.models import make_batch
from tests.support.oracle import local_loss
from tests.support.parity import Cell, local_world_size, make_parallel
from tests.support.ranks import RankPool

WHOLE = tdsp.WeightSync(rows=tdsp.SyncedRows.ALL)


def averaged(rank: int, world_size: int, cell: Cell) -> tuple[tdsp.SyncReport, list[int]]:
    """Return one averaging sync's report, and this rank's rows per shard."""
    parallel = make_parallel(cell, world_size, local_world_size())
    assert isinstance(parallel, tdsp.ModelParallel2D)
    local_loss(parallel(make_batch(cell.spec, rank))).backward()
    report = parallel.sync()
    assert parallel.sync() == tdsp.SyncReport()
    assert parallel.sync_total == report
    (module,) = parallel.sharded_tables()
    return report, [shard.num_rows for kernel in module.kernels() for shard in kernel.shards()]


def test_an_average_counts_each_row_once(ranks4: RankPool) -> None:
    """Rows count once, whatever their state: element-wise AdaGrad's is as large as weights."""
    cell = Cell(tdsp.Mesh2D(2, 2), "row_wise", optimizer="adagrad", sync=WHOLE)
    for report, rows in ranks4.run(averaged, cell):
        assert report.num_rows == sum(rows) > 0
        assert report.num_tensors == 2 * len(rows)
        dims = torch.tensor([table.dim for table in cell.spec.tables])
        values = int((torch.tensor(rows) * dims).sum())
        # A ring of two peers sends every value of weights and state once.
        assert report.num_bytes == 2 * 4 * values
        assert report.seconds > 0


PAUSE_S = 0.2


def travelling(rank: int, world_size: int, cell: Cell) -> tuple[tdsp.SyncReport, tdsp.SyncReport]:
    """Return reports of merges with gradients sent long before their rows were needed."""
    parallel = make_parallel(cell, world_size, local_world_size())
    assert isinstance(parallel, tdsp.ModelParallel2D)
    local_loss(parallel(make_batch(cell.spec, rank))).backward()
    assert parallel.sync() == tdsp.SyncReport()
    time.sleep(PAUSE_S)
    report = parallel.sync_now()
    local_loss(parallel(make_batch(cell.spec, rank))).backward()
    time.sleep(PAUSE_S)
    return report, parallel.sync_now()


def test_a_merge_tells_how_long_gradients_had_to_travel(ranks4: RankPool) -> None:
    cell = Cell(tdsp.Mesh2D(2, 2), "row_wise")
    for sent, unsent in ranks4.run(travelling, cell):
        assert sent.window_s >= PAUSE_S > sent.waited_s
        assert unsent.window_s < PAUSE_S, "nothing was sent before it was asked for"
        assert sent.waited_s < sent.seconds
