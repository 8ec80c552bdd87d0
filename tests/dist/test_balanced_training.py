"""Training on balanced batches is that of the global batch, on ranks with any shares of it."""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import largest_gap, shard_loss_model, snapshot
from tests.support.models import ModelSpec, make_batch, tables_of
from tests.support.oracle import Oracle
from tests.support.parity import LR, TOLERANCE, Cell, compare, make_optimizer, make_parallel
from tests.support.rank_device import rank_device
from tests.support.ranks import RankPool

pytestmark = pytest.mark.dealt_file


class MeanOracle(Oracle):
    """Trains on the mean loss of all samples of a step."""

    def mean_step(self, batches: list[KeyedJaggedTensor]) -> float:
        """One update; the mean loss before it."""
        self.model.zero_grad()
        scores = torch.cat([self.model(batch) for batch in batches if batch.stride()])
        loss = (scores - 1.0).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for param in self.model.over.parameters():
                param -= self.lr * param.grad  # type: ignore[operator]
            for name, table in tables_of(self.model).items():
                self._update_(name, cast(Any, table.weight).grad)
        return loss.item()


TRAINED = [[6, 6, 6, 6], [6, 6, 6, 6], [7, 3, 6, 2], [6, 6, 0, 6], [3, 0, 0, 4]]
CELLS = [
    Cell(tdsp.Mesh2D(1, 4), "table_wise"),
    Cell(tdsp.Mesh2D(1, 4), "row_wise", optimizer="sgd", stock_wrapper=True),
    Cell(tdsp.Mesh2D(1, 4), "row_wise", exchange="row"),
    Cell(tdsp.Mesh2D(2, 2), "row_wise"),
    Cell(tdsp.Mesh2D(2, 2), "table_wise", exchange="nonempty"),
]
WAYS: dict[str, dict[str, Any]] = {
    "equal": {},
    "speeds": {"rank_speeds": [1.0, 2.0, 1.0, 0.5], "shared_ids": 0.3},
}


def stream_of(rank: int, spec: ModelSpec) -> list[KeyedJaggedTensor]:
    last = max(step for step, sizes in enumerate(TRAINED) if sizes[rank])
    return [
        make_batch(spec, seed=10 * step + rank, batch_size=sizes[rank])
        for step, sizes in enumerate(TRAINED[: last + 1])
    ]


def train_cells(rank: int, world_size: int) -> list[tuple[str, float, float, int, list[int]]]:
    """For each cell and way: the largest gap of a loss and of a weight from the oracle."""
    gaps = []
    for cell in CELLS:
        oracle = MeanOracle(cell.spec, optimizer=cell.optimizer, lr=LR, eps=cell.eps)
        streams = [stream_of(owner, cell.spec) for owner in range(world_size)]
        expected = []
        for step in range(len(TRAINED)):
            expected.append(oracle.mean_step([s[step] for s in streams if step < len(s)]))
        for name, way in WAYS.items():
            parallel = make_parallel(cell, world_size, 4)
            optimizer = make_optimizer(parallel)
            loss_gap, counts = 0.0, []
            balanced = tdsp.BalancedBatches(streams[rank], **way)
            for step, batch in enumerate(balanced):
                optimizer.zero_grad()
                loss = (parallel(batch) - 1.0).pow(2).mean() * balanced.loss_weight
                loss.backward()
                if isinstance(parallel, tdsp.ModelParallel2D):
                    parallel.sync()
                optimizer.step()
                mean = loss.detach() / world_size
                dist.all_reduce(mean)
                loss_gap = max(loss_gap, abs(mean.item() - expected[step]))
                counts.append(batch.stride())
            assert len(counts) == len(TRAINED)
            gap = compare(parallel, oracle)
            gaps.append((f"{cell} {name}", loss_gap, gap.worst, balanced.report.num_moved, counts))
    return gaps


def test_training_is_that_of_the_global_batch(ranks4: RankPool) -> None:
    by_rank = ranks4.run(train_cells)
    for cases in zip(*by_rank, strict=True):
        for name, loss_gap, weight_gap, num_moved, _ in cases:
            # Sums of the same float32 numbers in another order, through five steps.
            assert loss_gap < 2 * TOLERANCE, name
            assert weight_gap < 2 * TOLERANCE, name
            assert num_moved > 10
        if cases[0][0].endswith("speeds"):
            assert cases[1][4][0] > cases[3][4][0] > 0


def lose_weights(rank: int, world_size: int) -> float:
    """How far training without loss weights is from the global batch, with unequal counts."""
    cell = CELLS[0]
    oracle = MeanOracle(cell.spec, optimizer=cell.optimizer, lr=LR, eps=cell.eps)
    streams = [stream_of(owner, cell.spec) for owner in range(world_size)]
    oracle.mean_step([stream[0] for stream in streams])
    parallel = make_parallel(cell, world_size, 4)
    optimizer = make_optimizer(parallel)
    balanced = tdsp.BalancedBatches(streams[rank][:1], rank_speeds=[1.0, 2.0, 1.0, 0.5])
    for batch in balanced:
        (parallel(batch) - 1.0).pow(2).mean().backward()
        optimizer.step()
    return compare(parallel, oracle).weight


def test_without_loss_weights_it_is_not(ranks4: RankPool) -> None:
    assert max(ranks4.run(lose_weights)) > 100 * TOLERANCE


def pipe(rank: int, world_size: int) -> float:
    """How far TorchRec's pipeline ends from a plain loop over balanced batches."""
    cell = Cell(tdsp.Mesh2D(1, world_size))
    ends = []
    for is_piped in (False, True):
        parallel = shard_loss_model(cell)
        optimizer = make_optimizer(parallel)
        batches = [make_batch(cell.spec, seed=10 * step + rank, batch_size=6) for step in range(4)]
        balanced = tdsp.BalancedBatches(batches)
        if is_piped:
            pipeline: Any = TrainPipelineSparseDist(parallel, optimizer, rank_device())
            for _ in range(4):
                pipeline.progress(balanced)
            with pytest.raises(StopIteration):
                pipeline.progress(balanced)
        else:
            for batch in balanced:
                optimizer.zero_grad()
                parallel(batch)[0].backward()
                optimizer.step()
        ends.append(snapshot(parallel))
    return largest_gap(*ends)


def test_pipelines_take_balanced_batches(ranks2: RankPool) -> None:
    assert ranks2.run(pipe) == [0.0, 0.0]
