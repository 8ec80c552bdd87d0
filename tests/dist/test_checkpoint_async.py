"""Saves that run while the model trains: their contents, side effects and failures."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import torchrec_2dsp as tdsp
from tests.support.buckets import bucket
from tests.support.loops import make_stream, plain_loop
from tests.support.models import SEQUENCES
from tests.support.parity import Cell
from tests.support.ranks import RankPool, error_text, run_ranks
from tests.support.trips import HOT, M14, M22, M41, make, stock
from torchrec_2dsp.comms.groups import WorldGroups
from torchrec_2dsp.errors import CheckpointError, ConfigError
from torchrec_2dsp.parallel.checkpoint import load_checkpoint, save_checkpoint
from torchrec_2dsp.parallel.checkpoint.address import Place
from torchrec_2dsp.parallel.checkpoint.writer import ChecksumWriter

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
ROW_WISE, COPIED = Cell(tdsp.Mesh2D(1, 2)), Cell(tdsp.Mesh2D(2, 1))
"""On two ranks."""


def writing_after(wait: Callable[[], object]) -> Any:
    """Return a patch that makes checkpoint writes wait."""
    write = ChecksumWriter.write_data

    def write_later(*args: Any) -> Any:
        wait()
        return write(*args)

    return patch.object(ChecksumWriter, "write_data", write_later)


@contextmanager
def held_writes() -> Iterator[threading.Event]:
    """Hold back checkpoint writes until the event is set."""
    may_write = threading.Event()

    def wait() -> None:
        assert may_write.wait(60)

    with writing_after(wait):
        yield may_write


@dataclass(frozen=True)
class Run:
    """A training run on one rank."""

    losses: list[float]
    num_unfinished: int
    """The number of saves still being written when some more steps had been trained."""


def run(cell: Cell, folder: Path, way: str) -> Run:
    """Train; ``way`` says how to save after some steps."""
    (model, optimizer), stream = make(cell), make_stream(cell, STEPS)
    losses: list[float] = []
    unfinished = 0

    def train(step: int) -> None:
        losses.extend(plain_loop(model, optimizer, [stream[step][dist.get_rank()]]))

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
        {way: run(cell, folder / str(number) / way, way) for way in ways}
        for number, cell in enumerate(cells)
    ]


@pytest.mark.dealt_file
def test_training_goes_on_undisturbed(ranks4: RankPool, tmp_path: Path) -> None:
    for by_cell in ranks4.run(run_all_ways, CELLS, tmp_path, timeout_s=280):
        for cell, runs in zip(CELLS, by_cell, strict=True):
            assert runs["asynchronous"].num_unfinished == len(SAVED_STEPS), cell
            assert runs["asynchronous"].losses == runs["synchronous"].losses, cell
            # Reading the state applies updates that a one-step delay would have applied later.
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
    model, _ = make(ROW_WISE)
    seen = []
    for number in range(2):
        save_checkpoint(folder / str(number), model, asynchronous=True).result()
        seen.append(WorldGroups.current().shared["background_checkpoints"])
    return [seen[0] is seen[1], seen[0] is dist.group.WORLD, dist.get_backend(seen[0])]


@pytest.mark.dealt_file
def test_saves_have_one_group_of_their_own(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(groups_are_made_once, tmp_path) == [[True, False, "gloo"]] * 2


def waits_for_one_another(rank: int, world_size: int, folder: Path) -> list[bool]:
    """Save or load while a save is in flight; return whether each waited."""
    model, optimizer = make(ROW_WISE)
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


@pytest.mark.dealt_file
def test_one_save_at_a_time(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(waits_for_one_another, tmp_path) == [[True] * 3] * 2


def fails(rank: int, world_size: int, folder: Path) -> list[str]:
    """Return a failed save's error, from its future or, if nobody waited, from the next save."""
    model, optimizer = make(ROW_WISE)
    texts = []

    def no_space(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    for number in range(2):
        with patch.object(ChecksumWriter, "write_data", no_space if rank else _WRITE):
            pending = save_checkpoint(folder / str(number), model, optimizer, asynchronous=True)
            save_next = partial(save_checkpoint, folder / "next", model, optimizer)
            ways: list[Callable[[], object]] = [pending.result, save_next]
            texts.append(error_text(ways[number], CheckpointError))
    save_checkpoint(folder / "0", model, optimizer, asynchronous=True).result()
    load_checkpoint(folder / "0", model, optimizer)
    return [text.replace(str(folder), "FOLDER") for text in texts]


_WRITE = ChecksumWriter.write_data


@pytest.mark.dealt_file
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
    model, _ = make(ROW_WISE)
    asynchronous: Any = bool(rank)
    return error_text(
        lambda: save_checkpoint(folder, model, asynchronous=asynchronous), ConfigError
    )


@pytest.mark.dealt_file
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
    """End with a save in flight; return its outcome where it can be seen."""
    model, optimizer = make(ROW_WISE)
    may_write = threading.Event()
    writing_after(lambda: may_write.wait(60)).start()
    pending = save_checkpoint(folder, model, optimizer, asynchronous=True)
    threading.Timer(0.5, may_write.set).start()
    if way == "destroy":
        dist.destroy_process_group()
        return error_text(pending.result, CheckpointError).replace(str(folder), "FOLDER")
    # The worker destroys the world, as many programs do; here the interpreter's exit does it.
    ways = iter([lambda: None, dist.destroy_process_group])
    patch.object(dist, "destroy_process_group", lambda: next(ways)()).start()
    return ""


@pytest.mark.dealt_file
def test_the_end_of_the_program_waits(tmp_path: Path) -> None:
    run_ranks(leave_while_saving, 2, tmp_path / "0", "end", timeout_s=250)
    assert (tmp_path / "0" / ".metadata").exists()


@pytest.mark.dealt_file
def test_a_world_that_is_destroyed_fails_the_save_by_name(tmp_path: Path) -> None:
    texts = run_ranks(leave_while_saving, 2, tmp_path / "0", "destroy", start_method="forkserver")
    for text in texts:
        assert text.startswith(
            "FOLDER couldn't be written and holds no checkpoint (the ranks have lost each other:"
        )
    assert not (tmp_path / "0" / ".metadata").exists()


Arguments = Callable[[int], dict[str, Any]]


def save_fails(rank: int, world_size: int, path: Path, make_arguments: Arguments) -> str:
    model, _ = make(COPIED)
    arguments: dict[str, Any] = {"path": path, "model": model, **make_arguments(rank)}
    text = error_text(lambda: save_checkpoint(**arguments), tdsp.TwoDError)
    return text.replace(str(path), "FOLDER")


def not_json(rank: int) -> dict[str, Any]:
    return {"extra": {"step": torch.ones(1)}}


def json_changes_it(rank: int) -> dict[str, Any]:
    return {"extra": {1: "one"}}


def differs(rank: int) -> dict[str, Any]:
    return {"extra": {"step": rank}}


def one_bad_rank(rank: int) -> dict[str, Any]:
    return {"extra": {"step": {1} if rank else 1}}


def an_unknown_address(rank: int) -> dict[str, Any]:
    return {"path": "nowhere://x"}


def nameless(rank: int) -> dict[str, Any]:
    return {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])}


JSON = "isn't the same after a round trip through JSON; use dicts with text keys, lists, texts and"
REFUSED_SAVES: dict[Arguments, str] = {
    not_json: f"extra={{'step': tensor([1.])}} {JSON} numbers",
    json_changes_it: f"extra={{1: 'one'}} {JSON} numbers",
    one_bad_rank: f"extra={{'step': {{1}}}} {JSON} numbers (found on rank 1)",
    differs: 'extra differs between ranks: rank 0 has {"step": 0}, rank 1 has {"step": 1}; '
    "give all ranks the same",
    an_unknown_address: "nowhere://x can't be opened: Protocol not known: nowhere",
    nameless: "the state of a SGD has no names; wrap it in TorchRec's KeyedOptimizerWrapper",
}


@pytest.mark.parametrize("make_arguments", REFUSED_SAVES, ids=lambda case: case.__name__)
def test_refused_saves(ranks2: RankPool, tmp_path: Path, make_arguments: Arguments) -> None:
    texts = ranks2.run(save_fails, tmp_path / "0", make_arguments)
    assert texts == [REFUSED_SAVES[make_arguments]] * 2
    assert not (tmp_path / "0").exists()


def save_twice_at_once(rank: int, world_size: int, path: Place) -> tuple[str, dict[str, Any]]:
    """Save again before a save writes; return the first one's error and the loadable content."""
    model, _ = make(COPIED)
    second_saves = [partial(save_checkpoint, path, model, extra={"save": "second"})]

    def overtake() -> None:
        while second_saves:
            second_saves.pop()()

    with writing_after(overtake):
        first_save = partial(save_checkpoint, path, model, extra={"save": "first"})
        text = error_text(first_save, CheckpointError)
    return text, load_checkpoint(path, model)


def test_saves_to_an_address_at_the_same_time_lose_nothing(
    ranks2: RankPool, tmp_path: Path
) -> None:
    for text, extra in ranks2.run(save_twice_at_once, bucket(tmp_path / "0")):
        assert "holds a checkpoint already; save to a new folder" in text
        assert extra == {"save": "second"}


def nothing(rank: int) -> dict[str, Any]:
    return {}


def save_on_two(rank: int, world_size: int, path: Path) -> None:
    model, _ = make(COPIED)
    save_checkpoint(path, model)


def test_a_checkpoint_is_never_overwritten(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(save_on_two, tmp_path / "0")
    before = {file.name: file.read_bytes() for file in (tmp_path / "0").iterdir()}
    assert (
        ranks2.run(save_fails, tmp_path / "0", nothing)
        == ["FOLDER holds a checkpoint already; save to a new folder"] * 2
    )
    assert {file.name: file.read_bytes() for file in (tmp_path / "0").iterdir()} == before


def test_a_folder_that_cannot_be_made(ranks2: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    first, second = ranks2.run(save_fails, tmp_path / "file" / "0", nothing)
    assert first == second
    assert first.startswith(
        "FOLDER couldn't be written and holds no checkpoint (rank 0: NotADirectoryError("
    )


def save_slowly(rank: int, world_size: int, path: Path, go_on: Path) -> None:
    """Save, but write nothing until the file ``go_on`` exists."""

    def wait() -> None:
        while not go_on.exists():
            time.sleep(0.01)

    with writing_after(wait):
        save_on_two(rank, world_size, path)


def load_on_two(rank: int, world_size: int, path: Path) -> None:
    model, _ = make(COPIED)
    load_checkpoint(path, model)


def test_another_run_that_saves_to_the_folder_is_named(ranks2: RankPool, tmp_path: Path) -> None:
    folder, go_on = tmp_path / "0", tmp_path / "go_on"
    with RankPool(2) as others:
        slow = threading.Thread(target=others.run, args=(save_slowly, folder, go_on))
        slow.start()
        try:
            while not (folder / "save.lock").exists():
                assert slow.is_alive()
                time.sleep(0.01)
            texts = ranks2.run(save_fails, folder, nothing)
        finally:
            go_on.touch()
            slow.join()
    assert texts[0] == texts[1]
    assert re.fullmatch(
        r"FOLDER is being saved to by process \d+ on \S+ since \d{4}-\d\d-\d\dT[0-9:+]+; save to a "
        r"new folder, or remove FOLDER/save\.lock if that process is gone \(found on rank 0\)",
        texts[0],
    )
    assert not (folder / "save.lock").exists()
    ranks2.run(load_on_two, folder)


def test_the_lock_of_a_dead_process_is_taken_over(ranks2: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "0"
    folder.mkdir()
    (folder / "save.lock").write_text('{"process": 1, "host": "gone", "since": "2020-01-01"}')
    ranks2.run(save_on_two, folder)
    assert not (folder / "save.lock").exists()


def test_a_failed_save_leaves_no_lock(ranks2: RankPool, tmp_path: Path) -> None:
    texts = ranks2.run(fail_to_finish, tmp_path / "0")
    assert texts[0] == texts[1]
    assert "No space left" in texts[0]
    assert not (tmp_path / "0" / "save.lock").exists()
    ranks2.run(save_on_two, tmp_path / "0")


def fail_to_finish(rank: int, world_size: int, path: Path) -> str:
    with patch.object(ChecksumWriter, "finish", side_effect=OSError(28, "No space left")):
        return save_fails(rank, world_size, path, nothing)
