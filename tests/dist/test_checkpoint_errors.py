"""Impossible saves and loads raise the same text on all ranks, and leave the model unchanged."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

import torchrec_2dsp as tdsp
from tests.support.models import SEQUENCES, ModelSpec, TableSpec
from tests.support.parity import Cell
from tests.support.ranks import RankPool, error_of, error_text
from tests.support.trips import HOT, M14, M22, M41, dense_optimizer, full_state, make, save, stock
from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.checkpoint import load_checkpoint, save as saving, save_checkpoint
from torchrec_2dsp.parallel.checkpoint.load import check_part

pytestmark = pytest.mark.dealt_file

SAVED = Cell(M22, "row_wise", hot_rows=HOT)
TABLES = SAVED.spec.tables


@dataclass(frozen=True)
class Refusal:
    """A rank's results from a failed load."""

    text: str
    seconds: float


def refused(rank: int, world_size: int, path: Path, cells: list[Cell], dense: str) -> list[Refusal]:
    """Load into each cell, which must fail."""
    refusals = []
    for cell in cells:
        model, _ = make(cell)
        optimizer = dense_optimizer(dense, model) if dense else None
        before = full_state(model)
        start = time.monotonic()
        text = error_text(partial(load_checkpoint, path, model, optimizer), CheckpointError)
        seconds = time.monotonic() - start
        after = full_state(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        refusals.append(Refusal(text, seconds))
    return refusals


def texts_of(pool: RankPool, path: Path, cells: list[Cell], dense: str = "") -> list[str]:
    """Return each refusal's text, equal on all ranks, with the folder's name shortened."""
    by_rank: list[list[Refusal]] = pool.run(refused, path, cells, dense)
    for of_rank in by_rank:
        assert [refusal.text for refusal in of_rank] == [r.text for r in by_rank[0]]
        assert max(refusal.seconds for refusal in of_rank) < 10
    return [refusal.text.replace(str(path), "FOLDER") for refusal in by_rank[0]]


def with_table(index: int, **changes: Any) -> Cell:
    tables = list(TABLES)
    tables[index] = replace(TABLES[index], **changes)
    return Cell(M22, "row_wise", spec=ModelSpec(tables=tuple(tables)))


FOUND = "(found on rank 0)"
"""Only the first rank compares."""


def test_other_tables_are_refused_by_name(ranks4: RankPool, tmp_path: Path) -> None:
    ranks4.run(save, [SAVED], tmp_path)
    path = tmp_path / "0"
    remedy = f"build the model with the tables, rows and dims that were saved {FOUND}"
    extra_table = ModelSpec(tables=(*TABLES, TableSpec("t3", 12, 8, ("f4",))))
    assert texts_of(
        ranks4,
        path,
        [
            with_table(0, num_rows=44),
            with_table(2, dim=12),
            with_table(1, name="goods"),
            Cell(M41, "table_wise", spec=extra_table),
            Cell(M22, "row_wise", spec=ModelSpec(tables=TABLES[:2])),
            Cell(M22, "row_wise", spec=SEQUENCES),
            stock("row_wise", spec=ModelSpec(tables=(replace(TABLES[0], num_rows=39),))),
        ],
    ) == [
        "'model.ebc.embedding_bags.t0.weight' is (40, 8) torch.float32 in the checkpoint FOLDER, "
        f"but (44, 8) torch.float32 in the model; {remedy}",
        "'model.ebc.embedding_bags.t2.weight' is (33, 8) torch.float32 in the checkpoint FOLDER, "
        f"but (33, 12) torch.float32 in the model; {remedy}",
        "'model.ebc.embedding_bags.goods.weight' is missing in the checkpoint FOLDER, but "
        f"(24, 16) torch.float32 in the model; {remedy}",
        "'model.ebc.embedding_bags.t3.weight' is missing in the checkpoint FOLDER, but (12, 8) "
        f"torch.float32 in the model; {remedy}",
        "'model.ebc.embedding_bags.t2.weight' is (33, 8) torch.float32 in the checkpoint FOLDER, "
        f"but missing in the model; {remedy}",
        "'model.ebc.embedding_bags.t0.weight' is (40, 8) torch.float32 in the checkpoint FOLDER, "
        f"but missing in the model; {remedy}",
        "'model.ebc.embedding_bags.t0.weight' is (40, 8) torch.float32 in the checkpoint FOLDER, "
        f"but (39, 8) torch.float32 in the model; {remedy}",
    ]


def test_other_optimizers_are_refused_by_name(ranks4: RankPool, tmp_path: Path) -> None:
    ranks4.run(save, [SAVED, replace(SAVED, optimizer="sgd")], tmp_path)
    remedy = "shard the model with the fused optimizer that was saved, and freeze and unfreeze "
    remedy += f"the same tables {FOUND}"
    state = "'fused_optimizer.state.ebc.embedding_bags.t0.weight.t0.momentum1'"
    adagrad = replace(SAVED, optimizer="adagrad")
    assert texts_of(ranks4, tmp_path / "0", [replace(SAVED, optimizer="sgd"), adagrad]) == [
        f"{state} is (40,) torch.float32 in the checkpoint FOLDER, but missing in the model; "
        + remedy,
        f"{state} is (40,) torch.float32 in the checkpoint FOLDER, but (40, 8) torch.float32 in "
        f"the model; {remedy}",
    ]
    assert texts_of(ranks4, tmp_path / "1", [SAVED]) == [
        f"{state} is missing in the checkpoint FOLDER, but (40,) torch.float32 in the model; "
        + remedy
    ]


def test_other_column_shards_are_refused_by_name(ranks4: RankPool, tmp_path: Path) -> None:
    ranks4.run(save, [SAVED, Cell(M22, "column_wise"), stock("grid_shard")], tmp_path)

    def text(before: str, now: str) -> str:
        return (
            "the row-wise moments of 'ebc.embedding_bags.t0.weight' are stored for columns "
            f"{before} in the checkpoint FOLDER, but the plan splits the columns {now}: TorchRec "
            "keeps one moment per row and column shard; plan the table with column shards "
            f"{before} {FOUND}"
        )

    split = [Cell(M14, "column_wise"), Cell(M41, "grid_shard"), stock("column_wise")]
    assert texts_of(ranks4, tmp_path / "0", split) == [text("8", "4+4")] * 3
    for number in ("1", "2"):
        whole = [Cell(M22, "row_wise"), stock("table_wise")]
        assert texts_of(ranks4, tmp_path / number, whole) == [text("4+4", "8")] * 2


def test_as_many_column_shards_of_other_widths_are_refused() -> None:
    """No stock plan has such shards, so the comparison is called directly."""
    weight, moment = "model.ebc.t0.weight", "fused_optimizer.state.ebc.t0.weight.t0.momentum1"

    def entries(*widths: int) -> dict[str, Any]:
        chunks = [
            ChunkStorageMetadata(torch.Size((0, sum(widths[:n]))), torch.Size((10, width)))
            for n, width in enumerate(widths)
        ]
        size = torch.Size((10, sum(widths)))
        return {
            weight: TensorStorageMetadata(TensorProperties(), size, chunks),
            moment: TensorStorageMetadata(TensorProperties(), torch.Size((20,)), []),
        }

    def check(*widths: int) -> None:
        path = ("fused_optimizer", "state", "ebc.t0.weight", "t0.momentum1")
        wanted = Metadata(entries(*widths), {moment: path})
        check_part("fused_optimizer", Path("x"), entries(4, 12), wanted)

    check(4, 12)
    with pytest.raises(CheckpointError, match=r"stored for columns 4\+12 .* the columns 8\+8:"):
        check(8, 8)


def test_other_dense_optimizers_are_refused_by_name(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(save_with_adam, tmp_path / "0")
    # Making its state is a step, which moves weights: they must be put back.
    cell = Cell(tdsp.Mesh2D(2, 1), "row_wise")
    assert texts_of(ranks2, tmp_path / "0", [cell], "decay") == [
        "'dense_optimizer.state.over.bias.exp_avg' is (1,) torch.float32 in the checkpoint "
        "FOLDER, but missing in the model; pass the optimizer that was saved, or none to load all "
        f"the rest {FOUND}"
    ]


def save_with_adam(rank: int, world_size: int, path: Path) -> None:
    cell = Cell(tdsp.Mesh2D(2, 1), "row_wise")
    model, _ = make(cell)
    adam = dense_optimizer("adam", model)
    adam.init_state()
    save_checkpoint(path, model, adam)


def given_on_some_ranks(rank: int, world_size: int, folder: Path) -> list[str]:
    """Return the errors of saves and loads with an optimizer or train state on one rank only."""
    model, _ = make(Cell(tdsp.Mesh2D(2, 1), "row_wise"))
    adam = dense_optimizer("adam", model)
    adam.init_state()
    state = tdsp.TrainState(model, adam)
    save_checkpoint(folder / "whole", model, adam, train_state=state)
    before = full_state(model)
    some_adam, some_state = (None, None) if rank else (adam, state)
    errors = [
        error_of(partial(call, path, model, optimizer, train_state=train_state))
        for call, path in ((save_checkpoint, folder / "part"), (load_checkpoint, folder / "whole"))
        for optimizer, train_state in ((some_adam, state), (adam, some_state))
    ]
    after = full_state(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not (folder / "part").exists()
    load_checkpoint(folder / "whole", model, adam, train_state=state)
    return errors


def test_all_ranks_give_an_optimizer_and_a_train_state_or_none(
    ranks2: RankPool, tmp_path: Path
) -> None:
    ((*errors,),) = {tuple(errors) for errors in ranks2.run(given_on_some_ranks, tmp_path)}
    rest = "differs between ranks: rank 0 has True, rank 1 has False; give all ranks the same"
    whether = "ConfigError: whether there is"
    assert errors == [f"{whether} an optimizer {rest}", f"{whether} a train state {rest}"] * 2


def cut(folder: Path) -> str:
    file = max(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:1000])
    return f"FOLDER/{file.name} has 1000 of its "


def remove_metadata(folder: Path) -> str:
    (folder / ".metadata").unlink()
    return "FOLDER has no .metadata; give the folder of a finished save"


@pytest.mark.parametrize("damage", [cut, remove_metadata])
def test_damaged_files_are_noticed_before_anything_changes(
    ranks4: RankPool, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    ranks4.run(save, [SAVED], tmp_path)
    expected = damage(tmp_path / "0")
    (text,) = texts_of(ranks4, tmp_path / "0", [SAVED])
    assert text.startswith(expected)


def test_damaged_contents_are_noticed(ranks4: RankPool, tmp_path: Path) -> None:
    ranks4.run(save, [SAVED], tmp_path)
    file = max((tmp_path / "0").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[:2000] = bytes(2000)
    file.write_bytes(content)
    (text,) = texts_of(ranks4, tmp_path / "0", [SAVED])
    assert text.startswith(f"FOLDER/{file.name} is damaged: its bytes 0 to ")


def error_of_a_folder(rank: int, world_size: int) -> str:
    """Make the first rank's file system fail."""
    error = PermissionError(13, "Permission denied") if rank == 0 else None
    with mock.patch.object(saving, "_numbered", side_effect=error):
        return error_of(lambda: saving.latest_checkpoint("there"))


def test_a_folder_that_cannot_be_listed_is_every_ranks_error(ranks2: RankPool) -> None:
    (text,) = set(ranks2.run(error_of_a_folder))
    assert text.startswith("CheckpointError: the checkpoints in there can't be listed ([Errno 13]")
