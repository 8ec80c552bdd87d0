"""Pipelined layers against the unsharded model, and their traffic, measurements and clipping."""

import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import torchrec_2dsp as tdsp
from tests.support.parity import Gap, compare, relative_gap
from tests.support.pipelining import (
    FORMS,
    TABLES,
    TWO_RANKS,
    WIDTH,
    PipelineCell,
    StackOracle,
    batch_for,
    batches_for,
    dense_sgd,
    pipelined,
    run_pipeline,
    stack_model,
    step_of,
    tensor_parallel_plan,
)
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives

pytestmark = pytest.mark.dealt_file

ROUNDING = 1e-6
"""Losses and weights: float32 sums in another order, over two steps."""
MOMENT_ROUNDING = 3e-6
"""Moments are sums of squares, with twice the error relative to the largest one."""

FOUR_RANKS: list[dict[str, Any]] = [
    {"num_stages": 4, "num_micro_batches": 20, "cuts": [1, 2, 6]},
    {
        "num_stages": 8,
        "num_micro_batches": 8,
        "stages_per_rank": 2,
        "schedule": "ZBVZeroBubble",
    },
]
"""One pipeline with four ranks, with one and two stages per rank."""

SHARED: list[dict[str, Any]] = [option | {"fully_shard": True} for option in TWO_RANKS]
"""Two pipelines with two ranks, with one and two stages per rank."""
STRIDED = {"layout": tdsp.RankLayout.STRIDED}
SPLIT: dict[str, Any] = {
    "num_stages": 1,
    "num_micro_batches": 5,
    "fully_shard": True,
    "plan": tensor_parallel_plan(),
    "tp": 2,
}
"""Two pipelines with one stage, in which two ranks compute each layer."""


def check(ranks: RankPool, cells: list[PipelineCell]) -> None:
    for cell in cells:
        check_gaps(ranks.run(run_pipeline, cell), cell)


def check_gaps(of_ranks: Sequence[Gap], cell: PipelineCell) -> None:
    assert sum(gap.num_values for gap in of_ranks) > 0
    assert sum(gap.synced_rows for gap in of_ranks) > 0
    for gap in of_ranks:
        assert gap.loss < ROUNDING, (cell, gap)
        assert gap.weight < ROUNDING, (cell, gap)
        assert gap.moment < MOMENT_ROUNDING, (cell, gap)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ranks_may_have_different_numbers_of_samples(ranks4: RankPool, reduction: str) -> None:
    """Some have none, and there are more micro-batches than samples."""
    options = [*FOUR_RANKS, TWO_RANKS[0]]
    cells = [
        PipelineCell(option | {"reduction": reduction}, sizes=sizes)
        for option, sizes in (
            *product(options, ((5, 0, 2, 7), (1, 3, 2, 1))),
            *((option | STRIDED, (5, 0, 2, 7)) for option in TWO_RANKS),
            # Of two pipelines one may have no samples.
            *product(SHARED, ((5, 0, 2, 7), (0, 0, 3, 1))),
            (SPLIT, (5, 0, 2, 7)),
        )
    ]
    check(ranks4, cells)


def test_three_axes_on_eight_ranks(ranks8: RankPool) -> None:
    """Two pipelines with two stages, whose layers two ranks each share."""
    options = {"num_stages": 2, "num_micro_batches": 4, "plan": tensor_parallel_plan(), "tp": 2}
    tables = replace(TABLES["2D"], mesh=tdsp.Mesh2D(2, 4))
    cells = [
        PipelineCell(options | {"layout": layout}, tables, sizes=(3,) * 8)
        for layout in tdsp.RankLayout
    ]
    check(ranks8, cells)


def evaluate(rank: int, world_size: int) -> tuple[float, ...]:
    """Return gaps to the uncut model in evaluations, without and with targets."""
    cell = PipelineCell(TWO_RANKS[1], sizes=(5, 0, 2, 7))
    oracle, gaps = StackOracle(cell.cell), []
    batch = batch_for(cell, 0, 0, rank)
    with pipelined(cell.cell, cell.wrapper()) as (model, _):
        assert model.training
        for with_targets in (False, True):
            with torch.no_grad():
                outputs = model(batch, with_targets=with_targets)
                assert not outputs.requires_grad
                if not cell.sizes[rank]:
                    # TorchRec's unsharded tables take no empty batch.
                    assert outputs.shape == ((0,) if with_targets else (0, 8))
                    continue
                expected = oracle.model(batch, with_targets=with_targets)  # type: ignore[call-arg]
            assert outputs.shape == expected.shape
            gaps.append((outputs - expected).abs().max().item())
        grads = [param.grad for param in model.parameters()]
        assert not any(grad is not None for grad in grads)
    return tuple(gaps)


def test_without_gradients_ranks_get_their_own_outputs(ranks4: RankPool) -> None:
    for gaps in ranks4.run(evaluate):
        assert max(gaps, default=0.0) < ROUNDING


def under_autocast(rank: int, world_size: int, options: dict[str, Any]) -> list[float]:
    """Return gaps to the uncut layers, alternately with and without autocast, for equal inputs."""
    cell, gaps = PipelineCell(options), []
    whole = stack_model(cell.cell.spec).stack
    given = torch.rand(7, WIDTH), torch.rand(7), torch.rand(7, 8)
    with pipelined(cell.cell, cell.wrapper()) as (model, _):
        (stack,) = [part for part in model.modules() if isinstance(part, tdsp.LayerStack)]
        for is_enabled in (False, True, False):
            with torch.autocast("cpu", enabled=is_enabled):
                losses, expected = stack(*given), whole(*given)
                with torch.no_grad():
                    outputs, reference = stack(given[0]), whole(given[0])
            losses.mean().backward()
            assert losses.dtype == expected.dtype
            assert outputs.dtype == reference.dtype
            gaps += [relative_gap(losses.tolist(), expected.tolist())]
            gaps += [(outputs - reference).abs().max().item()]
    return gaps


@pytest.mark.parametrize("options", [TWO_RANKS[0], FOUR_RANKS[1]], ids=["1F1B", "zero bubble"])
def test_autocast_may_change_between_calls(ranks4: RankPool, options: dict[str, Any]) -> None:
    for before, outputs_before, *rounded_gaps, after, outputs_after in ranks4.run(
        under_autocast, options
    ):
        assert max(before, outputs_before, after, outputs_after) < ROUNDING
        assert max(rounded_gaps) < 2**-5  # bf16 has 8 bits, and goes through eight layers.


def freed(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    """Name the objects that a step leaves alive without Python's cycle collection."""
    cell = PipelineCell(options)
    alive = []
    with pipelined(cell.cell, cell.wrapper()) as (model, _):
        gc.disable()
        try:
            losses = model(batch_for(cell, 0, 0, rank))
            losses.mean().backward()
            with pytest.raises(RuntimeError, match="a second time"):
                losses.mean().backward()
            references = {"trained": weakref.ref(losses)}
            losses = model(batch_for(cell, 1, 0, rank))
            references["not trained"] = weakref.ref(losses)
            del losses
            alive = [name for name, reference in references.items() if reference() is not None]
        finally:
            gc.enable()
    return alive


@pytest.mark.parametrize("options", [TWO_RANKS[0], SHARED[0]], ids=["copies", "shares"])
def test_a_step_leaves_nothing_behind(ranks4: RankPool, options: dict[str, Any]) -> None:
    assert ranks4.run(freed, options) == [[]] * 4


def step_collectives(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, int]:
    """Count this rank's collectives in pipeline and copy groups in the second step."""
    cell = PipelineCell(options)
    with pipelined(cell.cell, cell.wrapper()) as (model, _):
        model(batch_for(cell, 0, 0, rank)).mean().backward()
        with count_collectives() as seen:
            model(batch_for(cell, 1, 0, rank)).mean().backward()
    return Counter(
        f"{record.group.removeprefix('pipeline_')} {record.op}"
        for record in seen.records
        if record.group.startswith(("pipeline", "mesh_copy"))
    )


def test_collectives_of_a_step(ranks4: RankPool) -> None:
    """Five micro-batches cross one boundary, beside the samples and results."""
    first, last, *_ = ranks4.run(step_collectives, TWO_RANKS[0])
    # A rank's objects travel as their size and their bytes.
    alike = {"agreements all_gather": 2, "copies all_reduce": 1}
    # Targets and activations travel one way, the other rank's input gradients back.
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


def test_shares_are_gathered_once_for_all_micro_batches(ranks4: RankPool) -> None:
    for counts in ranks4.run(step_collectives, SHARED[0]):
        of_copies = {name: num for name, num in counts.items() if "cop" in name.split()[0]}
        assert of_copies == {
            "mesh_copy all_gather_into_tensor": 1,
            "copies reduce_scatter_tensor": 1,
        }


def by_dense_norm(rank: int, world_size: int, options: dict[str, Any]) -> tuple[float, float]:
    """Return the relative gap in the dense gradients' norm, and the weight gap after clipping."""
    cell = PipelineCell(options)
    wrapper = cell.wrapper()
    oracle = StackOracle(cell.cell)
    oracle.step_on(batches_for(cell, 0))
    model: Any = oracle.model
    dense = [*model.bottom.parameters(), *model.stack.parameters()]
    norm = torch.nn.utils.get_total_norm([param.grad for param in dense])
    with pipelined(cell.cell, wrapper) as (parallel, params):
        parallel(batch_for(cell, 0, 0, rank)).mean().backward()
        gap = abs(wrapper.clip_grad_norm_(float(norm) / 2) / float(norm) - 1)
        clipped = wrapper.clip_grad_norm_(1e9) / float(norm)
        times = wrapper.stage_times()["stack"]
        assert len(times.seconds_of_stage) == options["num_stages"]
        assert min(times.seconds_of_stage) > 0
        assert times.imbalance >= 1
        if options["num_stages"] > 1:
            assert len(params) < len(dense)
            assert 0 < times.bubble < 1
    return gap, abs(clipped - 0.5)


def test_gradients_are_clipped_by_the_norm_of_all_layers(ranks4: RankPool) -> None:
    split = TWO_RANKS[0] | {"plan": tensor_parallel_plan(), "tp": 2}
    for options in (*TWO_RANKS, split, *SHARED, SPLIT):
        for gap, clipped in ranks4.run(by_dense_norm, options):
            assert gap < ROUNDING
            assert clipped < ROUNDING


class Filter(nn.Module):
    """A layer whose weight is complex."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        weight = torch.randn(num_inputs, num_outputs, dtype=torch.complex64)
        self.weight = nn.Parameter(weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs.to(torch.complex64) @ self.weight
        return outputs.real + 2 * outputs.imag


def by_complex_norm(rank: int, world_size: int) -> tuple[float, float]:
    """Return the gradient norm with complex layers in and beside a stack, in parallel and not."""
    cell = PipelineCell(TWO_RANKS[0])
    models: Any = [stack_model(cell.cell.spec) for _ in range(2)]
    for model in models:
        model.bottom = Filter(*reversed(model.bottom.weight.shape))
        model.stack.layers[0] = Filter(*reversed(model.stack.layers[0].weight.shape))
    models[1].load_state_dict(models[0].state_dict())
    oracle, unsharded = models
    for batch in (batch for of_rank in batches_for(cell, 0) for batch in of_rank):
        (oracle(batch).mean() / world_size).backward()
    dense = [*oracle.bottom.parameters(), *oracle.stack.parameters()]
    norm = torch.nn.utils.get_total_norm([param.grad for param in dense])
    wrapper = cell.wrapper()
    with pipelined(cell.cell, wrapper, unsharded) as (parallel, _):
        parallel(batch_for(cell, 0, 0, rank)).mean().backward()
        return wrapper.clip_grad_norm_(1e9), float(norm)


def test_norms_count_imaginary_parts(ranks4: RankPool) -> None:
    for norm, in_one_process in ranks4.run(by_complex_norm):
        assert norm == pytest.approx(in_one_process, rel=ROUNDING)


def rounded(rank: int, world_size: int) -> list[float]:
    """Return losses with activations in fp32, bf16 and fp16 on the wire."""
    losses = []
    for values in ("fp32", "bf16", "fp16"):
        cell = PipelineCell(TWO_RANKS[0] | {"values": values})
        with pipelined(cell.cell, cell.wrapper()) as (model, params):
            losses.append(step_of(model, dense_sgd(params.values()), cell, 0, rank))
    return losses


def test_activations_may_be_rounded(ranks4: RankPool) -> None:
    """bf16 has 8 bits, fp16 has 11."""
    for exact, bf16, fp16 in ranks4.run(rounded):
        assert 0 < abs(bf16 / exact - 1) < 2**-6
        assert 0 < abs(fp16 / exact - 1) < 2**-9


THRESHOLDED = [
    TWO_RANKS[0] | {"cuts": [2]},
    TWO_RANKS[1] | {"cuts": [1, 2, 5]},
    {"num_stages": 4, "num_micro_batches": 3, "cuts": [1, 2, 6]},
]
"""A thresholded layer at the end of a stage: before another rank's twice, and before its own."""


def thresholded(
    rank: int, world_size: int, options: dict[str, Any], values: str
) -> tuple[Gap, list[int], list[int]]:
    """Return the gap to one process where a layer keeps 3 of 12, and the messages' bytes."""
    cell = PipelineCell(options | {"values": values})
    oracle, model = StackOracle(cell.cell), stack_model(cell.cell.spec)
    for whole in (cast(Any, oracle.model), model):
        whole.stack.layers[1] = tdsp.Thresholded(0.25)
    expected = oracle.step_on(batches_for(cell, 0))[rank]
    with pipelined(cell.cell, cell.wrapper(), model) as (parallel, params):
        with count_collectives() as seen:
            loss = step_of(parallel, dense_sgd(params.values()), cell, 0, rank)
        gap = compare(parallel, oracle, relative_gap([loss], [expected]))
    forward, backward = (
        [
            record.num_bytes
            for record in seen.records
            if (record.group, record.op) == (group, "send")
        ]
        for group in ("pipeline_forward", "pipeline_backward")
    )
    return gap, forward, backward


@pytest.mark.parametrize(("values", "num_bytes"), [("fp32", 4), ("bf16", 2)])
def test_only_what_a_thresholded_layer_keeps_travels(
    ranks4: RankPool, values: str, num_bytes: int
) -> None:
    for options in THRESHOLDED:
        answers = ranks4.run(thresholded, options, values)
        if values == "fp32":
            check_gaps([gap for gap, _, _ in answers], PipelineCell(options))
        if options["num_stages"] == 2:
            # Each sample sends 3 numbers, with a bit for each of 12 places; 3 come back.
            sizes = [3, 3, 3, 3, 2]
            (_, forward, _), (_, _, backward), *_ = answers
            assert forward[-5:] == [size * (3 * num_bytes + 2) for size in sizes]
            assert backward[:5] == [size * 3 * num_bytes for size in sizes]


def stock(rank: int, world_size: int, form: str) -> list[float]:
    """Return two steps' losses under TorchRec's own wrapper, then under ours."""
    losses = []
    for is_stock in (True, False):
        cell = replace(TABLES["row-wise"], stock_wrapper=is_stock, accumulates=False)
        with pipelined(cell, FORMS[form]()) as (model, params):
            optimizer = dense_sgd(params.values())
            work = PipelineCell({}, cell)
            losses += [step_of(model, optimizer, work, step, rank) for step in range(2)]
    return losses


@pytest.mark.parametrize("form", ["PP 1F1B", "FSDP", "TP, FSDP"])
def test_a_stock_wrapper_takes_it(ranks4: RankPool, form: str) -> None:
    for losses in ranks4.run(stock, form):
        assert losses[:2] == losses[2:]


def measured(rank: int, world_size: int) -> tuple[int, ...]:
    """Return the cuts by measured times, after a training step."""
    cuts = tdsp.MeasuredCuts(
        inputs=torch.rand(8, WIDTH), targets=[torch.rand(8), torch.rand(8, 8)], num_repeats=1
    )
    cell = PipelineCell(TWO_RANKS[1] | {"cuts": cuts})
    wrapper = cell.wrapper()
    with pipelined(cell.cell, wrapper) as (model, _):
        model(batch_for(cell, 0, 0, rank)).mean().backward()
        return wrapper.cuts["stack"]


def test_all_ranks_cut_by_the_mean_of_their_times(ranks4: RankPool) -> None:
    (cuts,) = set(ranks4.run(measured))
    assert len(cuts) == TWO_RANKS[1]["num_stages"] - 1
    assert list(cuts) == sorted(set(cuts))


def held(rank: int, world_size: int, options: dict[str, Any]) -> tuple[int, int]:
    """Count the stack's elements that this rank keeps between steps, and its layers' elements."""
    cell = PipelineCell(options)
    with pipelined(cell.cell, cell.wrapper()) as (model, params):
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
        # Parameters that aren't split are on both ranks in a tensor-parallel group.
        assert whole / 4 < kept < whole / 2


def one_pipeline(rank: int, world_size: int) -> bool:
    """Return whether any parameter of a single pipeline is sharded."""
    cell = PipelineCell({"num_stages": 4, "num_micro_batches": 5, "fully_shard": True})
    with pipelined(cell.cell, cell.wrapper()) as (_, params):
        return any(isinstance(param, DTensor) for name, param in params.items() if "stack" in name)


def test_one_pipeline_keeps_its_layers_whole(ranks4: RankPool) -> None:
    assert not any(ranks4.run(one_pipeline))
