"""Dense gradients in flight in train states: on other ranks, and where nobody takes them."""

from pathlib import Path

import pytest
import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

import torchrec_2dsp as tdsp
from tests.support.parity import Cell
from tests.support.ranks import RankPool
from tests.support.resuming import Run, Variant
from torchrec_2dsp._compat.ddp import data_parallel_wrapper
from torchrec_2dsp.errors import CheckpointError


def run_of(world_size: int, *, is_delayed: bool = True) -> Run:
    cell = Cell(tdsp.Mesh2D(1, world_size))
    return Run(Variant(cell, draws=False, dense=tdsp.DelayedDense if is_delayed else None))


def in_flight(run: Run) -> dict[str, torch.Tensor]:
    wrapper = data_parallel_wrapper(run.model)
    assert isinstance(wrapper, tdsp.DelayedDense)
    return wrapper.state_dict()["in_flight"]


def save(rank: int, world_size: int, folder: Path) -> dict[str, torch.Tensor]:
    run = run_of(world_size)
    for _ in range(3):
        run.step()
    run.losses.sum = 0.0
    run.save(folder)
    means = in_flight(run)
    dense = data_parallel_wrapper(run.model)
    assert isinstance(dense, tdsp.DelayedDense)
    inner = KeyedOptimizerWrapper(dict(run.optimizer.params), torch.optim.SGD)
    assert dense.flush(inner)
    run.save(folder / "flushed")
    return means


def load(rank: int, world_size: int, path: Path) -> dict[str, torch.Tensor]:
    run = run_of(world_size)
    for _ in range(2):
        run.step()
    run.load(path)
    means = in_flight(run)
    assert run.step() > 0
    plain = run_of(world_size, is_delayed=False)
    with pytest.raises(CheckpointError, match="holds dense gradients that weren't sent"):
        plain.load(path)
    plain.load(path.parent / "flushed" / path.name)
    assert plain.step() > 0
    return means


def test_other_ranks_take_over_what_was_in_flight(
    ranks4: RankPool, ranks2: RankPool, tmp_path: Path
) -> None:
    saved = ranks4.run(save, tmp_path)
    assert any(mean.any() for mean in saved[0].values())
    for means in (*saved[1:], *ranks2.run(load, tmp_path / "3")):
        assert means.keys() == saved[0].keys()
        assert all(torch.equal(mean, saved[0][name]) for name, mean in means.items())


def start_with_plain(rank: int, world_size: int, folder: Path) -> float:
    plain = run_of(world_size, is_delayed=False)
    plain.step()
    plain.save(folder)
    run = run_of(world_size)
    run.step()
    run.load(folder / "1")
    assert in_flight(run) == {}
    return run.step()


def test_a_run_may_begin_to_delay_at_a_checkpoint(ranks2: RankPool, tmp_path: Path) -> None:
    assert all(loss > 0 for loss in ranks2.run(start_with_plain, tmp_path))
