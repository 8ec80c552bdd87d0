"""Ids without a row raise on every rank, are dropped, or clamped; they never train a row."""

from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.devices import rank_device
from tests.support.loops import (
    PIPELINES,
    Tensors,
    largest_gap,
    make_stream,
    plain_loop,
    shard,
    shard_loss_model,
    sharded_tables,
    snapshot,
)
from tests.support.models import HOT_ROWS, SEQUENCES, ModelSpec, tables_of
from tests.support.oracle import local_loss
from tests.support.parity import TWO, Cell, make_optimizer
from tests.support.ranks import RankPool, error_of, error_text
from torchrec_2dsp._compat.tensors import take_gradient
from torchrec_2dsp.shard.stages import BatchNotes, StrayGradients

FAULTY_RANK = 2
CELLS = [
    Cell(TWO, "table_wise"),
    Cell(TWO, "row_wise", hot_rows=HOT_ROWS),
    Cell(tdsp.Mesh2D(1, 4), exchange="row", spec=ModelSpec(weighted=True)),
    Cell(TWO, exchange="row", spec=SEQUENCES),
    # In two parts, each of which checks the whole batch: t1 has its own mesh.
    Cell(TWO, in_world=("t1",)),
]
BAD = [-1, 24, 10**12]
"""For the features of t1, which has 24 rows."""


def with_id(batch: KeyedJaggedTensor, bad: int) -> tuple[KeyedJaggedTensor, int, int]:
    """Return the batch with ``bad`` as the last id of f1, the id's sample, and its place."""
    place = batch.offset_per_key()[batch.keys().index("f1") + 1] - 1
    values = batch.values().clone()
    values[place] = bad
    lengths = batch["f1"].lengths()
    sample = int(lengths.nonzero()[-1])
    changed = KeyedJaggedTensor(
        batch.keys(), values, batch.weights_or_none(), lengths=batch.lengths()
    )
    return changed, sample, place


def raising(rank: int, world_size: int, cell: Cell, bad: int) -> tuple[str, int, Tensors, Tensors]:
    """Return the error, its count, and the final states with and without a bad step in between."""
    stream, states = make_stream(cell, 3), []
    message, actual, sample = "", 0, -1
    for with_bad in (True, False):
        parallel = shard(cell)
        optimizer = make_optimizer(parallel)
        plain_loop(parallel, optimizer, [stream[0][rank]])
        batch = stream[1][rank]
        if rank == FAULTY_RANK:
            batch, sample, _ = with_id(batch, bad)
        if with_bad:
            message = error_text(partial(parallel, batch), tdsp.errors.InputError)
            actual = sum(part.num_bad_ids for part in sharded_tables(parallel))
        plain_loop(parallel, optimizer, [stream[2][rank]])
        states.append(snapshot(parallel))
    if rank == FAULTY_RANK:
        assert f"has the id {bad} in sample {sample} of this rank's batch" in message
    return message, actual, states[0], states[1]


@pytest.mark.dealt
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_all_ranks_raise_and_may_go_on(ranks4: RankPool, cell: Cell, bad: int) -> None:
    answers = ranks4.run(raising, cell, bad)
    (message,) = {message for message, *_ in answers}
    assert message.startswith(f"feature 'f1' has the id {bad} in sample ")
    assert "but its table 't1' has 24 rows (0 to 23); correct the data, or pass bad_ids=" in message
    assert message.endswith(f"(found on rank {FAULTY_RANK})")
    assert [actual for _, actual, *_ in answers] == [int(rank == FAULTY_RANK) for rank in range(4)]
    for _, _, with_bad, without in answers:
        assert largest_gap(with_bad, without) == 0.0


def raising_in_pipelines(rank: int, world_size: int, cell: Cell) -> tuple[list[str], float]:
    """Return each pipeline's error at the fourth batch, and the gap between their tables."""
    stream = [step[rank] for step in make_stream(cell, 6)]
    if rank == FAULTY_RANK:
        stream[3], *_ = with_id(stream[3], 24)
    answers, ends = [], []
    for kind in (PIPELINES["sparse dist"], tdsp.TrainPipelineRowPrefetch):
        parallel = shard_loss_model(cell)
        pipeline = kind(parallel, make_optimizer(parallel), rank_device())
        batches = iter(stream)
        for _ in range(3):
            pipeline.progress(batches)
        answers.append(error_text(partial(pipeline.progress, batches), tdsp.errors.InputError))
        ends.append(snapshot(parallel))
    return answers, largest_gap(*ends)


@pytest.mark.parametrize("cell", CELLS[1:3], ids=str)
def test_pipelines_stop_at_the_batch(ranks4: RankPool, cell: Cell) -> None:
    """This includes a pipeline that sends a batch's rows before it looks them up."""
    by_rank = ranks4.run(raising_in_pipelines, cell)
    (message,) = {answer for answers, _ in by_rank for answer in answers}
    assert message.startswith("feature 'f1' has the id 24")
    assert [gap for _, gap in by_rank] == [0.0] * 4


def test_an_unknown_policy_is_told() -> None:
    with pytest.raises(
        tdsp.errors.ConfigError, match="bad_ids='ignore' is unknown; use one of 'raise'"
    ):
        tdsp.EmbeddingBagCollectionSharder2D(bad_ids="ignore")


def after_short_ids(rank: int, world_size: int) -> str:
    """Return the error for an id that would be row 5 in the first batch's type."""
    parallel, (first, second) = shard(CELLS[0]), make_stream(CELLS[0], 2)
    short = first[rank]
    parallel(KeyedJaggedTensor(short.keys(), short.values().int(), lengths=short.lengths()))
    batch = second[rank]
    if rank == FAULTY_RANK:
        batch, *_ = with_id(batch, 2**40 + 5)
    return error_text(lambda: parallel(batch), tdsp.errors.InputError)


def test_ids_are_checked_before_they_are_cast(ranks4: RankPool) -> None:
    for text in ranks4.run(after_short_ids):
        assert f"feature 'f1' has the id {2**40 + 5} in sample" in text


PAST_LOOKUPS = [
    Cell(TWO, "table_wise"),
    Cell(TWO, "row_wise", hot_rows=HOT_ROWS),
    Cell(TWO, "data_parallel"),
    Cell(TWO, "row_wise", stored_as="int8"),
    Cell(tdsp.Mesh2D(1, 4), exchange="row", spec=SEQUENCES),
]


def past_lookups(rank: int, world_size: int, cell: Cell) -> list[str]:
    """Return the errors in steps with penalties on a table: times zero, a real one, then none."""
    parallel: Any = shard(cell)
    optimizer, messages = make_optimizer(parallel), []

    def step(batch: KeyedJaggedTensor, factor: float | None) -> None:
        loss = local_loss(parallel(batch))
        if factor is not None:
            penalty = tables_of(parallel.module).get_parameter("t0.weight").pow(2).sum()
            loss = loss + factor * penalty
        loss.backward()
        optimizer.step()
        parallel.zero_grad()

    for batches, factor in zip(make_stream(cell, 5), (0.0, 0.1, None, None, None), strict=True):
        messages.append(error_of(partial(step, batches[rank], factor)))
    return messages


def test_a_table_in_a_kernels_buffer_is_watched_too() -> None:
    """FBGEMM keeps tables like this on GPUs: lookups need no gradient for the buffer."""
    buffer, tables = torch.rand(24), nn.ModuleDict({"t0": nn.Module(), "t1": nn.Module()})
    for number, table in enumerate(tables.values()):
        weight = TableBatchedEmbeddingSlice(buffer, 12 * number, 12 * number + 12, -1, 4)
        table.register_parameter("weight", weight)
    stage, (_, weight) = StrayGradients(tables, []), tables.parameters()
    errors = []
    for factor in (0.0, 0.1, None):
        if factor is not None:
            (factor * weight.pow(2).sum()).backward()
        notes = BatchNotes()
        stage.before_ids_travel(notes, cast(Any, None))
        errors.append(str(notes.error or ""))
    assert errors[1].startswith("table 't1' got a gradient past its lookup, which no optimizer")
    assert errors[::2] == ["", ""]
    # `zero_grad` would look for it at the buffer.
    assert take_gradient(weight) is None
    assert not buffer.requires_grad


@pytest.mark.parametrize("cell", PAST_LOOKUPS, ids=str)
def test_gradients_that_reach_tables_past_their_lookups(ranks4: RankPool, cell: Cell) -> None:
    for no_penalty, real, refused, *others in ranks4.run(past_lookups, cell):
        assert [no_penalty, real, *others] == [""] * 4
        assert refused.startswith("UnsupportedError: table 't0' got a gradient past its lookup, w")
