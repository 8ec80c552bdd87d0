"""Layers sharded over pipelines: memory, messages, and refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import torchrec_2dsp as tdsp
from tests.support.cells import Cell
from tests.support.models import ModelSpec
from tests.support.parity import LR
from tests.support.pipelining import (
    TABLES,
    TWO_RANKS,
    WIDTH,
    PipelineCell,
    StackModel,
    StackOracle,
    batch_for,
    batches_for,
    error_text,
    pipelined,
    run_pipelines,
    stack_model,
    tensor_parallel_plan,
)
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.errors import ConfigError, TwoDError

pytestmark = pytest.mark.dealt_file

ROUNDING = 1e-6
"""Float32 sums in another order, over two steps."""
SHARED: list[dict[str, Any]] = [option | {"fully_shard": True} for option in TWO_RANKS]
"""Two pipelines with two ranks, with one and two stages per rank."""
SPLIT: dict[str, Any] = {
    "num_stages": 1,
    "num_micro_batches": 5,
    "fully_shard": True,
    "plan": tensor_parallel_plan(),
    "tp": 2,
}
"""Two pipelines with one stage, in which two ranks compute each layer."""


def cell_of(options: dict[str, Any], sizes: tuple[int, ...] = (7, 7, 7, 7)) -> PipelineCell:
    return PipelineCell(TABLES["row-wise"], tuple(options.items()), sizes=sizes)


def test_ranks_may_have_different_numbers_of_samples(ranks4: RankPool) -> None:
    """Some ranks have none, and so has a pipeline."""
    cells = [
        cell_of(options | {"reduction": reduction}, sizes)
        for options, reduction, sizes in (
            (SHARED[0], "mean", (5, 0, 2, 7)),
            (SHARED[1], "sum", (0, 0, 3, 1)),
            (SPLIT, "sum", (5, 0, 2, 7)),
        )
    ]
    for gaps in ranks4.run(run_pipelines, cells):
        assert max(gap.loss for gap in gaps) < ROUNDING
        assert max(gap.weight for gap in gaps) < ROUNDING


def held(rank: int, world_size: int, options: dict[str, Any]) -> tuple[int, int]:
    """Count the stack's elements that this rank keeps between steps, and its layers' elements."""
    cell = cell_of(options)
    with pipelined(cell.cell, tdsp.PipelinedDense(**options)) as (model, params):
        layers = {name: param for name, param in params.items() if "stack" in name}
        whole_layers = {name: id(param) for name, param in layers.items()}
        model(batch_for(cell, 0, 0, rank)).mean().backward()
        with torch.no_grad():
            model(batch_for(cell, 1, 0, rank))
        after = dict(model.named_parameters())
        assert whole_layers == {name: id(after[name]) for name in layers}, "shares are back"
        assert all(isinstance(param, DTensor) for param in layers.values())
        for param in layers.values():
            gradient: Any = param.grad
            assert gradient.to_local().shape == param.to_local().shape  # type: ignore[operator]
        return (
            sum(param.to_local().numel() for param in layers.values()),  # type: ignore[operator]
            sum(param.numel() for param in layers.values()),
        )


@pytest.mark.parametrize("options", SHARED, ids=["1F1B", "ZBVZeroBubble"])
def test_each_pipeline_keeps_a_share(ranks4: RankPool, options: dict[str, Any]) -> None:
    ranks = ranks4.run(held, options)
    for position in (0, 1):
        (first, whole), (second, whole_there) = ranks[position], ranks[position + 2]
        assert whole == whole_there == first + second
        assert abs(first - second) < 0.1 * whole


def test_split_layers_are_shared_as_well(ranks4: RankPool) -> None:
    for kept, whole in ranks4.run(held, SPLIT):
        # What isn't split is on both ranks of a tensor-parallel group.
        assert whole / 4 < kept < whole / 2


def step_collectives(rank: int, world_size: int) -> dict[str, int]:
    """List the messages between ranks that share layers in the second step."""
    cell = cell_of(SHARED[0])
    with pipelined(cell.cell, tdsp.PipelinedDense(**SHARED[0])) as (model, _):
        model(batch_for(cell, 0, 0, rank)).mean().backward()
        counts: dict[str, int] = {}
        with count_collectives() as seen:
            model(batch_for(cell, 1, 0, rank)).mean().backward()
        for record in seen.records:
            if record.group in ("mesh_copy", "pipeline_copies"):
                counts[f"{record.group} {record.op}"] = (
                    counts.get(f"{record.group} {record.op}", 0) + 1
                )
    return counts


def test_shares_are_gathered_once_for_all_micro_batches(ranks4: RankPool) -> None:
    assert (
        ranks4.run(step_collectives)
        == [{"mesh_copy all_gather_into_tensor": 1, "pipeline_copies reduce_scatter_tensor": 1}] * 4
    )


def clipped(rank: int, world_size: int, options: dict[str, Any]) -> float:
    """Return the largest gap of norm and weights after a clipped step."""
    cell = cell_of(options)
    oracle = StackOracle(cell.cell)
    oracle.step_on(batches_for(cell, 0))
    dense = list(oracle.dense.values())
    norm = float(torch.nn.utils.get_total_norm([param.grad for param in dense]))
    wrapper = tdsp.PipelinedDense(**options)
    with pipelined(cell.cell, wrapper) as (model, _):
        model(batch_for(cell, 0, 0, rank)).mean().backward()
        before = wrapper.clip_grad_norm_(norm / 2)
        after = wrapper.clip_grad_norm_(1e9)
    return max(abs(before / norm - 1), abs(after / norm - 0.5))


def test_gradients_are_clipped_by_the_norm_of_all_shares(ranks4: RankPool) -> None:
    for options in (*SHARED, SPLIT):
        assert max(ranks4.run(clipped, options)) < ROUNDING


class Scale(nn.Module):
    """A layer with a parameter of any shape and type."""

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
    """Return all refusals; the parameter sits in the first stage alone."""
    options = SHARED[0]

    def wrap(cell: Cell, model: StackModel | None = None, **more: Any) -> None:
        with pipelined(cell, tdsp.PipelinedDense(**(options | more)), model):
            pass

    cell = replace(TABLES["row-wise"])
    narrow = torch.ones(WIDTH, dtype=torch.bfloat16)
    errors = [
        error_text(lambda: wrap(cell, model_with(cell.spec, narrow)), ConfigError),
        error_text(lambda: wrap(cell, model_with(cell.spec, torch.ones(()))), ConfigError),
        error_text(lambda: wrap(cell, fully_shard=bool(rank % 2)), ConfigError),
    ]
    wrapper = tdsp.PipelinedDense(**options)
    with pipelined(cell, wrapper) as (_, params):
        optimizer = torch.optim.SGD(params.values(), lr=LR, foreach=False)
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


def one_pipeline(rank: int, world_size: int) -> bool:
    """Return whether any parameter of a single pipeline is sharded."""
    options: dict[str, Any] = {"num_stages": 4, "num_micro_batches": 5, "fully_shard": True}
    with pipelined(cell_of(options).cell, tdsp.PipelinedDense(**options)) as (_, params):
        return any(isinstance(param, DTensor) for name, param in params.items() if "stack" in name)


def test_one_pipeline_keeps_its_layers_whole(ranks4: RankPool) -> None:
    assert not any(ranks4.run(one_pipeline))
