"""Dense layers that are unfrozen, frozen or left out midway, checkpointed, or sparse."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import ref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.checkpoint import checkpoint
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_2dsp as tdsp
from tests.support.dense_training import cell_of, dense_of, whole
from tests.support.loops import shard
from tests.support.models import BagModel, make_batch
from tests.support.parity import Gap, compare
from tests.support.pipelining import (
    FORMS,
    TABLES,
    PipelineCell,
    StackModel,
    StackOracle,
    batch_for,
    batches_for,
    dense_sgd,
    pipelined,
    stack_model,
    step_of,
)
from tests.support.ranks import RankPool, error_of, error_text
from torchrec_2dsp._compat.ddp import data_parallel_module
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
    """Train beside the oracle; from some step on, train frozen layers, too."""
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


@pytest.mark.dealt
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


def set_tables_only(model: StackModel) -> None:
    """Freeze all layers but the tables."""
    for name, layers in model.named_children():
        layers.requires_grad_(name == "ebc")


def train_frozen(rank: int, world_size: int, form: str) -> tuple[Gap, str]:
    """Train only tables, with other dense weights on each rank at first; then thaw a layer."""
    oracle, unsharded = StackOracle(CELL.cell), stack_model(CELL.cell.spec)
    set_tables_only(cast(Any, oracle.model))
    set_tables_only(unsharded)
    with torch.no_grad():
        expected = unsharded.bottom.weight.clone()
        unsharded.bottom.weight.add_(rank)
    wrapper = DATA_PARALLEL[form]()
    model = shard(CELL.cell, model=unsharded, load=False, data_parallel_wrapper=wrapper)
    assert torch.equal(unsharded.bottom.weight, expected)
    model.load_state_dict(cast(Any, oracle.model.state_dict()))
    step, optimizer = partial(step_of, model, rank=rank), dense_sgd(dense_of(model).values())
    losses = [oracle.step_on(batches_for(CELL, number))[rank] for number in range(NUM_STEPS)]
    gaps = [abs(loss - step(optimizer, CELL, number)) for number, loss in enumerate(losses)]
    gap = compare(model, oracle, max(gaps))
    unsharded.bottom.weight.requires_grad_(True)
    return gap, error_text(partial(step, optimizer, CELL, 9), UnsupportedError)


@pytest.mark.parametrize("form", DATA_PARALLEL)
def test_tables_train_beside_layers_that_are_all_frozen(ranks4: RankPool, form: str) -> None:
    for gap, text in ranks4.run(train_frozen, form):
        assert gap.num_values > 0
        assert gap.worst < ROUNDING, gap
        assert text.startswith("'bottom.weight' was frozen when the model was sharded, so DDP")


def freeze_on_one_rank(rank: int, world_size: int, form: str) -> str:
    unsharded, wrapper = stack_model(CELL.cell.spec), DATA_PARALLEL[form]()
    if rank == 1:
        set_tables_only(unsharded)
    return error_of(lambda: shard(CELL.cell, model=unsharded, data_parallel_wrapper=wrapper))


@pytest.mark.parametrize("form", ["DDP", "delayed"])
def test_layers_that_one_rank_alone_freezes_are_refused(ranks4: RankPool, form: str) -> None:
    (text,) = set(ranks4.run(freeze_on_one_rank, form))
    assert text.startswith("ConfigError: whether all dense layers are frozen differs between ranks")


def replace_layer(model: Any, bottom: Any) -> None:
    model.module.bottom = nn.Linear(bottom.in_features, bottom.out_features)


def replace_weight(model: Any, bottom: Any) -> None:
    bottom.weight = nn.Parameter(torch.zeros(bottom.out_features, bottom.in_features))


def replace_by_frozen(model: Any, bottom: Any) -> None:
    replace_weight(model, bottom)
    bottom.weight.requires_grad_(False)


def normalise(model: Any, bottom: Any) -> None:
    nn.utils.parametrizations.weight_norm(bottom)


def hook(model: Any, bottom: Any) -> None:
    bottom.weight.register_hook(lambda gradient: gradient / 2)


CHANGES = (replace_layer, replace_weight, normalise)
SHARED = {form: FORMS[form] for form in ("FSDP", "TP", "TP, FSDP", "PP 1F1B")}
ANY_GRAPH = partial(DefaultDataParallelWrapper, static_graph=False, find_unused_parameters=True)
LATER: dict[str, Callable[[], Any]] = {**DATA_PARALLEL, "any graph": ANY_GRAPH, **SHARED}


def change_later(rank: int, world_size: int, form: str, stock: bool) -> dict[str, str]:
    """Train, change one of the sharded model's layers, and train again, for each change."""
    texts, cell = dict[str, str](), replace(CELL.cell, stock_wrapper=stock)
    for change in (*CHANGES, replace_by_frozen, hook) if form in SHARED else CHANGES:
        with pipelined(cell, LATER[form]()) as (model, params):
            optimizer = dense_sgd(params.values())
            step_of(model, optimizer, CELL, 0, rank)
            (bottom,) = (part for name, part in model.named_modules() if name.endswith("bottom"))
            change(model, bottom)
            texts[change.__name__] = error_of(partial(step_of, model, optimizer, CELL, 1, rank))
    return texts


@pytest.mark.dealt
@pytest.mark.parametrize(
    ("form", "stock"),
    [*((form, False) for form in LATER), *((form, True) for form in ("delayed", "FSDP"))],
)
def test_what_is_put_into_a_sharded_model_is_refused(
    ranks4: RankPool, form: str, stock: bool
) -> None:
    for texts in ranks4.run(change_later, form, stock):
        for change, text in texts.items():
            if change == "hook":
                assert text.startswith("ConfigError: 'bottom.weight' has a hook on its gradient")
            else:
                assert text.startswith("UnsupportedError: 'bottom."), (change, text)
                assert "was put into the model after it was sharded, so " in text, (change, text)


def train_on(rank: int, world_size: int, form: str) -> Gap:
    """Train through an evaluation, newly assigned shards, and manually gathered weights."""
    oracle = StackOracle(CELL.cell)
    loss_gap = 0.0
    with pipelined(CELL.cell, FORMS[form]()) as (model, params):
        for step in range(NUM_STEPS):
            if step == 2:
                dense = {name: value.detach().clone() for name, value in params.items()}
                model.module.load_state_dict(dense, strict=False, assign=True)
            optimizer = dense_sgd(dense_of(model).values())
            if step == 1:
                with torch.no_grad():
                    model(batches_for(CELL, 0)[rank][0])
            elif step in (0, 3):
                next(unit for unit in model.modules() if isinstance(unit, FSDPModule)).unshard()
            expected = oracle.step_on(batches_for(CELL, step))[rank]
            loss_gap = max(loss_gap, abs(step_of(model, optimizer, CELL, step, rank) - expected))
        return compare(model, oracle, loss_gap)


@pytest.mark.parametrize("form", ["FSDP", "FSDP at once", "FSDP, gathered once", "TP, FSDP"])
def test_what_fsdp2_puts_in_itself_is_trained(ranks4: RankPool, form: str) -> None:
    for gap in ranks4.run(train_on, form):
        assert gap.num_values > 0
        assert gap.worst < ROUNDING, gap


def freeze(model: torch.nn.Module, rank: int) -> torch.Tensor:
    set_trained(model, are_trained=False)
    return loss_of(model, rank)


def leave_out(model: torch.nn.Module, rank: int) -> torch.Tensor:
    """Return a loss that doesn't depend on one dense layer."""
    (bottom,) = (part for name, part in model.named_modules() if name.endswith("bottom"))
    weight, bias = (param.detach() for param in bottom.parameters())
    bottom.forward = lambda inputs: torch.nn.functional.linear(inputs, weight, bias)
    return loss_of(model, rank)


def loss_of(model: torch.nn.Module, rank: int) -> torch.Tensor:
    return model(*batches_for(CELL, 2)[rank]).mean()


def change_in_ddp(rank: int, world_size: int, form: str, change: Any) -> str:
    """Train two steps with all dense layers, then one without some; return the error."""
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


def go_back_twice(rank: int, world_size: int, form: str, num_steps: int) -> str:
    """Run two forwards, then their backwards, together and one by one; return the error."""
    with pipelined(CELL.cell, DATA_PARALLEL[form]()) as (model, params):
        optimizer = dense_sgd(params.values())
        for step in range(num_steps):
            step_of(model, optimizer, CELL, step, rank)
        optimizer.zero_grad()
        (loss_of(model, rank) + loss_of(model, rank)).backward()
        optimizer.zero_grad()
        first, second = loss_of(model, rank), loss_of(model, rank)
        second.backward()
        return error_text(first.backward, UnsupportedError)


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("form", DATA_PARALLEL)
def test_ddp_refuses_a_second_backward(ranks4: RankPool, form: str, num_steps: int) -> None:
    for text in ranks4.run(go_back_twice, form, num_steps):
        assert text.startswith("a second backward() came after the last forward, and DDP adds up")


def is_freed(rank: int, world_size: int, form: str) -> bool:
    """Drop a model that has trained; return whether its DDP is gone."""
    with pipelined(CELL.cell, DATA_PARALLEL[form]()) as (model, params):
        optimizer = dense_sgd(params.values())
        for step in range(3):
            step_of(model, optimizer, CELL, step, rank)
        ddp = ref(data_parallel_module(model))
        assert ddp() is not None
    del model, params, optimizer
    gc.collect()
    return ddp() is None


@pytest.mark.parametrize("form", DATA_PARALLEL)
def test_hooks_let_ddp_go(ranks4: RankPool, form: str) -> None:
    assert ranks4.run(is_freed, form) == [True] * 4


def clip(rank: int, world_size: int, form: str) -> list[str]:
    """Give an optimizer that clips by norm, then one that clips by value; return the errors."""
    texts = []
    with pipelined(CELL.cell, (FORMS | DATA_PARALLEL)[form]()) as (model, params):
        for clipping in (GradientClipping.NORM, GradientClipping.VALUE):
            dense = GradientClippingOptimizer(KeyedOptimizerWrapper(params, dense_sgd), clipping)
            optimizer = CombinedOptimizer([model.fused_optimizer, dense])
            text = error_of(partial(tdsp.TrainState, model, optimizer))
            assert isinstance(model, tdsp.ModelParallel2D)
            assert error_of(partial(model.combined_optimizer, dense)) == text
            texts.append(text)
    return texts


@pytest.mark.parametrize("form", ["DDP", "delayed", "FSDP", "TP", "TP, FSDP", "PP 1F1B"])
def test_clipping_that_sees_a_part_of_the_gradients_is_refused(ranks4: RankPool, form: str) -> None:
    for by_norm, by_value in ranks4.run(clip, form):
        assert by_value == ""
        assert ("wouldn't clip" in by_norm) == (form not in DATA_PARALLEL)


EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "leave sparse=True out, or make it a table of an": lambda: nn.Embedding(4, 2, sparse=True),
    "leave max_norm out, or scale rows in the forward": lambda: nn.EmbeddingBag(4, 2, max_norm=1.0),
}


def with_embedding(rank: int, world_size: int, form: str, remedy: str) -> str:
    unsharded = stack_model(CELL.cell.spec)
    unsharded.add_module("over", EMBEDDINGS[remedy]())
    wrapper = ({"local": tdsp.LocalDense} | FORMS | DATA_PARALLEL)[form]()

    def wrap() -> None:
        with pipelined(CELL.cell, wrapper, unsharded):
            pass

    if form == "local":
        wrap()
        return "'over' trains alone"
    return error_text(wrap, UnsupportedError)


@pytest.mark.parametrize("form", [*DATA_PARALLEL, "FSDP", "TP, FSDP", "PP 1F1B", "local"])
@pytest.mark.parametrize("remedy", EMBEDDINGS)
def test_embeddings_that_ranks_would_train_apart_are_refused(
    ranks4: RankPool, form: str, remedy: str
) -> None:
    (text,) = set(ranks4.run(with_embedding, form, remedy))
    assert text.startswith("'over' ")
    assert text.endswith("alone") or remedy in text


class Choice(nn.Module):
    """Layers from which each batch uses one branch, and a layer that no batch uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Sequential(nn.Linear(width, 3), nn.Linear(3, width))
        self.idle = nn.Linear(2, 2)
        self.takes_first = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh((self.first if self.takes_first else self.second)(inputs))


class Choosing(BagModel):
    """A model with a part that uses other layers on each rank, under a stack."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        width = self.over.in_features
        self.over = cast(Any, nn.Identity())
        self.choice = Choice(width)
        self.stack = tdsp.LayerStack(
            [nn.Linear(width, 4), nn.Linear(4, 1), nn.Flatten(0)], nn.MSELoss(reduction="none")
        )

    def forward(self, features: Any) -> torch.Tensor:
        inputs = self.choice(self.joined(features))
        return self.stack(inputs, torch.ones(len(inputs))).mean()


CHOOSING = {
    "FSDP": tdsp.FullyShardedDense,
    "TP": lambda: tdsp.TensorParallelDense(
        {"stack.layers.0": ColwiseParallel(), "stack.layers.1": RowwiseParallel()}, tp=2
    ),
    "TP, FSDP": lambda: tdsp.TensorParallelDense(
        {"choice.first": ColwiseParallel(output_layouts=Replicate())}, tp=2
    ),
    "PP": lambda: tdsp.PipelinedDense(2, num_micro_batches=2),
}


def choose_by_rank(rank: int, world_size: int, form: str) -> None:
    """Compare gradients with the mean over ranks in one process."""
    cell = cell_of(world_size)
    torch.manual_seed(0)
    oracle, unsharded = (Choosing(cell.spec) for _ in range(2))
    unsharded.load_state_dict(oracle.state_dict())
    model = shard(cell, model=unsharded, data_parallel_wrapper=CHOOSING[form]())
    unsharded.choice.takes_first = rank < 2
    model(make_batch(cell.spec, rank)).backward()
    for number in range(world_size):
        oracle.choice.takes_first = number < 2
        (oracle(make_batch(cell.spec, number)) / world_size).backward()
    expected = dict(oracle.choice.named_parameters())
    for name, param in unsharded.choice.named_parameters():
        gradient, wanted = whole(param.grad), expected[name].grad
        assert (wanted is None) == name.startswith("idle")
        wanted = torch.zeros_like(gradient) if wanted is None else wanted
        torch.testing.assert_close(gradient, wanted, msg=name)


@pytest.mark.parametrize("form", CHOOSING)
def test_batches_of_ranks_may_use_other_layers(ranks4: RankPool, form: str) -> None:
    ranks4.run(choose_by_rank, form)


def checkpointed(rank: int, world_size: int, form: str) -> Gap:
    """Train a layer that is recomputed with a nested backward inside the loss's backward."""
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


def train_among_evaluations(
    rank: int, world_size: int, form: str, *, evaluates: bool
) -> dict[str, torch.Tensor]:
    """Return weights that a loop changes after its evaluations, which change nothing themselves."""
    with pipelined(CELL.cell, FORMS[form]()) as (model, params):
        start = {name: whole(param) for name, param in params.items()}

        def evaluate(*, in_training: bool = False) -> None:
            with torch.set_grad_enabled(in_training):
                model.train(in_training)(batch_for(CELL, 9, 0, rank))
            model.train()

        if evaluates:
            evaluate()
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        optimizer = dense_sgd(dense.values())
        for step in range(3):
            optimizer.zero_grad()
            model(batch_for(CELL, step, 0, rank)).mean().backward()
            if evaluates:
                evaluate(in_training=step == 1)
            optimizer.step()
            if evaluates:
                evaluate()
            with torch.no_grad():
                for param in dense.values():
                    param.mul_(0.9)
        weights = {name: whole(param) for name, param in dense.items()}
    assert not any(torch.equal(start[name] * 0.9**3, weights[name]) for name in weights)
    return weights


@pytest.mark.dealt
@pytest.mark.parametrize("form", FORMS)
def test_what_changes_weights_after_an_evaluation_is_not_lost(ranks4: RankPool, form: str) -> None:
    expected = ranks4.run(partial(train_among_evaluations, form=form, evaluates=False))
    evaluated = ranks4.run(partial(train_among_evaluations, form=form, evaluates=True))
    for weights, plain in zip(evaluated, expected, strict=True):
        assert weights.keys() == plain.keys() != set()
        assert all(torch.equal(weights[name], value) for name, value in plain.items())
