"""Pipelines that are detached and go on: losses and weights are those of a run without a pause."""

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import torchrec_2dsp as tdsp
from tests.support.devices import rank_device
from tests.support.loops import largest_gap, snapshot
from tests.support.models import SEQUENCES
from tests.support.oracle import batches_of
from tests.support.parity import Cell, make_optimizer
from tests.support.prefetching import sharded
from tests.support.ranks import RankPool
from tests.support.slices import Deal

STEPS = 5
PIPELINES = (TrainPipelineSparseDist, tdsp.TrainPipelineRowPrefetch)
BAGS = [
    Cell(tdsp.Mesh2D(1, 2), sharding, exchange=exchange, batch_sizes=sizes)
    for sharding, exchange in (
        ("row_wise", "pooled"),
        ("row_wise", "nonempty"),
        ("row_wise", "row"),
        ("table_wise", "pooled"),
        ("column_wise", "nonempty"),
        ("grid_shard", "pooled"),
    )
    for sizes in ((6, 6), (6, 2))
]
SEQUENCES = [
    Cell(tdsp.Mesh2D(1, 2), sharding, spec=SEQUENCES, exchange=exchange, batch_sizes=(6, 2))
    for sharding, exchange in (
        ("row_wise", "pooled"),
        ("table_wise", "pooled"),
        ("row_wise", "row"),
    )
]
CELLS = [
    *BAGS,
    *SEQUENCES,
    replace(BAGS[0], mesh=tdsp.Mesh2D(2, 1)),
    replace(BAGS[1], hot_rows=(("t0", (0, 1, 5)),)),
]


def trained(rank: int, cell: Cell, kind: type[Any], is_paused: bool) -> tuple[list[float], Any]:
    """Losses and weights of a few steps, with or without a pause for an evaluation between."""
    parallel = sharded(cell)
    pipeline = kind(parallel, make_optimizer(parallel), rank_device())
    batches = [
        batches_of(cell.spec, cell.seed, cell.batch_sizes, cell.max_length, step)[rank]
        for step in range(STEPS)
    ]
    stream, losses = iter(batches), []
    for step in range(STEPS):
        losses.append(float(pipeline.progress(stream).sum()))
        if is_paused and step in (1, 2):
            model = pipeline.detach()
            with torch.no_grad():
                model.eval()
                model(batches[0])
                model.train()
    return losses, snapshot(parallel)


def gap_by_a_pause(rank: int, world_size: int, cell: Cell, kind: type[Any]) -> float:
    """Return the gap between runs with and without a pause."""
    losses, tensors = trained(rank, cell, kind, is_paused=True)
    expected_losses, expected_tensors = trained(rank, cell, kind, is_paused=False)
    assert losses == expected_losses
    return largest_gap(tensors, expected_tensors)


def test_a_pause_changes_nothing(ranks2: RankPool, dealt: Deal) -> None:
    for cell, kind in dealt(list(product(CELLS, PIPELINES))):
        assert ranks2.run(gap_by_a_pause, cell, kind) == [0.0, 0.0], f"{cell} {kind.__name__}"
