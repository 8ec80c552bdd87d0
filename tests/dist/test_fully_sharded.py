"""A dense part whose parameters are shared out, against DDP."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import torchrec_2dsp as tdsp
from tests.support.dense_training import (
    LR,
    NUM_STEPS,
    batch_of,
    cell_of,
    dense_of,
    model_of,
    train as train_by_ddp,
    train_dtensors,
    whole,
)
from tests.support.loops import shard
from tests.support.models import BagModel
from tests.support.parity import make_sharder
from tests.support.ranks import RankPool
from torchrec_2dsp.errors import ConfigError

pytestmark = pytest.mark.dealt_file

ROUNDING = 1e-6
OPTIONS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "by layer": {"units": [nn.Linear]},
    "kept": {"units": [nn.Linear], "reshard_after_forward": False},
    "two copies": {"num_copies": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_are_those_of_ddp(ranks4: RankPool, name: str) -> None:
    for cell in (cell_of(4), cell_of(4, groups=2), cell_of(4, stock=True)):
        by_ddp = ranks4.run(train_by_ddp, cell, None)[0]
        ours = ranks4.run(train_dtensors, cell, tdsp.FullyShardedDense(**OPTIONS[name]))
        assert len({rank.digest for rank in ours}) == 1
        assert ours[0].held_share < 1.1 * OPTIONS[name].get("num_copies", 1) / 4
        for actual, wanted in zip(ours[0].weights, by_ddp.weights, strict=True):
            assert actual.keys() == wanted.keys()
            for param, value in wanted.items():
                torch.testing.assert_close(actual[param], value, rtol=0, atol=ROUNDING)


def accumulate(rank: int, world_size: int, kind: str) -> list[dict[str, torch.Tensor]]:
    """Return the dense weights after each step of two batches."""
    plan = {"tower.0": ColwiseParallel(), "tower.2": RowwiseParallel()}
    wrappers: dict[str, Any] = {
        "ddp": lambda: None,
        "sharded": tdsp.FullyShardedDense,
        "split": lambda: tdsp.TensorParallelDense(plan, tp=2),
    }
    cell = replace(cell_of(world_size), always_capture=True)
    model = model_of(cell, wrappers[kind]())
    dense = dense_of(model)
    optimizer = torch.optim.SGD(dense.values(), lr=LR, foreach=False)
    weights = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for batch in tdsp.accumulate(
            model, [batch_of(cell, 2 * step + part, rank) for part in (0, 1)]
        ):
            (model(batch) / 2).backward()
        optimizer.step()
        named = {name.removeprefix("module."): value for name, value in dense.items()}
        weights.append({name: whole(value) for name, value in named.items()})
    return weights


def test_several_batches_make_one_update(ranks4: RankPool) -> None:
    by_ddp = ranks4.run(accumulate, "ddp")[0]
    for kind in ("sharded", "split"):
        for actual, wanted in zip(ranks4.run(accumulate, kind)[0], by_ddp, strict=True):
            for name, value in wanted.items():
                torch.testing.assert_close(actual[name], value, rtol=0, atol=ROUNDING)


class WithParameter(BagModel):
    """A model with a parameter beside its tables."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.scale = nn.Parameter(torch.ones(1))


def misuse(rank: int, world_size: int) -> tuple[str, ...]:
    cell = cell_of(world_size)
    with pytest.raises(ConfigError) as no_divisor:
        model_of(cell, tdsp.FullyShardedDense(num_copies=3))
    with pytest.raises(ConfigError) as differs:
        model_of(cell, tdsp.FullyShardedDense(num_copies=1 + rank % 2))
    with pytest.raises(ConfigError) as no_count:
        tdsp.FullyShardedDense(num_copies=0)
    wrapper = tdsp.FullyShardedDense()
    with pytest.raises(ConfigError) as beside:
        shard(cell, make_sharder(cell), WithParameter(cell.spec), data_parallel_wrapper=wrapper)
    return tuple(str(raised.value) for raised in (no_divisor, differs, no_count, beside))


def test_what_cannot_be_is_said(ranks4: RankPool) -> None:
    ((no_divisor, differs, no_count, beside),) = set(ranks4.run(misuse))
    assert no_divisor == (
        "FullyShardedDense(num_copies=3) doesn't divide 4 ranks; use one of 1, 2, 4"
    )
    assert differs.startswith("the settings of FullyShardedDense differs between ranks")
    assert no_count == "FullyShardedDense(num_copies=0) is no count; use 1 or more"
    assert beside == (
        "the model holds the parameter 'scale' beside tables, which FullyShardedDense can't shard; "
        "put it into a module of its own"
    )
