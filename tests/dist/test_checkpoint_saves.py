"""What can't be saved: one text on every rank, and nothing is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrec_2dsp as tdsp
from tests.dist.test_checkpoint_harness import make
from tests.support.parity import Cell
from tests.support.ranks import RankPool
from torchrec_2dsp.parallel.checkpoint import save_checkpoint

Arguments = Callable[[int], dict[str, Any]]


def save_fails(rank: int, world_size: int, path: Path, make_arguments: Arguments) -> str:
    """The text of a save that fails."""
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
