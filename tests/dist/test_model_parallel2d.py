"""`ModelParallel2D` without a plan, and uses that it must refuse or report."""

import copy
import io
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_2dsp as tdsp
from tests.support.devices import rank_device
from tests.support.loops import logged, plain_loop
from tests.support.models import SEQUENCES, BagModel, ModelSpec, build, make_batch
from tests.support.oracle import local_loss
from tests.support.parity import (
    TOLERANCE,
    TWO,
    Cell,
    group_plan,
    make_sharder,
    shard,
    shards_of,
)
from tests.support.planning import planner_for
from tests.support.ranks import RankPool, error_of, error_text
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.parallel import planning

STEPS = 3


def losses_of(parallel: DistributedModelParallel, spec: ModelSpec, rank: int) -> list[float]:
    """Return a few steps' losses from the same weights, with SGD at the fused default rate."""
    weights = build(spec, seed=0).state_dict()
    parallel.load_state_dict(cast(Any, weights))
    # In TorchRec's model it trains data-parallel tables, too.
    dense = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    optimizer = torch.optim.SGD(dense.values(), lr=0.01)
    batches = [make_batch(spec, seed=10 * step + rank) for step in range(STEPS)]
    return plain_loop(parallel, optimizer, batches)


def load_wrong(rank: int, world_size: int, cell: Cell) -> list[str]:
    """Return errors from loads of a table in other shapes, and in place of the table."""
    parallel = shard(cell)
    (name,) = (name for name in parallel.state_dict() if name.endswith(".t0.weight"))
    rows, dim = parallel.state_dict()[name].size()
    shapes = [(rows + 9, dim), (rows, dim + 4), (rows - 1, dim)]
    loads: list[Any] = [
        partial(parallel.load_state_dict, cast(Any, {name: torch.ones(shape)}), strict=False)
        for shape in shapes
    ]
    whole = {name: torch.ones(rows, dim)}
    loads.append(partial(parallel.module.load_state_dict, whole, strict=False, assign=True))
    return [error_of(load) for load in loads]


@pytest.mark.parametrize(
    "cell",
    [Cell(TWO), Cell(TWO, "column_wise", spec=SEQUENCES), Cell(TWO, in_world=("t0",))],
    ids=str,
)
def test_tables_that_would_be_loaded_in_part_are_refused(ranks4: RankPool, cell: Cell) -> None:
    for *of_shapes, of_assign in ranks4.run(load_wrong, cell):
        assert all(re.match(r"CheckpointError: '.*\.weight' has the shape", e) for e in of_shapes)
        assert of_assign.startswith("UnsupportedError: load_state_dict(assign=True) can't replace")


@contextmanager
def known_machines() -> Iterator[None]:
    """Yield a context in which ranks needn't be measured."""
    known = tdsp.Calibration.load("emulated_200mbit")
    with mock.patch.object(planning, "calibration_of_world", return_value=known):
        yield


def train_both(rank: int, world_size: int, spec: ModelSpec) -> tuple[list[float], list[float], str]:
    """Return our losses and stock TorchRec's, both without a plan, and what was printed."""
    printed = io.StringIO()
    with known_machines(), redirect_stderr(printed):
        ours = tdsp.ModelParallel2D(build(spec, seed=1), device=rank_device())
    stock = DistributedModelParallel(build(spec, seed=2), device=rank_device())
    return losses_of(ours, spec, rank), losses_of(stock, spec, rank), printed.getvalue()


@pytest.mark.parametrize(
    "spec",
    [ModelSpec(), SEQUENCES],
    ids=["bags", "sequences"],
)
def test_without_a_plan_it_trains_as_stock_does(ranks4: RankPool, spec: ModelSpec) -> None:
    results = ranks4.run(train_both, spec)
    for ours, stock, _ in results:
        assert len(set(ours)) == STEPS
        assert ours == pytest.approx(stock, abs=TOLERANCE)
    printed = [text for _, _, text in results]
    assert "a step should take" in printed[0]
    assert not any("a step should take" in text for text in printed[1:])


def error_of_what_does_not_fit(rank: int, world_size: int) -> str:
    table = EmbeddingBagConfig(
        num_embeddings=10**12, embedding_dim=128, name="huge", feature_names=["f"]
    )
    model = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    with known_machines():
        return error_text(
            lambda: tdsp.ModelParallel2D(model, device=rank_device()), tdsp.errors.PlanError
        )


def test_what_does_not_fit_is_one_error_on_all_ranks(ranks4: RankPool) -> None:
    (error,) = set(ranks4.run(error_of_what_does_not_fit))
    assert error.startswith("no plan fits a sharding group of Mesh2D(1x4")


ROWS = Cell(tdsp.Mesh2D(1, 2), exchange="row")
BAGS = Cell(tdsp.Mesh2D(2, 1), sync=tdsp.WeightSync())


def evaluate(rank: int, world_size: int, cell: Cell) -> None:
    """Train, evaluate in inference mode and without gradients, and train on."""
    model = shard(cell)
    batch = make_batch(cell.spec, seed=rank)
    for _ in range(2):
        local_loss(model(batch)).backward()
        model.eval()
        with torch.inference_mode():
            inferred = model(batch)
        with torch.no_grad():
            expected = model(batch)
        assert torch.equal(inferred, expected)
        model.train()


def read_gradients(rank: int, world_size: int, cell: Cell) -> list[float]:
    """Return the losses with and without reading gradients before the backward."""
    losses = []
    for reads in (False, True):
        model, seen = shard(cell), list[Any]()
        ebc: Any = model.module.ebc
        ebc.register_forward_hook(lambda *call, seen=seen: seen.append(call[-1]))
        for step in range(STEPS):
            loss = local_loss(model(make_batch(cell.spec, seed=10 * step + rank)))
            wanted = [seen[-1].values(), *cast(Any, model).dense_parameters()]
            if reads and step:
                assert torch.autograd.grad(loss, wanted, retain_graph=True)[0].any()
            loss.backward()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("cell", [ROWS, BAGS], ids=str)
def test_gradients_may_be_read_before_the_backward(ranks2: RankPool, cell: Cell) -> None:
    for losses in ranks2.run(read_gradients, cell):
        assert losses[:STEPS] == losses[STEPS:]
        assert losses[0] != losses[1]


@pytest.mark.parametrize("cell", [ROWS, BAGS], ids=str)
def test_evaluation_in_inference_mode(ranks2: RankPool, cell: Cell) -> None:
    ranks2.run(evaluate, cell)


def copied(model: tdsp.ModelParallel2D, batch: Any) -> None:
    copy.deepcopy(model)


def trained_in_eval_mode(model: tdsp.ModelParallel2D, batch: Any) -> None:
    by_adam = shard(replace(ROWS, optimizer="adam")).eval()
    local_loss(by_adam(batch)).backward()


@dataclass
class Scores:
    """An output in which DDP finds no tensors."""

    logits: torch.Tensor


class ReturnsScores(BagModel):
    """Returns scores in a custom class."""

    def forward(self, features: Any) -> Any:
        return Scores(super().forward(features))


def trained_on_an_output_that_ddp_cannot_see(model: tdsp.ModelParallel2D, batch: Any) -> None:
    spec = ModelSpec()
    parallel = shard(replace(BAGS, spec=spec), model=ReturnsScores(spec))
    scores = parallel(make_batch(spec, seed=0))
    (0.0 * scores.logits).sum().backward()


def sharded_again(model: tdsp.ModelParallel2D, batch: Any) -> None:
    tdsp.ModelParallel2D(model.module)


def wrapped_again(model: tdsp.ModelParallel2D, batch: Any) -> None:
    tdsp.parallelize(model, batch_size=1, optimizer=ADAGRAD)


def trained_by_two_backwards(model: tdsp.ModelParallel2D, batch: Any) -> None:
    loss = local_loss(model(batch))
    loss.backward(retain_graph=True)
    loss.backward()


def graph_learned_by_grad(model: tdsp.ModelParallel2D, batch: Any) -> None:
    loss = local_loss(model(batch))
    torch.autograd.grad(loss, model.dense_parameters(), retain_graph=True)
    loss.backward()


META = torch.device("meta")
ADAGRAD = tdsp.MomentScaledRowWiseAdaGrad(lr=0.1)


def with_dense(**modules: nn.Module) -> tdsp.ModelParallel2D:
    """Shard bags beside other modules."""
    bags = {"bags": BagModel(ModelSpec()), **modules}
    return tdsp.parallelize(nn.ModuleDict(bags), batch_size=1, optimizer=ADAGRAD)


def memory_as_it_is(model: tdsp.ModelParallel2D, batch: Any) -> None:
    with_dense(attention=nn.MultiheadAttention(8, 2, device=META))


def zeros_for_statistics(model: tdsp.ModelParallel2D, batch: Any) -> None:
    with_dense(norm=nn.BatchNorm1d(8, affine=False, device=META))


def untied_by_meta(model: tdsp.ModelParallel2D, batch: Any) -> None:
    first, second = nn.Linear(8, 8, device=META), nn.Linear(8, 8, device=META)
    second.weight = first.weight
    with_dense(first=first, second=second)


REFUSED = {
    trained_by_two_backwards: "a second backward through one lookup would update its rows twice;",
    graph_learned_by_grad: "torch.autograd.grad reached the outputs before the first backward(),",
    memory_as_it_is: "'attention.in_proj_weight' is on the meta device, and its module (Multihead",
    zeros_for_statistics: "'norm.running_mean' is on the meta device, and its module (BatchNorm1d)",
    untied_by_meta: "'first.weight' and 'second.weight' are one parameter on the meta device, of",
    copied: "a sharded model can't be copied, because it holds process groups; copy it before you",
    trained_on_an_output_that_ddp_cannot_see: "DDP didn't see where the loss comes from, so",
    trained_in_eval_mode: "Adam and LAMB don't count a lookup in eval mode as a step, so",
    sharded_again: "module 'ebc' is sharded already, perhaps by a try that failed, and would stay",
    wrapped_again: "module '_dmp_wrapped_module.module.ebc' is sharded already, perhaps by a try",
}


def refusal(rank: int, world_size: int, cell: Cell, use: Callable[..., None]) -> str:
    model = shard(cell)
    batch = make_batch(cell.spec, seed=rank)
    return error_text(lambda: use(model, batch), tdsp.errors.UnsupportedError)


@pytest.mark.parametrize("use", REFUSED, ids=lambda use: use.__name__)
@pytest.mark.parametrize("cell", [ROWS, BAGS], ids=str)
def test_unsupported_uses_are_named(ranks2: RankPool, cell: Cell, use: Callable[..., None]) -> None:
    for text in ranks2.run(refusal, cell, use):
        assert text.startswith(REFUSED[use])


def look_up_in_float16(rank: int, world_size: int) -> list[str]:
    """Return the messages logged in two training forwards after an evaluation."""
    model = shard(ROWS)
    batch = make_batch(ROWS.spec, seed=rank)
    with logged() as messages, torch.autocast(rank_device().type, torch.float16):
        with torch.no_grad():
            model(batch)
        assert messages == []
        for _ in range(2):
            model(batch)
    return messages


def test_a_loss_that_is_probably_scaled_is_told_once(ranks2: RankPool) -> None:
    (message,), others = ranks2.run(look_up_in_float16)
    assert message.startswith("tables are looked up under autocast in float16, which is mostly")
    assert others == []


def norm_on_meta(rank: int, world_size: int) -> list[float]:
    with known_machines():
        model = with_dense(norm=nn.BatchNorm1d(1, device=META)).module
    return [value.item() for name, value in model.state_dict().items() if "norm." in name]


def test_what_resets_itself_may_be_on_the_meta_device(ranks2: RankPool) -> None:
    weight, bias, mean, variance, num_batches = 1, 0, 0, 1, 0
    assert ranks2.run(norm_on_meta) == [[weight, bias, mean, variance, num_batches]] * 2


WHOLE = tdsp.WeightSync(rows=tdsp.SyncedRows.ALL)


def averaged(rank: int, world_size: int, cell: Cell) -> tuple[tdsp.SyncReport, list[int]]:
    """Return one averaging sync's report, and this rank's rows per shard."""
    parallel = shard(cell)
    assert isinstance(parallel, tdsp.ModelParallel2D)
    local_loss(parallel(make_batch(cell.spec, rank))).backward()
    report = parallel.sync()
    assert parallel.sync() == tdsp.SyncReport()
    assert parallel.sync_total == report
    (module,) = parallel.sharded_tables()
    return report, [shard.num_rows for kernel in module.kernels() for shard in kernel.shards()]


def test_an_average_counts_each_row_once(ranks4: RankPool) -> None:
    """Rows count once, whatever their state; element-wise AdaGrad's is as large as the weights."""
    cell = Cell(tdsp.Mesh2D(2, 2), "row_wise", optimizer="adagrad", sync=WHOLE)
    for report, rows in ranks4.run(averaged, cell):
        assert report.num_rows == sum(rows) > 0
        assert report.num_tensors == 2 * len(rows)
        dims = torch.tensor([table.dim for table in cell.spec.tables])
        values = int((torch.tensor(rows) * dims).sum())
        # A ring of two peers sends every weight and state value once.
        assert report.num_bytes == 2 * 4 * values
        assert report.seconds > 0


PAUSE_S = 0.2


def travelling(rank: int, world_size: int, cell: Cell) -> tuple[tdsp.SyncReport, tdsp.SyncReport]:
    """Return reports on merges whose gradients were sent long before their rows were needed."""
    parallel = shard(cell)
    assert isinstance(parallel, tdsp.ModelParallel2D)
    local_loss(parallel(make_batch(cell.spec, rank))).backward()
    assert parallel.sync() == tdsp.SyncReport()
    time.sleep(PAUSE_S)
    report = parallel.sync_now()
    local_loss(parallel(make_batch(cell.spec, rank))).backward()
    time.sleep(PAUSE_S)
    return report, parallel.sync_now()


def test_a_merge_tells_how_long_gradients_had_to_travel(ranks4: RankPool) -> None:
    cell = Cell(tdsp.Mesh2D(2, 2), "row_wise")
    for sent, unsent in ranks4.run(travelling, cell):
        assert sent.window_s >= PAUSE_S > sent.waited_s
        assert unsent.window_s < PAUSE_S, "nothing was sent before it was asked for"
        assert sent.waited_s < sent.seconds


def weights_after_lookup(
    rank: int, world_size: int, cell: Cell, equal: bool
) -> tuple[list[torch.Tensor], list[str]]:
    """Return this rank's shards after its own initialisation and a lookup, and the log."""
    parallel = shard(cell)
    assert isinstance(parallel, tdsp.ModelParallel2D)
    (module,) = parallel.sharded_tables()
    shards = [shard.tensors["weight"] for kernel in module.kernels() for shard in kernel.shards()]
    for weight in shards:
        rows = torch.arange(weight.shape[0], dtype=weight.dtype)
        # The second group has the same rows in another order.
        rows = rows if equal or TWO.group_of(rank) == 0 else rows.flip(0)
        weight.copy_(rows[:, None].expand_as(weight))
    with logged() as messages:
        parallel(make_batch(cell.spec, rank))
    return [weight.cpu().clone() for weight in shards], messages


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_the_first_group_wins(ranks4: RankPool, sharding: str, equal: bool) -> None:
    results = ranks4.run(weights_after_lookup, Cell(TWO, sharding), equal)
    for rank, (shards, messages) in enumerate(results):
        expected, _ = results[TWO.replica_peers(rank)[0]]
        assert all(map(torch.equal, shards, expected))
        assert all(weight[0, 0] == 0 for weight in shards)
        differed = bool(shards) and not equal
        assert bool(messages) == differed, messages


def refused_subgroups(rank: int, world_size: int) -> list[str]:
    """Return the errors on half the ranks; the others make no such calls."""
    half: Any = dist.new_subgroups(2)[0]
    envs = [ShardingEnv.from_process_group(group) for group in (half, world_group())]
    model, sharder = build(ModelSpec()), make_sharder(ROWS)
    shared: dict[str, Any] = {"plan": group_plan(ROWS, model, sharder), "sharders": [sharder]}
    calls: list[Any] = [
        lambda: planner_for(ROWS.mesh).collective_plan(model, [sharder], half),
        lambda: tdsp.ModelParallel2D(model, env=envs[0], **shared),
        lambda: DistributedModelParallel(model, env=envs[0], **shared),
    ]
    errors = [error_text(call, tdsp.errors.UnsupportedError) for call in calls if rank < 2]
    plan = group_plan(Cell(TWO), model, sharder)
    tdsp.ModelParallel2D(model, env=envs[1], plan=plan, sharders=[sharder])
    return errors


def test_subgroups_are_refused_and_the_group_of_all_ranks_is_not(ranks4: RankPool) -> None:
    first, second, *others = ranks4.run(refused_subgroups, timeout_s=30)
    assert first == second == 3 * first[:1]
    assert first[0].startswith("a process group has ranks 0, 1 of 4 alone, but tables are sharded")
    assert others == [[], []]


Rows = set[tuple[str, int]]


def tracked_rows(rank: int, world_size: int, cell: Cell) -> tuple[Rows, Rows]:
    """Return the rows that TorchRec's tracker saw on this rank, and the rows in its batch."""
    model = shard(cell)
    tracker = model.init_torchrec_delta_tracker(DeltaTrackerConfig())
    batch = make_batch(cell.spec, seed=rank)
    local_loss(model(batch)).backward()
    first_rows = {table_shard.table: table_shard.row for table_shard in shards_of(model)}
    seen = {
        (table, first_rows[table] + row)
        for path, rows in tracker.get_unique_ids().items()
        for table in [path.rpartition(".")[2]]
        for row in rows.tolist()
    }
    given = {
        (table.name, row)
        for feature, table in cell.spec.features
        for row in batch[feature].values().tolist()
    }
    return seen, given


@pytest.mark.parametrize(
    "cell",
    [
        Cell(tdsp.Mesh2D(1, 2)),
        Cell(tdsp.Mesh2D(1, 2), exchange="nonempty", stock_wrapper=True),
        Cell(tdsp.Mesh2D(1, 2), spec=SEQUENCES),
        Cell(tdsp.Mesh2D(2, 1)),
    ],
    ids=str,
)
def test_torchrecs_tracker_sees_all_rows(ranks2: RankPool, cell: Cell) -> None:
    seen, given = zip(*ranks2.run(tracked_rows, cell), strict=True)
    assert set.union(*seen) == set.union(*given)
