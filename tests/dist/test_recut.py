"""A pipeline's layers may change ranks between two steps without affecting training."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.models import ModelSpec
from tests.support.parity import LR
from tests.support.pipelining import (
    WIDTH,
    ItemLoss,
    PipelineCell,
    StackModel,
    batch_for,
    dense_sgd,
    pipelined,
    stack_model,
    step_of,
)
from tests.support.ranks import RankPool, error_text
from torchrec_2dsp.dense.pipelined import cut_stack
from torchrec_2dsp.errors import ConfigError, TwoDError

pytestmark = pytest.mark.dealt_file

ONE_PIPELINE: dict[str, Any] = {"num_stages": 4, "num_micro_batches": 5}
TWO_PIPELINES: dict[str, Any] = {
    "num_stages": 4,
    "num_micro_batches": 4,
    "stages_per_rank": 2,
    "schedule": "ZBVZeroBubble",
}
NUM_STEPS = 3


def make_optimizer(name: str, params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Build an optimizer with two groups, whose parameters must not be mixed up."""
    biases = [param for key, param in params.items() if key.endswith("bias")]
    others = [param for key, param in params.items() if not key.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": others, "lr": LR}, {"params": biases, "lr": 2 * LR}]
    kind = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}[name]
    return kind(groups, foreach=False)


def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    """List this rank's layer parameters in the optimizer's order, with their moments."""
    names = {id(param): name for name, param in model.named_parameters()}
    return [
        (
            number,
            names[id(param)],
            param.detach().clone(),
            *(moment.clone() for _, moment in sorted(optimizer.state[param].items())),
        )
        for number, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if "stack" in names[id(param)]
    ]


def train(
    rank: int, options: dict[str, Any], optimizer_name: str, recuts: dict[int, list[int]]
) -> tuple[list[float], list[tuple[Any, ...]], dict[str, tuple[int, ...]]]:
    cell = PipelineCell(options)
    wrapper, losses = cell.wrapper(), []
    with pipelined(cell.cell, wrapper) as (model, params):
        optimizer = make_optimizer(optimizer_name, params)
        for step in range(NUM_STEPS):
            if step in recuts:
                optimizer.zero_grad()
                assert wrapper.recut(optimizer, cuts=recuts[step])
            losses.append(step_of(model, optimizer, cell, step, rank))
        return losses, kept(model, optimizer), wrapper.cuts


def with_and_without(
    rank: int, world_size: int, options: dict[str, Any], optimizer_name: str
) -> int:
    """Compare runs with and without two recuts; count the compared parameters."""
    before, between, after = [1, 2, 6], [2, 5, 7], [1, 3, 6]
    recuts = {1: between, 2: after}
    losses, ours, cuts = train(rank, options | {"cuts": before}, optimizer_name, recuts)
    expected_losses, expected, _ = train(rank, options | {"cuts": after}, optimizer_name, {})
    assert cuts == {"stack": tuple(after)}
    assert losses == expected_losses
    assert [entry[:2] for entry in ours] == [entry[:2] for entry in expected]
    for own, wanted in zip(ours, expected, strict=True):
        assert all(map(torch.equal, own[2:], wanted[2:])), own[1]
        assert len(own) > 3, "there are moments"
    return len(ours)


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
@pytest.mark.parametrize("options", [ONE_PIPELINE, TWO_PIPELINES], ids=["one", "two"])
def test_training_goes_on_with_the_bits_of_the_new_cuts(
    ranks4: RankPool, options: dict[str, Any], optimizer: str
) -> None:
    assert all(num > 0 for num in ranks4.run(with_and_without, options, optimizer))


class Slow(nn.Module):
    """A slow layer."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return torch.tanh(inputs)


def cut_by_time(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """Return the cuts after each step, until two slow layers are on different stages."""
    cell = PipelineCell({"num_stages": 4, "num_micro_batches": 2})
    wrapper = cell.wrapper()
    model = stack_model(cell.cell.spec)
    model.stack.layers[0], model.stack.layers[1] = Slow(), Slow()
    with pipelined(cell.cell, wrapper, model) as (parallel_model, params):
        optimizer = dense_sgd(params.values())
        with pytest.raises(ConfigError, match="no layer has been timed"):
            wrapper.recut(optimizer)
        cuts = [wrapper.cuts["stack"]]
        # A busy machine may make other layers seem slow, the first step above all.
        for step in range(8):
            step_of(parallel_model, optimizer, cell, step, rank)
            optimizer.zero_grad()
            assert wrapper.recut(optimizer, least_gain=0.3) == (wrapper.cuts["stack"] != cuts[-1])
            cuts.append(wrapper.cuts["stack"])
            if cuts[-1][0] == 1:
                break
        return cuts


def test_slow_layers_part(ranks4: RankPool) -> None:
    cuts_of_ranks = ranks4.run(cut_by_time)
    assert all(cuts == cuts_of_ranks[0] for cuts in cuts_of_ranks)
    assert cuts_of_ranks[0][0] == (2, 4, 6)
    assert cuts_of_ranks[0][-1][0] == 1


def cut_by_given_times(rank: int, world_size: int) -> tuple[list[bool], list[tuple[int, ...]]]:
    """Tell whether layers move, and the cuts, when two times are four times the others."""
    cell = PipelineCell(ONE_PIPELINE)
    wrapper = cell.wrapper()

    def seconds_of(stack: Any) -> dict[int, float]:
        return {number: 0.4 if number in (0, 1) else 0.1 for number in stack._own_layers}

    with pipelined(cell.cell, wrapper) as (model, params), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_stack.CutStack, "_layer_seconds", seconds_of)
        optimizer = dense_sgd(params.values())
        moved, cuts = [], []
        for step, least_gain in enumerate((0.6, 0.3, 0.3)):
            step_of(model, optimizer, cell, step, rank)
            optimizer.zero_grad()
            moved.append(wrapper.recut(optimizer, least_gain=least_gain))
            cuts.append(wrapper.cuts["stack"])
        return moved, cuts


def test_layers_move_once_and_only_for_enough(ranks4: RankPool) -> None:
    """The slowest stage shrinks from 0.8 to 0.4 seconds: enough for 30 %, not for 60 %."""
    for moved, cuts in ranks4.run(cut_by_given_times):
        assert moved == [False, True, False]
        assert cuts[0] == (2, 4, 6)
        assert cuts[1] == cuts[2]
        assert cuts[1][:2] == (1, 2)


def named_optimizer(params: dict[str, nn.Parameter]) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(
        {name.removeprefix("module."): param for name, param in params.items()},
        lambda given: torch.optim.Adagrad(given, lr=LR, foreach=False),
    )


def loaded_elsewhere(rank: int, world_size: int, folder: str) -> None:
    """Save after a recut, then load and continue with other cuts."""
    cell = PipelineCell(ONE_PIPELINE | {"cuts": [1, 2, 6]})
    wrapper, losses = cell.wrapper(), []
    with pipelined(cell.cell, wrapper) as (model, params):
        optimizer = named_optimizer(params)
        whole = CombinedOptimizer([model.fused_optimizer, optimizer])
        step_of(model, optimizer, cell, 0, rank)
        optimizer.zero_grad()
        wrapper.recut(optimizer, cuts=[2, 5, 7])
        # It was created before, and learns about the move.
        tdsp.save_checkpoint(folder, model, whole)
        losses.append(step_of(model, optimizer, cell, 1, rank))
    with pipelined(cell.cell, PipelineCell(ONE_PIPELINE).wrapper()) as (model, params):
        optimizer = named_optimizer(params)
        whole = CombinedOptimizer([model.fused_optimizer, optimizer])
        tdsp.load_checkpoint(folder, model, whole)
        losses.append(step_of(model, optimizer, cell, 1, rank))
    assert losses[0] == losses[1]


def test_checkpoints_do_not_depend_on_cuts(ranks4: RankPool, tmp_path: Path) -> None:
    ranks4.run(loaded_elsewhere, str(tmp_path / "saved"))


class Local(nn.Linear):
    """A layer with an attribute that can't be sent."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.function: Callable[[torch.Tensor], torch.Tensor] = lambda inputs: inputs


class TwoStacks(StackModel):
    """A model with a second stack, in which one layer can't be sent."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        _, table = spec.features[-1]
        layers = [Local() if number == 1 else nn.Linear(WIDTH, WIDTH) for number in range(7)]
        self.second = tdsp.LayerStack([*layers, nn.Linear(WIDTH, table.dim)], ItemLoss())

    def forward(self, features: KeyedJaggedTensor, *, with_targets: bool = True) -> torch.Tensor:
        pooled = self.ebc(features)
        joined = torch.cat([pooled[name] for name in self.features], dim=1)
        inputs, items = torch.tanh(self.bottom(joined)), pooled[self.item]
        labels = torch.ones(len(inputs))
        return self.stack(inputs, labels, items) + self.second(inputs, labels, items)


def refused(rank: int, world_size: int) -> list[str]:
    """Return `recut`'s errors; the cuts stay, and training continues."""
    cell = PipelineCell(ONE_PIPELINE | {"cuts": [1, 2, 6]})
    wrapper = cell.wrapper()
    model = TwoStacks(cell.cell.spec)
    messages = []
    with pipelined(cell.cell, wrapper, model) as (parallel_model, params):
        optimizer = dense_sgd(params.values())
        step_of(parallel_model, optimizer, cell, 0, rank)
        attempts: list[tuple[torch.optim.Optimizer, list[int]]] = [(optimizer, [3, 4, 6])]
        optimizer.zero_grad()
        attempts += [
            (optimizer, [1, 2, 6 + rank % 2]),
            (optimizer, [1, 2]),
            (CombinedOptimizer([named_optimizer(params)]), [3, 4, 6]),
            (optimizer, [2, 4, 6]),
        ]
        for number, (given, cuts) in enumerate(attempts):
            if number == 0:
                parallel_model(batch_for(cell, 0, 0, rank)).mean().backward()
            recut = partial(wrapper.recut, given, cuts=cuts)
            messages.append(error_text(recut, TwoDError))
            optimizer.zero_grad()
            assert wrapper.cuts == dict.fromkeys(("stack", "second"), (1, 2, 6))
            step_of(parallel_model, optimizer, cell, 1, rank)
            # Zero gradients can be lost without harm, so they don't prevent a recut.
            optimizer.zero_grad(set_to_none=False)
    return messages


def by_times_of_launches(rank: int, world_size: int) -> tuple[str, bool]:
    """Return the error for cuts by time on the meta device, and whether given cuts work."""
    cell = PipelineCell(ONE_PIPELINE)
    wrapper = cell.wrapper()
    with pipelined(cell.cell, wrapper) as (model, params):
        optimizer = dense_sgd(params.values())
        step_of(model, optimizer, cell, 0, rank)
        optimizer.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wrapper._model_groups(), "device", torch.device("meta"))
            error = error_text(partial(wrapper.recut, optimizer), TwoDError)
            return error, wrapper.recut(optimizer, cuts=[1, 3, 6])


def test_no_cuts_are_chosen_by_times_of_launches(ranks4: RankPool) -> None:
    for error, has_moved in ranks4.run(by_times_of_launches):
        assert error.startswith("recut() chooses cuts by the layers' times, and on a GPU only")
        assert has_moved


def test_what_cannot_be_moved_is_refused_by_all(ranks4: RankPool) -> None:
    for gradients, differ, too_few, combined, unpicklable in ranks4.run(refused):
        assert "has gradients, which a move would lose" in gradients
        assert "the choice of cuts differs between ranks" in differ
        assert "make 3 stages, not num_stages=4" in too_few
        assert "can't change the parameters of a CombinedOptimizer" in combined
        assert "layer 1 of 'second' can't be sent to another rank" in unpicklable
