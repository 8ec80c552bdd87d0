"""`MomentScaledRowWiseAdaGrad`: the rule, its eager twin, and its form as a stock kernel."""

import math
from typing import Any, cast

import pytest
import torch
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torchrec.modules.embedding_configs import DataType

import torchrec_2dsp as tdsp
from tests.support.models import ModelSpec, build, tables_of
from tests.support.oracle import row_wise_adagrad_
from tests.support.tbe import Case, make_ids, make_tbe, tensors_of, upstream_gradient
from torchrec_2dsp import MomentScaledRowWiseAdaGrad
from torchrec_2dsp._compat.fbgemm import EmbOptimType, set_learning_rate
from torchrec_2dsp._compat.torchrec import InBackwardOptimizers, in_backward_optimizers
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.optim import (
    MomentScaledRowWiseAdaGradOptimizer,
    to_kernel_units,
)
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.shard.kernels import MOMENT_SCALE
from torchrec_2dsp.shard.optimizers import (
    check_optimizers,
    params_for_plan,
    stock_optimizer_classes,
    stock_params,
)

ROW_WISE = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
SCALES = [0.25, 1.0, 3.7, 4.0, 100.0]
ROUNDING = 1e-6
"""Both sides divide and take roots in another order: some float32 roundings per step."""


def gradients(num_steps: int, shape: tuple[int, int] = (9, 4)) -> list[torch.Tensor]:
    """Random gradients that leave a third of the rows out each time."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator) for _ in range(num_steps)]
    for step, grad in enumerate(grads):
        grad[step % 3 :: 3] = 0.0
    return grads


def stepped(
    weight: torch.nn.Parameter, grads: list[torch.Tensor], scale: float
) -> MomentScaledRowWiseAdaGradOptimizer:
    optimizer = MomentScaledRowWiseAdaGradOptimizer([weight], lr=0.1, eps=1e-3, moment_scale=scale)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("scale", SCALES)
def test_the_eager_twin_is_the_reference(scale: float) -> None:
    weight = torch.nn.Parameter(torch.rand(9, 4))
    expected, moment = weight.detach().clone(), torch.zeros(9)
    optimizer = stepped(weight, grads := gradients(5), scale)
    for grad in grads:
        row_wise_adagrad_(expected, grad, moment, lr=0.1, eps=1e-3, moment_scale=scale)
    assert torch.equal(weight, expected)
    assert list(optimizer.state[weight]) == ["sum"]
    assert torch.equal(optimizer.state[weight]["sum"], moment)


def test_the_update_by_hand() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    stepped(weight, [grad], scale=2.0)
    # mean(g^2) = 12.5, and 12.5 / 2 has the root 2.5.
    expected = [[-0.1 * 3 / 2.501, -0.1 * 4 / 2.501], [0.0, 0.0]]
    torch.testing.assert_close(weight.detach(), torch.tensor(expected))


@pytest.mark.parametrize("scale", SCALES)
def test_a_stock_kernel_runs_it(scale: float) -> None:
    """Row-wise AdaGrad of FBGEMM with lr and eps in kernel units, against the reference."""
    case = Case(((11, 8),), (0,), eps=to_kernel_units(1e-2, scale))
    tbe = make_tbe(case)
    set_learning_rate(tbe, to_kernel_units(0.1, scale))
    weight, moment = tensors_of(tbe)
    for seed in range(4):
        ids, offsets, _ = make_ids(case, seed)
        output = tbe(ids, offsets)
        grad = upstream_gradient(output, seed)
        output.backward(grad)
        bag_of = torch.arange(case.batch_size).repeat_interleave(offsets.diff())
        dense = torch.zeros_like(weight).index_add(0, ids, grad[bag_of])
        row_wise_adagrad_(weight, dense, moment, lr=0.1, eps=1e-2, moment_scale=scale)
    kernel_weight, kernel_moment = tensors_of(tbe)
    # Steps are as large as lr * sqrt(scale).
    rounding = ROUNDING * max(1.0, math.sqrt(scale))
    torch.testing.assert_close(kernel_weight, weight, rtol=ROUNDING, atol=rounding)
    torch.testing.assert_close(kernel_moment, moment, rtol=ROUNDING, atol=ROUNDING)
    assert not torch.equal(weight, tensors_of(make_tbe(case))[0])


def test_half_precision_weights_keep_a_float_moment() -> None:
    weight = torch.nn.Parameter(torch.rand(9, 4).half())
    optimizer = stepped(weight, [grad.half() for grad in gradients(2)], scale=4.0)
    assert weight.dtype is torch.float16
    assert optimizer.state[weight]["sum"].dtype is torch.float32


def test_parameters_without_a_gradient_stay() -> None:
    weight, other = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = MomentScaledRowWiseAdaGradOptimizer([weight, other], lr=0.1, moment_scale=1.0)
    weight.grad = torch.ones(2, 2)
    assert optimizer.step(lambda: 3.5) == 3.5
    assert torch.equal(other, torch.ones(2, 2))
    assert not torch.equal(weight, torch.ones(2, 2))


def test_each_parameter_group_has_its_own_settings() -> None:
    slow, fast = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    groups = [{"params": [slow]}, {"params": [fast], "lr": 1.0, "moment_scale": 4.0}]
    optimizer = MomentScaledRowWiseAdaGradOptimizer(groups, lr=0.5, eps=0.0, moment_scale=1.0)
    slow.grad = fast.grad = torch.ones(2, 2)
    optimizer.step()
    assert (slow[0, 0].item(), fast[0, 0].item()) == (-0.5, -2.0)


def test_an_eager_step_has_no_mesh() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = MomentScaledRowWiseAdaGradOptimizer([weight], lr=0.1)
    weight.grad = torch.ones(2, 2)
    with pytest.raises(
        ConfigError,
        match=r"^an eager step has no mesh to take moment_scale from; pass a number, such as the "
        r"mesh's num_groups$",
    ):
        optimizer.step()
    assert torch.equal(weight, torch.zeros(2, 2))


BAD_VALUES = [
    ({"lr": -0.1}, r"^lr=-0\.1 must be a finite number >= 0$"),
    ({"lr": math.inf}, "^lr=inf must be a finite number >= 0$"),
    ({"lr": math.nan}, "^lr=nan must be a finite number >= 0$"),
    ({"eps": -1e-3}, r"^eps=-0\.001 must be a finite number >= 0$"),
    ({"eps": math.nan}, "^eps=nan must be a finite number >= 0$"),
    ({"moment_scale": 0.0}, r"^moment_scale=0\.0 must be a finite number > 0, or FROM_MESH$"),
    ({"moment_scale": -2.0}, r"^moment_scale=-2\.0 must be a finite number > 0, or FROM_MESH$"),
    ({"moment_scale": {"t0": 2.0}}, r"^moment_scale=\{'t0': 2\.0\} must be a finite number > 0"),
    ({"moment_scale": math.inf}, "^moment_scale=inf must be a finite number > 0, or FROM_MESH$"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_VALUES)
def test_bad_values_are_refused(bad: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MomentScaledRowWiseAdaGrad(**{"lr": 0.1, **bad})
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ConfigError, match=message):
        MomentScaledRowWiseAdaGradOptimizer([weight], **{"lr": 0.1, **bad})


def test_edge_values_are_allowed() -> None:
    config = MomentScaledRowWiseAdaGrad(lr=0.0, eps=0.0, moment_scale=1e-3)

    assert (config.lr, config.eps, config.moment_scale) == (0.0, 0.0, 1e-3)


AVERAGED = ModulePlan2D({}, mesh=tdsp.Mesh2D(4, 2), sync=tdsp.WeightSync())
EXACT = ModulePlan2D({}, mesh=tdsp.Mesh2D(4, 2), sync=tdsp.GradientSync())
OURS = tdsp.MomentScaledRowWiseAdaGrad(lr=0.1, eps=1e-4)
KINDS = [tdsp.EmbeddingBagCollectionSharder2D, tdsp.EmbeddingCollectionSharder2D]


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
    for kind in KINDS:
        with pytest.raises(tdsp.errors.ConfigError, match=text):
            kind(optimizer, fused_params=fused_params)


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


@pytest.mark.parametrize("name", ["optimizer_state_dtypes", "extra_optimizer_config"])
def test_what_a_rule_on_tensors_lacks_is_refused(name: str) -> None:
    model = build(ModelSpec())
    params = {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM, name: {"momentum1": "fp16"}}
    with pytest.raises(tdsp.errors.UnsupportedError, match=f"{name}=.* is unknown to .* on a CPU"):
        check_optimizers(model, params, AVERAGED, "cpu")
    check_optimizers(model, params, AVERAGED, "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD}, "EMAINPLACE_ROWWISE_ADAGRAD,"),
        ({"optimizer": EmbOptimType.LARS_SGD}, "LARS_SGD,"),
        (ROW_WISE | {"weight_decay": 0.5}, "EXACT_ROWWISE_ADAGRAD and weight_decay=0.5,"),
        (ROW_WISE | {"max_norm": 0.5}, "EXACT_ROWWISE_ADAGRAD and max_norm=0.5,"),
    ],
)
def test_what_no_rule_does_to_tables_in_bf16_is_refused(
    params: dict[str, Any], text: str, device: str
) -> None:
    model: Any = build(ModelSpec(data_type=DataType.BF16))
    text = f"data_type=.*BF16.* of table 't0' isn't possible with EmbOptimType.{text} because"
    with pytest.raises(tdsp.errors.UnsupportedError, match=text):
        check_optimizers(model.ebc, params, AVERAGED, device)
    check_optimizers(model.ebc, {"optimizer": EmbOptimType.ADAM}, AVERAGED, device)


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


def test_an_attached_optimizer_keeps_its_classs_rates() -> None:
    model, rates = build(ModelSpec()), {torch.optim.Adam: 1e-3, torch.optim.Adagrad: 1e-2}
    for (kind, lr), table in zip(rates.items(), tables_of(model).values(), strict=False):
        _apply_optimizer_in_backward(kind, table.parameters(), {})
        with stock_optimizer_classes(model, EXACT):
            attached = in_backward_optimizers(cast(Any, table.weight))
            assert attached is not None
            assert attached.kwargs[0]["lr"] == lr
            assert attached.kwargs[0]["eps"] == (1e-10 if kind is torch.optim.Adagrad else 1e-8)
