"""Pipelined stages with unusual layers: in place, detached, shared weights, unused, batch norm."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn

import torchrec_2dsp as tdsp
from tests.support.dense_training import whole
from tests.support.parity import Gap, compare
from tests.support.pipelining import (
    TABLES,
    TWO_RANKS,
    WIDTH,
    PipelineCell,
    StackOracle,
    batch_for,
    batches_for,
    dense_sgd,
    pipelined,
    stack_model,
    step_of,
)
from tests.support.ranks import RankPool

pytestmark = pytest.mark.dealt_file

ROUNDING = 1e-6
"""Losses and weights: float32 sums in another order, over a step."""


class Detach(nn.Module):
    """A layer through which no gradient goes back."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.detach()


class Reused(nn.Module):
    """Applies one weight twice, with two biases that come before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = map(nn.Parameter, torch.rand(2, 2 * WIDTH))
        self.weight = nn.Parameter(torch.rand(2 * WIDTH, 2 * WIDTH) / WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = torch.tanh(nn.functional.linear(inputs, self.weight, self.first))
        return nn.functional.linear(outputs, self.weight, self.second)


def beginning_with(rank: int, world_size: int, options: dict[str, Any], first: nn.Module) -> Gap:
    """Train where a stage begins with a layer."""
    cell = PipelineCell(options)
    oracle, unsharded = StackOracle(cell.cell), stack_model(cell.cell.spec)
    for model in (oracle.model, unsharded):
        layers = cast(Any, model.stack).layers
        layers[4] = nn.Sequential(copy.deepcopy(first), layers[4])
    oracle.dense_optimizer.add_param_group(
        {"params": [*cast(Any, oracle.model).stack.layers[4].parameters()]}
    )
    with pipelined(cell.cell, cell.wrapper(), unsharded) as (model, params):
        expected = oracle.step_on(batches_for(cell, 0))[rank]
        loss = step_of(model, dense_sgd(params.values()), cell, 0, rank)
        return compare(model, oracle, abs(loss - expected))


ZERO_BUBBLE: dict[str, Any] = TWO_RANKS[1] | {"fully_shard": True}


@pytest.mark.parametrize("options", [TWO_RANKS[0], ZERO_BUBBLE], ids=["1F1B", "ZBVZeroBubble"])
def test_stages_may_begin_with_any_layer(ranks4: RankPool, options: dict[str, Any]) -> None:
    """It may write into its input, detach it, or have one parameter at several places."""
    for first in (nn.LeakyReLU(0.1, inplace=True), Detach(), Reused()):
        for gap in ranks4.run(beginning_with, options, first):
            assert gap.num_values > 0
            assert gap.worst < ROUNDING, (first, gap)


def running_statistics(rank: int, world_size: int) -> list[list[float]]:
    """Return this rank's batch norm statistics after two steps."""
    cell, unsharded = PipelineCell(TWO_RANKS[0]), stack_model(TABLES["row-wise"].spec)
    layers = [nn.BatchNorm1d(WIDTH), *unsharded.stack.layers, nn.BatchNorm1d(8)]
    unsharded.stack = tdsp.LayerStack(layers, unsharded.stack.loss)
    with pipelined(cell.cell, cell.wrapper(), unsharded) as (model, dense):
        optimizer = dense_sgd(list(dense.values()))
        for step in range(2):
            step_of(model, optimizer, cell, step, rank)
        return [buffer.tolist() for name, buffer in model.named_buffers() if "running_mean" in name]


def test_pipelines_have_the_first_ones_statistics(ranks4: RankPool) -> None:
    by_rank = ranks4.run(running_statistics)
    assert len({str(means) for means in by_rank}) == 2  # One batch norm in each stage.
    assert all(len(means) == 1 and any(means[0]) for means in by_rank)


def with_densities(rank: int, world_size: int) -> Gap:
    """Train where a stage ends with fewer or more numbers in each step."""
    cell = PipelineCell(TWO_RANKS[0] | {"cuts": [2]})
    oracle, unsharded = StackOracle(cell.cell), stack_model(cell.cell.spec)
    split = [tdsp.Thresholded(density=0.5) for _ in range(2)]
    for model, layer in zip((oracle.model, unsharded), split, strict=True):
        cast(Any, model.stack).layers[1] = layer
    loss_gap = 0.0
    with pipelined(cell.cell, cell.wrapper(), unsharded) as (model, params):
        optimizer = dense_sgd(params.values())
        for step, density in enumerate((0.5, 0.25, 1.0, 0.5)):
            for layer in split:
                cast(Any, layer).density = density
            expected = oracle.step_on(batches_for(cell, step))[rank]
            loss_gap = max(loss_gap, abs(step_of(model, optimizer, cell, step, rank) - expected))
        return compare(model, oracle, loss_gap)


def test_a_density_may_change_between_steps(ranks4: RankPool) -> None:
    for gap in ranks4.run(with_densities):
        assert gap.num_values > 0
        assert gap.worst < ROUNDING, gap


class Spare(nn.Linear):
    """A layer with unused parameters, and a bias that only one pipeline uses."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.unused, self.at_times = nn.Linear(3, 3), nn.Parameter(torch.ones(WIDTH))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(input)
        return outputs + self.at_times if torch.distributed.get_rank() < 2 else outputs


def gradients_of_spare(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the gradients in one of the first stage's layers, as lists, or `None`."""
    cell = PipelineCell(TWO_RANKS[0] | options)
    unsharded = stack_model(cell.cell.spec)
    unsharded.stack.layers[1] = nn.Sequential(nn.Tanh(), Spare())
    with pipelined(cell.cell, cell.wrapper(), unsharded) as (model, params):
        model(batch_for(cell, 0, 0, rank)).mean().backward()
        return {
            name.rpartition(".1.1.")[2]: None if param.grad is None else whole(param.grad).tolist()
            for name, param in params.items()
            if ".1.1." in name
        }


@pytest.mark.parametrize("options", [{}, {"fully_shard": True}], ids=["copies", "shares"])
def test_a_parameter_that_no_pipeline_uses_has_no_gradient(
    ranks4: RankPool, options: dict[str, Any]
) -> None:
    first, _, second, _ = ranks4.run(gradients_of_spare, options)
    assert first == second
    assert first["unused.weight"] is first["unused.bias"] is None
    # The mean over two pipelines; one has none.
    assert any(first["at_times"])
    assert first["at_times"] != first["bias"]
