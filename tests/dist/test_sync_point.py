"""There is one sync per training backward, whoever asks first, and replicas are equal."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed import comm_ops
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loop_oracles import LoopOracle, TwiceModel, bag_loss, bag_oracle
from tests.support.loops import (
    Tensors,
    counting_syncs,
    largest_gap,
    make_stream,
    plain_loop,
    shard,
    sharded_tables,
    snapshot,
)
from tests.support.models import HOT_ROWS, SEQUENCES, build
from tests.support.oracle import Oracle, local_loss
from tests.support.parity import (
    LR,
    TWO,
    Cell,
    compare,
    make_optimizer,
    make_oracle,
    make_sharder,
    shards_of,
)
from tests.support.ranks import RankPool, error_text
from torchrec_2dsp.errors import SyncError, UnsupportedError
from torchrec_2dsp.replicas.sync_action import SyncReason

pytestmark = pytest.mark.dealt_file

EXACT = Cell(TWO)
HOT = Cell(TWO, sharding="table_wise", hot_rows=HOT_ROWS)
AVERAGED = Cell(TWO, optimizer="sgd", sync=tdsp.WeightSync())
SEQUENCE = Cell(TWO, spec=SEQUENCES)
BOTH = replace(HOT, optimizer="sgd", sync=tdsp.WeightSync())

ROUNDING = 1e-6
"""The oracle adds gradients in another order: some float32 roundings below 1."""


Trigger = Callable[[Any, KeyedJaggedTensor], object]


def evaluate(parallel: nn.Module, batch: KeyedJaggedTensor) -> None:
    with torch.no_grad():
        parallel(batch)


TRIGGERS: dict[str, Trigger] = {
    "sync": lambda parallel, batch: parallel.sync(),
    "step": lambda parallel, batch: parallel.fused_optimizer.step(),
    "zero_grad": lambda parallel, batch: parallel.fused_optimizer.zero_grad(),
    "lookup": lambda parallel, batch: parallel(batch),
    "evaluation": evaluate,
    "sync_now": lambda parallel, batch: parallel.sync_now(),
    "weights": lambda parallel, batch: parallel.state_dict(),
    "state": lambda parallel, batch: parallel.fused_optimizer.state_dict(),
    "hyper-parameters": lambda parallel, batch: parallel.fused_optimizer.update_hyper_parameters(
        {"lr": LR}
    ),
}


ENDS_OF_A_STEP = ("sync", "step", "zero_grad")


def each_trigger_first(
    rank: int, world_size: int, cell: Cell
) -> tuple[list[int], list[int], float]:
    """Use another trigger first in each step; return its syncs and the total by step, and a gap."""
    parallel = shard(cell)
    assert isinstance(parallel, tdsp.ModelParallel2D)
    optimizer, oracle = make_optimizer(parallel), make_oracle(cell)
    stream, counts, totals = make_stream(cell, len(TRIGGERS)), [], []
    with counting_syncs(parallel) as reports:
        for first, batches in zip(TRIGGERS.values(), stream, strict=True):
            optimizer.zero_grad()
            local_loss(parallel(batches[rank])).backward()
            before = len(reports)
            first(parallel, batches[rank])
            counts.append(len(reports) - before)
            for trigger in TRIGGERS.values():
                trigger(parallel, batches[rank])
            assert parallel.sync() == tdsp.SyncReport()
            optimizer.step()
            totals.append(len(reports) - before)
            oracle.step(batches)
        assert not any(part.sync_point.pending for part in sharded_tables(parallel))
    return counts, totals, compare(parallel, oracle).worst


@pytest.mark.parametrize(
    ("cell", "num_averages", "num_merges"),
    [(EXACT, 0, 1), (HOT, 0, 2), (AVERAGED, 1, 0), (BOTH, 1, 1), (SEQUENCE, 0, 1)],
    ids=str,
)
def test_one_sync_whoever_is_first(
    ranks4: RankPool, cell: Cell, num_averages: int, num_merges: int
) -> None:
    """Hot rows are merged besides the replicas' sync; a rank may hold no table.

    Merges go on until the rows are needed, so the end of a step doesn't run them.
    """
    answers = ranks4.run(each_trigger_first, cell)
    num_actions = num_averages + num_merges
    expected = [num_averages if name in ENDS_OF_A_STEP else num_actions for name in TRIGGERS]
    assert max(counts for counts, _, _ in answers) == expected
    for counts, totals, gap in answers:
        assert all(count <= most for count, most in zip(counts, expected, strict=True))
        assert set(totals) == {max(counts)}, "a second sync of one backward, or none"
        assert gap < ROUNDING


def read_in_inference_mode(rank: int, world_size: int, cell: Cell) -> float:
    """Read the state in inference mode, in which FBGEMM's CPU kernel can't look up."""
    parallel, oracle, (batches,) = shard(cell), make_oracle(cell), make_stream(cell, 1)
    local_loss(parallel(batches[rank])).backward()
    with torch.inference_mode():
        parallel.state_dict()
    make_optimizer(parallel).step()
    oracle.step(batches)
    return compare(parallel, oracle).worst


@pytest.mark.parametrize("cell", [EXACT, HOT], ids=str)
def test_the_state_can_be_read_in_inference_mode(ranks4: RankPool, cell: Cell) -> None:
    assert max(ranks4.run(read_in_inference_mode, cell)) < ROUNDING


def sync_now(rank: int, world_size: int, cell: Cell) -> tuple[tdsp.SyncReport, ...]:
    parallel = shard(cell)
    assert isinstance(parallel, tdsp.ModelParallel2D)
    idle = parallel.sync_now()
    local_loss(parallel(make_stream(cell, 1)[0][rank])).backward()
    due = parallel.sync()
    return idle, due, parallel.sync_now(), parallel.sync_now()


def test_sync_now_does_not_ask_the_policy(ranks4: RankPool) -> None:
    rarely = replace(AVERAGED, sync=tdsp.WeightSync(policy=tdsp.every(2)))
    for cell in (EXACT, rarely, replace(rarely, sync=tdsp.WeightSync(policy=tdsp.never()))):
        for idle, due, pending, again in ranks4.run(sync_now, cell):
            assert idle == due == again == tdsp.SyncReport()
            assert pending.num_rows > 0
            assert pending.num_bytes > 0
            assert pending.seconds > 0


def train_from_scratch(rank: int, world_size: int, cell: Cell, device: str) -> tuple[Tensors, ...]:
    """Return snapshots at the start and after two steps; ranks use different seeds."""
    torch.manual_seed(rank)
    parallel = shard(cell, model=build(cell.spec, seed=rank, device=device), load=False)
    start = snapshot(parallel)
    plain_loop(parallel, make_optimizer(parallel), [step[rank] for step in make_stream(cell, 2)])
    return start, snapshot(parallel)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("cell", [EXACT, HOT, BOTH, SEQUENCE], ids=str)
def test_replicas_are_equal_from_start_to_end(ranks4: RankPool, cell: Cell, device: str) -> None:
    answers = ranks4.run(train_from_scratch, cell, device)
    for rank, (start, end) in enumerate(answers):
        for peer in TWO.replica_peers(rank):
            assert largest_gap(start, answers[peer][0]) == 0.0
            assert largest_gap(end, answers[peer][1]) == 0.0
        assert largest_gap(start, end) > 0.0
        assert all(value.isfinite().all() for value in end.values())


def weights_kept(rank: int, world_size: int, cell: Cell, keep: bool) -> float:
    """Return the tables' distance from the first group's tables."""
    model, alone = build(cell.spec, seed=7), build(cell.spec, seed=7)
    sharder: Any = make_sharder(cell)
    if keep:
        sharder.keep_weights = True
    oracle = Oracle(cell.spec, optimizer=cell.optimizer, lr=LR, model=alone)
    torch.manual_seed(rank)
    return compare(shard(cell, sharder, model, load=False), oracle).weight


def test_weights_of_the_cpu_module_are_kept(ranks4: RankPool) -> None:
    assert ranks4.run(weights_kept, HOT, True) == [0.0] * 4
    assert ranks4.run(weights_kept, SEQUENCE, False) == [0.0] * 4
    # TorchRec drops the bags' ones, so that the first assertion is meaningful.
    assert min(ranks4.run(weights_kept, EXACT, False)) > 0.0


def broadcast(rank: int, world_size: int, cell: Cell) -> Tensors:
    parallel = shard(cell)
    assert isinstance(parallel, tdsp.ModelParallel2D)
    for table in shards_of(parallel):
        for tensor in table.tensors.values():
            tensor.fill_(rank + 1.0)
    parallel.broadcast_replicas()
    parallel(make_stream(cell, 1)[0][rank])
    return {name: value for name, value in snapshot(parallel).items() if "over" not in name}


@pytest.mark.parametrize("cell", [EXACT, HOT], ids=str)
def test_weights_and_state_are_broadcast(ranks4: RankPool, cell: Cell) -> None:
    for rank, tensors in enumerate(ranks4.run(broadcast, cell)):
        source = TWO.replica_peers(rank)[0]
        assert all(bool((value == source + 1.0).all()) for value in tensors.values())


def different_rates(rank: int, world_size: int, cell: Cell, rates: tuple[float, float]) -> str:
    """Return a sync's error if each group has another learning rate."""
    parallel = shard(cell)
    (group,) = parallel.fused_optimizer.param_groups
    group["lr"] = rates[TWO.group_of(rank)]  # type: ignore[index]
    parallel.fused_optimizer.zero_grad()
    local_loss(parallel(make_stream(cell, 1)[0][rank])).backward()
    try:
        parallel.state_dict()
    except SyncError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("rates", [(0.1, 0.2), (0.0, 0.1)])
@pytest.mark.parametrize("cell", [EXACT, replace(HOT, sharding="row_wise")], ids=str)
def test_peers_need_one_learning_rate(
    ranks4: RankPool, cell: Cell, rates: tuple[float, float]
) -> None:
    (message,) = set(ranks4.run(different_rates, cell, rates))
    assert message.startswith("ranks that hold the same rows have different learning rates [0.")
    assert message.endswith("set the same schedule on every rank")
    assert ranks4.run(different_rates, cell, (rates[0], rates[0])) == ["no error"] * 4


def twice_refused(rank: int, world_size: int, cell: Cell) -> str:
    parallel = shard(cell, model=TwiceModel(cell.spec))
    loss = local_loss(parallel(make_stream(cell, 1)[0][rank]))
    return error_text(loss.backward, UnsupportedError)


ONE_GROUP = Cell(tdsp.Mesh2D(1, 4))


def test_two_lookups_in_one_forward_are_refused_where_each_would_update(ranks4: RankPool) -> None:
    for cell in (
        ONE_GROUP,
        replace(ONE_GROUP, exchange="row"),
        replace(AVERAGED, optimizer="rowwise_adagrad"),
    ):
        for text in ranks4.run(twice_refused, cell):
            assert text.startswith("two lookups of a collection reach one backward,"), str(cell)


def two_backwards(rank: int, world_size: int, cell: Cell) -> float:
    """Run two forwards, two backwards and one sync on the sharded module itself."""
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
    """Return the error from two backwards with a sync in between; empty if there is none.

    They are the sharded module's, because DDP adds up only the first one's gradients.
    """
    parallel, stream = shard(cell), make_stream(cell, 2)
    (part,) = sharded_tables(parallel)
    first, second = (bag_loss(cell, part.module(batches[rank])) for batches in stream)
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
    """TorchRec reads the switch in every backward, so it may be set after construction."""
    for cell in (EXACT, HOT):
        # Gradients, and so their roundings, are four times as large as elsewhere.
        assert max(ranks4.run(undivided, cell, late)) < 4 * ROUNDING
