"""Dense layers that are thawed, frozen or left out after some steps, or that are checkpointed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchrec_2dsp as tdsp
from tests.support.dense_products import FORMS
from tests.support.parity import Gap, compare
from tests.support.pipelining import (
    TABLES,
    PipelineCell,
    StackOracle,
    batches_for,
    dense_sgd,
    pipelined,
    stack_model,
    step_of,
)
from tests.support.ranks import RankPool, error_text
from torchrec_2dsp.errors import UnsupportedError

ROUNDING = 1e-6
"""Losses and weights: float32 sums in another order, over four steps."""
FROZEN = ("bottom.", "stack.layers.2.", "stack.layers.7.")
NUM_STEPS, THAWED_AT = 4, 2
CELL = PipelineCell({}, TABLES["row-wise"])


def set_trained(model: torch.nn.Module, *, are_trained: bool) -> None:
    """Freeze or thaw the layers that this rank has."""
    for name, param in model.named_parameters():
        if any(layer in name for layer in FROZEN):
            param.requires_grad_(are_trained)


def thaw(rank: int, world_size: int, form: str) -> Gap:
    """Train beside the oracle, from a step on also what was frozen."""
    oracle, unsharded = StackOracle(CELL.cell), stack_model(CELL.cell.spec)
    set_trained(oracle.model, are_trained=False)
    set_trained(unsharded, are_trained=False)
    loss_gap = 0.0
    with pipelined(CELL.cell, FORMS[form](), unsharded) as (model, params):
        optimizer = dense_sgd(params.values())
        for step in range(NUM_STEPS):
            if step == THAWED_AT:
                set_trained(oracle.model, are_trained=True)
                set_trained(model, are_trained=True)
            expected = oracle.step_on(batches_for(CELL, step))[rank]
            loss_gap = max(loss_gap, abs(step_of(model, optimizer, CELL, step, rank) - expected))
        return compare(model, oracle, loss_gap)


@pytest.mark.parametrize(
    "form", ["FSDP", "FSDP at once", "HSDP", "TP", "TP, FSDP", "PP 1F1B", "PP ZBVZeroBubble, FSDP"]
)
def test_shared_layers_train_from_then_on(ranks4: RankPool, form: str) -> None:
    for gap in ranks4.run(thaw, form):
        assert gap.num_values > 0
        assert gap.worst < ROUNDING, gap


DATA_PARALLEL: dict[str, Callable[[], Any]] = {
    "DDP": lambda: None,
    "thresholded": tdsp.ThresholdedDataParallel,
    "hooked": partial(tdsp.HookedDataParallel, "fp16"),
    "delayed": tdsp.DelayedDense,
}


def thaw_in_ddp(rank: int, world_size: int, form: str) -> str:
    unsharded = stack_model(CELL.cell.spec)
    set_trained(unsharded, are_trained=False)
    with pipelined(CELL.cell, DATA_PARALLEL[form](), unsharded) as (model, params):
        optimizer = dense_sgd(params.values())
        step_of(model, optimizer, CELL, 0, rank)
        set_trained(model, are_trained=True)
        with torch.no_grad():
            model(batches_for(CELL, 0)[rank][0])
        return error_text(lambda: step_of(model, optimizer, CELL, 1, rank), UnsupportedError)


@pytest.mark.parametrize("form", DATA_PARALLEL)
def test_ddp_refuses_them(ranks4: RankPool, form: str) -> None:
    for text in ranks4.run(thaw_in_ddp, form):
        assert text.startswith("'bottom.weight' was frozen when the model was sharded, so DDP")


def freeze(model: torch.nn.Module, rank: int) -> torch.Tensor:
    set_trained(model, are_trained=False)
    return loss_of(model, rank)


def leave_out(model: torch.nn.Module, rank: int) -> torch.Tensor:
    """Return a loss in which one dense layer has no part."""
    (bottom,) = (part for name, part in model.named_modules() if name.endswith("bottom"))
    weight, bias = (param.detach() for param in bottom.parameters())
    bottom.forward = lambda inputs: torch.nn.functional.linear(inputs, weight, bias)
    return loss_of(model, rank)


def loss_of(model: torch.nn.Module, rank: int) -> torch.Tensor:
    return model(*batches_for(CELL, 2)[rank]).mean()


def change_in_ddp(rank: int, world_size: int, form: str, change: Any) -> str:
    """Train two steps with all dense layers, and one without some of them."""
    with pipelined(CELL.cell, DATA_PARALLEL[form]()) as (model, params):
        optimizer = dense_sgd(params.values())
        for step in range(2):
            step_of(model, optimizer, CELL, step, rank)
        return error_text(lambda: change(model, rank).backward(), UnsupportedError)


@pytest.mark.parametrize("change", [freeze, leave_out])
@pytest.mark.parametrize("form", DATA_PARALLEL)
def test_ddp_refuses_a_step_that_trains_fewer(ranks4: RankPool, form: str, change: Any) -> None:
    for text in ranks4.run(change_in_ddp, form, change):
        assert text.startswith("this backward reached other dense parameters than the first one")


def checkpointed(rank: int, world_size: int, form: str) -> Gap:
    """Train a layer that is computed anew in a backward of its own, inside the loss's."""
    oracle, unsharded = StackOracle(CELL.cell), stack_model(CELL.cell.spec)
    bottom: Any = unsharded.bottom
    bottom.forward = partial(checkpoint, bottom.forward, use_reentrant=True)
    loss_gap = 0.0
    with pipelined(CELL.cell, DATA_PARALLEL[form](), unsharded) as (model, params):
        optimizer = dense_sgd(params.values())
        for step in range(NUM_STEPS):
            expected = oracle.step_on(batches_for(CELL, step))[rank]
            loss_gap = max(loss_gap, abs(step_of(model, optimizer, CELL, step, rank) - expected))
        return compare(model, oracle, loss_gap)


def test_layers_with_a_backward_of_their_own_train_as_without(ranks4: RankPool) -> None:
    for gap in ranks4.run(checkpointed, "DDP"):
        assert gap.num_values > 0
        assert gap.worst < ROUNDING, gap
