"""`failing_together` where ranks fail alike or run out of batches; `test_faults` has the rest."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.devices import rank_device
from tests.support.loops import (
    LossModel,
    largest_gap,
    make_stream,
    plain_loop,
    shard,
    shard_tables,
    snapshot,
)
from tests.support.models import HOT_ROWS, SEQUENCES, ModelSpec, TableSpec
from tests.support.oracle import local_loss
from tests.support.parity import TWO, Cell, make_optimizer, shards_of
from tests.support.ranks import RankPool, error_text, run_ranks
from torchrec_2dsp._compat.c10d import store_of_world
from torchrec_2dsp.comms.alarm import as_ours
from torchrec_2dsp.comms.breaking import described
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.comms.failure_detection import Activity, NoticeBoard
from torchrec_2dsp.replicas.capture import RowCapture
from torchrec_2dsp.replicas.synced_shard import TouchedRows

pytestmark = pytest.mark.dealt_file

EXACT = Cell(tdsp.Mesh2D(2, 2))
ROWS = Cell(tdsp.Mesh2D(1, 4), exchange="row", owners="hash")
UNEVEN = (
    "no batch is left after 2 for rank 1, but one for ranks 0, 2, 3; give all ranks the same "
    "number of batches: drop or pad the rest"
)


def in_context(rank: int, world_size: int, cell: Cell) -> tuple[float, list[int], int, int]:
    """Return the gap to a loop without it, alarms by step, posts meanwhile, and open contexts."""
    batches = [step[rank] for step in make_stream(cell, 3)]
    plain = shard(cell)
    plain_loop(plain, make_optimizer(plain), batches)
    model, alarms = shard(cell), []
    optimizer = make_optimizer(model)
    with pytest.MonkeyPatch.context() as patch:
        posts: list[NoticeBoard] = []
        waits: list[int] = []
        patch.setattr(NoticeBoard, "wait_for_others", lambda board, change: waits.append(change))
        post = NoticeBoard._post

        def noted_post(board: NoticeBoard) -> bool:
            # The board's own thread may still answer requests from an earlier test.
            if threading.current_thread().name != "notice board":
                posts.append(board)
            return post(board)

        patch.setattr(NoticeBoard, "_post", noted_post)
        with tdsp.failing_together(model) as loop:
            # A world that has trained before, in another test, is told once that this rank is back.
            posts.clear()
            for batch in loop.batches(batches):
                with count_collectives() as seen:
                    plain_loop(model, optimizer, [batch])
                alarms.append(sum(record.group == "alarm" for record in seen.records))
            num_posts = len(posts)
    return largest_gap(snapshot(model), snapshot(plain)), alarms, num_posts, sum(waits)


@pytest.mark.parametrize("loop", ["first", "second"])
def test_a_good_loop_trains_the_same_and_posts_nothing(ranks4: RankPool, loop: str) -> None:
    for gap, alarms, num_posts, num_open in ranks4.run(in_context, EXACT):
        assert gap == 0.0
        # The batch's and the sync's, as without the context; the first batch also settles
        # the types of numbers, by a gather of objects, which is two collectives.
        assert alarms == [4, 2, 2]
        assert num_posts == 0
        assert num_open == 0


def uneven(rank: int, world_size: int, cell: Cell) -> tuple[str, tuple[int, ...], int, float]:
    """Return the error, the ranks it names, its step and whether the model can be read."""
    model = shard(cell)
    optimizer = make_optimizer(model)
    batches = [step[rank] for step in make_stream(cell, 3)][: 2 if rank == 1 else 3]
    num_steps = 0
    message, ranks = "", ()
    try:
        with tdsp.failing_together(model) as loop:
            for batch in loop.batches(batches):
                plain_loop(model, optimizer, [batch])
                num_steps += 1
    except tdsp.errors.RankError as error:
        message, ranks = str(error), error.ranks
    expected = shard(cell)
    plain_loop(expected, make_optimizer(expected), batches[:2])
    return message, ranks, num_steps, largest_gap(snapshot(model), snapshot(expected))


@pytest.mark.parametrize("cell", [EXACT, replace(EXACT, stock_wrapper=True)], ids=str)
def test_a_rank_without_a_batch_is_named_before_the_step(ranks4: RankPool, cell: Cell) -> None:
    assert ranks4.run(uneven, cell) == [(UNEVEN, (1,), 2, 0.0)] * 4


def broken_loader(rank: int, world_size: int) -> tuple[str, str]:
    model = shard(EXACT)
    optimizer = make_optimizer(model)
    batches = [step[rank] for step in make_stream(EXACT, 2)]

    def load() -> Iterator[Any]:
        yield batches[0]
        if rank == 1:
            raise OSError("no such file")
        yield batches[1]

    try:
        with tdsp.failing_together(model) as loop:
            for batch in loop.batches(load()):
                plain_loop(model, optimizer, [batch])
    except (OSError, tdsp.errors.RankError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_an_error_of_a_loader_is_told_with_its_place(ranks4: RankPool) -> None:
    answers = ranks4.run(broken_loader)
    assert answers[1] == ("OSError", "no such file")
    others = {answer for rank, answer in enumerate(answers) if rank != 1}
    ((kind, message),) = others
    assert kind == "RankError"
    assert message.startswith(
        "rank 1 failed at step 0, in the loader, for batch 2: OSError: no such file (test_failing_"
    )


def prefetching(rank: int, world_size: int, num_batches: list[int]) -> tuple[str, list[float]]:
    """Return the error that `TrainPipelineRowPrefetch` raises, and the losses until then."""
    torch.manual_seed(0)
    model = shard(ROWS, model=LossModel(ROWS.spec))
    pipeline: Any = tdsp.TrainPipelineRowPrefetch(model, make_optimizer(model), rank_device())
    batches = iter([step[rank] for step in make_stream(ROWS, 6)][: num_batches[rank]])
    losses = []
    message = ""
    try:
        while True:
            losses.append(float(pipeline.progress(batches).sum()))
    except StopIteration:
        pass
    except tdsp.errors.RankError as error:
        message = str(error)
        with pytest.raises(tdsp.errors.RankError, match="no batch is left"):
            pipeline.progress(batches)
    # Nothing is half done: the ranks can still talk.
    snapshot(model)
    dist.barrier()
    return message, losses


def test_a_prefetching_pipeline_names_the_rank_without_a_batch(ranks4: RankPool) -> None:
    """Else its ids would meet other messages, and gloo would abort the processes."""
    for message, losses in ranks4.run(prefetching, [5, 3, 5, 5]):
        assert message == UNEVEN.replace("after 2", "after 3")
        assert len(losses) == 1
    for message, losses in ranks4.run(prefetching, [2, 2, 2, 2]):
        assert message == ""
        assert len(losses) == 2


def switching(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Return a pipeline's losses with one iterator, and with a second that continues the first."""
    batches = [step[rank] for step in make_stream(ROWS, 6)]
    losses: list[list[float]] = []
    for parts in ([batches], [batches[:4], batches[4:]]):
        torch.manual_seed(0)
        model = shard(ROWS, model=LossModel(ROWS.spec))
        pipeline: Any = tdsp.TrainPipelineRowPrefetch(model, make_optimizer(model), rank_device())
        iterators = [iter(part) for part in parts]
        losses.append([])
        # After one step, three batches from the first iterator are in flight.
        for iterator in (iterators[0], *[iterators[-1]] * 6):
            with suppress(StopIteration):
                losses[-1].append(float(pipeline.progress(iterator).sum()))
    return losses[0], losses[1]


def test_batches_taken_ahead_are_trained_though_the_iterator_changes(ranks4: RankPool) -> None:
    for whole, switched in ranks4.run(switching):
        assert len(whole) == 6
        assert switched == whole


def alike(rank: int, world_size: int) -> tuple[bool, str]:
    """Raise the same error on all ranks; return whether they can go on, and the posted text."""
    model, (batches,) = shard(EXACT), make_stream(EXACT, 1)
    optimizer = make_optimizer(model)
    bad = replace_ids(batches[rank]) if rank == 1 else batches[rank]
    with pytest.raises(tdsp.errors.InputError), tdsp.failing_together(model):
        model(bad)
    notice = store_of_world().get(f"torchrec_2dsp/notice/{rank}").decode()
    losses = plain_loop(model, optimizer, [batches[rank]])
    return bool(losses), notice


def replace_ids(batch: Any) -> Any:
    return type(batch)(keys=batch.keys(), values=batch.values() + 10_000, lengths=batch.lengths())


def test_what_all_ranks_raise_is_no_fault_of_one(ranks4: RankPool) -> None:
    for goes_on, notice in ranks4.run(alike):
        assert goes_on
        assert '"standing": "here"' in notice


def after_an_error(rank: int, world_size: int) -> list[str]:
    """Return the errors that a model with bad row gradients raises at each later use."""
    model: Any = shard(replace(EXACT, sync=tdsp.GradientSync()))
    (batches,) = make_stream(EXACT, 1)
    (local_loss(model(batches[rank])) * float("nan" if rank == 1 else 1)).backward()
    uses = (model.sync_now, model.sync_now, lambda: model(batches[rank]), model.state_dict)
    return [error_text(use, tdsp.errors.SyncError) for use in uses]


def test_a_model_that_failed_says_so_again() -> None:
    with RankPool(4) as pool:
        (texts,) = {tuple(texts) for texts in pool.run(after_an_error)}
    assert len(set(texts)) == 1
    assert "no row was updated" in texts[0]


def test_a_model_without_our_modules_is_refused() -> None:
    with pytest.raises(
        tdsp.errors.ConfigError, match=r"the model \(Linear\) has no sharded module"
    ):
        tdsp.failing_together(torch.nn.Linear(1, 1))


SPEC = ModelSpec((TableSpec("t0", 400, 8, ("f0",)), TableSpec("t1", 240, 16, ("f1", "f2"))))
"""Few of its rows are in a batch."""
SMALL = Cell(TWO, spec=SPEC)
ONE_TABLE = Cell(TWO, "table_wise", ModelSpec(SPEC.tables[:1]))
"""Half of the ranks hold none."""
SEQUENCE = Cell(TWO, spec=SEQUENCES)
LAYERED = replace(SMALL, mesh=tdsp.Mesh2D(4, 1))
"""On two hosts, gradients are added up inside each first."""
AVERAGED = replace(SMALL, sync=tdsp.WeightSync())

FAULTY_RANK = 1


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
    """Return the error that all ranks raised; check that no weight changed."""
    (message,) = {message for message, _ in answers}
    assert max(changed for _, changed in answers) == 0.0
    return message


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "cell", [SMALL, ONE_TABLE, SEQUENCE, replace(SMALL, hot_rows=HOT_ROWS)], ids=str
)
def test_a_bad_gradient(ranks4: RankPool, cell: Cell, factor: float) -> None:
    message = same_message(ranks4.run(bad_loss, cell, factor))
    assert message.startswith("table 't")
    assert "is not finite; no row was updated" in message
    assert "(found on rank " in message


@pytest.mark.parametrize("cell", [LAYERED, replace(SMALL, hot_rows=HOT_ROWS)], ids=str)
def test_a_bad_gradient_on_one_of_two_hosts(two_hosts: RankPool, cell: Cell) -> None:
    message = same_message(two_hosts.run(bad_loss, cell, float("nan")))
    assert "is not finite; no row was updated" in message


class TwoModules(torch.nn.Module):
    """Bags in two modules; the first has two kernels."""

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
    sharders = [tdsp.EmbeddingBagCollectionSharder2D(fused_params={"learning_rate": 0.1})]
    t1_type = "table_wise" if second_kernel == "table_wise" else "row_wise"
    types = {"t0": "row_wise", "t1": t1_type, "t2": "row_wise"}
    pins = {"t1": {"exchange": "row"}} if second_kernel == "row exchange" else {}
    parallel = shard_tables(TwoModules(), TWO, sharders, types, pins)
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


def crashing(rank: int, world_size: int, cell: Cell) -> tuple[str, float]:
    parallel, (batches,) = shard(cell), make_stream(cell, 1)
    local_loss(parallel(batches[rank])).backward()
    with pytest.MonkeyPatch.context() as patch:
        if rank == FAULTY_RANK:
            patch.delattr(RowCapture, "take")
            patch.delattr(TouchedRows, "changed")
        return syncing(parallel)


@pytest.mark.parametrize("cell", [SMALL, AVERAGED], ids=str)
def test_an_error_that_nobody_thought_of(cell: Cell) -> None:
    """Ranks need separate processes: peers still wait for messages from the faulty rank."""
    with RankPool(4) as pool:
        message = same_message(pool.run(crashing, cell))
    assert message.startswith("AttributeError: ")
    assert message.endswith(f"(found on rank {FAULTY_RANK})")


def test_an_error_that_nobody_thought_of_on_one_of_two_hosts() -> None:
    """The faulty rank's neighbour must hear about it before it waits for its rows."""
    with RankPool(4, local_world_size=2) as pool:
        message = same_message(pool.run(crashing, LAYERED, timeout_s=60))
    assert message.startswith("AttributeError: ")


def drifting(rank: int, world_size: int, cell: Cell) -> tuple[int, str]:
    """Return the step at which a changed row is detected, and the error."""
    parallel = shard(cell)
    assert isinstance(parallel, tdsp.ModelParallel2D)
    optimizer = make_optimizer(parallel)
    for step, batches in enumerate(make_stream(cell, 4), 1):
        optimizer.zero_grad()
        local_loss(parallel(batches[rank])).backward()
        if rank == 3:
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
    cell = replace(SMALL, sync=sync(drift_every=3), hot_rows=HOT_ROWS)
    (answer,) = set(ranks4.run(drifting, cell))
    step, message = answer
    assert step == 3
    assert message.startswith(
        "copies of table 't0' differ in rows 200 to 399 after a sync; if weights"
    )
    assert "call model.broadcast_replicas() (found on rank " in message


def alone(rank: int, world_size: int) -> str:
    """Return the error on a rank that reaches a sync which the other never reaches."""
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
    uses: list[Any] = [parallel.sync_now, parallel.state_dict, lambda: parallel(batches[rank])]
    again = [syncing(parallel)[0], *(error_text(use, tdsp.errors.RankError) for use in uses)]
    assert set(again) == {message}
    store.set("told", "")
    return message


def test_a_wait_has_a_deadline() -> None:
    assert run_ranks(alone, 2, start_method="forkserver")[0].startswith(
        "not all ranks do the same: rank 0 at step 1, in sync_now(); rank 1 at step 1, in the "
        "backward; lookups, syncs and reads of the state are for all ranks alike (RuntimeError: "
    )


def comparing_fails(rank: int, world_size: int) -> str:
    parallel = shard(replace(SMALL, sync=tdsp.GradientSync(drift_every=1)))
    assert isinstance(parallel, tdsp.ModelParallel2D)
    local_loss(parallel(make_stream(SMALL, 1)[0][rank])).backward()
    fault = mock.patch("torchrec_2dsp.replicas.drift._checksums", side_effect=MemoryError("full"))
    with fault if rank == FAULTY_RANK else nullcontext():
        return error_text(parallel.sync_now, tdsp.errors.SyncError)


def test_a_rank_that_can_not_compare_its_copies_keeps_no_peer_waiting(ranks4: RankPool) -> None:
    (message,) = set(ranks4.run(comparing_fails, timeout_s=30))
    assert message == f"MemoryError: full (found on rank {FAULTY_RANK})"


def test_errors_and_places_are_told_in_a_line() -> None:
    assert described(ValueError("not a number\nat all")) == "ValueError: not a number"
    ours = as_ours(ValueError("no such row"), tdsp.errors.SyncError)
    assert (type(ours), str(ours)) == (tdsp.errors.SyncError, "ValueError: no such row")
    assert as_ours(ours, tdsp.errors.ConfigError) is ours
    activity = Activity()
    activity.step = 1
    activity.begin("the forward")
    assert str(activity) == "at step 1, in the forward"
