"""Pipelines' errors: wrong settings, wrong calls, and failing ranks."""

import copy
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import torchrec_2dsp as tdsp
from tests.support.dense_training import cell_of, model_of
from tests.support.loops import shard
from tests.support.models import ModelSpec, make_batch
from tests.support.parity import Cell
from tests.support.pipelining import (
    TABLES,
    TWO_RANKS,
    WIDTH,
    ItemLoss,
    StackModel,
    close_groups,
    dense_sgd,
    layers_of,
    pipelined,
    stack_model,
)
from tests.support.ranks import RankPool, RanksFailed, error_of, error_text
from torchrec_2dsp.dense.pipelined.layer_stack import LayerElsewhere
from torchrec_2dsp.errors import ConfigError, InputError, MeshError, TwoDError, UnsupportedError

pytestmark = pytest.mark.dealt_file

DEADLINE_S = 10.0
"""The limit for hearing of another rank's error; without a message, it takes minutes."""
TWO_STAGES: dict[str, Any] = {"num_stages": 2, "num_micro_batches": 4}


class SharedWeights(StackModel):
    """A model with one parameter in two layers."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        first, *layers = layers_of(8)
        self.stack = tdsp.LayerStack([first, *layers[:-1], first, layers[-1]], ItemLoss())


def wrapped(cell: Cell, model: nn.Module | None = None, **options: Any) -> Any:
    model = stack_model(cell.spec) if model is None else model
    wrapper = tdsp.PipelinedDense(**(TWO_STAGES | options))
    return shard(cell, model=model, data_parallel_wrapper=wrapper)


def set_up_wrongly(rank: int, world_size: int) -> list[str]:
    """Return the errors, in the order of the test below."""
    cell = cell_of(world_size)
    plan = {"stack.layers.9": ColwiseParallel()}
    dense = tdsp.PipelinedDense(**TWO_STAGES)
    return [
        error_text(lambda: wrapped(cell, num_stages=3, num_micro_batches=3), MeshError),
        error_text(lambda: wrapped(cell, num_stages=2, num_micro_batches=4 + rank), ConfigError),
        error_text(lambda: wrapped(cell, cuts=[3, 5]), ConfigError),
        error_text(lambda: wrapped(cell, cuts=[8]), ConfigError),
        error_text(lambda: wrapped(cell, plan=plan, tp=2), ConfigError),
        error_text(lambda: wrapped(cell, tp=2), ConfigError),
        error_text(lambda: wrapped(cell, reduction="max"), ConfigError),
        error_text(lambda: wrapped(cell, values="int8"), ConfigError),
        error_text(lambda: model_of(cell, dense), ConfigError),
        error_text(lambda: wrapped(cell, SharedWeights(cell.spec)), ConfigError),
        error_text(dense.stage_times, ConfigError),
        error_text(LayerElsewhere(), ConfigError),
    ]


def test_what_cannot_be_set_up_is_said(ranks4: RankPool) -> None:
    (answers,) = {tuple(answer) for answer in ranks4.run(set_up_wrongly)}
    assert answers[:5] == (
        "pp=3 pipeline ranks of tp=1 do not divide 4 ranks; use one of 1, 2, 4",
        answers[1],
        "cuts=[3, 5] make 3 stages, not num_stages=2; give the first layer of each stage but the "
        "first, 1 numbers",
        "cuts=[8] leave a stage without layers; give numbers that rise, from 1 to 7",
        "PipelinedDense: no module of a LayerStack is called 'stack.layers.9'; the model has the "
        "stacks stack",
    )
    assert answers[1].startswith("the settings of PipelinedDense differs between ranks: rank 0 has")
    assert answers[5:8] == (
        "PipelinedDense(tp=2) with a plan of 0 modules splits nothing; give both, or neither",
        "PipelinedDense(reduction='max') is unknown; use one of 'mean', 'sum'",
        "PipelinedDense(values='int8') is unknown; use one of 'fp32', 'bf16', 'fp16'",
    )
    assert answers[8].startswith("PipelinedDense found no LayerStack with parameters in the model")
    assert answers[9].startswith(
        "stage 1 of 'stack' (layers 5 to 8) shares a parameter with stage 0 of 'stack' (layers 0 to"
    )
    assert answers[10].startswith("PipelinedDense has no model yet")
    assert answers[11].startswith("this layer of a LayerStack is on another rank")


def tp_over_hosts(rank: int, world_size: int) -> str:
    plan = {"stack.layers.*.up": ColwiseParallel()}
    cell = cell_of(world_size)
    return error_text(lambda: wrapped(cell, num_stages=1, plan=plan, tp=4), MeshError)


def test_layers_are_not_split_over_hosts(two_hosts: RankPool) -> None:
    assert set(two_hosts.run(tp_over_hosts)) == {
        "tp=4 would spread layers over hosts of 2 ranks; use one of 1, 2"
    }


class SumLoss(nn.Module):
    """Sums each sample's outputs."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs * targets).sum(dim=1)


class Faulty(nn.Linear):
    """A layer that fails on one rank, once armed."""

    fault = ""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(input)
        if self.fault == "raises":
            raise OSError("no such file")
        if self.fault == "loses samples":
            return outputs[1:]
        if self.fault == "changes type":
            return outputs.double()
        if self.fault == "fails backward":
            outputs.register_hook(_fail)
        return outputs


def _fail(_: torch.Tensor) -> None:
    raise OSError("no such gradient")


def stack_of(cell: Cell, faulty: nn.Module, **options: Any) -> tuple[tdsp.LayerStack, Any]:
    """Return a sharded model's stack, which can be called alone, and the wrapper."""
    torch.manual_seed(0)
    model = StackModel(cell.spec)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), faulty, nn.Linear(4, 4)]
    model.stack = tdsp.LayerStack(layers, SumLoss())
    wrapper = tdsp.PipelinedDense(**(TWO_STAGES | options))
    parallel = shard(cell, model=model, data_parallel_wrapper=wrapper, load=False)
    (stack,) = [part for part in parallel.modules() if isinstance(part, tdsp.LayerStack)]
    return stack, wrapper


def called_wrongly(rank: int, world_size: int) -> list[str]:
    """Return the errors for invalid calls; the stack works after each."""
    stack, wrapper = stack_of(cell_of(world_size), nn.Identity())
    inputs, targets = torch.ones(3, 4, requires_grad=True), torch.ones(3, 4)
    features = torch.ones(3, 4)
    is_first = rank % 2 == 0

    def backward(factor: float) -> None:
        (factor * stack(inputs, targets)).mean().backward()

    def uneven() -> None:
        stack(inputs, targets)[: 2 + is_first].sum().backward()

    def in_checkpoint() -> None:
        checkpoint(stack, inputs, targets, use_reentrant=False)

    def in_two_types() -> None:
        with torch.autocast("cpu", enabled=is_first):
            stack(inputs, targets)

    def penalized() -> None:
        loss = stack(inputs, targets).mean()
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + gradient.sum()).backward()

    answers = [
        error_text(lambda: stack(inputs, targets[: 3 - (not is_first)]), InputError),
        error_text(lambda: stack(inputs, torch.ones(3, 4 + is_first)), InputError),
        error_text(lambda: stack(inputs), UnsupportedError),
        error_text(lambda: backward(1.0 + is_first), UnsupportedError),
        error_text(uneven, UnsupportedError),
        error_text(lambda: stack(features), UnsupportedError),
        error_text(in_two_types, InputError),
        error_text(penalized, UnsupportedError),
        error_text(in_checkpoint, UnsupportedError),
    ]
    outputs = stack.eval()(features)
    assert torch.equal(stack.train().requires_grad_(False)(features), outputs)
    stack.requires_grad_(True)
    inputs.grad = None
    backward(1.0)
    assert inputs.grad is not None
    close_groups(wrapper)
    return answers


def test_calls_that_do_not_fit_are_errors_on_all_ranks(ranks4: RankPool) -> None:
    answers = ranks4.run(called_wrongly)
    assert answers[0] == answers[1]
    # The other pipeline names its own ranks; errors about gradients are the same on all ranks.
    assert answers[0][2:6] == answers[2][2:6] == answers[3][2:6]
    assert answers[0][0] == (
        "target 1 of a LayerStack has the shape (2, 4), for 3 samples; give tensors whose first "
        "dimension is the batch (found on rank 1)"
    )
    assert answers[0][1].startswith(
        "rank 1 calls a LayerStack with float32[batch, 4] and float32[batch, 4] with gradients, "
        "but rank 0 of its pipeline with float32[batch, 4] and float32[batch, 5] with gradients;"
    )
    assert answers[0][2].startswith("a pipelined LayerStack gives losses gradients, but no outputs")
    assert answers[0][5] == answers[0][2], "layers that are trained are refused as well"
    assert "with gradients, under autocast to bfloat16; give all" in answers[1][6]
    assert answers[0][7].startswith("a second derivative (create_graph=True) through a pipelined ")
    assert {texts[8] for texts in answers} == {
        "a pipelined LayerStack is called inside torch.utils.checkpoint, which would run the "
        "pipeline again in the backward; checkpoint layers inside the stack, and leave out what "
        "is around it"
    }
    for text in answers[0][3:5]:
        assert text.startswith("the losses of a pipeline's samples don't count alike: relative to")
    assert "one of rank 0 counts 2, one of rank 1 1." in answers[0][3]


REFUSED = {
    "loses samples": "stage 2 of 'stack' (layers 2 to 2) gives a tensor of float32 of shape (1, 4) "
    "for 2 samples; let layers give one tensor",
    "changes type": "stage 2 of a pipelined LayerStack gives torch.float64 of shape (batch, 4), "
    "and torch.float32 of shape (batch, 4) for an earlier call",
}


def fail(rank: int, world_size: int, fault: str, schedule: str) -> tuple[str, str, float]:
    """Return the error's kind, text and delay in a schedule in which rank 2 fails."""
    faulty = Faulty()
    options: dict[str, Any] = {"num_stages": 4, "num_micro_batches": 6, "schedule": schedule}
    stack, wrapper = stack_of(cell_of(world_size), faulty, **options)
    inputs, targets = torch.ones(3, 4, requires_grad=True), torch.ones(3, 4)
    stack(inputs, targets).mean().backward()
    dist.barrier()
    if rank == 2:
        faulty.fault = fault
    started = time.monotonic()
    with pytest.raises((OSError, TwoDError)) as raised:
        stack(inputs, targets)
    seconds = time.monotonic() - started
    # The schedule is gone, so the ranks keep raising that error.
    with pytest.raises(TwoDError):
        stack(inputs, targets)
    dist.barrier()
    close_groups(wrapper)
    return type(raised.value).__name__, str(raised.value), seconds


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("fault", ["raises", "loses samples", "changes type", "fails backward"])
def test_an_error_in_a_schedule_reaches_all_ranks(
    ranks4: RankPool, fault: str, schedule: str
) -> None:
    answers = ranks4.run(fail, fault, schedule, timeout_s=4 * DEADLINE_S)
    assert max(seconds for _, _, seconds in answers) < DEADLINE_S
    own = answers.pop(2)
    if fault in REFUSED:
        assert own[0] == "UnsupportedError"
        assert own[1].startswith(REFUSED[fault])
        assert {(kind, text) for kind, text, _ in answers} == {
            ("UnsupportedError", f"{own[1]} (found on rank 2)")
        }
        return
    assert own[0] == "OSError"
    for kind, text, _ in answers:
        assert kind == "RankError"
        assert text.startswith(f"rank 2 failed in a pipeline of layers: OSError: {own[1]} (")


def die(rank: int, world_size: int) -> None:
    """Train a step, then let the last stage's rank exit in its forward."""
    cell = cell_of(world_size)
    model = stack_model(cell.spec)
    wrapper = tdsp.PipelinedDense(**TWO_STAGES)
    parallel = shard(cell, model=model, data_parallel_wrapper=wrapper, load=False)
    parallel(make_batch(cell.spec, seed=rank)).mean().backward()
    if rank == 1:
        model.stack.layers[-1].register_forward_pre_hook(lambda *_: os._exit(3))
    parallel(make_batch(cell.spec, seed=rank)).mean().backward()


def test_a_rank_that_dies_in_a_schedule_is_named() -> None:
    with RankPool(2) as pool, pytest.raises(RanksFailed) as failed:
        pool.run(die, timeout_s=4 * DEADLINE_S)
    reports = failed.value.reports
    assert "died with exit code 3" in reports[1]
    assert "RankError: rank 1 did not answer: killed, stopped, or cut off" in reports[0]


class Scale(nn.Module):
    """A layer with a given parameter, of any shape and type."""

    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(parameter)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.scale.to(inputs.dtype)


def model_with(spec: ModelSpec, parameter: torch.Tensor) -> StackModel:
    model = stack_model(spec)
    model.stack.layers[1] = Scale(parameter)
    return model


def refused(rank: int, world_size: int) -> list[str]:
    """Return all refusals; the parameter is in the first stage alone."""
    options: dict[str, Any] = TWO_RANKS[0] | {"fully_shard": True}

    def wrap(cell: Cell, model: StackModel | None = None, **more: Any) -> None:
        with pipelined(cell, tdsp.PipelinedDense(**(options | more)), model):
            pass

    cell = TABLES["row-wise"]
    narrow = torch.ones(WIDTH, dtype=torch.bfloat16)
    errors = [
        error_text(lambda: wrap(cell, model_with(cell.spec, narrow)), ConfigError),
        error_text(lambda: wrap(cell, model_with(cell.spec, torch.ones(()))), ConfigError),
        error_text(lambda: wrap(cell, fully_shard=bool(rank % 2)), ConfigError),
    ]
    wrapper = tdsp.PipelinedDense(**options)
    with pipelined(cell, wrapper) as (_, params):
        optimizer = dense_sgd(params.values())
        errors.append(error_text(lambda: wrapper.recut(optimizer, cuts=[3]), TwoDError))
    return errors


def test_what_cannot_be_shared_is_refused_by_all(ranks4: RankPool) -> None:
    ((types, scalar, differs, moved),) = {tuple(errors) for errors in ranks4.run(refused)}
    assert types.startswith(
        "stage 0 of 'stack' (layers 0 to 3) trains parameters of torch.bfloat16 and torch.float32, "
        "which fully_shard=True can't gather together"
    )
    assert scalar.startswith("stage 0 of 'stack' (layers 0 to 3) has a parameter without a dimen")
    assert differs.startswith("the settings of PipelinedDense differs between ranks")
    assert moved == (
        "layers of which 2 pipelines keep a share each can't be moved; save a checkpoint, choose "
        "other cuts, and load it"
    )


def copied(rank: int, world_size: int) -> list[str]:
    """Return the errors of copying a stack that ranks have cut, and of averaging it."""
    model = wrapped(cell_of(world_size))
    (stack,) = (part for part in model.modules() if isinstance(part, tdsp.LayerStack))
    return [error_of(lambda: copy.deepcopy(stack)), error_of(lambda: AveragedModel(stack))]


def test_a_stack_that_is_cut_cannot_be_copied(ranks2: RankPool) -> None:
    for texts in ranks2.run(copied):
        assert all(text.startswith("UnsupportedError: a LayerStack that") for text in texts)
