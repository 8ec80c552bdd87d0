"""What goes wrong in a sync is told on every rank, before anything is applied."""

from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.planner import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import make_stream, shard, sharded_tables
from tests.support.models import SEQUENCES, ModelSpec, TableSpec
from tests.support.oracle import local_loss
from tests.support.parity import TWO, Cell, make_optimizer
from tests.support.ranks import RankPool, run_ranks
from torchrec_2dsp._compat.c10d import store_of_world
from torchrec_2dsp.replicas.capture import RowCapture
from torchrec_2dsp.replicas.synced_shard import TouchedRows
from torchrec_2dsp.shard.kernels import TableShard

pytestmark = pytest.mark.dealt_file

SPEC = ModelSpec((TableSpec("t0", 400, 8, ("f0",)), TableSpec("t1", 240, 16, ("f1", "f2"))))
"""Few of its rows are in a batch."""
HOT_ROWS = (("t0", (0, 1, 5)), ("t1", (0, 2)))
EXACT = Cell(TWO, spec=SPEC)
ONE_TABLE = Cell(TWO, "table_wise", ModelSpec(SPEC.tables[:1]))
"""Half of the ranks hold none."""
SEQUENCE = Cell(TWO, spec=SEQUENCES)
LAYERED = replace(EXACT, mesh=tdsp.Mesh2D(4, 1))
"""On two hosts, gradients are added up inside each first."""
AVERAGED = replace(EXACT, sync=tdsp.WeightSync())

FAULTY_RANK = 1


def shards_of(parallel: torch.nn.Module) -> list[TableShard]:
    """Return this rank's shards, read behind the sync point's back."""
    kernels = [kernel for part in sharded_tables(parallel) for kernel in part.kernels()]
    return [shard for kernel in kernels for shard in kernel.shards()]


def values_of(parallel: torch.nn.Module) -> torch.Tensor:
    tensors = [shard.tensors["weight"].reshape(-1) for shard in shards_of(parallel)]
    return torch.cat([torch.zeros(1), *tensors])


def syncing(parallel: Any) -> tuple[str, float]:
    """Sync; return the error text, and the largest change to a weight."""
    before = values_of(parallel)
    try:
        parallel.sync()
        parallel.sync_now()
    except tdsp.errors.SyncError as error:
        changed = (values_of(parallel) - before).abs().nan_to_num(0.0).max().item()
        return str(error), changed
    return "", 0.0


def bad_loss(rank: int, world_size: int, cell: Cell, factor: float) -> tuple[str, float]:
    parallel, (batches,) = shard(cell), make_stream(cell, 1)
    loss = local_loss(parallel(batches[rank]))
    (loss * (factor if rank == FAULTY_RANK else 1.0)).backward()
    return syncing(parallel)


def same_message(answers: list[tuple[str, float]]) -> str:
    """Return the error that all ranks raised, without having written anything."""
    (message,) = {message for message, _ in answers}
    assert max(changed for _, changed in answers) == 0.0
    return message


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "cell", [EXACT, ONE_TABLE, SEQUENCE, replace(EXACT, hot_rows=HOT_ROWS)], ids=str
)
def test_a_bad_gradient(ranks4: RankPool, cell: Cell, factor: float) -> None:
    message = same_message(ranks4.run(bad_loss, cell, factor))
    assert message.startswith("table 't")
    assert "is not finite; no row was updated" in message
    assert "(found on rank " in message


@pytest.mark.parametrize("cell", [LAYERED, replace(EXACT, hot_rows=HOT_ROWS)], ids=str)
def test_a_bad_gradient_on_one_of_two_hosts(two_hosts: RankPool, cell: Cell) -> None:
    message = same_message(two_hosts.run(bad_loss, cell, float("nan")))
    assert "is not finite; no row was updated" in message


class TwoModules(torch.nn.Module):
    """Bags of two modules, of which the first has two kernels."""

    def __init__(self) -> None:
        super().__init__()
        # Of different sizes, so that a message which meets another one's receive is seen.
        tables = [
            EmbeddingBagConfig(40, dim, name=f"t{index}", feature_names=[f"f{index}"])
            for index, dim in enumerate([8, 16, 32])
        ]
        self.first = EmbeddingBagCollection(tables=cast(Any, tables[:2]))
        self.second = EmbeddingBagCollection(tables=cast(Any, tables[2:]))

    def forward(self, batch: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        return self.first(batch).to_dict() | self.second(batch).to_dict()


def bad_bags(rank: int, world_size: int, feature: str, value: float, second_kernel: str) -> str:
    """Sync after one feature's bags got a non-finite gradient on one rank."""
    model = TwoModules()
    sharders: Any = [tdsp.EmbeddingBagCollectionSharder2D(fused_params={"learning_rate": 0.1})]
    t1_type = "table_wise" if second_kernel == "table_wise" else "row_wise"
    types = {"t0": "row_wise", "t1": t1_type, "t2": "row_wise"}
    constraints = {
        name: ParameterConstraints(sharding_types=[kind]) for name, kind in types.items()
    }
    planner = tdsp.Planner2D(mesh=TWO, batch_size=4, constraints=constraints)
    plan = planner.collective_plan(model, sharders)
    if second_kernel == "row exchange":
        plan = tdsp.pin(plan, "t1", exchange="row")
    parallel = tdsp.ModelParallel2D(model, plan=plan, sharders=sharders)
    batch = KeyedJaggedTensor(
        ["f0", "f1", "f2"], torch.arange(12) + rank, lengths=torch.ones(12, dtype=torch.int32)
    )
    bags = parallel(batch)
    factors = {name: value if (rank, name) == (FAULTY_RANK, feature) else 1.0 for name in bags}
    torch.stack([(bags[name] * factor).sum() for name, factor in factors.items()]).sum().backward()
    return syncing(parallel)[0]


@pytest.mark.parametrize("second_kernel", ["row exchange", "table_wise"])
@pytest.mark.parametrize("feature", ["f0", "f1", "f2"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_in_one_kernel_of_two_modules(
    ranks4: RankPool, feature: str, value: float, second_kernel: str
) -> None:
    """The faulty rank still sends the other kernels' gradients, so that all messages match."""
    (raised,) = set(ranks4.run(bad_bags, feature, value, second_kernel, timeout_s=60))
    assert raised.startswith(f"table '{feature.replace('f', 't')}' has a gradient for its row")
    assert "is not finite; no row was updated" in raised


def bad_weights(rank: int, world_size: int, cell: Cell) -> tuple[str, float]:
    parallel, (batches,) = shard(cell), make_stream(cell, 1)
    local_loss(parallel(batches[rank])).backward()
    for table in shards_of(parallel) if rank == FAULTY_RANK else []:
        table.tensors["weight"].fill_(float("nan"))
    return syncing(parallel)


def test_a_bad_weight(ranks4: RankPool) -> None:
    message = same_message(ranks4.run(bad_weights, AVERAGED))
    assert message.startswith("table 't0' has weights or optimizer state that are not finite")
    assert message.endswith(f"(found on rank {FAULTY_RANK})")


def crashing(rank: int, world_size: int, cell: Cell) -> tuple[str, float]:
    parallel, (batches,) = shard(cell), make_stream(cell, 1)
    local_loss(parallel(batches[rank])).backward()
    with pytest.MonkeyPatch.context() as patch:
        if rank == FAULTY_RANK:
            patch.delattr(RowCapture, "take")
            patch.delattr(TouchedRows, "changed")
        return syncing(parallel)


@pytest.mark.parametrize("cell", [EXACT, AVERAGED], ids=str)
def test_an_error_that_nobody_thought_of(cell: Cell) -> None:
    """In processes of their own: peers still wait for what the faulty rank didn't send."""
    with RankPool(4) as pool:
        message = same_message(pool.run(crashing, cell))
    assert message.startswith("AttributeError: ")
    assert message.endswith(f"(found on rank {FAULTY_RANK})")


def test_an_error_that_nobody_thought_of_on_one_of_two_hosts() -> None:
    """The faulty rank's neighbour must hear about it before it waits for its rows."""
    with RankPool(4, local_world_size=2) as pool:
        message = same_message(pool.run(crashing, LAYERED, timeout_s=60))
    assert message.startswith("AttributeError: ")


def drifting(rank: int, world_size: int, cell: Cell, faulty_rank: int) -> tuple[int, str]:
    """After how many steps a changed row is found, and what is said."""
    parallel = shard(cell)
    assert isinstance(parallel, tdsp.ModelParallel2D)
    optimizer = make_optimizer(parallel)
    for step, batches in enumerate(make_stream(cell, 4), 1):
        optimizer.zero_grad()
        local_loss(parallel(batches[rank])).backward()
        if rank == faulty_rank:
            # A row that no batch looks up, so that no sync mends it.
            shards_of(parallel)[0].tensors["weight"][-1] += 1e-3
        try:
            parallel.sync_now()
        except tdsp.errors.SyncError as error:
            return step, str(error)
        optimizer.step()
    return 0, ""


@pytest.mark.parametrize("sync", [tdsp.GradientSync, tdsp.WeightSync])
def test_drift_is_found_at_the_next_check(ranks4: RankPool, sync: Any) -> None:
    cell = replace(EXACT, sync=sync(drift_every=3), hot_rows=HOT_ROWS)
    (answer,) = set(ranks4.run(drifting, cell, 3))
    step, message = answer
    assert step == 3
    assert message.startswith(
        "copies of table 't0' differ in rows 200 to 399 after a sync; if weights"
    )
    assert "call model.broadcast_replicas() (found on rank " in message


@pytest.mark.parametrize("sync", [tdsp.GradientSync, tdsp.WeightSync])
def test_equal_copies_are_no_drift(ranks4: RankPool, sync: Any) -> None:
    cells = [EXACT, ONE_TABLE, replace(EXACT, hot_rows=HOT_ROWS), SEQUENCE]
    for cell in cells:
        checked = replace(cell, sync=sync(drift_every=1))
        assert set(ranks4.run(drifting, checked, -1)) == {(0, "")}


def alone(rank: int, world_size: int) -> str:
    """Return the error on a rank that reaches a sync which the other one never reaches."""
    world = dist.group.WORLD
    assert world is not None
    options = world._get_backend(torch.device("cpu")).options
    options._timeout = timedelta(seconds=3)  # pyright: ignore[reportAttributeAccessIssue]
    cell = Cell(tdsp.Mesh2D(2, 1), "table_wise", SPEC)
    parallel, (batches,) = shard(cell), make_stream(cell, 1)
    local_loss(parallel(batches[rank])).backward()
    store = store_of_world()
    if rank == 1:
        store.wait(["told"], timedelta(seconds=60))
        return ""
    message, _ = syncing(parallel)
    # An error like this one is the last: whatever uses the model raises it again, at once.
    again = [syncing(parallel)[0]]
    uses: list[Any] = [parallel.sync_now, parallel.state_dict, lambda: parallel(batches[rank])]
    for use in uses:
        with pytest.raises(tdsp.errors.RankError) as caught:
            use()
        again.append(str(caught.value))
    assert set(again) == {message}
    store.set("told", "")
    return message


def test_a_wait_has_a_deadline() -> None:
    assert run_ranks(alone, 2, start_method="forkserver")[0].startswith(
        "not all ranks do the same: rank 0 at step 1, in sync_now(); rank 1 at step 1, in the "
        "backward; lookups, syncs and reads of the state are for all ranks alike (RuntimeError: "
    )
