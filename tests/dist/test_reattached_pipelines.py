"""Pipelines that are detached and go on: losses and weights are those of a run without a pause."""

from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.runtime_forwards import (
    EmbeddingPipelinedForward,
    InSyncEmbeddingPipelinedForward,
    PipelinedForward,
)

import torchrec_2dsp as tdsp
from tests.support.devices import rank_device
from tests.support.loops import OTHER_BATCH, largest_gap, snapshot
from tests.support.models import SEQUENCES, ModelSpec
from tests.support.oracle import batches_of
from tests.support.parity import Cell, make_optimizer
from tests.support.prefetching import sharded
from tests.support.ranks import RankPool, error_of
from tests.support.slices import Deal
from torchrec_2dsp._compat.shardings import distributed_ahead

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
SEQUENCE_CELLS = [
    Cell(tdsp.Mesh2D(1, 2), sharding, spec=SEQUENCES, exchange=exchange, batch_sizes=(6, 2))
    for sharding, exchange in (
        ("row_wise", "pooled"),
        ("table_wise", "pooled"),
        ("row_wise", "row"),
    )
]
CELLS = [
    *BAGS,
    *SEQUENCE_CELLS,
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


def errors_of_a_direct_lookup(rank: int, world_size: int, cell: Cell, kind: type[Any]) -> list[str]:
    """Evaluate other batches, and the pipeline's own, while a pipeline is attached."""
    parallel = sharded(cell)
    pipeline = kind(parallel, make_optimizer(parallel), rank_device())
    batches = [
        batches_of(cell.spec, cell.seed, cell.batch_sizes, cell.max_length, step)[rank]
        for step in range(STEPS)
    ]
    pipeline.progress(iter(batches))
    with torch.no_grad():
        return [error_of(partial(parallel, batches[step])) for step in (3, 1)]


def test_a_batch_past_the_pipeline_is_refused(ranks2: RankPool, dealt: Deal) -> None:
    processed = replace(BAGS[0], spec=ModelSpec(weighted=True, positions="collection"))
    cells = (BAGS[0], BAGS[4], SEQUENCE_CELLS[2], CELLS[-1], processed)
    for cell, kind in dealt(list(product(cells, PIPELINES))):
        for other, next_one in ranks2.run(errors_of_a_direct_lookup, cell, kind):
            assert OTHER_BATCH in other, f"{cell} {kind.__name__}"
            assert not next_one


@pytest.mark.parametrize(
    "kind", [PipelinedForward, EmbeddingPipelinedForward, InSyncEmbeddingPipelinedForward]
)
def test_pipelines_that_need_a_gpu_know_the_next_batch_as_well(kind: Any) -> None:
    context = SimpleNamespace(module_contexts={"ebc": "its context"})
    module: Any = SimpleNamespace(forward=kind("ebc", None, None, context))
    assert distributed_ahead(module) == "its context"
