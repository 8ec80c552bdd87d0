"""Settings and gradients that can't be, and torch's own hooks."""

from collections.abc import Callable

import pytest
import torch

import torchrec_2dsp as tdsp
from tests.support.dense_training import (
    LR,
    Trained,
    batch_of,
    cell_of,
    dense_of,
    model_of,
    train,
)
from tests.support.ranks import RankPool, RanksFailed
from torchrec_2dsp.errors import ConfigError, SyncError

pytestmark = pytest.mark.dealt_file


def fail_with_nan(rank: int, world_size: int) -> str:
    wrapper = tdsp.ThresholdedDataParallel(0.05)
    cell = cell_of(world_size)
    model = model_of(cell, wrapper)
    model(batch_of(cell, 0, rank)).backward()
    before = {name: value.detach().clone() for name, value in dense_of(model).items()}
    residuals = wrapper.state_dict()["residuals"]
    layer = dict(model.named_parameters())["tower.0.weight"]
    if rank == 1:
        layer.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), torch.nan))
    try:
        model(batch_of(cell, 1, rank)).backward()
    except SyncError as error:
        for name, value in dense_of(model).items():
            assert torch.equal(value, before[name])
        for name, residual in wrapper.state_dict()["residuals"].items():
            assert torch.equal(residual, residuals[name])
        return str(error)
    return "no error"


def test_a_nan_of_one_rank_stops_all(ranks4: RankPool) -> None:
    (message,) = set(ranks4.run(fail_with_nan))
    assert message == (
        "gradients of 'tower.0.weight' are not finite in step 1; nothing of the bucket was sent, "
        "and no dense weight has changed. Lower the learning rate, or clip gradients (found on "
        "rank 1)"
    )


def differ(rank: int, world_size: int) -> str:
    wrapper = tdsp.ThresholdedDataParallel(0.05 if rank else 0.06)
    with pytest.raises(ConfigError) as raised:
        model_of(cell_of(world_size), wrapper)
    return str(raised.value)


def test_ranks_with_other_settings_are_told_at_construction(ranks2: RankPool) -> None:
    (message,) = set(ranks2.run(differ))
    assert "the settings of ThresholdedDataParallel differs between ranks" in message
    assert "density=0.05" in message
    assert "density=0.06" in message


def use_twice(rank: int, world_size: int) -> None:
    wrapper = tdsp.ThresholdedDataParallel(0.05)
    model_of(cell_of(world_size), wrapper)
    model_of(cell_of(world_size), wrapper)


def test_a_wrapper_keeps_to_its_model(ranks2: RankPool) -> None:
    with pytest.raises(RanksFailed, match="has a model already; make another one"):
        ranks2.run(use_twice)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tdsp.ThresholdedDataParallel(0.0), "density=0.0 is no share; use one above 0"),
        (lambda: tdsp.ThresholdedDataParallel(1.5), "density=1.5 is no share"),
        (lambda: tdsp.ThresholdedDataParallel(float("nan")), "density=nan is no share"),
        (lambda: tdsp.ThresholdedDataParallel(warm_up=-1), "warm_up=-1 is no count; use 0 or more"),
        (lambda: tdsp.ThresholdedDataParallel(refresh=0), "refresh=0 is no count; use 1 or more"),
        (
            lambda: tdsp.ThresholdedDataParallel(values="fp64"),
            "values='fp64' is no transport; use one of fp32, bf16, fp16, int8, int4",
        ),
        (
            lambda: tdsp.ThresholdedDataParallel(route="ring"),
            "route='ring' is unknown; use one of auto, dense, gather, owners",
        ),
        (lambda: tdsp.HookedDataParallel("int8"), "hook='int8'.*use one of fp16, powersgd"),
        (lambda: tdsp.HookedDataParallel("powersgd", warm_up=1), "warm_up of 2 or more"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def train_hooked(rank: int, world_size: int, hook: str) -> Trained:
    cell = cell_of(world_size)
    model = model_of(cell, tdsp.HookedDataParallel(hook, rank=4, warm_up=2))
    dense = dense_of(model)
    optimizer = torch.optim.SGD(dense.values(), lr=LR)
    trained = Trained()
    for step in range(4):
        optimizer.zero_grad()
        model(batch_of(cell, step, rank)).backward()
        optimizer.step()
        trained.weights.append({name: value.detach().clone() for name, value in dense.items()})
    return trained


@pytest.mark.parametrize(("hook", "bound"), [("fp16", 1e-3), ("powersgd", 5e-2)])
def test_stock_hooks_train_nearly_as_ddp(ranks4: RankPool, hook: str, bound: float) -> None:
    stock = ranks4.run(train, cell_of(4), None, 4)[0].weights
    hooked = ranks4.run(train_hooked, hook)
    assert len({rank.digest for rank in hooked}) == 1
    for name, value in hooked[0].weights[-1].items():
        moved = (stock[-1][name] - stock[0][name]).norm()
        gap = (value - stock[-1][name]).norm()
        assert gap > 0
        assert gap <= bound * 4 * (moved + LR)
