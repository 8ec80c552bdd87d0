"""Frozen tables cost nothing, and train later as in a new model; random cases freeze, too."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import torchrec_2dsp as tdsp
from tests.support.loops import (
    OTHER_BATCH,
    LossModel,
    entries,
    largest_gap,
    plain_loop,
    snapshot,
)
from tests.support.models import SEQUENCES, ModelSpec, build, tables_of
from tests.support.oracle import batch_of, local_loss
from tests.support.parity import (
    ONE,
    TOLERANCE,
    TWO,
    Cell,
    Gap,
    compare,
    make_optimizer,
    make_oracle,
    shard,
)
from tests.support.ranks import RankPool, error_of
from torchrec_2dsp._compat.ddp import start_in_order
from torchrec_2dsp._compat.fbgemm import iteration_of
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.shard.parted import PartedModule

pytestmark = pytest.mark.dealt_file

STEPS = 3
"""The steps before a call, and after it."""
SIZES = (6,) * 4
ADAGRAD = Cell(TWO)
ADAM = Cell(TWO, optimizer="adam")
HOT = (("t0", (0, 1, 5)), ("t1", (0, 2)))
WEIGHT_SYNC = Cell(TWO, optimizer="sgd", sync=tdsp.WeightSync(policy=tdsp.every(1)))
SHARD = ("mesh_shard", "sharding_intra_pg")
"""The names of sharding groups."""
SGD = Cell(TWO, optimizer="sgd")


def of_rule(rule: Cell) -> list[Cell]:
    """Return a rule's cells for all placements."""
    return [
        rule,
        replace(rule, mesh=ONE, sharding="table_wise"),
        replace(rule, sharding="column_wise"),
        replace(rule, sharding="data_parallel"),
        replace(rule, exchange="row"),
        replace(rule, exchange="row", owners="hash", mesh=ONE),
        replace(rule, exchange="row", hot_rows=HOT),
        replace(rule, exchange="row", in_world=("t0", "t1")),
        replace(rule, exchange="nonempty", sharding="table_wise", hot_rows=HOT),
        replace(rule, spec=SEQUENCES, exchange="row"),
    ]


def frozen_model(cell: Cell, names: tuple[str, ...]) -> Any:
    """Build the cell's model with some frozen tables."""
    return freeze(build(cell.spec, seed=0), names)


def freeze(model: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        tables_of(model)[name].requires_grad_(False)
    return model


def batch(cell: Cell, step: int, rank: int) -> Any:
    return batch_of(cell.spec, cell.seed, SIZES, cell.max_length, step, rank=rank)


def train(parallel: Any, cell: Cell, steps: range, rank: int) -> list[float]:
    """Train with a new optimizer; return the losses."""
    batches = (batch(cell, step, rank) for step in steps)
    return plain_loop(parallel, make_optimizer(parallel), batches)


def output_names(parallel: Any, cell: Cell, rank: int) -> list[str]:
    """Return a module's output names, in order."""
    module = parallel.module.ec if cell.spec.sequence else parallel.module.ebc
    with torch.no_grad():
        return list(module(batch(cell, 0, rank)).keys())


@dataclass(frozen=True)
class Costs:
    """A model's optimizer state, and its communication besides its forward."""

    states: list[str]
    """The entries of its optimizer state."""
    sent_back: int
    """All-to-alls of a step in sharding groups that its forward doesn't have."""
    groups: set[str]
    """The groups in which a step sends."""


def costs_by_training(rank: int, world_size: int) -> tuple[Costs, Costs]:
    """Return the costs with trained tables, and with the same tables frozen."""
    cell = replace(SGD, optimizer="rowwise_adagrad", exchange="row")
    costs = []
    for names in ((), ("t0", "t1", "t2")):
        parallel = shard(cell, model=frozen_model(cell, names))
        train(parallel, cell, range(1), rank)
        with count_collectives() as step:
            train(parallel, cell, range(1, 2), rank)
        with torch.no_grad(), count_collectives() as forward:
            parallel(batch(cell, 1, rank))
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
        assert trained.sent_back == 2  # Gradients for rows with 8 and with 16 columns.
        assert "replica_rows" in trained.groups
        assert (frozen.states, frozen.sent_back) == ([], 0)
        assert "replica_rows" not in frozen.groups


def froze_on_one_rank(rank: int, world_size: int) -> str:
    model = frozen_model(SGD, ("t1",) if rank == 1 else ())
    return error_of(partial(shard, SGD, model=model))


def test_ranks_agree_on_what_is_frozen(ranks4: RankPool) -> None:
    for message in ranks4.run(froze_on_one_rank, timeout_s=60):
        assert message.startswith("ConfigError: frozen tables differs between ranks")


def gaps_to_a_new_model(rank: int, world_size: int, cells: list[Cell]) -> list[float]:
    """Return the final gaps to models that were sharded when all their tables joined."""
    gaps = []
    for cell in cells:
        names = tuple(table.name for table in cell.spec.tables)
        parallel: Any = shard(cell, model=frozen_model(cell, names))
        start, order = snapshot(parallel), output_names(parallel, cell, rank)
        train(parallel, cell, range(STEPS), rank)
        end = snapshot(parallel)
        assert all(torch.equal(end[name], start[name]) for name in start if "over" not in name)
        new: Any = shard(cell)
        new.load_state_dict(parallel.state_dict())
        generator = torch.get_rng_state()
        parallel.unfreeze(*names)
        assert torch.equal(generator, torch.get_rng_state())
        assert output_names(parallel, cell, rank) == order
        # Otherwise DDP adds in the order of its later steps.
        start_in_order(parallel._dmp_wrapped_module, None)
        for model in (parallel, new):
            train(model, cell, range(STEPS, 2 * STEPS), rank)
        gaps.append(largest_gap(snapshot(parallel), snapshot(new)))
    return gaps


def test_they_train_bit_for_bit_as_in_a_new_model(ranks4: RankPool) -> None:
    cells = [*of_rule(ADAGRAD), *of_rule(ADAM), WEIGHT_SYNC]
    cells = [cell for cell in cells if not cell.spec.sequence]
    for gaps in ranks4.run(gaps_to_a_new_model, cells, timeout_s=250):
        assert gaps == [0.0] * len(cells)


def collectives(parallel: Any, cell: Cell, rank: int) -> Counter[tuple[str, str]]:
    """Count a later step's collectives."""
    train(parallel, cell, range(1), rank)
    with count_collectives() as seen:
        train(parallel, cell, range(1, 2), rank)
    return Counter((record.op, record.group) for record in seen.records)


def collectives_by_past(rank: int, world_size: int) -> list[Counter[tuple[str, str]]]:
    """Count collectives with two tables frozen, after one has joined, and with one frozen."""
    cell = replace(ADAGRAD, exchange="row")
    counts = []
    every = ("t0", "t1", "t2")
    pasts = ((("t0", "t1"), ()), (("t0", "t1"), ("t0", "t1")), ((), ()), (every, every))
    for names, call in pasts:
        parallel: Any = shard(cell, model=frozen_model(cell, names))
        if call:
            parallel.unfreeze(*call)
        counts.append(collectives(parallel, cell, rank))
    return counts


def test_a_step_has_the_collectives_of_its_parts(ranks4: RankPool) -> None:
    for frozen, joined, trained, all_joined in ranks4.run(collectives_by_past, timeout_s=60):
        assert all_joined == trained  # Both have one part.
        # One part for t2, and one for t0 and t1 with two column widths: t0 alone adds none.
        exchange = ("all_to_all_single", "mesh_shard")
        assert joined[exchange] > frozen[exchange] > 0
        for key in trained:
            assert trained[key] <= joined[key] <= 2 * trained[key], (key, trained, joined)


def with_a_past(rank: int, world_size: int) -> dict[str, Any]:
    """Return the state that a joining table takes over, and optimizers' and schedulers' views."""
    sync = tdsp.WeightSync(policy=tdsp.every(4))
    cell = Cell(TWO, hot_rows=HOT, sync=sync, optimizer="adam")
    parallel: Any = shard(cell, model=frozen_model(cell, ("t0", "t1")))
    train(parallel, cell, range(3), rank)
    # Its sync is due when the table joins.
    local_loss(parallel(batch(cell, 3, rank))).backward()
    parallel.refresh_hot_sets({"t0": (3, 4)})
    for tables in parallel.sharded_tables():
        tables.num_bad_ids = 5 if tables.are_frozen else 0
    parallel.eval()
    before = [(id(tables), tables.table_names) for tables in parallel.sharded_tables()]
    parallel.unfreeze("t0")
    after = [(id(tables), tables.table_names) for tables in parallel.sharded_tables()]
    is_training = [tables.module.training for tables in parallel.sharded_tables()]
    parallel.train()
    optimizer: Any = make_optimizer(parallel)
    keys = [key for key in optimizer.params if ".t0." in key]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    weights = snapshot(parallel)
    iterations = {}
    for tables in parallel.sharded_tables():
        iterations[tables.table_names[0]] = [iteration_of(tbe) for tbe in tables.tbes()]
    optimizer.zero_grad()
    local_loss(parallel(batch(cell, 4, rank))).backward()
    parallel.sync()
    moved = {
        key
        for key, value in snapshot(parallel).items()
        if "/" not in key and "over" not in key and not torch.equal(value, weights[key])
    }
    return {
        "parts": ([names for _, names in before], [names for _, names in after]),
        "kept": before[0] == after[0],
        "is training": is_training,
        "hot": parallel.hot_sets["t0"].row_ids,
        "bad ids": sum(tables.num_bad_ids for tables in parallel.sharded_tables()),
        "policy steps": {
            tables.table_names[0]: tables.sync_point.policy_step
            for tables in parallel.sharded_tables()
        },
        "keys": keys,
        "iterations": iterations,
        "moved at a rate of 0": moved,
    }


def test_a_table_takes_over_what_is_not_of_its_optimizer(ranks4: RankPool) -> None:
    for seen in ranks4.run(with_a_past, timeout_s=60):
        assert seen["parts"] == ([["t2"], ["t0", "t1"]], [["t2"], ["t0"], ["t1"]])
        assert seen["kept"]
        assert seen["is training"] == [False] * 3
        assert seen["hot"] == (3, 4)
        assert seen["bad ids"] == 5
        assert seen["policy steps"] == {"t2": 5, "t0": 5, "t1": 0}
        assert seen["keys"] == ["ebc.embedding_bags.t0.weight"]
        assert set(seen["iterations"]["t0"]) == {0}
        assert max(seen["iterations"]["t2"]) == 4
        assert seen["moved at a rate of 0"] == set()


def go_on(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Save after two calls, and load into models with the same past and with others."""
    cell = Cell(TWO, optimizer="adam", hot_rows=HOT)
    names = ("t0", "t1", "t2")

    def made(*calls: tuple[str, ...]) -> tuple[Any, Any, Any]:
        model: Any = shard(cell, model=frozen_model(cell, names))
        for call in calls:
            model.unfreeze(*call)
        optimizer = make_optimizer(model)
        return model, optimizer, tdsp.TrainState(model, optimizer)

    model, _, _ = made()
    train(model, cell, range(2), rank)
    model.unfreeze("t1")
    train(model, cell, range(2, 4), rank)
    model.unfreeze("t0")
    train(model, cell, range(4, 6), rank)
    optimizer = make_optimizer(model)
    state = tdsp.TrainState(model, optimizer)
    tdsp.save_checkpoint(folder, model, optimizer, train_state=state)
    train(model, cell, range(6, 9), rank)
    other, optimizer, state = made(("t1",), ("t0",))
    tdsp.load_checkpoint(folder, other, optimizer, train_state=state)
    train(other, cell, range(6, 9), rank)
    errors = []
    for calls in ((), (("t0", "t1"),), (("t0",), ("t1",)), (("t1",), ("t0",), ("t2",))):
        refusing, optimizer, state = made(*calls)
        load = partial(tdsp.load_checkpoint, folder, refusing, optimizer)
        errors.append(error_of(partial(load, train_state=state)))
        errors.append(error_of(load))
    return {"gap": largest_gap(snapshot(model), snapshot(other)), "errors": errors}


def test_checkpoints_go_on_bit_for_bit(ranks4: RankPool, tmp_path: Path) -> None:
    for seen in ranks4.run(go_on, tmp_path / "0", timeout_s=120):
        assert seen["gap"] == 0.0
        saved = "'t2' frozen after unfreeze('t1'), unfreeze('t0')"
        others = [
            ("'t0', 't1', 't2' frozen after no unfreeze()", "optimizer that was saved, and freeze"),
            ("'t2' frozen after unfreeze('t0', 't1')", ""),
            ("'t2' frozen after unfreeze('t0'), unfreeze('t1')", ""),
            (
                "no tables frozen after unfreeze('t1'), unfreeze('t0'), unfreeze('t2')",
                "optimizer that was saved, and freeze",
            ),
        ]
        with_state, without = seen["errors"][::2], seen["errors"][1::2]
        for (own, remedy), error, plain in zip(others, with_state, without, strict=True):
            assert f"saved with {saved}, but the model has {own}; freeze the same" in error
            assert remedy in plain
            assert bool(remedy) == bool(plain)


def refusals(rank: int, world_size: int) -> list[str]:
    """Return the errors for invalid calls; the model trains on after them."""
    cell = Cell(TWO, exchange="row")
    parallel: Any = shard(cell, model=freeze(LossModel(cell.spec), ("t0", "t1")))
    calls: list[tuple[str, ...]] = [(), ("t2",), ("t0", "t7"), ("t0",) if rank else ("t1",)]
    errors = [error_of(partial(parallel.unfreeze, *call)) for call in calls]
    optimizer = make_optimizer(parallel)
    pipeline = tdsp.TrainPipelineRowPrefetch(parallel, optimizer, torch.device("cpu"))
    stream = iter([batch(cell, step, rank) for step in range(6)])
    pipeline.progress(stream)
    assert OTHER_BATCH in error_of(lambda: parallel(batch(cell, 5, rank)))
    errors.append(error_of(lambda: parallel.unfreeze("t0")))
    pipeline.detach()
    parallel.unfreeze("t0")
    errors.append(error_of(lambda: pipeline.progress(stream)))
    errors.append(error_of(lambda: parallel.combined_optimizer(optimizer)))
    cell = Cell(TWO, spec=ModelSpec(weighted=True, positions="collection"))
    processed = frozen_model(cell, ("t0",))
    processed.ebc._feature_processors.requires_grad_(False)
    behind: Any = shard(cell, model=processed)
    errors.append(error_of(lambda: behind.unfreeze("t0")))
    cell = Cell(TWO)
    accumulating: Any = shard(cell, model=frozen_model(cell, ("t0",)))
    batches: Any = tdsp.accumulate(accumulating, [batch(cell, step, rank) for step in range(2)])
    local_loss(accumulating(next(batches))).backward()
    errors.append(error_of(lambda: accumulating.unfreeze("t0")))
    batches.close()
    return errors


def test_calls_that_can_not_be_right_are_refused(ranks4: RankPool) -> None:
    for errors in ranks4.run(refusals, timeout_s=60):
        assert "unfreeze() got no table; give it frozen tables: t0, t1" in errors[0]
        assert "unfreeze() got 't2'; give it frozen tables: t0, t1" in errors[1]
        assert "unfreeze() got 't7'; give it frozen tables: t0, t1" in errors[2]
        assert "the tables of unfreeze()" in errors[3]
        assert "a train pipeline is attached" in errors[4]
        assert "make the pipeline anew after the call" in errors[5]
        assert "lacks tables that unfreeze() has added since it was made" in errors[6]
        assert "can't train tables in a FeatureProcessedEmbeddingBagCollection" in errors[7]
        assert "an accumulate() of this model isn't over" in errors[8]


def leave_trained_sequences_out(rank: int, world_size: int, cell: Cell) -> Gap:
    """Train losses of which some reach a frozen table's sequences alone; compare."""
    oracle, parallel = make_oracle(cell), shard(cell, model=frozen_model(cell, ("t1",)))
    oracle.rates["t1"] = 0.0
    for step in range(4):
        oracle.step([batch(cell, step, each) for each in range(world_size)])
    train(parallel, cell, range(4), rank)
    return compare(parallel, oracle)


@pytest.mark.parametrize("hot_rows", [(), HOT[:1]])
def test_a_loss_may_reach_frozen_tables_alone(ranks4: RankPool, hot_rows: Any) -> None:
    cell = replace(SGD, spec=replace(SEQUENCES, leaves_out=True), hot_rows=hot_rows)
    for gap in ranks4.run(leave_trained_sequences_out, cell):
        assert gap.num_values > 0
        assert gap.worst <= TOLERANCE, gap
