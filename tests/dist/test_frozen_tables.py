"""Frozen tables stay as they are, beside trained ones that equal the unsharded model's."""

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torchrec.distributed.types import ShardingType

import torchrec_2dsp as tdsp
from tests.support import planning
from tests.support.cells import Cell
from tests.support.loops import LossModel, entries, make_stream, pipeline_loop, plain_loop, shard
from tests.support.models import SEQUENCES, ModelSpec, tables_of
from tests.support.oracle import local_loss
from tests.support.parity import FOUR, LR, ONE, TWO, local_shards, make_optimizer, make_sharder
from tests.support.prefetching import SequenceLossModel
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.cost.loads import Placed
from torchrec_2dsp.shard.parted import PartedModule

STEPS = 4
SHARD = ("mesh_shard", "sharding_intra_pg")
"""The names of sharding groups."""
SGD = Cell(TWO, optimizer="sgd")
CELLS = (
    SGD,
    replace(SGD, sharding="table_wise", mesh=ONE),
    replace(SGD, sharding="column_wise"),
    replace(SGD, sharding="data_parallel"),
    replace(SGD, exchange="row"),
    replace(SGD, exchange="row", owners="hash", mesh=ONE),
    replace(SGD, exchange="row", hot_rows=(("t0", (0, 1)), ("t1", (0, 2)))),
    replace(SGD, exchange="row", in_world=("t0", "t1")),
    replace(SGD, exchange="nonempty", sharding="table_wise"),
    replace(SGD, sync=tdsp.WeightSync(policy=tdsp.every(1)), mesh=FOUR),
    replace(SGD, spec=ModelSpec(pooling="mean")),
    replace(SGD, spec=ModelSpec(weighted=True), exchange="row"),
    replace(SGD, spec=SEQUENCES, exchange="row"),
    replace(SGD, spec=SEQUENCES, sharding="table_wise", mesh=ONE),
    replace(SGD, stock_wrapper=True),
)


def frozen_model(cell: Cell, names: tuple[str, ...]) -> Any:
    """Build the cell's model with some frozen tables."""
    torch.manual_seed(0)
    model = (SequenceLossModel if cell.spec.sequence else LossModel)(cell.spec)
    for name in names:
        cast(Any, tables_of(model)[name]).requires_grad_(False)
    return model


def gap_to_unsharded(
    rank: int, world_size: int, cell: Cell, names: tuple[str, ...]
) -> tuple[float, float, int]:
    """Train both; return the largest gap of trained tables, that of frozen ones, and its count."""
    stream = make_stream(cell, STEPS)
    alone = frozen_model(cell, names)
    optimizer = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=LR)
    for batches in stream:
        optimizer.zero_grad()
        torch.stack([alone(batch)[0] for batch in batches]).mean().backward()
        optimizer.step()
    parallel = shard(cell, model=frozen_model(cell, names))
    own = [batches[rank] for batches in stream]
    plain_loop(parallel, make_optimizer(parallel), own)
    gaps = {True: 0.0, False: 0.0}
    num_compared = 0
    for name, value in parallel.state_dict().items():
        if not name.startswith(("ebc", "ec")):
            continue
        expected = alone.state_dict()[name]
        is_frozen = name.split(".")[-2] in names
        for part, (row, column) in local_shards(value):
            there = expected[row : row + part.shape[0], column : column + part.shape[1]]
            gaps[is_frozen] = max(gaps[is_frozen], _gap(part, there))
            num_compared += part.numel()
    return gaps[False], gaps[True], num_compared


def _gap(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (actual - expected).abs().max().item() if actual.numel() else 0.0


def gaps_to_unsharded(
    rank: int, world_size: int, cells: list[tuple[Cell, tuple[str, ...]]]
) -> list[tuple[float, float, int]]:
    return [gap_to_unsharded(rank, world_size, cell, names) for cell, names in cells]


@pytest.mark.parametrize("names", [("t1",), ("t0", "t1", "t2")], ids=["one", "all"])
def test_others_train_as_in_the_unsharded_model(ranks4: RankPool, names: tuple[str, ...]) -> None:
    # The model of sequences has no dense part, so some table has to be trained.
    cells = [(cell, ("t1",) if cell.spec.sequence else names) for cell in CELLS]
    answers = ranks4.run(gaps_to_unsharded, cells, timeout_s=200)
    for (cell, _), of_ranks in zip(cells, zip(*answers, strict=True), strict=True):
        assert max(trained for trained, _, _ in of_ranks) < 1e-6, cell
        assert max(frozen for _, frozen, _ in of_ranks) == 0.0, cell
        assert sum(num_compared for _, _, num_compared in of_ranks) == cell.num_values, cell


def losses_by_pipeline(rank: int, world_size: int, cell: Cell) -> list[list[float]]:
    """Return the losses of a plain loop, TorchRec's pipeline, and row prefetch."""
    own = [batches[rank] for batches in make_stream(cell, 6)]
    losses = []
    for kind in ("plain", "sparse dist", "prefetch"):
        parallel = shard(cell, model=frozen_model(cell, ("t1",)))
        optimizer = make_optimizer(parallel)
        if kind == "plain":
            losses.append(plain_loop(parallel, optimizer, own))
        elif kind == "prefetch":
            pipeline = tdsp.TrainPipelineRowPrefetch(parallel, optimizer, torch.device("cpu"))
            stream = iter(own)
            losses.append([local_loss(pipeline.progress(stream)).item() for _ in own])
        else:
            losses.append(pipeline_loop(kind, parallel, optimizer, own))
    return losses


def test_pipelines_train_alike(ranks4: RankPool) -> None:
    cell = replace(SGD, exchange="row", mesh=ONE)
    for plain, sparse_dist, prefetched in ranks4.run(losses_by_pipeline, cell, timeout_s=60):
        assert plain == sparse_dist == pytest.approx(prefetched, rel=1e-6)


def accumulated_gap(rank: int, world_size: int) -> float:
    """Return how far two batches in one step end from the unsharded model."""
    cell = replace(SGD, mesh=ONE)
    alone, stream = frozen_model(cell, ("t1",)), make_stream(cell, 2)
    optimizer = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=LR)
    for batches in stream:
        torch.stack([alone(batch)[0] for batch in batches]).mean().backward()
    optimizer.step()
    sharder = make_sharder(cell)
    sharder.accumulates = True
    parallel = shard(cell, sharder, frozen_model(cell, ("t1",)))
    combined = make_optimizer(parallel)
    for batch in tdsp.accumulate(parallel, [batches[rank] for batches in stream]):
        parallel(batch)[0].backward()
    combined.step()
    gap = 0.0
    for name, value in parallel.state_dict().items():
        for part, (row, column) in local_shards(value) if name.startswith("ebc") else ():
            expected = alone.state_dict()[name]
            there = expected[row : row + part.shape[0], column : column + part.shape[1]]
            gap = max(gap, _gap(part, there))
    return gap


def test_batches_accumulate_beside_frozen_tables(ranks4: RankPool) -> None:
    assert max(ranks4.run(accumulated_gap, timeout_s=60)) < 1e-6


@dataclass(frozen=True)
class Costs:
    """What a model keeps and sends beside its forward."""

    states: list[str]
    """The entries of its optimizer state."""
    sent_back: int
    """All-to-alls of a step in sharding groups that its forward doesn't have."""
    groups: set[str]
    """The groups in which a step sends."""


def costs_by_training(rank: int, world_size: int) -> tuple[Costs, Costs]:
    """Return the costs of trained tables, and of the same tables frozen."""
    cell = replace(SGD, optimizer="rowwise_adagrad", exchange="row")
    costs = []
    for names in ((), ("t0", "t1", "t2")):
        parallel = shard(cell, model=frozen_model(cell, names))
        optimizer = make_optimizer(parallel)
        batch = make_stream(cell, 1)[0][rank]
        plain_loop(parallel, optimizer, [batch])
        with count_collectives() as step:
            plain_loop(parallel, optimizer, [batch])
        with torch.no_grad(), count_collectives() as forward:
            parallel(batch)
        in_step, in_forward = (
            sum(record.op == "all_to_all_single" and record.group in SHARD for record in seen)
            for seen in (step.records, forward.records)
        )
        states = [key for key in entries(parallel) if "/" in key]
        groups = {record.group for record in step.records}
        costs.append(Costs(states, in_step - in_forward, groups))
        assert isinstance(cast(Any, parallel.module).ebc, PartedModule) == bool(names)
        assert in_forward
    trained, frozen = costs
    return trained, frozen


def test_frozen_tables_have_no_state_and_no_backward(ranks4: RankPool) -> None:
    for trained, frozen in ranks4.run(costs_by_training, timeout_s=60):
        assert len(trained.states) == 3
        assert trained.sent_back == 2  # Gradients of rows with 8 columns, and with 16.
        assert "replica_rows" in trained.groups
        assert (frozen.states, frozen.sent_back) == ([], 0)
        assert "replica_rows" not in frozen.groups


def froze_on_one_rank(rank: int, world_size: int) -> str:
    model = frozen_model(SGD, ("t1",) if rank == 1 else ())
    try:
        shard(SGD, model=model)
    except tdsp.TwoDError as error:
        return str(error)
    return ""


def test_ranks_agree_on_what_is_frozen(ranks4: RankPool) -> None:
    for message in ranks4.run(froze_on_one_rank, timeout_s=60):
        assert "frozen tables" in message


ROW_IN_GROUP = planning.table(ShardingType.ROW_WISE, [0, 1], exchange=tdsp.Exchange.ROW)


def frozen_of(trained: Placed) -> Placed:
    return replace(trained, work=replace(trained.work, is_frozen=True))


@pytest.mark.parametrize("trained", [planning.TABLE_WISE, planning.ROW], ids=["vectors", "rows"])
def test_frozen_tables_send_nothing_back(trained: Placed) -> None:
    alone, both, predicted = (
        planning.cost(trained),
        planning.cost(trained, frozen_of(trained)),
        planning.cost(frozen_of(trained)),
    )
    assert predicted.forward_exchange_s == alone.forward_exchange_s > 0.0
    assert predicted.backward_exchange_s == 0.0 < alone.backward_exchange_s
    assert both.forward_exchange_s == pytest.approx(2 * alone.forward_exchange_s)
    assert both.backward_exchange_s == alone.backward_exchange_s


def test_copies_of_frozen_tables_have_nothing_to_sync() -> None:
    for sync in (planning.EXACT, tdsp.WeightSync(policy=tdsp.every(4))):
        assert planning.cost(ROW_IN_GROUP, mesh=planning.TWO, sync=sync).sync_s > 0.0
        assert planning.cost(frozen_of(ROW_IN_GROUP), mesh=planning.TWO, sync=sync).sync_s == 0.0
