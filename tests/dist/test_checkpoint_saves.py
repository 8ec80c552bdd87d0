"""What can't be saved: one text on every rank, and nothing is written."""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import torchrec_2dsp as tdsp
from tests.support.parity import Cell
from tests.support.ranks import RankPool
from tests.support.trips import make
from torchrec_2dsp.parallel.checkpoint import load_checkpoint, save_checkpoint
from torchrec_2dsp.parallel.checkpoint.writer import ChecksumWriter

Arguments = Callable[[int], dict[str, Any]]


def save_fails(rank: int, world_size: int, path: Path, make_arguments: Arguments) -> str:
    model, _ = make(Cell(tdsp.Mesh2D(2, 1), "row_wise"), world_size)
    arguments: dict[str, Any] = {"path": path, **make_arguments(rank)}
    with pytest.raises(tdsp.TwoDError) as caught:
        save_checkpoint(model=model, **arguments)
    return str(caught.value).replace(str(path), "FOLDER")


def not_json(rank: int) -> dict[str, Any]:
    return {"extra": {"step": torch.ones(1)}}


def json_changes_it(rank: int) -> dict[str, Any]:
    return {"extra": {1: "one"}}


def differs(rank: int) -> dict[str, Any]:
    return {"extra": {"step": rank}}


def one_bad_rank(rank: int) -> dict[str, Any]:
    return {"extra": {"step": {1} if rank else 1}}


def an_address(rank: int) -> dict[str, Any]:
    return {"path": "s3://bucket/x"}


def nameless(rank: int) -> dict[str, Any]:
    return {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])}


JSON = "isn't the same after a round trip through JSON; use dicts with text keys, lists, texts and"
REFUSED_SAVES: dict[Arguments, str] = {
    not_json: f"extra={{'step': tensor([1.])}} {JSON} numbers",
    json_changes_it: f"extra={{1: 'one'}} {JSON} numbers",
    one_bad_rank: f"extra={{'step': {{1}}}} {JSON} numbers (found on rank 1)",
    differs: 'extra differs between ranks: rank 0 has {"step": 0}, rank 1 has {"step": 1}; '
    "give all ranks the same",
    an_address: "s3://bucket/x is an address; give a folder that all ranks have mounted",
    nameless: "the state of a SGD has no names; wrap it in TorchRec's KeyedOptimizerWrapper",
}


@pytest.mark.parametrize("make_arguments", REFUSED_SAVES, ids=lambda case: case.__name__)
def test_refused_saves(ranks2: RankPool, tmp_path: Path, make_arguments: Arguments) -> None:
    texts = ranks2.run(save_fails, tmp_path / "0", make_arguments)
    assert texts == [REFUSED_SAVES[make_arguments]] * 2
    assert not (tmp_path / "0").exists()


def nothing(rank: int) -> dict[str, Any]:
    return {}


def save_on_two(rank: int, world_size: int, path: Path) -> None:
    model, _ = make(Cell(tdsp.Mesh2D(2, 1), "row_wise"), world_size)
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
    """Save, but write nothing before the file ``go_on`` exists."""
    write = ChecksumWriter.write_data

    def write_later(*arguments: Any) -> Any:
        while not go_on.exists():
            time.sleep(0.01)
        return write(*arguments)

    with patch.object(ChecksumWriter, "write_data", write_later):
        save_on_two(rank, world_size, path)


def load_on_two(rank: int, world_size: int, path: Path) -> None:
    model, _ = make(Cell(tdsp.Mesh2D(2, 1), "row_wise"), world_size)
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
