"""`failing_together` where ranks fail alike or run out of batches; `test_faults` has the rest."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrec_2dsp as tdsp
from tests.support.devices import rank_device
from tests.support.loops import LossModel, largest_gap, make_stream, plain_loop, shard, snapshot
from tests.support.oracle import local_loss
from tests.support.parity import Cell, make_optimizer
from tests.support.ranks import RankPool
from torchrec_2dsp._compat.c10d import store_of_world
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.comms.notice_board import NoticeBoard

pytestmark = pytest.mark.dealt_file

EXACT = Cell(tdsp.Mesh2D(2, 2))
ROWS = Cell(tdsp.Mesh2D(1, 4), exchange="row", owners="hash")
UNEVEN = (
    "no batch is left after 2 for rank 1, but one for ranks 0, 2, 3; give all ranks the same "
    "number of batches: drop or pad the rest"
)


def in_context(rank: int, world_size: int, cell: Cell) -> tuple[float, list[int], int]:
    """Return gap to a loop without the context, alarms by step, and what was posted meanwhile."""
    batches = [step[rank] for step in make_stream(cell, 3)]
    plain = shard(cell)
    plain_loop(plain, make_optimizer(plain), batches)
    model, alarms = shard(cell), []
    optimizer = make_optimizer(model)
    with pytest.MonkeyPatch.context() as patch:
        posts: list[NoticeBoard] = []
        post = NoticeBoard._post

        def noted_post(board: NoticeBoard) -> bool:
            # The board's own thread may still answer what ranks asked in a test before this one.
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
                alarms.append(sum(one.group == "alarm" for one in seen.records))
            num_posts = len(posts)
    return largest_gap(snapshot(model), snapshot(plain)), alarms, num_posts


@pytest.mark.parametrize("loop", ["first", "second"])
def test_a_good_loop_trains_the_same_and_posts_nothing(ranks4: RankPool, loop: str) -> None:
    for gap, alarms, num_posts in ranks4.run(in_context, EXACT):
        assert gap == 0.0
        # Those of the batch and of the sync, as without the context; the first batch also settles
        # the types of numbers, by a gather of objects, which is two collectives.
        assert alarms == [4, 2, 2]
        assert num_posts == 0


def uneven(rank: int, world_size: int, cell: Cell) -> tuple[str, tuple[int, ...], int, float]:
    """Return the error, the ranks it names, its step and whether the model can be read."""
    model = shard(cell)
    optimizer = make_optimizer(model)
    batches = [step[rank] for step in make_stream(cell, 3)][: 2 if rank == 1 else 3]
    num_steps = 0
    said, ranks = "", ()
    try:
        with tdsp.failing_together(model) as loop:
            for batch in loop.batches(batches):
                plain_loop(model, optimizer, [batch])
                num_steps += 1
    except tdsp.errors.RankError as error:
        said, ranks = str(error), error.ranks
    expected = shard(cell)
    plain_loop(expected, make_optimizer(expected), batches[:2])
    return said, ranks, num_steps, largest_gap(snapshot(model), snapshot(expected))


def test_a_rank_without_a_batch_is_named_before_the_step(ranks4: RankPool) -> None:
    assert ranks4.run(uneven, EXACT) == [(UNEVEN, (1,), 2, 0.0)] * 4


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
    ((kind, said),) = others
    assert kind == "RankError"
    assert said.startswith(
        "rank 1 failed at step 0, in the loader, for batch 2: OSError: no such file (test_failing_"
    )


def prefetching(rank: int, world_size: int, num_batches: list[int]) -> tuple[str, list[float]]:
    """Return what `TrainPipelineRowPrefetch` raises, and the losses until then."""
    torch.manual_seed(0)
    model = shard(ROWS, model=LossModel(ROWS.spec))
    pipeline: Any = tdsp.TrainPipelineRowPrefetch(model, make_optimizer(model), rank_device())
    batches = iter([step[rank] for step in make_stream(ROWS, 6)][: num_batches[rank]])
    losses = []
    said = ""
    try:
        while True:
            losses.append(float(pipeline.progress(batches).sum()))
    except StopIteration:
        pass
    except tdsp.errors.RankError as error:
        said = str(error)
        with pytest.raises(tdsp.errors.RankError, match="no batch is left"):
            pipeline.progress(batches)
    # Nothing is half done: the ranks can still talk.
    snapshot(model)
    dist.barrier()
    return said, losses


def test_a_prefetching_pipeline_names_the_rank_without_a_batch(ranks4: RankPool) -> None:
    """Its ids would meet other messages, and gloo would abort the processes."""
    for said, losses in ranks4.run(prefetching, [5, 3, 5, 5]):
        assert said == UNEVEN.replace("after 2", "after 3")
        assert len(losses) == 1
    for said, losses in ranks4.run(prefetching, [2, 2, 2, 2]):
        assert said == ""
        assert len(losses) == 2


def switching(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Return losses of a pipeline that goes on with another iterator, and of one that doesn't."""
    batches = [step[rank] for step in make_stream(ROWS, 6)]
    losses: list[list[float]] = []
    for parts in ([batches], [batches[:4], batches[4:]]):
        torch.manual_seed(0)
        model = shard(ROWS, model=LossModel(ROWS.spec))
        pipeline: Any = tdsp.TrainPipelineRowPrefetch(model, make_optimizer(model), rank_device())
        iterators = [iter(part) for part in parts]
        losses.append([])
        # After one step, three batches of the first iterator are under way.
        for iterator in (iterators[0], *[iterators[-1]] * 6):
            with suppress(StopIteration):
                losses[-1].append(float(pipeline.progress(iterator).sum()))
    return losses[0], losses[1]


def test_batches_taken_ahead_are_trained_though_the_iterator_changes(ranks4: RankPool) -> None:
    for whole, switched in ranks4.run(switching):
        assert len(whole) == 6
        assert switched == whole


def alike(rank: int, world_size: int) -> tuple[bool, str]:
    """All ranks raise the same; whether they can go on, and whether anything was posted."""
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
    """Return what a model raises whose row gradients were bad, again and again."""
    model: Any = shard(replace(EXACT, sync=tdsp.GradientSync()))
    (batches,) = make_stream(EXACT, 1)
    (local_loss(model(batches[rank])) * float("nan" if rank == 1 else 1)).backward()
    texts = []
    for use in (model.sync_now, model.sync_now, lambda: model(batches[rank]), model.state_dict):
        with pytest.raises(tdsp.errors.SyncError) as caught:
            use()
        texts.append(str(caught.value))
    return texts


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
