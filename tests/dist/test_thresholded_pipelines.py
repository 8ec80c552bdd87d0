"""Pipelines that exchange their gradients' largest elements, against sorting."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import KeyedOptimizerWrapper

import torchrec_2dsp as tdsp
from tests.support.dense_training import ThresholdOracle
from tests.support.parity import compare, relative_gap
from tests.support.pipelining import (
    TABLES,
    TWO_RANKS,
    PipelineCell,
    StackOracle,
    batches_for,
    dense_sgd,
    pipelined,
    reduced,
    stack_model,
    step_of,
    tensor_parallel_plan,
)
from tests.support.ranks import RankPool, error_of
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.dense.thresholded_gradients import ThresholdedGradients

NUM_STEPS = 4
ROUNDING = 2e-6
OPTIONS: dict[str, Any] = {
    "density": 0.1,
    "dense_below": 20,
    "values": "fp32",
    "exact_thresholds": True,
    "warm_up": 1,
}
CELLS = [
    PipelineCell(TWO_RANKS[0], TABLES["row exchange"]),
    PipelineCell(TWO_RANKS[1], TABLES["2D"], sizes=(5, 0, 2, 7)),
    PipelineCell(TWO_RANKS[0] | {"reduction": "sum"}, sizes=(1, 3, 2, 1)),
    PipelineCell(TWO_RANKS[0] | {"layout": tdsp.RankLayout.STRIDED}),
]


def thresholded(**options: Any) -> tdsp.ThresholdedDataParallel:
    return tdsp.ThresholdedDataParallel(**OPTIONS | options)


def pipelines_of(cell: PipelineCell) -> list[list[int]]:
    """Return two pipelines' ranks."""
    if cell.options.get("layout") is tdsp.RankLayout.STRIDED:
        return [[0, 2], [1, 3]]
    return [[0, 1], [2, 3]]


def expected(cell: PipelineCell) -> tuple[StackOracle, list[list[float]], ThresholdOracle]:
    """Train one process that thresholds each pipeline's layer gradients."""
    oracle = StackOracle(cell.cell, reduction=cell.reduction)
    layers = {key: value for key, value in oracle.dense.items() if key.startswith("stack.")}
    thresholds = ThresholdOracle(0.1, Transport.FP32, OPTIONS["dense_below"], OPTIONS["warm_up"])
    by_step = []
    for step in range(NUM_STEPS):
        batches = [of_rank[0] for of_rank in batches_for(cell, step)]
        oracle.model.zero_grad()
        losses = [
            reduced(oracle.model(batch), cell.reduction) if batch.stride() else torch.zeros(())
            for batch in batches
        ]
        gradients = []
        for ranks in pipelines_of(cell):
            loss = sum((losses[rank] for rank in ranks), torch.zeros(())) / len(ranks)
            of_pipeline = torch.autograd.grad(loss, [*layers.values()], retain_graph=True)
            gradients.append(dict(zip(layers, of_pipeline, strict=True)))
        (sum(losses, torch.zeros(())) / len(batches)).backward()
        for name, mean in thresholds.mean(gradients).items():
            layers[name].grad = mean
        oracle.dense_optimizer.step()
        oracle.apply_(batches)
        by_step.append([loss.item() for loss in losses])
    return oracle, [list(of_rank) for of_rank in zip(*by_step, strict=True)], thresholds


def run(rank: int, world_size: int, cell: PipelineCell) -> dict[str, Any]:
    oracle, losses, thresholds = expected(cell)
    gradients = thresholded()
    wrapper = tdsp.PipelinedDense(**cell.options, gradients=gradients)
    with pipelined(cell.cell, wrapper) as (model, params):
        optimizer = dense_sgd(params.values())
        own = [step_of(model, optimizer, cell, step, rank) for step in range(NUM_STEPS)]
        gap = compare(model, oracle, relative_gap(own, losses[rank]))
    pipeline = [rank in ranks for ranks in pipelines_of(cell)].index(True)
    residuals = gradients.state_dict()["residuals"]
    assert residuals
    for name, residual in residuals.items():
        wanted = thresholds.residuals[pipeline, name]
        torch.testing.assert_close(residual, wanted, rtol=0, atol=ROUNDING)
    total = gradients.total
    return {
        "gaps": (gap.loss, gap.weight),
        "num_values": gap.num_values,
        "steps": (total.num_steps, total.num_thresholded_steps),
        "share": total.num_bytes / total.dense_bytes,
    }


@pytest.mark.parametrize("cell", CELLS)
def test_weights_are_those_of_sorting(ranks4: RankPool, cell: PipelineCell) -> None:
    for of_rank in ranks4.run(run, cell):
        assert of_rank["num_values"]
        assert max(of_rank["gaps"]) < ROUNDING
        assert of_rank["steps"] == (NUM_STEPS, NUM_STEPS - 1)
        assert of_rank["share"] < 1


def batches_of_a_step(rank: int, world_size: int, preconditioner: str) -> tuple[str, Any]:
    """Train steps with two batches each; return the error, and the number of counted steps."""
    cell = PipelineCell(TWO_RANKS[0], num_batches=2)
    optimizer_rule = {"preconditioner": preconditioner}
    gradients = thresholded(warm_up=2, **optimizer_rule)
    wrapper = tdsp.PipelinedDense(**cell.options, gradients=gradients)
    with pipelined(cell.cell, wrapper) as (model, params):
        optimizer = dense_sgd(params.values())

        def train() -> None:
            for step in range(3):
                step_of(model, optimizer, cell, step, rank)

        error = error_of(train)
    return error, gradients.state_dict()["step"]


def test_batches_of_a_step_are_one_step(ranks4: RankPool) -> None:
    assert ranks4.run(batches_of_a_step, "none") == [("", 3)] * 4
    for error, _ in ranks4.run(batches_of_a_step, "adagrad"):
        assert error.startswith("ConfigError: ThresholdedDataParallel's preconditioner needs")


def nan_in_a_stage(rank: int, world_size: int) -> str:
    cell = PipelineCell(TWO_RANKS[0])
    wrapper = tdsp.PipelinedDense(**cell.options, gradients=thresholded())
    with pipelined(cell.cell, wrapper) as (model, params):
        optimizer = dense_sgd(params.values())
        step_of(model, optimizer, cell, 0, rank)
        first = [param for name, param in params.items() if name.endswith("stack.layers.0.weight")]
        for param in first if rank == 2 else ():
            param.register_hook(lambda gradient: gradient * float("nan"))
        return error_of(partial(step_of, model, optimizer, cell, 1, rank))


def test_a_nan_in_one_stage_stops_all(ranks4: RankPool) -> None:
    for error in ranks4.run(nan_in_a_stage):
        assert error.startswith("NotFiniteError")
        assert "stack.layers.0.weight' are not finite in step 1" in error


def saved_or_resumed(rank: int, world_size: int, folder: str, is_resumed: bool) -> list[float]:
    """Train four steps with a save after the second, or load it and train the last two."""
    cell = PipelineCell(TWO_RANKS[0])
    wrapper = tdsp.PipelinedDense(**cell.options, gradients=thresholded())
    with pipelined(cell.cell, wrapper) as (model, params):
        optimizer = KeyedOptimizerWrapper(params, dense_sgd)
        state = tdsp.TrainState(model, optimizer)
        if is_resumed:
            tdsp.load_checkpoint(folder, model, optimizer, train_state=state)
            return [step_of(model, optimizer, cell, step, rank) for step in (2, 3)]
        losses = [step_of(model, optimizer, cell, step, rank) for step in (0, 1)]
        tdsp.save_checkpoint(folder, model, optimizer, train_state=state)
        return losses[2:] + [step_of(model, optimizer, cell, step, rank) for step in (2, 3)]


def load_elsewhere(rank: int, world_size: int, folder: str) -> str:
    """Load into pipelines with another layout, in which ranks have other layers."""
    cell = PipelineCell(TWO_RANKS[0] | {"layout": tdsp.RankLayout.STRIDED})
    wrapper = tdsp.PipelinedDense(**cell.options, gradients=thresholded())
    with pipelined(cell.cell, wrapper) as (model, params):
        optimizer = KeyedOptimizerWrapper(params, dense_sgd)
        state = tdsp.TrainState(model, optimizer)
        return error_of(partial(tdsp.load_checkpoint, folder, model, optimizer, train_state=state))


def test_a_resumed_run_goes_on_bit_for_bit(ranks4: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    losses = ranks4.run(saved_or_resumed, folder, False)
    assert ranks4.run(saved_or_resumed, folder, True) == losses
    for error in ranks4.run(load_elsewhere, folder):
        assert "hasn't sent yet, and that parameter is on other ranks now" in error


def devices_of_nothing(rank: int, world_size: int) -> list[str]:
    """Return the reduced buffer's device in a stage without trained layers, by group device."""
    group, devices = dist.group.WORLD, []
    assert group is not None

    def mean(_: object, layout: object, buffer: torch.Tensor, **options: bool) -> Any:
        devices.append(buffer.device.type)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThresholdedGradients, "_mean", mean)
        for device in ("cpu", "meta"):
            gradients = thresholded().over_copies({}, group, group, torch.device(device))
            assert gradients.means([], []) == []
    return devices


def test_a_stage_without_parameters_reduces_on_its_device(ranks2: RankPool) -> None:
    assert ranks2.run(devices_of_nothing) == [["cpu", "meta"]] * 2


def refusals(rank: int, world_size: int) -> list[str]:
    cell = PipelineCell(TWO_RANKS[0])
    gradients = thresholded()
    wrapper = tdsp.PipelinedDense(**cell.options, gradients=gradients)
    with pipelined(cell.cell, wrapper) as (model, params):
        optimizer = dense_sgd(params.values())
        step_of(model, optimizer, cell, 0, rank)
        optimizer.zero_grad()
        errors = [error_of(partial(wrapper.recut, optimizer))]
    again = tdsp.PipelinedDense(**cell.options, gradients=gradients)
    errors.append(error_of(lambda: pipelined(cell.cell, again).__enter__()))
    two: Any = stack_model(cell.cell.spec)
    two.second = tdsp.LayerStack([nn.Linear(4, 4), nn.Linear(4, 4)], nn.MSELoss(reduction="none"))
    fresh = tdsp.PipelinedDense(**cell.options, gradients=thresholded())
    errors.append(error_of(lambda: pipelined(cell.cell, fresh, two).__enter__()))
    return errors


def test_what_cannot_be_is_refused(ranks4: RankPool) -> None:
    for moved, again, several in ranks4.run(refusals):
        assert "gradients=...) is for one LayerStack, and the model has 2: stack, second" in several
        assert "recut() can't move what layers with thresholded gradients" in moved
        assert "this ThresholdedDataParallel has a model already" in again


@pytest.mark.parametrize(
    "options", [{"fully_shard": True}, {"tp": 2, "plan": tensor_parallel_plan()}]
)
def test_parts_of_layers_are_refused(options: dict[str, Any]) -> None:
    make: Callable[..., object] = tdsp.PipelinedDense
    with pytest.raises(tdsp.errors.ConfigError, match="sends elements of whole layers' gradients"):
        make(2, num_micro_batches=2, gradients=thresholded(), **options)
