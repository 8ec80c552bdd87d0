"""`accumulate`: several batches per rank train the same as one large batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

import torchrec_2dsp as tdsp
from tests.support.loops import logged
from tests.support.models import HOT_ROWS, build
from tests.support.oracle import batch_of, local_loss, trained_oracle
from tests.support.parity import (
    ONE,
    TOLERANCE,
    TWO,
    Cell,
    Gap,
    compare,
    make_optimizer,
    make_oracle,
    oracle_of,
    shard,
)
from tests.support.ranks import RankPool, error_text
from torchrec_2dsp._compat.ddp import reduce_late
from torchrec_2dsp._compat.fbgemm import iteration_of
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.errors import ConfigError, SyncError
from torchrec_2dsp.replicas.sync_action import SyncReason
from torchrec_2dsp.shard.parted import sharded_tables

STEPS = 5
CELLS = [
    Cell(ONE, "table_wise"),
    Cell(ONE, "row_wise", exchange="row", owners="hash", hot_rows=HOT_ROWS),
    Cell(ONE, "row_wise", variable=True),
    Cell(ONE, "data_parallel"),
    Cell(TWO, "row_wise", stock_wrapper=True),
]


def make_model(cell: Cell, model: Any = None) -> DistributedModelParallel:
    """Shard a model that can accumulate."""
    return shard(replace(cell, accumulates=True), model=model)


def train(rank: int, world_size: int, cell: Cell, num_batches: int) -> tuple[Gap, list[int]]:
    """Return the gap to the oracle, and the bytes in the last step's all-reduces."""
    parallel = make_model(cell)
    optimizer = make_optimizer(parallel)
    sizes = (6,) * (world_size * num_batches)
    drawn = (cell.seed, sizes, cell.max_length)
    oracle, expected = trained_oracle(oracle_of(cell), *drawn, STEPS, cell.variable)
    loss_gap, summed = 0.0, list[int]()
    for step in range(STEPS):
        batches = [
            (place, batch_of(cell.spec, *drawn, step, cell.variable, rank=place))
            for place in range(rank * num_batches, (rank + 1) * num_batches)
        ]
        optimizer.zero_grad()
        with count_collectives() as seen:
            for place, batch in tdsp.accumulate(parallel, batches):
                loss = local_loss(parallel(batch))
                (loss / num_batches).backward()
                wanted = expected[step][place]
                loss_gap = max(loss_gap, abs(loss.item() - wanted) / (1 + wanted))
        optimizer.step()
        summed = [record.num_bytes for record in seen.records if record.op == "all_reduce"]
    for part in sharded_tables(parallel):
        part.sync_point.reach(SyncReason.READ)
        # FBGEMM counts steps for some optimizers only.
        assert {iteration_of(tbe) for tbe in part.tbes()} <= {0, STEPS}
    return compare(parallel, oracle, loss_gap), summed


@pytest.mark.dealt
@pytest.mark.parametrize("num_batches", [1, 4])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_weights_are_those_of_one_large_batch(
    ranks4: RankPool, cell: Cell, num_batches: int
) -> None:
    for gap, summed in ranks4.run(train, cell, num_batches):
        assert gap.num_values > 0 or cell.sharding == "table_wise"
        assert gap.worst < 3 * TOLERANCE, gap
        # Dense gradients are added up once.
        dense = 1 + (cell.sharding == "data_parallel")
        assert len(summed) >= dense
        if cell.exchange == "pooled" and cell.sync == tdsp.GradientSync():
            # Signals have 8 bytes: one for each batch's lookup, and one at the beginning.
            assert summed.count(8) <= num_batches + 1
            assert len(summed) - summed.count(8) < 2 * dense


def without_last(rank: int, world_size: int, cell: Cell, leaves_by: str) -> tuple[Gap, str]:
    """Skip each last batch; return the gap to the oracle, and a sync's error after a break."""
    parallel: Any = make_model(cell)
    oracle = make_oracle(cell)
    optimizer, sizes, error = make_optimizer(parallel), (6,) * world_size, ""
    for step in range(4):
        batches = [
            [batch_of(cell.spec, 0, sizes, 4, 3 * step + place, rank=other) for place in range(3)]
            for other in range(world_size)
        ]
        optimizer.zero_grad()
        for number, batch in enumerate(tdsp.accumulate(parallel, batches[rank])):
            if number == 2 and leaves_by != "no backward":
                if leaves_by == "break" and step == 3:
                    break
                continue
            loss = local_loss(parallel(batch)) / 2
            if number < 2:
                loss.backward()
        if leaves_by == "break" and step == 3:
            error = error_text(parallel.sync, SyncError)
            optimizer.zero_grad()
            continue
        optimizer.step()
        oracle.step([batch for own in batches for batch in own[:2]])
    return compare(parallel, oracle), error


@pytest.mark.parametrize("cell", [Cell(ONE, exchange="row"), Cell(TWO)], ids=str)
@pytest.mark.parametrize("leaves_by", ["continue", "no backward"])
def test_dense_gradients_are_added_up_without_a_last_backward(
    ranks4: RankPool, cell: Cell, leaves_by: str
) -> None:
    for gap, _ in ranks4.run(without_last, cell, leaves_by):
        assert gap.num_values > 0
        assert gap.worst < TOLERANCE, gap


def reduced_late(rank: int, world_size: int) -> tuple[float, float]:
    """Return a gradient that DDP reduces, and one that it ignores."""
    module = nn.ModuleDict({"reduced": nn.Linear(1, 1), "ignored": nn.Linear(1, 1)})
    ignored = [f"ignored.{name}" for name in ("weight", "bias")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    ddp = DistributedDataParallel(module)
    gradients = [torch.full_like(param, rank) for param in module.parameters()]
    for param, gradient in zip(module.parameters(), gradients, strict=True):
        param.grad = gradient
    reduce_late(ddp)
    return gradients[0].sum().item(), gradients[-1].sum().item()


def test_parameters_that_ddp_ignores_keep_their_own_gradients(ranks2: RankPool) -> None:
    assert ranks2.run(reduced_late) == [(0.5, 0.0), (0.5, 1.0)]


def test_a_step_after_a_break_is_refused(ranks4: RankPool) -> None:
    for _, error in ranks4.run(without_last, Cell(ONE, exchange="row"), "break"):
        assert error.startswith("accumulate() was left before its last backward")


def misuse(rank: int, world_size: int) -> list[str]:
    """Return the errors for invalid calls."""
    cell = Cell(ONE, "row_wise")
    batch = batch_of(cell.spec, 0, (6,) * 4, 4, 0, rank=rank)
    fused, model = shard(cell), make_model(cell)
    stock = DistributedModelParallel(build(cell.spec), device=torch.device("cpu"))

    def read_between() -> None:
        for number, given in enumerate(tdsp.accumulate(model, [batch, batch])):
            local_loss(model(given)).backward()
            if number == 0:
                model.state_dict()

    def leave_and_begin() -> str:
        left = iter(tdsp.accumulate(model, [batch, batch]))
        local_loss(model(next(left))).backward()
        message = error_text(lambda: list(tdsp.accumulate(model, [batch])), ConfigError)
        left.close()  # type: ignore[attr-defined]
        return message

    messages = [
        error_text(lambda: list(tdsp.accumulate(fused, [batch])), ConfigError),
        error_text(lambda: list(tdsp.accumulate(stock, [batch])), ConfigError),
        error_text(lambda: list(tdsp.accumulate(model, [batch] * (1 + rank % 2))), ConfigError),
        error_text(lambda: list(tdsp.accumulate(model, [])), ConfigError),
        leave_and_begin(),
        error_text(read_between, SyncError),
    ]
    # What an error has left behind can be trained by, and read.
    local_loss(model(batch)).backward()
    model.state_dict()
    return messages


def test_what_cannot_be_is_said(ranks4: RankPool) -> None:
    texts = (
        "make their sharder with accumulates=True",
        "ebc' (ShardedEmbeddingBagCollection) updates its tables in the backward of each batch",
        "the number of batches of accumulate() differs between ranks",
        "accumulate() got no batches, so there is nothing to update by",
        "another accumulate() of this model isn't over",
        "between the batches of accumulate()",
    )
    (messages,) = {tuple(of_rank) for of_rank in ranks4.run(misuse)}
    for text, message in zip(texts, messages, strict=True):
        assert text in message


def summed_by_hand(rank: int, world_size: int, cell: Cell, steps_between: bool) -> list[str]:
    """Return the warnings about two backwards before each of two steps."""
    parallel = shard(cell)
    optimizer = make_optimizer(parallel)
    with logged() as messages:
        for step in range(2):
            optimizer.zero_grad()
            for part in range(2):
                batch = batch_of(
                    cell.spec, cell.seed, (6,) * world_size, 4, 2 * step + part, rank=rank
                )
                local_loss(parallel(batch)).backward()
                if steps_between:
                    optimizer.step()
            optimizer.step()
    return [message for message in messages if "two backwards" in message]


@pytest.mark.parametrize("cell", [Cell(ONE), Cell(ONE, exchange="row"), Cell(TWO)], ids=str)
def test_sums_by_hand_are_warned_of(ranks4: RankPool, cell: Cell) -> None:
    first, *others = ranks4.run(summed_by_hand, cell, False)
    (message,) = first
    assert message.startswith("tables are updated in each of two backwards without a step")
    assert others == [[]] * 3
    assert not any(ranks4.run(summed_by_hand, cell, True))
    linear = replace(cell, optimizer="sgd")
    assert not any(ranks4.run(summed_by_hand, linear, False))
