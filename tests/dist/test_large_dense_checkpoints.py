"""Sharded dense parts' checkpoints move between all wrappers and worlds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

import torchrec_2dsp as tdsp
from tests.support.dense_training import batch_of, cell_of, dense_of, whole
from tests.support.loops import shard
from tests.support.pipelining import close_groups, split, stack_model, tensor_parallel
from tests.support.ranks import RankPool
from torchrec_2dsp.parallel.checkpoint.load import load_weights

pytestmark = pytest.mark.slow

ROUNDING = 2e-6
NUM_BEFORE, NUM_AFTER = 2, 2
WRAPPERS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: None,
    "sharded": tdsp.FullyShardedDense,
    "copied": lambda: tdsp.FullyShardedDense(num_copies=2),
    "split": split(2, num_copies=1),
    "split copies": split(2, num_copies=2),
    "pipelined": lambda: tdsp.PipelinedDense(2, num_micro_batches=2),
    "pipelined shares": lambda: tdsp.PipelinedDense(
        2, num_micro_batches=2, cuts=[5], fully_shard=True
    ),
    "interleaved": lambda: tdsp.PipelinedDense(
        8, num_micro_batches=2, stages_per_rank=2, schedule="ZBVZeroBubble"
    ),
    "both": lambda: tdsp.PipelinedDense(2, num_micro_batches=2, cuts=[6], **tensor_parallel()),
    "both shares": lambda: tdsp.PipelinedDense(
        1, num_micro_batches=2, fully_shard=True, **tensor_parallel()
    ),
    "three axes": lambda: tdsp.PipelinedDense(
        2, num_micro_batches=4, fully_shard=True, **tensor_parallel()
    ),
}
KINDS = [kind for kind in WRAPPERS if kind != "three axes"]
ON_EIGHT_RANKS = ("split copies", "three axes")
ON_TWO_RANKS = ("ddp", "sharded", "split", "pipelined")


class Run:
    """A model with AdaGrad for its dense part; the moments must move as well."""

    def __init__(self, rank: int, world_size: int, kind: str) -> None:
        self._rank, self._cell, self._wrapper = rank, cell_of(world_size), WRAPPERS[kind]()
        self.model = shard(
            self._cell,
            model=stack_model(self._cell.spec),
            data_parallel_wrapper=self._wrapper,
        )
        self.params = dense_of(self.model)
        self.optimizer = KeyedOptimizerWrapper(
            {name.removeprefix("module."): value for name, value in self.params.items()},
            lambda values: torch.optim.Adagrad(values, lr=0.05, foreach=False),
        )

    def train(self, first: int, num_steps: int) -> None:
        for step in range(first, first + num_steps):
            self.optimizer.zero_grad()
            self.model(batch_of(self._cell, step, self._rank)).mean().backward()
            self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return all dense weights that this rank holds, whole or in part."""
        return {name.removeprefix("module."): whole(value) for name, value in self.params.items()}

    def close(self) -> None:
        close_groups(self._wrapper)


def together(by_rank: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Merge all ranks' weights; several ranks may hold the same ones."""
    weights: dict[str, torch.Tensor] = {}
    for of_rank in by_rank:
        for name, value in of_rank.items():
            assert torch.equal(value, weights.setdefault(name, value)), name
    return weights


def run_through(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    run = Run(rank, world_size, "ddp")
    run.train(0, NUM_BEFORE + NUM_AFTER)
    return run.weights()


def save(rank: int, world_size: int, kind: str, folder: str) -> dict[str, torch.Tensor]:
    run = Run(rank, world_size, kind)
    run.train(0, NUM_BEFORE)
    tdsp.save_checkpoint(folder, run.model, run.optimizer)
    run.close()
    return run.weights()


def load(rank: int, world_size: int, kind: str, folder: str) -> list[dict[str, torch.Tensor]]:
    run = Run(rank, world_size, kind)
    with torch.no_grad():
        for param in run.params.values():
            param.mul_(0.5)
    tdsp.load_checkpoint(folder, run.model, run.optimizer)
    loaded = run.weights()
    run.train(NUM_BEFORE, NUM_AFTER)
    run.close()
    return [loaded, run.weights()]


def assert_close(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("saved", KINDS)
def test_a_run_goes_on_with_another_wrapper(
    ranks4: RankPool, ranks2: RankPool, tmp_path: Path, saved: str
) -> None:
    uninterrupted = together(ranks4.run(run_through))
    folder = str(tmp_path / "checkpoint")
    before = together(ranks4.run(save, saved, folder))
    for kind in KINDS:
        runs = ranks4.run(load, kind, folder)
        assert_close(together([loaded for loaded, _ in runs]), before)
        assert_close(together([after for _, after in runs]), uninterrupted)
    for kind in ON_TWO_RANKS:
        runs = ranks2.run(load, kind, folder)
        assert_close(together([loaded for loaded, _ in runs]), before)
    assert_close(in_one_process(folder), before)


@pytest.mark.parametrize("saved", ON_EIGHT_RANKS)
def test_runs_move_between_eight_ranks_and_four(
    ranks8: RankPool, ranks4: RankPool, tmp_path: Path, saved: str
) -> None:
    folder, back = str(tmp_path / "of eight"), str(tmp_path / "of four")
    before = together(ranks8.run(save, saved, folder))
    for kind in ("ddp", "split copies", "pipelined shares"):
        runs = ranks4.run(load, kind, folder)
        assert_close(together([loaded for loaded, _ in runs]), before)
    before = together(ranks4.run(save, "pipelined shares", back))
    runs = ranks8.run(load, saved, back)
    assert_close(together([loaded for loaded, _ in runs]), before)


def in_one_process(folder: str) -> dict[str, torch.Tensor]:
    """Load a checkpoint's dense weights into an unsharded model without ranks."""
    model = stack_model(cell_of(4).spec)
    load_weights(folder, model)
    return {
        name: param.detach()
        for name, param in model.named_parameters()
        if not name.startswith("ebc")
    }
