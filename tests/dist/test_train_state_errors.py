"""Train states that can't be saved or loaded: every rank raises, and nothing has changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrec_2dsp as tdsp
from tests.support.parity import Cell, make_optimizer, make_parallel
from tests.support.ranks import RankPool
from tests.support.resuming import M14
from torchrec_2dsp.shard.parted import sharded_tables


def refusals(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    """Return the errors of saves and loads that can't be done."""
    cell = Cell(M14)
    model = make_parallel(cell, world_size, world_size)
    optimizer = make_optimizer(model)
    told: dict[str, str] = {}

    def refuse(name: str, action: Callable[[], object]) -> None:
        with pytest.raises(tdsp.TwoDError) as caught:
            action()
        told[name] = f"{type(caught.value).__name__}: {caught.value}"

    def load(state: tdsp.TrainState, path: Path = folder / "with") -> object:
        return tdsp.load_checkpoint(path, model, optimizer, train_state=state)

    position = {"row": 7}
    state = tdsp.TrainState(model, optimizer, position=position)
    state.step = 3
    tdsp.save_checkpoint(folder / "with", model, optimizer, train_state=state)
    tdsp.save_checkpoint(folder / "without", model, optimizer)
    before = {name: value.clone() for name, value in _local(model).items()}
    with torch.no_grad():
        for value in _local(model).values():
            value += 1
    changed = {name: value.clone() for name, value in _local(model).items()}
    position["row"], state.step = 0, 0
    refuse("no train state", lambda: load(state, folder / "without"))
    refuse("too few", lambda: load(tdsp.TrainState(model, optimizer)))
    refuse("too many", lambda: load(tdsp.TrainState(model, optimizer, position={}, more={})))
    refuse("no dense", lambda: _save_without_dense(folder, model, optimizer))
    assert all(torch.equal(value, changed[name]) for name, value in _local(model).items())
    assert (position, state.step) == ({"row": 0}, 0)
    load(state)
    assert all(torch.equal(value, before[name]) for name, value in _local(model).items())
    assert (position, state.step) == ({"row": 7}, 3)

    other = make_parallel(cell, world_size, world_size)
    refuse("other model", lambda: load(tdsp.TrainState(other)))
    save = tdsp.save_checkpoint
    refuse("not plain", lambda: tdsp.TrainState(model, things={"a": {1, 2}}).state_dict())
    refuse("no member", lambda: tdsp.TrainState(model, things=[1]))  # type: ignore[arg-type]
    state.step = 3 + (rank == 1)
    refuse("other step", lambda: save(folder / "x", model, optimizer, train_state=state))
    state.step = 3
    optimizer.param_groups[-1]["lr"] = 0.5 + rank  # type: ignore[index]
    refuse("other rate", lambda: save(folder / "x", model, optimizer, train_state=state))
    assert not (folder / "x").exists()
    return told


def _save_without_dense(folder: Path, model: Any, optimizer: Any) -> None:
    tdsp.save_checkpoint(folder / "fused", model, train_state=tdsp.TrainState(model))
    state = tdsp.TrainState(model, optimizer)
    tdsp.load_checkpoint(folder / "fused", model, train_state=state)


def _local(model: Any) -> dict[str, torch.Tensor]:
    parts = sharded_tables(model)
    return {
        f"{number} {shard.table} {name}": tensor
        for number, part in enumerate(parts)
        for kernel in part.kernels()
        for shard in kernel.shards()
        for name, tensor in shard.tensors.items()
    }


TEXTS = {
    "no train state": "CheckpointError: {folder}/without has no train state, because it was saved "
    "without train_state=...; load it without one, and set the TrainState's step yourself",
    "too few": "CheckpointError: the train state was saved with 'position'; make the TrainState "
    "with position=...",
    "too many": "CheckpointError: the train state was saved without 'more'; make the TrainState "
    "without it",
    "no dense": "CheckpointError: the train state has no hyper-parameters of 'over.",
    "other model": "CheckpointError: the train state is that of another model; make it by",
    "not plain": "CheckpointError: things can't be stored: a is a set, which a train state can't "
    "hold without a pickle; use dicts",
    "no member": "ConfigError: things=[1] has no state_dict() and load_state_dict()",
    "other step": "ConfigError: the number of steps done differs between ranks: rank 0 has 3, rank "
    "1 has 4",
    "other rate": "CheckpointError: rank 1 has the hyper-parameters",
}


def test_what_cannot_be_saved_or_loaded_is_refused_before_anything_changes(
    ranks4: RankPool, tmp_path: Path
) -> None:
    for told in ranks4.run(refusals, tmp_path):
        assert told.keys() == TEXTS.keys()
        for name, text in TEXTS.items():
            assert told[name].startswith(text.format(folder=tmp_path)), told[name]
