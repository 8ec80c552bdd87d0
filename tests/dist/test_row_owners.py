"""Rows that are spread over their owners: nothing changes but who does the work."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import (
    all_to_all_bytes,
    make_stream,
    plain_loop,
    shard,
)
from tests.support.models import HOT_ROWS, ModelSpec, TableSpec, build
from tests.support.parity import (
    ONE,
    TWO,
    Cell,
    compare,
    group_plan,
    local_loss,
    make_optimizer,
    make_oracle,
    make_sharder,
)
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.plan.serialize import from_json, to_json
from torchrec_2dsp.programs.data.draws import Zipf

pytestmark = pytest.mark.dealt_file

TOLERANCE = 1e-6
HASH = Cell(ONE, exchange="row", owners="hash")


def read_at_every_moment(rank: int, world_size: int, cell: Cell) -> float:
    """Read the state at different moments while training; return the final gap to the oracle."""
    parallel = shard(cell)
    assert isinstance(parallel, tdsp.ModelParallel2D)
    optimizer, oracle = make_optimizer(parallel), make_oracle(cell)
    for step, batches in enumerate(make_stream(cell, 8)):
        reads: list[Callable[[], object]] = [lambda: None] * 4
        reads[step % 4] = parallel.fused_optimizer.state_dict if step % 2 else parallel.state_dict
        optimizer.zero_grad()
        reads[0]()
        loss = local_loss(parallel(batches[rank]))
        reads[1]()
        loss.backward()
        reads[2]()
        optimizer.step()
        with torch.no_grad():
            parallel(batches[rank])
        reads[3]()
        if step in (1, 4):
            parallel.broadcast_replicas()
        if step in (2, 5):
            parallel.load_state_dict(cast(Any, {}), strict=False)
        oracle.step(batches)
    return compare(parallel, oracle).worst


@pytest.mark.parametrize("mesh", [ONE, TWO], ids=str)
def test_the_state_may_be_read_at_any_moment(ranks4: RankPool, mesh: tdsp.Mesh2D) -> None:
    """Also between a forward and its backward, which update the rows where they are then."""
    cell = replace(HASH, mesh=mesh, hot_rows=HOT_ROWS)
    assert max(ranks4.run(read_at_every_moment, cell)) <= TOLERANCE


def write_by_hand(rank: int, world_size: int, cell: Cell) -> tuple[float, torch.Tensor]:
    """Read shards directly after some training steps, then overwrite them in the first group only.

    Returns:
        The gap between read weights and the oracle's, and a lookup's result after each row was set
        to its number.
    """
    parallel = shard(cell)
    assert isinstance(parallel, tdsp.ModelParallel2D)
    optimizer, oracle = make_optimizer(parallel), make_oracle(cell)
    stream = make_stream(cell, 3)
    plain_loop(parallel, optimizer, [batches[rank] for batches in stream])
    for batches in stream:
        oracle.step(batches)
    parallel.sync_now()
    (part,) = parallel.sharded_tables()
    gap = 0.0
    for kernel in part.kernels():
        for entry in kernel.shards():
            weight = entry.tensors["weight"]
            expected = oracle.weights[entry.table][entry.row : entry.row + entry.num_rows]
            gap = max(gap, (weight - expected).abs().max().item())
            numbers = torch.arange(entry.row, entry.row + entry.num_rows).float()
            weight.copy_((numbers if rank < 2 else torch.zeros_like(numbers))[:, None])
    parallel.broadcast_replicas()
    ids = KeyedJaggedTensor.from_lengths_sync(
        keys=["f0"], values=torch.arange(40), lengths=torch.ones(40).int()
    )
    with torch.no_grad():
        return gap, part.module(ids).wait().values()[:, 0]


def test_tables_may_be_written_by_hand(ranks4: RankPool) -> None:
    spec = ModelSpec((TableSpec("t0", 40, 8, ("f0",)),))
    contiguous = tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS)
    cell = replace(HASH, mesh=contiguous, spec=spec, hot_rows=HOT_ROWS[:1])
    for gap, actual in ranks4.run(write_by_hand, cell):
        assert gap <= TOLERANCE
        assert actual.tolist() == list(range(40))


SORTED = ModelSpec((TableSpec("t0", 4_000, 8, ("f0",)),))


def rows_sent(rank: int, world_size: int, cell: Cell) -> tuple[float, int]:
    """Return the row bytes that this rank sends in a step, ids by frequency, and the loss."""
    ranks = Zipf(4_000, 1.05).sample_ranks(7, torch.arange(1_000).numpy() + 1_000 * rank)
    batch = KeyedJaggedTensor.from_lengths_sync(
        keys=["f0"], values=torch.from_numpy(ranks - 1), lengths=torch.ones(1_000).int()
    )
    parallel = shard(cell)
    optimizer = make_optimizer(parallel)
    plain_loop(parallel, optimizer, [batch])
    with count_collectives() as seen:
        (loss,) = plain_loop(parallel, optimizer, [batch])
    _, _, _, rows, _ = all_to_all_bytes(seen)
    return loss, rows


def test_owners_of_sorted_ids_do_equal_work(ranks4: RankPool) -> None:
    losses, blocks = zip(
        *ranks4.run(rows_sent, replace(HASH, spec=SORTED, owners="block")), strict=True
    )
    same, spread = zip(*ranks4.run(rows_sent, replace(HASH, spec=SORTED)), strict=True)
    assert same == pytest.approx(losses, rel=1e-5)
    assert max(blocks) > 2.5 * sum(blocks) / 4
    assert max(spread) < 1.1 * sum(spread) / 4
    assert sum(spread) == sum(blocks)


def test_a_plan_file_keeps_it() -> None:
    cell = Cell(ONE)
    plan = group_plan(cell, build(cell.spec), make_sharder(cell), 4)
    spread = tdsp.pin(plan, "t0", exchange="row", owners="hash")
    assert from_json(to_json(spread)) == spread != tdsp.pin(plan, "t0", exchange="row")
