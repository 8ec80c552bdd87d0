"""Sending dense gradients' largest elements, against sorting, DDP and itself."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import torchrec_2dsp as tdsp
from tests.support.dense_training import (
    LR,
    NUM_STEPS,
    WIDTH,
    ThresholdOracle,
    Trained,
    batch_of,
    cell_of,
    copied_weights,
    dense_of,
    model_of,
    train,
    unsharded,
    with_nan,
)
from tests.support.parity import Cell
from tests.support.ranks import RankPool, error_text
from torchrec_2dsp.dense import hooked_data_parallel
from torchrec_2dsp.errors import ConfigError, SyncError

pytestmark = pytest.mark.dealt_file

ROUNDING = 2e-6
"""A few float32 roundings of weights below 1: the reference adds in float64."""


def expected_weights(
    world_size: int,
    cell: Cell,
    oracle: ThresholdOracle,
    flush_at: int = -1,
) -> list[dict[str, torch.Tensor]]:
    """Return the reference's weights, trained in one process."""
    model, dense = unsharded(cell)
    weights = []
    for step in range(NUM_STEPS):
        gradients = []
        for rank in range(world_size):
            model.zero_grad()
            model(batch_of(cell, step, rank)).backward()
            gradients.append({name: _gradient(value) for name, value in dense.items()})
        mean = oracle.mean(gradients, flush=step == flush_at)
        with torch.no_grad():
            for name, value in dense.items():
                value -= LR * mean[name]
        weights.append(copied_weights(dense))
    return weights


def _gradient(value: torch.Tensor) -> torch.Tensor:
    assert value.grad is not None
    return value.grad.clone()


CASES: dict[str, dict[str, Any]] = {
    "exact thresholds": {"density": 0.05, "exact_thresholds": True},
    "sampled": {"density": 0.1},
    "fp32 values": {"density": 0.02, "values": "fp32"},
    "fp16 values": {"density": 0.1, "values": "fp16"},
    "warm-up": {"density": 0.05, "warm_up": 2},
    "all large": {"density": 0.05, "dense_below": 0},
    "Adam": {"density": 0.05, "warm_up": 2, "preconditioner": "adam"},
    "AdaGrad": {"density": 0.05, "warm_up": 1, "preconditioner": "adagrad", "values": "fp32"},
    "small buckets": {"density": 0.05, "bucket_cap_mb": 0.005},
}


def thresholded(**options: Any) -> Callable[[], tdsp.ThresholdedDataParallel]:
    """Return a factory for wrappers, which can be sent to ranks."""
    return partial(tdsp.ThresholdedDataParallel, **options)


def check_against_oracle(
    pool: RankPool, cell: Cell, options: dict[str, Any], flush_at: int = -1
) -> list[Trained]:
    world_size = cell.mesh.world_size
    wrapper = thresholded(**{"route": "gather", **options})
    trained = pool.run(train, cell, wrapper, NUM_STEPS, flush_at)
    oracle = ThresholdOracle(
        options["density"],
        tdsp.Transport(options.get("values", "bf16")),
        options.get("dense_below", 1024),
        options.get("warm_up", 0),
        options.get("preconditioner", "none"),
    )
    expected = expected_weights(world_size, cell, oracle, flush_at)
    assert len({rank.digest for rank in trained}) == 1
    for actual, wanted in zip(trained[0].weights, expected, strict=True):
        assert actual.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(actual[name], value, rtol=0, atol=ROUNDING)
    for rank, result in enumerate(trained):
        squares = [
            float(residual.square().sum())
            for (owner, _), residual in oracle.residuals.items()
            if owner == rank
        ]
        assert result.residual_norm == pytest.approx(sum(squares) ** 0.5, rel=1e-3, abs=1e-6)
    return trained


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_sorting(ranks4: RankPool, name: str) -> None:
    trained = check_against_oracle(ranks4, cell_of(4), CASES[name])
    report = trained[0].reports[-1]
    warm_up = CASES[name].get("warm_up", 0)
    assert report.num_steps == NUM_STEPS
    assert report.num_thresholded_steps == NUM_STEPS - warm_up
    assert 0.8 <= report.density / CASES[name]["density"] <= 1.1
    assert trained[0].residual_norm > 0


def test_groups_and_the_stock_wrapper_take_it(ranks4: RankPool) -> None:
    alone = check_against_oracle(ranks4, cell_of(4), CASES["sampled"])
    in_groups = check_against_oracle(ranks4, cell_of(4, groups=2), CASES["sampled"])
    stock = check_against_oracle(ranks4, cell_of(4, stock=True), CASES["sampled"])
    assert alone[0].digest == stock[0].digest
    assert alone[0].reports == in_groups[0].reports == stock[0].reports


def test_a_flush_of_one_rank_empties_the_residuals_of_all(ranks2: RankPool) -> None:
    trained = check_against_oracle(ranks2, cell_of(2), CASES["sampled"], flush_at=4)
    assert [rank.residual_norm for rank in trained] == [0.0, 0.0]
    assert trained[0].reports[-1].num_thresholded_steps == 4


@pytest.mark.parametrize(
    "options",
    [
        {"density": 1.0},
        {"density": 0.01, "warm_up": 100},
        {"density": 0.01, "dense_below": 1_000_000},
        {"density": 0.01, "route": "dense"},
    ],
    ids=str,
)
def test_dense_steps_are_those_of_ddp_bit_for_bit(
    ranks4: RankPool, options: dict[str, Any]
) -> None:
    stock = ranks4.run(train, cell_of(4))
    dense = ranks4.run(train, cell_of(4), thresholded(**options))
    assert dense[0].digest == stock[0].digest
    assert dense[0].reports[-1].num_thresholded_steps == 0


@pytest.mark.parametrize(
    ("rule", "optimizer"), [("adam", torch.optim.Adam), ("adagrad", torch.optim.Adagrad)]
)
def test_dense_steps_of_updates_are_those_of_the_optimizer(
    ranks2: RankPool, rule: str, optimizer: type[torch.optim.Optimizer]
) -> None:
    stock = ranks2.run(train, cell_of(2), None, NUM_STEPS, -1, optimizer)
    for options in ({"warm_up": 100}, {"density": 1.0}, {"route": "dense"}):
        wrapper = thresholded(preconditioner=rule, **options)
        dense = ranks2.run(train, cell_of(2), wrapper)
        assert len({rank.digest for rank in dense}) == 1
        for name, value in stock[0].weights[-1].items():
            # Updates that gradients near zero turn into noise.
            torch.testing.assert_close(dense[0].weights[-1][name], value, rtol=0, atol=2e-5)


def test_a_step_has_the_collectives_that_are_documented(ranks4: RankPool) -> None:
    stock = ranks4.run(train, cell_of(4))[0].counts[-1]
    extra = {}
    for route in ("gather", "owners"):
        wrapper = thresholded(density=0.05, route=route)
        counts = ranks4.run(train, cell_of(4), wrapper)[0].counts[-1]
        extra[route] = Counter(counts) - Counter(stock)
    # DDP's own all-reduce handles only gradients that are sent whole.
    assert extra["gather"] == {"all_reduce": 1, "all_gather_into_tensor": 1}
    assert extra["owners"] == {**extra["gather"], "all_to_all_single": 1}


def test_reports_count_bytes(ranks4: RankPool) -> None:
    wrapper = thresholded(density=0.05, route="gather", dense_below=1024)
    report = ranks4.run(train, cell_of(4), wrapper)[0].reports[-1]
    width = sum(table.dim for _, table in cell_of(4).spec.features)
    large, small = [width * WIDTH, WIDTH * WIDTH], [WIDTH, WIDTH, WIDTH, 1]
    entries = sum(-int(-0.05 * size // 1) for size in large)
    message = 4 + 2 * (entries + entries % 2) + 2 * 128 * -(-entries // 128)
    assert report.num_bytes == 5 * (3 * message + 1.5 * 4 * sum(small))
    assert report.dense_bytes == 5 * 1.5 * 4 * (sum(large) + sum(small))


def accumulate(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Count all steps and thresholded ones, after each of three steps."""
    cell = cell_of(world_size, groups=world_size)
    dense = tdsp.ThresholdedDataParallel(0.1, warm_up=1, route="gather")
    model = model_of(cell, dense)
    counts = []
    for step in range(3):
        model.zero_grad()
        for batch in tdsp.accumulate(model, [batch_of(cell, 2 * step + i, rank) for i in (0, 1)]):
            model(batch).backward()
        counts.append((dense.total.num_steps, dense.total.num_thresholded_steps))
    return counts


def accumulate_updates(rank: int, world_size: int) -> str:
    dense = tdsp.ThresholdedDataParallel(0.1, preconditioner="adam")
    cell = cell_of(world_size, groups=world_size)
    model = model_of(cell, dense)
    for batch in tdsp.accumulate(model, [batch_of(cell, i, rank) for i in (0, 1)]):
        try:
            model(batch).backward()
        except ConfigError as error:
            return str(error)
    return "no error"


def test_updates_of_a_part_of_a_step_are_refused(ranks2: RankPool) -> None:
    (message,) = set(ranks2.run(accumulate_updates))
    assert message.endswith("in DDP's first step; set static_graph=False")


def test_the_batches_of_a_step_are_one_step_of_the_warm_up(ranks2: RankPool) -> None:
    assert ranks2.run(accumulate) == [[(1, 0), (2, 1), (3, 2)]] * 2


def fail_with_nan(rank: int, world_size: int, num_before: int) -> tuple[str, list[float]]:
    """Return the error after some steps, and the weights' sums in later steps."""
    wrapper = tdsp.ThresholdedDataParallel(0.05)
    cell = cell_of(world_size)
    model = model_of(cell, wrapper)
    optimizer = torch.optim.SGD(dense_of(model).values(), lr=0.05)
    for step in range(num_before):
        optimizer.zero_grad()
        model(batch_of(cell, step, rank)).backward()
    before = {name: value.detach().clone() for name, value in dense_of(model).items()}
    residuals = wrapper.state_dict()["residuals"]
    layer = dict(model.named_parameters())["tower.0.weight"]
    hook = layer.register_hook(with_nan) if rank == 1 else None
    message = error_text(model(batch_of(cell, num_before, rank)).backward, SyncError)
    for name, value in dense_of(model).items():
        assert torch.equal(value, before[name])
    for name, residual in wrapper.state_dict()["residuals"].items():
        assert torch.equal(residual, residuals[name])
    if hook is not None:
        hook.remove()
    sums = []
    for step in range(3):
        optimizer.zero_grad()
        model(batch_of(cell, step, rank)).backward()
        optimizer.step()
        sums.append(sum(value.detach().sum().item() for value in dense_of(model).values()))
    return message, sums


@pytest.mark.parametrize("num_before", [0, 1, 4])
def test_a_nan_of_one_rank_stops_all_and_they_may_go_on(ranks4: RankPool, num_before: int) -> None:
    first, *others = ranks4.run(fail_with_nan, num_before)
    assert others == [first] * 3
    message, sums = first
    assert message == (
        f"gradients of 'tower.0.weight' are not finite in step {num_before}; nothing of the bucket "
        "was sent, and no dense weight has changed. Lower the learning rate, or clip gradients "
        "(found on rank 1)"
    )
    assert len(set(sums)) == 3
    assert all(map(math.isfinite, sums))


def differ(rank: int, world_size: int) -> str:
    wrapper = tdsp.ThresholdedDataParallel(0.05 if rank else 0.06)
    return error_text(lambda: model_of(cell_of(world_size), wrapper), ConfigError)


def test_ranks_with_other_settings_are_told_at_construction(ranks2: RankPool) -> None:
    (message,) = set(ranks2.run(differ))
    assert "the settings of ThresholdedDataParallel differs between ranks" in message
    assert "density=0.05" in message
    assert "density=0.06" in message


WRAPPERS = (partial(tdsp.ThresholdedDataParallel, 0.05), partial(tdsp.HookedDataParallel, "fp16"))


def use_twice(rank: int, world_size: int, make_wrapper: Callable[[], Any]) -> str:
    wrapper = make_wrapper()
    model_of(cell_of(world_size), wrapper)
    return error_text(lambda: model_of(cell_of(world_size), wrapper), ConfigError)


@pytest.mark.parametrize("make_wrapper", WRAPPERS, ids=["thresholded", "hooked"])
def test_a_wrapper_keeps_to_its_model(ranks2: RankPool, make_wrapper: Callable[[], Any]) -> None:
    (message,) = set(ranks2.run(use_twice, make_wrapper))
    assert "has a model already; make another one" in message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tdsp.ThresholdedDataParallel(0.0), "density=0.0. is no share; use one above 0"),
        (lambda: tdsp.ThresholdedDataParallel(1.5), "density=1.5. is no share"),
        (lambda: tdsp.ThresholdedDataParallel(float("nan")), "density=nan. is no share"),
        (
            lambda: tdsp.ThresholdedDataParallel(warm_up=-1),
            "warm_up=-1. is no count; use 0",
        ),
        (
            lambda: tdsp.ThresholdedDataParallel(preconditioner="lamb"),
            "preconditioner='lamb'. is unknown; use one of 'none', 'adagrad', 'adam'",
        ),
        (lambda: tdsp.ThresholdedDataParallel(refresh=0), "refresh=0. is no count; use 1 or more"),
        (
            lambda: tdsp.ThresholdedDataParallel(values="fp64"),
            "values='fp64'. is unknown; use one of 'fp32', 'bf16', 'fp16', 'int8', 'int4'",
        ),
        (
            lambda: tdsp.ThresholdedDataParallel(route="ring"),
            "route='ring'. is unknown; use one of 'auto', 'dense', 'gather', 'owners'",
        ),
        (lambda: tdsp.HookedDataParallel("int8"), "hook='int8'.*use one of 'fp16', 'powersgd'"),
        (lambda: tdsp.HookedDataParallel("powersgd", warm_up=1), "warm_up of 2 or more"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(("hook", "bound"), [("fp16", 1e-3), ("powersgd", 5e-2)])
def test_stock_hooks_train_nearly_as_ddp(ranks4: RankPool, hook: str, bound: float) -> None:
    stock = ranks4.run(train, cell_of(4), None, 4)[0].weights
    wrapper = partial(tdsp.HookedDataParallel, hook, rank=4, warm_up=2)
    hooked = ranks4.run(train, cell_of(4), wrapper, 4)
    assert len({rank.digest for rank in hooked}) == 1
    gaps = {name: (value - stock[-1][name]).norm() for name, value in hooked[0].weights[-1].items()}
    for name, gap in gaps.items():
        moved = (stock[-1][name] - stock[0][name]).norm()
        assert gap <= bound * 4 * (moved + LR)
    # PowerSGD leaves gradients that it can't compress unchanged.
    assert any(gaps.values())


def test_power_sgd_keeps_nothing_for_buckets_that_change() -> None:
    first, second, third = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    dense: Any = tdsp.HookedDataParallel("powersgd")
    dense._names = {id(first): "first", id(second): "second", id(third): "third"}
    state: Any = SimpleNamespace(error_dict={}, p_memory_dict={}, q_memory_dict={})
    memories = (state.error_dict, state.p_memory_dict, state.q_memory_dict)

    def reduce(number: int, *params: nn.Parameter) -> None:
        bucket = SimpleNamespace(index=lambda: number, parameters=lambda: list(params))
        with mock.patch.object(hooked_data_parallel, "powerSGD_hook"):
            dense._reduce_by_power_sgd(state, bucket)

    for _ in range(2):  # A resumed run's memories come before its first bucket.
        for memory in memories:
            memory.update({0: torch.ones(2), 1: torch.ones(4)})
        reduce(0, third)
        reduce(1, first, second)
    assert [sorted(memory) for memory in memories] == [[0, 1]] * 3
    reduce(1, second, first)
    assert [sorted(memory) for memory in memories] == [[0]] * 3
