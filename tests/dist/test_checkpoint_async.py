"""Saves that go on while the model trains: what they store, what they disturb, how they fail."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import torchrec_2dsp as tdsp
from tests.support.models import SEQUENCES
from tests.support.oracle import local_loss
from tests.support.parity import Cell
from tests.support.ranks import RankPool, run_ranks
from tests.support.trips import HOT, M14, M22, M41, batches, make, stock
from torchrec_2dsp.comms.groups import WorldGroups
from torchrec_2dsp.errors import CheckpointError, ConfigError
from torchrec_2dsp.parallel.checkpoint import load_checkpoint, save_checkpoint
from torchrec_2dsp.parallel.checkpoint.writer import ChecksumWriter

pytestmark = pytest.mark.dealt_file

SAVED_STEPS = (1, 4)
STEPS = 7
TRAINED_MEANWHILE = 2
"""Steps that are trained while a save can't write yet."""
CELLS = [
    Cell(M22, "row_wise", sync=tdsp.GradientSync(delay=1), hot_rows=HOT),
    Cell(M14, "row_wise", exchange="row", owners="hash", hot_rows=HOT),
    Cell(M41, "table_wise", sync=tdsp.WeightSync(), optimizer="adagrad"),
    Cell(M22, "column_wise", spec=SEQUENCES),
    stock("table_wise"),
]


@contextmanager
def held_writes() -> Iterator[threading.Event]:
    """Saves that write nothing before the event is set."""
    may_write = threading.Event()
    write = ChecksumWriter.write_data

    def write_later(*args: Any) -> Any:
        plan, planner = args[1:]
        assert may_write.wait(60)
        return write(args[0], plan, planner)

    with patch.object(ChecksumWriter, "write_data", write_later):
        yield may_write


@dataclass(frozen=True)
class Run:
    """A training run on one rank."""

    losses: list[float]
    num_unfinished: int
    """How many saves were still writing when some steps more had been trained."""


def run(cell: Cell, world_size: int, folder: Path, way: str) -> Run:
    """Train; ``way`` says how to save after some of the steps."""
    model, optimizer = make(cell, world_size)
    losses: list[float] = []
    unfinished = 0

    def train(step: int) -> None:
        optimizer.zero_grad()
        loss = local_loss(model(batches(cell, step, world_size)[dist.get_rank()]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    steps = iter(range(STEPS))
    for step in steps:
        train(step)
        path, extra = folder / str(step), {"step": step}
        if way == "synchronous" and step in SAVED_STEPS:
            save_checkpoint(path, model, optimizer, extra=extra)
        elif way == "asynchronous" and step in SAVED_STEPS:
            with held_writes() as may_write:
                pending = save_checkpoint(path, model, optimizer, extra=extra, asynchronous=True)
                for _ in range(TRAINED_MEANWHILE):
                    train(next(steps))
                unfinished += not pending.done()
                may_write.set()
                pending.result()
    return Run(losses, unfinished)


def run_all_ways(
    rank: int, world_size: int, cells: list[Cell], folder: Path
) -> list[dict[str, Run]]:
    ways = ("none", "synchronous", "asynchronous")
    return [
        {way: run(cell, world_size, folder / str(number) / way, way) for way in ways}
        for number, cell in enumerate(cells)
    ]


def test_training_goes_on_undisturbed(ranks4: RankPool, tmp_path: Path) -> None:
    for by_cell in ranks4.run(run_all_ways, CELLS, tmp_path, timeout_s=280):
        for cell, runs in zip(CELLS, by_cell, strict=True):
            assert runs["asynchronous"].num_unfinished == len(SAVED_STEPS), cell
            assert runs["asynchronous"].losses == runs["synchronous"].losses, cell
            # A read of the state applies what a delay of one step would have applied later.
            is_delayed = isinstance(cell.sync, tdsp.GradientSync) and cell.sync.delay
            assert is_delayed or runs["asynchronous"].losses == runs["none"].losses, cell
    for number, cell in enumerate(CELLS):
        for step in SAVED_STEPS:
            folders = [tmp_path / str(number) / way / str(step) for way in WAYS]
            contents = [
                {file.name: file.read_bytes() for file in folder.glob("*.distcp")}
                for folder in folders
            ]
            assert len(contents[0]) == 4
            assert contents[0] == contents[1], (cell, step)


WAYS = ("synchronous", "asynchronous")


def groups_are_made_once(rank: int, world_size: int, folder: Path) -> list[object]:
    model, _ = make(Cell(tdsp.Mesh2D(1, 2), "row_wise"), world_size)
    seen = []
    for number in range(2):
        save_checkpoint(folder / str(number), model, asynchronous=True).result()
        seen.append(WorldGroups.current().shared["background_checkpoints"])
    return [seen[0] is seen[1], seen[0] is dist.group.WORLD, dist.get_backend(seen[0])]


def test_saves_have_one_group_of_their_own(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(groups_are_made_once, tmp_path) == [[True, False, "gloo"]] * 2


def waits_for_one_another(rank: int, world_size: int, folder: Path) -> list[bool]:
    """A second save, of either kind, and a load come after the one that runs."""
    model, optimizer = make(Cell(tdsp.Mesh2D(1, 2), "row_wise"), world_size)
    was_done = []

    def save_too(path: Path) -> None:
        save_checkpoint(path.with_suffix(".too"), model, optimizer)

    def save_too_and_return(path: Path) -> None:
        save_checkpoint(path.with_suffix(".too"), model, optimizer, asynchronous=True)

    def load(path: Path) -> None:
        load_checkpoint(path, model, optimizer)

    for number, action in enumerate((save_too, save_too_and_return, load)):
        with held_writes() as may_write:
            path = folder / str(number)
            pending = save_checkpoint(path, model, optimizer, asynchronous=True)
            assert not pending.done()
            assert not pending.cancel()
            threading.Timer(0.3, may_write.set).start()
            action(path)
            was_done.append(pending.done() and pending.result() is None)
    return was_done


def test_one_save_at_a_time(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(waits_for_one_another, tmp_path) == [[True] * 3] * 2


def fails(rank: int, world_size: int, folder: Path) -> list[str]:
    """Return the errors of a future, and of the save after one that nobody asked."""
    model, optimizer = make(Cell(tdsp.Mesh2D(1, 2), "row_wise"), world_size)
    texts = []

    def no_space(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    for number in range(2):
        with patch.object(ChecksumWriter, "write_data", no_space if rank else _WRITE):
            pending = save_checkpoint(folder / str(number), model, optimizer, asynchronous=True)
            if number == 0:
                with pytest.raises(CheckpointError) as caught:
                    pending.result()
                texts.append(str(caught.value))
            else:
                with pytest.raises(CheckpointError) as caught:
                    save_checkpoint(folder / "next", model, optimizer)
                texts.append(str(caught.value))
    save_checkpoint(folder / "0", model, optimizer, asynchronous=True).result()
    load_checkpoint(folder / "0", model, optimizer)
    return [text.replace(str(folder), "FOLDER") for text in texts]


_WRITE = ChecksumWriter.write_data


def test_a_failure_of_one_rank_is_everybodys(ranks2: RankPool, tmp_path: Path) -> None:
    def text(number: int) -> str:
        return (
            f"FOLDER/{number} couldn't be written and holds no checkpoint (rank 1: "
            "OSError(28, 'No space left on device')); make room there, and resume from an earlier "
            "checkpoint"
        )

    expected = [text(0), f"an earlier asynchronous save has failed: {text(1)}"]
    assert ranks2.run(fails, tmp_path) == [expected] * 2
    assert not (tmp_path / "1" / ".metadata").exists()
    assert not (tmp_path / "next").exists()


def refused(rank: int, world_size: int, folder: Path) -> str:
    model, _ = make(Cell(tdsp.Mesh2D(1, 2), "row_wise"), world_size)
    with pytest.raises(ConfigError) as caught:
        save_checkpoint(folder, model, asynchronous=bool(rank))  # type: ignore[call-overload]
    return str(caught.value)


def test_ranks_must_agree_on_it(ranks2: RankPool, tmp_path: Path) -> None:
    assert (
        ranks2.run(refused, tmp_path)
        == [
            "asynchronous differs between ranks: rank 0 has False, rank 1 has True; give all ranks "
            "the same"
        ]
        * 2
    )


def leave_while_saving(rank: int, world_size: int, folder: Path, way: str) -> str:
    """End with a save under way; return what comes of it where that can be seen."""
    model, optimizer = make(Cell(tdsp.Mesh2D(1, 2), "row_wise"), world_size)
    write = ChecksumWriter.write_data
    may_write = threading.Event()

    def write_later(writer: Any, plan: Any, planner: Any) -> Any:
        may_write.wait(60)
        return write(writer, plan, planner)

    patch.object(ChecksumWriter, "write_data", write_later).start()
    pending = save_checkpoint(folder, model, optimizer, asynchronous=True)
    threading.Timer(0.5, may_write.set).start()
    if way == "destroy":
        dist.destroy_process_group()
        with pytest.raises(CheckpointError) as caught:
            pending.result()
        return str(caught.value).replace(str(folder), "FOLDER")
    # The worker destroys the world, as many programs do; here the end of the interpreter does it.
    ways = iter([lambda: None, dist.destroy_process_group])
    patch.object(dist, "destroy_process_group", lambda: next(ways)()).start()
    return ""


def test_the_end_of_the_program_waits(tmp_path: Path) -> None:
    run_ranks(leave_while_saving, 2, tmp_path / "0", "end", timeout_s=250)
    assert (tmp_path / "0" / ".metadata").exists()


def test_a_world_that_is_destroyed_fails_the_save_by_name(tmp_path: Path) -> None:
    texts = run_ranks(leave_while_saving, 2, tmp_path / "0", "destroy", start_method="forkserver")
    for text in texts:
        assert text.startswith(
            "FOLDER couldn't be written and holds no checkpoint (the ranks have lost each other:"
        )
    assert not (tmp_path / "0" / ".metadata").exists()
