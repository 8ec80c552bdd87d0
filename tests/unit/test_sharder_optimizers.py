"""From the user's optimizer to fused parameters."""

from typing import Any, cast

import pytest
import torch
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

import torchrec_2dsp as tdsp
from tests.support.models import ModelSpec, build, tables_of
from torchrec_2dsp._compat.fbgemm import EmbOptimType
from torchrec_2dsp._compat.torchrec import InBackwardOptimizers
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.shard.kernels import MOMENT_SCALE
from torchrec_2dsp.shard.optimizers import (
    check_optimizers,
    params_for_plan,
    stock_optimizer_classes,
    stock_params,
)

AVERAGED = ModulePlan2D({}, mesh=tdsp.Mesh2D(4, 2), sync=tdsp.WeightSync())
EXACT = ModulePlan2D({}, mesh=tdsp.Mesh2D(4, 2), sync=tdsp.GradientSync())
OURS = tdsp.MomentScaledRowWiseAdaGrad(lr=0.1, eps=1e-4)


@pytest.mark.parametrize(
    ("optimizer", "fused_params", "text"),
    [
        (OURS, {"learning_rate": 0.9}, r"fused_params\['learning_rate'\] are given"),
        (OURS, {"eps": 0.5}, r"fused_params\['eps'\] are given"),
        (OURS, {"optimizer": EmbOptimType.EXACT_SGD}, r"fused_params\['optimizer'\] are given"),
        (EmbOptimType.ADAM, {"optimizer": EmbOptimType.EXACT_SGD}, "give one"),
    ],
)
def test_nothing_is_given_twice(optimizer: Any, fused_params: dict[str, Any], text: str) -> None:
    with pytest.raises(tdsp.errors.ConfigError, match=text):
        stock_params(optimizer, fused_params)


KINDS = [tdsp.EmbeddingBagCollectionSharder2D, tdsp.EmbeddingCollectionSharder2D]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_come_in_the_order_of_torchrecs_sharders(kind: Any) -> None:
    given = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
    codecs: dict[str, Any] = {}
    sharder = kind(given, codecs)
    assert sharder.optimizer is None
    assert sharder.fused_params == kind(fused_params=given).fused_params == given
    assert sharder.qcomm_codecs_registry is codecs


def test_what_is_no_optimizer_is_named() -> None:
    with pytest.raises(
        tdsp.errors.ConfigError, match=r"no fused optimizer; .* or fused_params, a dict"
    ):
        tdsp.EmbeddingBagCollectionSharder2D("sgd")  # type: ignore[arg-type]
    with pytest.raises(tdsp.errors.ConfigError, match="fused parameters are given twice"):
        tdsp.EmbeddingBagCollectionSharder2D({"eps": 1.0}, fused_params={"eps": 1.0})


def test_sequences_are_not_planned_data_parallel_on_a_cpu() -> None:
    """FBGEMM's dense lookup returns bags there."""
    sharder = tdsp.EmbeddingCollectionSharder2D()
    assert "data_parallel" in sharder.sharding_types("cuda")
    assert "data_parallel" not in sharder.sharding_types("cpu")


def test_ours_becomes_stock_row_wise_adagrad_in_the_users_units() -> None:
    given = {"max_gradient": 1.0}
    assert stock_params(OURS, given) == {
        "max_gradient": 1.0,
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": 0.1,
        "eps": 1e-4,
    }
    assert given == {"max_gradient": 1.0}


def test_the_scale_follows_mesh_and_sync() -> None:
    assert params_for_plan({}, OURS, AVERAGED)[MOMENT_SCALE] == 4.0
    assert params_for_plan({}, OURS, EXACT)[MOMENT_SCALE] == 1.0


@pytest.mark.parametrize(
    ("kind", "scale"),
    [(torch.optim.SGD, 1.0), (MomentScaledRowWiseAdaGradOptimizer, 4.0)],
)
def test_a_parameters_own_optimizer_brings_its_own_scale(kind: Any, scale: float) -> None:
    """The sharder's scale must not reach tables that another optimizer trains."""
    model = build(ModelSpec())
    params = list(tables_of(model).parameters())
    param: Any = params[0]
    _apply_optimizer_in_backward(kind, params, {"lr": 0.05})
    before = dict(param._optimizer_kwargs[0])
    with stock_optimizer_classes(model, AVERAGED):
        assert param._optimizer_kwargs[0][MOMENT_SCALE] == scale
    assert param._optimizer_kwargs[0] == before
    assert param._optimizer_classes == [kind]


def attach(kind: Any, model: torch.nn.Module, **arguments: Any) -> None:
    for param in tables_of(model).parameters():
        InBackwardOptimizers([kind], [{"lr": 0.1, **arguments}]).attach_to(param)


@pytest.mark.parametrize("is_attached", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "device", "text"),
    [
        ("weight_decay", 0.5, "cpu", "weight_decay=0.5 does nothing in FBGEMM's CPU kernels"),
        ("max_norm", 0.5, "cpu", "max_norm=0.5 does nothing in FBGEMM's CPU kernels"),
        ("weight_decay", 0.5, "cuda", "does nothing in FBGEMM's fused EmbOptimType.EXACT_SGD"),
        ("momentum", 0.9, "cpu", "momentum=0.9 does nothing in FBGEMM's fused .*LARS_SGD"),
        ("momentum", 0.9, "cuda", "momentum=0.9 does nothing in FBGEMM's fused"),
        ("beta1", 0.9, "cpu", "beta1=0.9 does nothing in FBGEMM's fused .*EmbOptimType.ADAM"),
        ("nesterov", True, "cpu", "nesterov=True is unknown to FBGEMM's fused .*; leave it out"),
        ("dampening", 0.1, "cpu", "dampening=0.1 is unknown"),
        ("maximize", True, "cpu", "maximize=True is unknown .*; negate the loss, leave it out"),
        ("lr_decay", 0.1, "cpu", "lr_decay=0.1 is unknown .*; use a schedule"),
        ("initial_accumulator_value", 0.1, "cpu", "initial_accumulator_value=0.1 is unknown"),
        ("betas", (0.9, 0.99), "cuda", "is unknown .*; give beta1 and beta2, leave it out"),
    ],
)
def test_what_would_be_ignored_is_refused(
    name: str, value: Any, device: str, text: str, is_attached: bool
) -> None:
    model = build(ModelSpec())
    if is_attached:
        attach(torch.optim.SGD, model, **{name: value})
    fused_params = {} if is_attached else {name: value}
    with pytest.raises(tdsp.errors.UnsupportedError, match=text):
        check_optimizers(model, fused_params, AVERAGED, device)


def test_what_an_optimizer_uses_or_what_changes_nothing_is_taken() -> None:
    model = build(ModelSpec())
    for optimizer, arguments in (
        (EmbOptimType.EXACT_SGD, {"momentum": 0.0, "weight_decay": 0.0, "eps": 1e-3}),
        (EmbOptimType.LARS_SGD, {"momentum": 0.9}),
        (EmbOptimType.ADAM, {"beta1": 0.9, "weight_decay": 0.5}),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, {"weight_decay": 0.5, "max_norm": 1.0}),
    ):
        check_optimizers(model, {"optimizer": optimizer, **arguments}, AVERAGED, "cuda")
    attach(torch.optim.Adam, model)
    # The sharder's arguments are for tables without an optimizer of their own.
    check_optimizers(cast(Any, model).ebc, {"momentum": 0.9}, AVERAGED, "cuda")
