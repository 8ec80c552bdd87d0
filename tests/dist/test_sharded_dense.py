"""Sharded dense layers: layers that train as in DDP, and layers that are refused."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.checkpoint import checkpoint
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedTensor

import torchrec_2dsp as tdsp
from tests.support.dense_training import TowerModel, cell_of, model_of
from tests.support.loops import shard
from tests.support.models import BagModel, build, make_batch
from tests.support.pipelining import (
    FORMS,
    TABLES,
    PipelineCell,
    dense_sgd,
    pipelined,
    stack_model,
    step_of,
)
from tests.support.ranks import RankPool, error_of, error_text
from torchrec_2dsp.dense.joint_batch import JointBatch
from torchrec_2dsp.errors import ConfigError, MeshError, UnsupportedError

pytestmark = pytest.mark.dealt_file


class WithParameter(BagModel):
    """A model with a parameter beside its tables."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.scale = nn.Parameter(torch.ones(1))


class Tied(BagModel):
    """A model in which two layers share a parameter, beside a layer stack."""

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


def halved(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad /= 2


class Block(nn.Linear):
    """A layer that forms a unit."""


def tower(change: str, width: int) -> Any:
    """Return layers with a part that can't be sharded or split and still train as in DDP."""
    up, down = nn.Linear(width, 4), Block(4, 4)
    layers: Any = nn.Sequential(up, down, Block(4, 4))
    if change == "a gradient hook":
        up.weight.register_hook(lambda gradient: gradient / 2)
    elif change == "a hook after the gradient":
        up.weight.register_post_accumulate_grad_hook(halved)
    elif change == "a scalar":
        down.register_parameter("scale", nn.Parameter(torch.ones(())))
    elif change == "no elements":
        down.register_parameter("spare", nn.Parameter(torch.ones(0, 4)))
    elif change == "a transposed weight":
        up.weight = nn.Parameter(torch.ones(width, 4).t())
    elif change == "two types":
        up.bfloat16()
    elif change == "tied layers":
        layers[2].weight = down.weight
    elif change == "a parametrized layer":
        nn.utils.parametrizations.weight_norm(up)
    elif change == "no forward":
        layers = nn.ParameterList([torch.ones(2)])
    elif change == "split layers in a list":
        layers = nn.ModuleList([up])
    return layers


SPLITTING = {"tower.0": ColwiseParallel(), "tower.1": RowwiseParallel()}
SHARDED = {
    "FullyShardedDense": lambda: tdsp.FullyShardedDense([Block]),
    "TensorParallelDense": lambda: tdsp.TensorParallelDense(SPLITTING, tp=2),
    "PipelinedDense": lambda: tdsp.PipelinedDense(2, num_micro_batches=2),
}
WITHOUT_LAYERS: dict[str, Callable[[], Any]] = {
    "no forward": tdsp.FullyShardedDense,
    "split layers in a list": lambda: tdsp.TensorParallelDense(
        {"tower.0": ColwiseParallel()}, tp=2
    ),
}
EVERYWHERE = {
    "a gradient hook": "'tower.0.weight' has a hook on its gradient, which {} doesn't run on",
    "a hook after the gradient": "'tower.0.weight' has a hook on its gradient, which {}",
}
CHANGES = {
    **{(wrapper, change): text for wrapper in SHARDED for change, text in EVERYWHERE.items()},
    ("FullyShardedDense", "a scalar"): "'tower.1' has a parameter without a dimension or elements",
    ("TensorParallelDense", "a scalar"): "'tower' has a parameter without a dimension or elements",
    ("PipelinedDense", "a transposed weight"): "'tower' has a parameter without a dimension or",
    ("FullyShardedDense", "no elements"): "'tower.1' has a parameter without a dimension or",
    ("FullyShardedDense", "two types"): "",
    ("PipelinedDense", "two types"): (
        "'tower' trains parameters of torch.bfloat16 and torch.float32, which {} can't gather "
        "together; choose one type, or modules of their own"
    ),
    ("FullyShardedDense", "tied layers"): (
        "'tower.1' and 'tower.2' share a parameter, which {} would shard as two; choose units that"
    ),
    ("TensorParallelDense", "tied layers"): (
        "'tower.1.weight' and 'tower.2.weight' are one parameter, which {} would split as two; "
    ),
    ("PipelinedDense", "tied layers"): "",
    ("FullyShardedDense", "a parametrized layer"): "",
    ("TensorParallelDense", "a parametrized layer"): (
        "'tower.0' has a parametrized weight (weight_norm, spectral_norm, orthogonal), which {} "
        "can't split; leave it out of the plan"
    ),
    ("FullyShardedDense", "no forward"): (
        "'tower' is a ParameterList without a forward, at which {} would run it; put its"
    ),
    ("TensorParallelDense", "split layers in a list"): (
        "TensorParallelDense: 'tower.0' is a part of the model that holds no tables"
    ),
}


def with_changed_parts(rank: int, world_size: int) -> dict[tuple[str, str], str]:
    cell, answers = cell_of(world_size), dict[tuple[str, str], str]()
    for wrapper, change in CHANGES:
        model: Any = build(cell.spec)
        model.tower = tower(change, model.over.in_features)
        model.stack = tdsp.LayerStack(
            [nn.Linear(2, 2), nn.Linear(2, 2)], nn.MSELoss(reduction="none")
        )
        dense = (WITHOUT_LAYERS.get(change) or SHARDED[wrapper])()
        answers[wrapper, change] = error_of(
            partial(shard, cell, model=model, data_parallel_wrapper=dense)
        )
    return answers


def test_parts_that_would_train_otherwise_are_refused(ranks4: RankPool) -> None:
    for answers in ranks4.run(with_changed_parts):
        for (wrapper, change), text in answers.items():
            expected = CHANGES[wrapper, change].replace("{}", wrapper)
            assert text.startswith(expected and f"ConfigError: {expected}"), (wrapper, change)
            assert bool(text) == bool(expected), (wrapper, change)


class Lists(TowerModel):
    """A tower whose layers are called one by one, with nested units."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.tower = cast(Any, nn.ModuleList([nn.Sequential(*self.tower)]))

    def forward(self, features: Any) -> torch.Tensor:
        joined = self.tower[0](self.joined(features))
        return (self.last(joined).squeeze(1) - 1.0).pow(2).mean()


LISTS = {
    "DDP": lambda: None,
    "FSDP": lambda: tdsp.FullyShardedDense([nn.Sequential, nn.Linear]),
    "TP": lambda: tdsp.TensorParallelDense(
        {"tower.*.0": ColwiseParallel(), "tower.*.2": RowwiseParallel()}, tp=2
    ),
}


def train_lists(rank: int, world_size: int) -> list[list[float]]:
    cell, losses = cell_of(world_size), list[list[float]]()
    for form in LISTS.values():
        torch.manual_seed(0)
        unsharded: Any = Lists(cell.spec)
        model = shard(cell, model=unsharded, data_parallel_wrapper=form())
        params = dict(in_backward_optimizer_filter(model.named_parameters()))
        optimizer = dense_sgd(params.values())
        of_form = []
        for step in range(3):
            optimizer.zero_grad()
            loss = model(make_batch(cell.spec, 10 * step + rank))
            loss.backward()
            optimizer.step()
            of_form.append(loss.item())
        losses.append(of_form)
    return losses


def test_modules_in_a_list_are_parts_of_their_own(ranks4: RankPool) -> None:
    for ddp, *others in ranks4.run(train_lists):
        assert len(set(ddp)) == 3
        for losses in others:
            assert losses == pytest.approx(ddp, abs=1e-5)


class Recomputed(nn.Sequential):
    """Layers under an activation checkpoint, which recomputes them in the backward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, checkpoint(super().forward, input, use_reentrant=False))


def call_past_parts(rank: int, world_size: int, wrapper: str) -> list[str]:
    cell = cell_of(world_size)
    model: Any = build(cell.spec)
    width = model.over.in_features
    model.tower = Recomputed(nn.Linear(width, 4), nn.Linear(4, width))
    model.tower.norm = nn.LayerNorm(width)
    # gloo doesn't know this type.
    number = torch.tensor(rank, dtype=torch.int16)
    model.tower.register_buffer("number", number, persistent=False)
    old: Any = model.tower[0].weight
    dense: Any = tdsp.FullyShardedDense()
    if wrapper == "TensorParallelDense":
        dense = tdsp.TensorParallelDense(SPLITTING, tp=2)
    parallel: Any = shard(cell, model=model, data_parallel_wrapper=dense)
    layers = parallel.module.tower
    rows = torch.ones(3, width, requires_grad=True)
    assert layers.number.item() == 0
    text = error_text(lambda: old.square().sum().backward(), UnsupportedError)
    assert text.startswith(f"'tower.0.weight' got a gradient as it was before {wrapper} sharded")
    text = error_text(torch.optim.SGD([old]).step, UnsupportedError)
    assert text.startswith(f"an optimizer has 'tower.0.weight' as it was before {wrapper} sharded")

    def fail() -> None:
        with pytest.raises(TypeError):
            layers(rows, 1)

    def past() -> list[str]:
        return [
            error_text(partial(layer, rows), UnsupportedError) for layer in (layers[0], layers.norm)
        ]

    before = past()
    layers(rows).sum().backward()
    fail()
    assert past() == before
    return before


@pytest.mark.parametrize(
    ("wrapper", "purpose"),
    [
        ("FullyShardedDense", "FullyShardedDense gathers its weights"),
        ("TensorParallelDense", "TensorParallelDense joins the ranks' batches"),
    ],
)
def test_layers_called_past_their_part_are_refused(
    ranks4: RankPool, wrapper: str, purpose: str
) -> None:
    for texts in ranks4.run(call_past_parts, wrapper):
        assert texts == [
            f"'tower.{layer}' is called outside a call of 'tower', in which {purpose}; call "
            "'tower' itself, whose forward may call its layers"
            for layer in ("0", "norm")
        ]


class Keyed(nn.Linear):
    """A layer whose result is no tensor."""

    def forward(self, input: torch.Tensor) -> Any:
        return KeyedTensor(["f"], [self.out_features], super().forward(input))


def return_keyed(rank: int, world_size: int) -> list[str]:
    """Return the errors of a part with such a layer, with and without a second gathering."""
    cell, texts = cell_of(world_size), list[str]()
    for reshards in (True, False):
        model: Any = build(cell.spec)
        model.keyed = Keyed(2, 2)
        dense = tdsp.FullyShardedDense(reshard_after_forward=reshards)
        part = cast(Any, shard(cell, model=model, data_parallel_wrapper=dense).module).keyed
        texts.append(error_of(lambda part=part: part(torch.ones(1, 2)).values().sum().backward()))
        with torch.no_grad():
            part(torch.ones(1, 2))
    return texts


def test_results_whose_backward_would_find_no_weights_are_refused(ranks4: RankPool) -> None:
    for refused, passed in ranks4.run(return_keyed):
        assert refused.startswith(
            "UnsupportedError: 'keyed' returns a KeyedTensor without a tensor"
        )
        assert passed == ""


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


def with_a_part_named_module(rank: int, world_size: int, wrapper: str) -> str:
    cell, model = cell_of(world_size), nn.Module()
    model.module = build(cell.spec)
    dense = IN_BACKWARD[wrapper]()
    return error_text(lambda: shard(cell, model=model, data_parallel_wrapper=dense), ConfigError)


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "LocalDense"])
def test_a_part_with_the_name_of_ddps_is_refused(ranks4: RankPool, wrapper: str) -> None:
    for text in ranks4.run(with_a_part_named_module, wrapper):
        assert text.startswith("the model's part 'module' has DDP's name for it, which " + wrapper)


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


class Flat(nn.Linear):
    """A layer that drops the batch dimension."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).sum()


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
    """Dropout that records its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[torch.Tensor] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.masks.append(torch.rand(inputs.shape[1]) > 0.3)
        return inputs * self.masks[-1]


def train_with_dropout(
    rank: int, world_size: int, form: str
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], float]:
    """Return a rank's masks, its parameters that aren't split, and its next random number."""
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
