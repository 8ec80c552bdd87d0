"""Checkpoints of dense parts that are sharded or split move between all wrappers and worlds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torchrec.optim.keyed import KeyedOptimizerWrapper

import torchrec_2dsp as tdsp
from tests.support.dense_training import batch_of, cell_of, dense_of, model_of, whole
from tests.support.ranks import RankPool

ROUNDING = 2e-6
NUM_BEFORE, NUM_AFTER = 2, 2
KINDS = ("ddp", "sharded", "copied", "split")


def make_wrapper(kind: str) -> Any:
    if kind == "sharded":
        return tdsp.FullyShardedDense()
    if kind == "copied":
        return tdsp.FullyShardedDense(num_copies=2)
    if kind == "split":
        plan = {"tower.0": ColwiseParallel(), "tower.2": RowwiseParallel()}
        return tdsp.TensorParallelDense(plan, tp=2)
    return None


class Run:
    """A model with AdaGrad for its dense part, whose moments have to move as well."""

    def __init__(self, rank: int, world_size: int, kind: str) -> None:
        self._rank, self._cell = rank, cell_of(world_size)
        self.model = model_of(self._cell, make_wrapper(kind))
        self.params = dense_of(self.model)
        self.optimizer = KeyedOptimizerWrapper(
            {name.removeprefix("module."): value for name, value in self.params.items()},
            lambda values: torch.optim.Adagrad(values, lr=0.05, foreach=False),
        )

    def train(self, first: int, num_steps: int) -> None:
        for step in range(first, first + num_steps):
            self.optimizer.zero_grad()
            self.model(batch_of(self._cell, step, self._rank)).backward()
            self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name.removeprefix("module."): whole(value) for name, value in self.params.items()}


def run_through(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    run = Run(rank, world_size, "ddp")
    run.train(0, NUM_BEFORE + NUM_AFTER)
    return run.weights()


def save(rank: int, world_size: int, kind: str, folder: str) -> dict[str, torch.Tensor]:
    run = Run(rank, world_size, kind)
    run.train(0, NUM_BEFORE)
    tdsp.save_checkpoint(folder, run.model, run.optimizer)
    return run.weights()


def load(rank: int, world_size: int, kind: str, folder: str) -> list[dict[str, torch.Tensor]]:
    run = Run(rank, world_size, kind)
    with torch.no_grad():
        for param in run.params.values():
            param.mul_(0.5)
    tdsp.load_checkpoint(folder, run.model, run.optimizer)
    loaded = run.weights()
    run.train(NUM_BEFORE, NUM_AFTER)
    return [loaded, run.weights()]


def assert_close(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("saved", KINDS)
def test_a_run_goes_on_with_another_wrapper(
    ranks4: RankPool, ranks2: RankPool, tmp_path: Path, saved: str
) -> None:
    uninterrupted = ranks4.run(run_through)[0]
    folder = str(tmp_path / saved)
    before = ranks4.run(save, saved, folder)[0]
    for kind in KINDS:
        loaded, after = ranks4.run(load, kind, folder)[0]
        assert_close(loaded, before)
        assert_close(after, uninterrupted)
    for kind in ("ddp", "sharded", "split"):
        assert_close(ranks2.run(load, kind, folder)[0][0], before)
