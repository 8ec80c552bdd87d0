"""Data-parallel tables of which the touched rows travel, against DDP's all-reduce."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_2dsp as tdsp
from tests.support.loops import shard
from tests.support.models import ModelSpec, TableSpec, build, make_batch
from tests.support.parity import Cell, local_loss
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives

pytestmark = pytest.mark.dealt_file

NUM_STEPS = 4
EVERY_RANK = -2
"""In place of an idle rank: all are."""
LARGE = (
    TableSpec("t0", 400, 8, ("f0",)),
    TableSpec("t1", 240, 16, ("f1", "f2")),
    TableSpec("t2", 330, 8, ("f3",)),
)
BAGS, SMALL = ModelSpec(LARGE), ModelSpec()


@dataclass
class Trained:
    """A rank's weights after all steps, and what was sent."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: list[Counter[str]] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)


def cell_of(world_size: int, spec: ModelSpec, *, stock: bool = False) -> Cell:
    return Cell(tdsp.Mesh2D(1, world_size), "data_parallel", spec, stock_wrapper=stock)


def batch_of(cell: Cell, step: int, rank: int, idle_rank: int) -> Any:
    """A batch of a rank; one of a rank that is idle has no ids at all."""
    batch = make_batch(
        cell.spec, seed=100 * step + rank, batch_size=100 if cell.spec == SMALL else 6
    )
    if idle_rank not in (rank, EVERY_RANK):
        return batch
    empty = torch.zeros_like(batch.lengths())
    return type(batch)(batch.keys(), batch.values()[:0], lengths=empty)


def train(rank: int, world_size: int, cell: Cell, is_by_rows: bool, idle_rank: int = -1) -> Trained:
    wrapper = tdsp.ThresholdedDataParallel(1.0) if is_by_rows else None
    model = shard(cell, model=build(cell.spec), data_parallel_wrapper=wrapper)
    # Once each: a table's weights have its own name, and that of all tables together.
    params = {
        id(value): value for _, value in in_backward_optimizer_filter(model.named_parameters())
    }
    optimizer = torch.optim.SGD(params.values(), lr=0.02)
    trained = Trained()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = local_loss(model(batch_of(cell, step, rank, idle_rank)))
        with count_collectives() as seen:
            loss.backward()
        trained.counts.append(Counter(seen.counts()))
        optimizer.step()
        trained.reports.append(wrapper and wrapper.total)
    trained.weights = {name: value.clone() for name, value in model.state_dict().items()}
    return trained


def check_against_ddp(pool: RankPool, cell: Cell, idle_rank: int = -1) -> list[Trained]:
    """Ranks must have the same bits, and DDP's numbers; two ranks add up in one order only."""
    by_ddp = pool.run(train, cell, False, idle_rank)[0]
    by_rows = pool.run(train, cell, True, idle_rank)
    for trained in by_rows:
        assert trained.weights.keys() == by_ddp.weights.keys()
        for name, value in trained.weights.items():
            assert torch.equal(value, by_rows[0].weights[name])
            tolerance = 0.0 if cell.mesh.world_size == 2 else 1e-6
            torch.testing.assert_close(value, by_ddp.weights[name], rtol=0, atol=tolerance)
    return by_rows


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
@pytest.mark.parametrize("spec", [BAGS, SMALL], ids=["large", "small"])
def test_weights_are_those_of_ddp(
    ranks2: RankPool, ranks4: RankPool, spec: ModelSpec, stock: bool
) -> None:
    check_against_ddp(ranks2, cell_of(2, spec, stock=stock))
    check_against_ddp(ranks4, cell_of(4, spec, stock=stock))


def test_ranks_without_rows_take_part(ranks4: RankPool) -> None:
    check_against_ddp(ranks4, cell_of(4, BAGS), idle_rank=2)


def test_a_batch_may_touch_no_row_on_any_rank(ranks2: RankPool) -> None:
    check_against_ddp(ranks2, cell_of(2, BAGS), idle_rank=EVERY_RANK)


def test_few_rows_are_gathered_and_many_are_reduced(ranks4: RankPool) -> None:
    by_ddp = ranks4.run(train, cell_of(4, BAGS), False)[0]
    few = ranks4.run(train, cell_of(4, BAGS), True)[0]
    many = ranks4.run(train, cell_of(4, SMALL), True)[0]
    # The tables' own all-reduce is an all-gather; the dense part's finds out where ranks are.
    assert few.counts[-1] - by_ddp.counts[-1] == {"all_gather_into_tensor": 2}
    assert many.counts[-1] - by_ddp.counts[-1] == {"all_reduce": 1, "all_gather_into_tensor": 1}
    assert few.reports[-1].num_bytes < 0.6 * few.reports[-1].dense_bytes
    assert many.reports[-1].num_bytes <= many.reports[-1].dense_bytes
