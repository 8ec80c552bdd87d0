"""Dense layers that ranks share: joint batches of split layers, and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

import torchrec_2dsp as tdsp
from tests.support.dense_products import FORMS
from tests.support.dense_training import cell_of, model_of
from tests.support.loops import shard
from tests.support.models import BagModel, build
from tests.support.pipelining import (
    TABLES,
    PipelineCell,
    dense_sgd,
    pipelined,
    stack_model,
    step_of,
)
from tests.support.ranks import RankPool, error_text
from torchrec_2dsp.dense.sharded_dense import JointBatch
from torchrec_2dsp.errors import ConfigError, MeshError, UnsupportedError

pytestmark = pytest.mark.dealt_file


class WithParameter(BagModel):
    """A model with a parameter beside its tables."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.scale = nn.Parameter(torch.ones(1))


class Tied(BagModel):
    """A model of which two parts share a parameter, beside a stack of layers."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.again = nn.Linear(self.over.in_features, 1)
        self.again.weight = self.over.weight
        self.stack = tdsp.LayerStack([nn.Linear(2, 2)], nn.MSELoss(reduction="none"))


WRAPPERS = {
    "FullyShardedDense": tdsp.FullyShardedDense,
    "TensorParallelDense": lambda: tdsp.TensorParallelDense({"over": ColwiseParallel()}, tp=2),
    "PipelinedDense": lambda: tdsp.PipelinedDense(2, num_micro_batches=2),
}


def with_tied_parts(rank: int, world_size: int, wrapper: str) -> str:
    cell = cell_of(world_size)
    dense = WRAPPERS[wrapper]()
    return error_text(
        lambda: shard(cell, model=Tied(cell.spec), data_parallel_wrapper=dense), ConfigError
    )


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_parts_that_share_a_parameter_are_refused(ranks4: RankPool, wrapper: str) -> None:
    for text in ranks4.run(with_tied_parts, wrapper):
        assert text.startswith(f"'over' and 'again' share a parameter, which {wrapper} would shard")


IN_BACKWARD = {
    **WRAPPERS,
    "ThresholdedDataParallel": tdsp.ThresholdedDataParallel,
    "HookedDataParallel": lambda: tdsp.HookedDataParallel("fp16"),
    "DelayedDense": tdsp.DelayedDense,
    "LocalDense": tdsp.LocalDense,
}


def with_optimizers_in_backward(rank: int, world_size: int, wrapper: str) -> str:
    cell = cell_of(world_size)
    model = build(cell.spec)
    _apply_optimizer_in_backward(torch.optim.SGD, model.over.parameters(), {"lr": 1.0})
    dense = IN_BACKWARD[wrapper]()
    return error_text(lambda: shard(cell, model=model, data_parallel_wrapper=dense), ConfigError)


@pytest.mark.parametrize("wrapper", IN_BACKWARD)
def test_dense_optimizers_in_the_backward_are_refused(ranks4: RankPool, wrapper: str) -> None:
    for text in ranks4.run(with_optimizers_in_backward, wrapper):
        assert text.startswith("'over.weight' has an optimizer in the backward, which " + wrapper)


def misuse_fully_sharded(rank: int, world_size: int) -> tuple[str, ...]:
    cell = cell_of(world_size)

    def with_copies(num_copies: int) -> None:
        model_of(cell, tdsp.FullyShardedDense(num_copies=num_copies))

    def with_a_parameter_beside() -> None:
        wrapper = tdsp.FullyShardedDense()
        shard(cell, model=WithParameter(cell.spec), data_parallel_wrapper=wrapper)

    return (
        error_text(lambda: with_copies(3), ConfigError),
        error_text(lambda: with_copies(1 + rank % 2), ConfigError),
        error_text(lambda: with_copies(0), ConfigError),
        error_text(with_a_parameter_beside, ConfigError),
        error_text(lambda: model_of(cell, tdsp.FullyShardedDense([nn.GRU])), ConfigError),
    )


def test_impossible_shards_are_refused(ranks4: RankPool) -> None:
    ((no_divisor, differs, no_count, beside, units),) = set(ranks4.run(misuse_fully_sharded))
    assert no_divisor == (
        "FullyShardedDense(num_copies=3) doesn't divide 4 ranks; use one of 1, 2, 4"
    )
    assert differs.startswith("the settings of FullyShardedDense differs between ranks")
    assert no_count == "FullyShardedDense(num_copies=0) is no count; use 1 or more"
    assert beside == (
        "the model holds the parameter 'scale' beside tables, which FullyShardedDense can't shard; "
        "put it into a module of its own"
    )
    assert units == (
        "FullyShardedDense(units=...): no module of the dense part is a GRU; use some of Linear, "
        "Sequential, Tanh, or leave it out"
    )


PLAN = {"tower.0": ColwiseParallel(), "tower.2": RowwiseParallel()}


class Sums(nn.Module):
    """Takes all that a joint batch can gather, and gives the sum for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(
        self, rows: torch.Tensor, scale: float, *, more: dict[str, Any]
    ) -> dict[str, list[torch.Tensor]]:
        jagged, keyed = more["jagged"], more["keyed"]
        samples = torch.arange(jagged.lengths().numel()).repeat_interleave(jagged.lengths())
        sums = torch.zeros(rows.shape[0]).index_add(0, samples, jagged.values())
        return {"sums": [scale * self.weight * (rows.sum(1) + sums + keyed["f"].sum(1))]}


def gather_and_take_back(rank: int, world_size: int, sizes: list[int]) -> None:
    """Compare outputs and gradients with each rank alone; the parameter's gradient is the mean."""
    size = sizes[rank]
    generator = torch.Generator().manual_seed(rank)
    rows = torch.rand(size, 3, generator=generator, requires_grad=True)
    lengths = torch.randint(0, 4, (size,), generator=generator)
    values = torch.rand(int(lengths.sum()), generator=generator, requires_grad=True)
    keyed = torch.rand(size, 2, generator=generator, requires_grad=True)
    given = {
        "jagged": JaggedTensor(values, lengths=lengths),
        "keyed": KeyedTensor(["f"], [2], keyed),
    }
    alone, joint = Sums(), Sums()
    group = torch.distributed.group.WORLD
    assert group is not None
    JointBatch("sums", joint, group)
    gradients = []
    for module in (alone, joint):
        (actual,) = module(rows, 3.0, more=given)["sums"]
        inputs = (rows, values, keyed)
        gradients.append(
            [actual, *torch.autograd.grad(actual.square().sum(), (*inputs, module.weight))]
        )
    for by_itself, together in zip(gradients[0][:-1], gradients[1][:-1], strict=True):
        torch.testing.assert_close(together, by_itself)
    mean = gradients[0][-1].clone()
    torch.distributed.all_reduce(mean)
    torch.testing.assert_close(gradients[1][-1], mean / world_size)


@pytest.mark.parametrize("sizes", [[3, 3, 3, 3], [5, 1, 2, 7], [4, 0, 1, 0]], ids=str)
def test_ranks_get_what_they_would_alone(ranks4: RankPool, sizes: list[int]) -> None:
    ranks4.run(gather_and_take_back, sizes)


class Flat(nn.Linear):
    """A layer that loses the batch."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).sum()


class Failing(nn.Linear):
    """A layer that fails on a condition that all ranks see."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such samples")


def draw_after_an_error(rank: int, world_size: int) -> float:
    layer, group = Failing(2, 1), torch.distributed.group.WORLD
    assert group is not None
    JointBatch("failing", layer, group)
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match="no such samples"):
        layer(torch.ones(3, 2))
    with pytest.raises(UnsupportedError, match="without tensors"):
        layer()
    return float(torch.rand(()))


def test_ranks_draw_their_own_numbers_after_an_error(ranks4: RankPool) -> None:
    assert len(set(ranks4.run(draw_after_an_error))) == 4


def misuse_split_layers(rank: int, world_size: int) -> tuple[str, ...]:
    cell = cell_of(world_size)

    def split(plan: Any, tp: int, num_copies: int = 1) -> None:
        model_of(cell, tdsp.TensorParallelDense(plan, tp=tp, num_copies=num_copies))

    layer, group = Flat(2, 1), torch.distributed.group.WORLD
    assert group is not None
    JointBatch("flat", layer, group)
    return (
        error_text(lambda: split({"tower.7": ColwiseParallel()}, 2), ConfigError),
        error_text(lambda: split(PLAN, 3), MeshError),
        error_text(lambda: split(PLAN, 2 + 2 * (rank % 2)), ConfigError),
        error_text(lambda: split({}, 2), ConfigError),
        error_text(lambda: split({"last": ColwiseParallel()}, 2), ConfigError),
        error_text(lambda: split(PLAN, 2, 4), ConfigError),
        error_text(lambda: split(PLAN, 2, 1 + rank % 2), ConfigError),
        error_text(lambda: split(PLAN, 2, True), ConfigError),
        error_text(lambda: layer(torch.ones(3, 2)), UnsupportedError),
    )


def test_impossible_splits_are_refused(ranks4: RankPool) -> None:
    ((unknown, no_divisor, differs, nothing, alone, *copies, flat),) = set(
        ranks4.run(misuse_split_layers)
    )
    assert unknown == (
        "TensorParallelDense: no module of the dense part is called 'tower.7'; the dense part has "
        "tower, last"
    )
    assert no_divisor == "tp=3 does not divide 4 ranks; use one of 1, 2, 4"
    assert differs.startswith("the settings of TensorParallelDense differs between ranks")
    assert nothing == "TensorParallelDense(plan={}) splits nothing; name some modules"
    assert alone.startswith(
        "TensorParallelDense: 'last' is a part of the model that holds no tables"
    )
    assert copies[0] == (
        "TensorParallelDense(num_copies=4) doesn't divide 2 groups of tp=2 ranks; use one of 1, 2"
    )
    assert copies[1].startswith("the settings of TensorParallelDense differs between ranks")
    assert copies[2] == "TensorParallelDense(num_copies=True) is no count; use 1 or more"
    assert flat.startswith("'flat' gives a Tensor () for 12 samples; give tensors whose first")


class KeptDropout(nn.Module):
    """Dropout that keeps its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[torch.Tensor] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.masks.append(torch.rand(inputs.shape[1]) > 0.3)
        return inputs * self.masks[-1]


def train_with_dropout(
    rank: int, world_size: int, form: str
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], float]:
    """Return a rank's masks, what it holds of layers that aren't split, and its next number."""
    cell, dropout = PipelineCell({}, TABLES["row-wise"]), KeptDropout()
    unsharded = stack_model(cell.cell.spec)
    unsharded.stack.layers[1] = dropout
    with pipelined(cell.cell, FORMS[form](), unsharded) as (model, params):
        optimizer = dense_sgd(params.values())
        torch.manual_seed(rank)
        for step in range(3):
            step_of(model, optimizer, cell, step, rank)
        whole = {
            name: (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in params.items()
            if "stack" in name and not name.endswith(("up.weight", "up.bias", "down.weight"))
        }
    return dropout.masks, whole, float(torch.rand(1))


@pytest.mark.parametrize("form", ["TP", "TP, FSDP", "PP, TP", "one stage, TP, FSDP"])
def test_ranks_that_split_layers_draw_the_same(ranks4: RankPool, form: str) -> None:
    of_ranks = ranks4.run(train_with_dropout, form)
    peers = [(0, 1), (1, 2), (2, 3)] if form == "TP" else [(0, 1), (2, 3)]
    for first, second in peers:
        (masks, whole, drawn), (peer_masks, peer_whole, peer_drawn) = (
            of_ranks[first],
            of_ranks[second],
        )
        assert whole.keys() == peer_whole.keys() != set()
        for name, value in whole.items():
            assert torch.equal(value, peer_whole[name]), name
        assert drawn != peer_drawn, "their own generators are as different as they were"
        assert all(map(torch.equal, masks, peer_masks))
    all_masks = [mask for rank in {peer[0] for peer in peers} for mask in of_ranks[rank][0]]
    assert len({tuple(mask.tolist()) for mask in all_masks}) > 2, "steps have masks of their own"
