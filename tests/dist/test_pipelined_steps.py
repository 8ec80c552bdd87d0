"""What a step of a pipeline of layers sends, measures and clips, and in which wrapper it runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import torchrec_2dsp as tdsp
from tests.support.parity import LR
from tests.support.pipelining import (
    TABLES,
    TWO_RANKS,
    WIDTH,
    PipelineCell,
    StackOracle,
    batch_for,
    batches_for,
    pipelined,
    tensor_parallel_plan,
)
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives

pytestmark = pytest.mark.dealt_file

ROUNDING = 1e-6
"""A norm is a sum of float32 in another order."""


def step_collectives(rank: int, world_size: int) -> dict[str, int]:
    """What this rank issues in the groups of pipelines in a step after the first one."""
    cell = PipelineCell(TABLES["row-wise"], tuple(TWO_RANKS[0].items()))
    with pipelined(cell.cell, tdsp.PipelinedDense(**dict(cell.options))) as (model, _):
        counts: dict[str, int] = {}
        model(batch_for(cell, 0, 0, rank)).mean().backward()
        with count_collectives() as seen:
            model(batch_for(cell, 1, 0, rank)).mean().backward()
        for record in seen.records:
            if record.group.startswith("pipeline"):
                name = f"{record.group.removeprefix('pipeline_')} {record.op}"
                counts[name] = counts.get(name, 0) + 1
    return counts


def test_collectives_of_a_step(ranks4: RankPool) -> None:
    """Five micro-batches go over one boundary, beside what is handed over and back."""
    first, last, *_ = ranks4.run(step_collectives)
    # A rank's objects travel as their size and their bytes.
    alike = {"agreements all_gather": 2, "copies all_reduce": 1}
    # The targets and the activations one way; of the gradients of the inputs the other rank's.
    assert first == alike | {
        "forward send": 2 + 5,
        "forward recv": 1,
        "backward send": 1,
        "backward recv": 5 + 1 + 1,
    }
    assert last == alike | {
        "forward send": 1,
        "forward recv": 2 + 5,
        "backward send": 5 + 1 + 1,
        "backward recv": 1,
    }


def by_dense_norm(rank: int, world_size: int, options: dict[str, Any]) -> tuple[float, float]:
    """The norm of all dense gradients and the largest weight's gap after a clipped step."""
    cell = PipelineCell(TABLES["row-wise"], tuple(options.items()))
    wrapper = tdsp.PipelinedDense(**options)
    oracle = StackOracle(cell.cell)
    oracle.step_on(batches_for(cell, 0))
    model: Any = oracle.model
    dense = [*model.bottom.parameters(), *model.stack.parameters()]
    norm = torch.nn.utils.get_total_norm([param.grad for param in dense])
    with pipelined(cell.cell, wrapper) as (parallel, params):
        parallel(batch_for(cell, 0, 0, rank)).mean().backward()
        gap = abs(wrapper.clip_grad_norm_(float(norm) / 2) / float(norm) - 1)
        clipped = wrapper.clip_grad_norm_(1e9) / float(norm)
        assert len(params) < len(dense)
        times = wrapper.stage_times()["stack"]
        assert len(times.seconds_of_stage) == options["num_stages"]
        assert min(times.seconds_of_stage) > 0
        assert 0 < times.bubble < 1
        assert times.imbalance >= 1
    return gap, abs(clipped - 0.5)


def test_gradients_are_clipped_by_the_norm_of_all_layers(ranks4: RankPool) -> None:
    for options in (*TWO_RANKS, TWO_RANKS[0] | {"plan": tensor_parallel_plan(), "tp": 2}):
        for gap, clipped in ranks4.run(by_dense_norm, options):
            assert gap < ROUNDING
            assert clipped < ROUNDING


def rounded(rank: int, world_size: int) -> list[float]:
    """The losses of a step with activations that travel as they are, in bf16 and in fp16."""
    losses = []
    for values in ("fp32", "bf16", "fp16"):
        options: dict[str, Any] = TWO_RANKS[0] | {"values": values}
        cell = PipelineCell(TABLES["row-wise"], tuple(options.items()))
        with pipelined(cell.cell, tdsp.PipelinedDense(**options)) as (model, _):
            loss = model(batch_for(cell, 0, 0, rank)).mean()
            loss.backward()
            losses.append(loss.item())
    return losses


def test_activations_may_be_rounded(ranks4: RankPool) -> None:
    """A number in bf16 has 8 bits, one in fp16 has 11."""
    for exact, bf16, fp16 in ranks4.run(rounded):
        assert 0 < abs(bf16 / exact - 1) < 2**-6
        assert 0 < abs(fp16 / exact - 1) < 2**-9


def stock(rank: int, world_size: int) -> list[float]:
    """The losses of two steps under TorchRec's own wrapper, then under ours."""
    losses = []
    for is_stock in (True, False):
        cell = replace(TABLES["row-wise"], stock_wrapper=is_stock, always_capture=False)
        options = TWO_RANKS[0]
        pipeline = PipelineCell(cell, tuple(options.items()))
        with pipelined(cell, tdsp.PipelinedDense(**options)) as (model, params):
            optimizer = torch.optim.SGD(params.values(), lr=LR, foreach=False)
            for step in range(2):
                optimizer.zero_grad()
                loss = model(batch_for(pipeline, step, 0, rank)).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return losses


def test_a_stock_wrapper_takes_it(ranks4: RankPool) -> None:
    for losses in ranks4.run(stock):
        assert losses[:2] == losses[2:]


def measured(rank: int, world_size: int) -> tuple[int, ...]:
    """The cuts by measured times, with which a step has been trained."""
    cuts = tdsp.MeasuredCuts(
        inputs=torch.rand(8, WIDTH), targets=[torch.rand(8), torch.rand(8, 8)], num_repeats=1
    )
    options: dict[str, Any] = TWO_RANKS[1] | {"cuts": cuts}
    wrapper = tdsp.PipelinedDense(**options)
    cell = PipelineCell(TABLES["row-wise"], tuple(options.items()))
    with pipelined(cell.cell, wrapper) as (model, _):
        model(batch_for(cell, 0, 0, rank)).mean().backward()
        return wrapper.cuts["stack"]


def test_all_ranks_cut_by_the_mean_of_their_times(ranks4: RankPool) -> None:
    (cuts,) = set(ranks4.run(measured))
    assert len(cuts) == TWO_RANKS[1]["num_stages"] - 1
    assert list(cuts) == sorted(set(cuts))
