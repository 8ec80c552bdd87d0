"""Data-parallel tables train by the tables' optimizer, whatever runs the dense part."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import torchrec_2dsp as tdsp
from tests.support.loops import plain_loop, shard
from tests.support.models import ModelSpec, TableSpec, build, make_batch, tables_of
from tests.support.oracle import batches_of, local_loss
from tests.support.parity import (
    EPS,
    LR,
    TOLERANCE,
    Cell,
    compare,
    make_optimizer,
    make_oracle,
    shards_of,
)
from tests.support.ranks import RankPool, error_text
from tests.support.trips import full_state
from torchrec_2dsp.comms.counting import count_collectives

pytestmark = pytest.mark.dealt_file

COPIED = Cell(tdsp.Mesh2D(2, 2), "data_parallel")
STEPS = 4

Loop = Callable[[Any, Any, int, int], None]
"""Trains a model by an optimizer for one step of a rank."""


def plain(model: Any, optimizer: Any, step: int, rank: int) -> None:
    optimizer.zero_grad()
    local_loss(model(make_batch(ModelSpec(), 10 * step + rank))).backward()
    optimizer.step()


def without_zero_grad(model: Any, optimizer: Any, step: int, rank: int) -> None:
    local_loss(model(make_batch(ModelSpec(), 10 * step + rank))).backward()
    model.sync()
    for param in model.parameters():
        param.grad = None
    optimizer.step()
    model.sync_now()


def without_backward(model: Any, optimizer: Any, step: int, rank: int) -> None:
    """Look up a batch and drop it; clip the gradients of `parameters()`."""
    optimizer.zero_grad()
    model(make_batch(ModelSpec(), 77 + rank))
    local_loss(model(make_batch(ModelSpec(), 10 * step + rank))).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def twice_backward(model: Any, optimizer: Any, step: int, rank: int) -> None:
    """Update tables in each backward, as TorchRec does."""
    optimizer.zero_grad()
    for part in range(2):
        local_loss(model(make_batch(ModelSpec(), 10 * step + rank + 100 * part))).backward()
    optimizer.step()


def accumulating(model: Any, optimizer: Any, step: int, rank: int) -> None:
    optimizer.zero_grad()
    for batch in tdsp.accumulate(model, [make_batch(ModelSpec(), 10 * step + rank)] * 3):
        local_loss(model(batch)).backward()
    optimizer.step()


def tables_after(cell: Cell, rank: int, loop: Loop, wrapper: Any) -> dict[str, torch.Tensor]:
    """Return tables and moments, whole, after a few steps."""
    model = shard(cell, data_parallel_wrapper=wrapper)
    optimizer = make_optimizer(model, lr=0.01)
    for step in range(STEPS):
        loop(model, optimizer, step, rank)
    assert [name for name, _ in in_backward_optimizer_filter(model.named_parameters(), True)]
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    assert not [name for name in dense if "ebc" in name]
    tables = {name: value for name, value in model.named_parameters() if "ebc" in name}
    assert len(tables) == 3
    assert all(value.grad is None for value in tables.values())
    del model.module.over, optimizer
    return full_state(model)


def gap_to_sharded(rank: int, world_size: int, loop: Loop, shards_dense: bool) -> float:
    """Return the gap between data-parallel and table-wise tables in the same loop."""
    wrapper = tdsp.FullyShardedDense() if shards_dense else None
    copied, sharded = (
        tables_after(replace(COPIED, sharding=kind), rank, loop, wrapper)
        for kind in ("data_parallel", "table_wise")
    )
    assert copied.keys() == sharded.keys()
    assert len(copied) == 6
    return max((copied[name] - sharded[name]).abs().max().item() for name in copied)


@pytest.mark.parametrize(
    "loop", [plain, without_zero_grad, without_backward, twice_backward, accumulating]
)
def test_any_loop_trains_them_as_sharded_tables(ranks4: RankPool, loop: Loop) -> None:
    assert max(ranks4.run(gap_to_sharded, loop, False)) < 3 * TOLERANCE


def test_they_train_as_sharded_tables_beside_sharded_layers(ranks4: RankPool) -> None:
    # Both runs' dense parts round alike, except for their inputs.
    assert max(ranks4.run(gap_to_sharded, plain, True)) < 1e-4


def set_rate(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def gap_with_schedule(rank: int, world_size: int, cell: Cell, way: str) -> float:
    """Train with a changing learning rate, and an optimizer given by ``way``."""
    model, sharder = build(cell.spec), None
    if way == "in backward":
        options = {"lr": LR, "eps": EPS}
        _apply_optimizer_in_backward(RowWiseAdagrad, tables_of(model).parameters(), options)
        sharder = tdsp.EmbeddingBagCollectionSharder2D()
    elif way == "moment-scaled":
        optimizer = tdsp.MomentScaledRowWiseAdaGrad(lr=LR, eps=EPS)
        sharder = tdsp.EmbeddingBagCollectionSharder2D(optimizer)
    parallel, oracle = shard(cell, sharder, model), make_oracle(cell)
    optimizer = make_optimizer(parallel)
    for step in range(STEPS):
        lr = LR / (step + 1)
        set_rate(optimizer, lr)
        oracle.lr = lr
        batches = batches_of(cell.spec, 0, (6,) * world_size, 4, step)
        plain_loop(parallel, optimizer, [batches[rank]])
        oracle.step(batches)
    return compare(parallel, oracle).worst


@pytest.mark.parametrize("way", ["sharder", "moment-scaled", "in backward"])
@pytest.mark.parametrize("sync", [tdsp.GradientSync(), tdsp.WeightSync()], ids=lambda s: type(s))
def test_schedules_reach_them(ranks4: RankPool, way: str, sync: Any) -> None:
    """Their moments are exact under any sync, so they need no moment scale."""
    cell = replace(COPIED, mesh=tdsp.Mesh2D(4, 1), sync=sync)
    assert max(ranks4.run(gap_with_schedule, cell, way)) < TOLERANCE


LARGE = ModelSpec((TableSpec("t0", 4_000, 8, ("f0",)), TableSpec("t1", 2_400, 16, ("f1", "f2"))))
EVERY_RANK = -1


def sent(rank: int, world_size: int, cell: Cell, idle: int) -> tuple[float, list[str], int]:
    """Return the gap to the oracle, the last step's collectives, and all steps' bytes."""
    parallel, oracle = shard(cell), make_oracle(cell)
    optimizer, operations = make_optimizer(parallel), []
    for step in range(2):
        batches = batches_of(cell.spec, 0, (6,) * world_size, 4, step)
        for number, batch in enumerate(batches):
            if idle in (number, EVERY_RANK):
                lengths = torch.zeros_like(batch.lengths())
                batches[number] = type(batch)(batch.keys(), batch.values()[:0], lengths=lengths)
        with count_collectives() as seen:
            plain_loop(parallel, optimizer, [batches[rank]])
        operations = [record.op for record in seen.records if record.num_bytes > 300]
        oracle.step(batches)
    assert isinstance(parallel, tdsp.ModelParallel2D)
    parallel.sync_now()
    return compare(parallel, oracle).worst, operations, parallel.sync_total.num_bytes


@pytest.mark.parametrize("idle", [EVERY_RANK, 2, 9])
def test_few_rows_travel_by_row_and_many_as_tables(ranks4: RankPool, idle: int) -> None:
    for spec in (LARGE, ModelSpec()):
        cell = replace(COPIED, spec=spec)
        table_bytes = sum(4 * table.num_rows * table.dim for table in spec.tables)
        for gap, operations, num_bytes in ranks4.run(sent, cell, idle):
            assert gap < TOLERANCE
            if spec is LARGE:
                assert "all_reduce" not in operations
                assert num_bytes < 0.1 * table_bytes
            elif idle != EVERY_RANK:
                assert "all_reduce" in operations
                assert num_bytes >= 2 * 1.5 * table_bytes


def error_of(rank: int, world_size: int, what: str) -> str:
    """Return the error when one rank acts differently from the others."""
    sync = tdsp.GradientSync(drift_every=1)
    parallel = shard(replace(COPIED, sync=sync))
    optimizer = make_optimizer(parallel)
    if rank == 1 and what == "rate":
        set_rate(optimizer, 0.5)
    if rank == 1 and what == "weight":
        shards_of(parallel)[0].tensors["weight"].data[3] += 1
    optimizer.zero_grad()
    step = partial(without_zero_grad, parallel, optimizer, 0, rank)
    return error_text(step, tdsp.errors.SyncError)


@pytest.mark.parametrize(
    ("what", "text"), [("rate", "different learning rates"), ("weight", "'t0'")]
)
def test_copies_that_would_differ_are_an_error_on_all_ranks(
    ranks4: RankPool, what: str, text: str
) -> None:
    errors = ranks4.run(error_of, what)
    assert all(text in error for error in errors), errors
