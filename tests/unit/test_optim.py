"""`MomentScaledRowWiseAdaGrad` in all its forms, and rules on tensors without kernels."""

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
from torchrec_2dsp._compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    SparseType,
    Tbe,
    adopt_optimizer,
    iteration_of,
    optimizer_states,
    params_to_build,
    set_learning_rate,
    without_update,
)
from torchrec_2dsp._compat.torchrec import InBackwardOptimizers, in_backward_optimizers
from torchrec_2dsp.errors import ConfigError, UnsupportedError
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer, to_kernel_units
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.replicas.capture import RowCapture
from torchrec_2dsp.rows.update import RULES_WITHOUT_KERNEL, DirectLookup
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
    """Draw gradients that leave out a third of the rows each time."""
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


@pytest.mark.parametrize("scale", SCALES)
def test_a_stock_kernel_runs_it(scale: float) -> None:
    """FBGEMM's row-wise AdaGrad with lr and eps in kernel units matches the reference."""
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
        with pytest.raises(ConfigError, match=text):
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
    with pytest.raises(ConfigError, match=r"no fused optimizer; .* or fused_params, a dict"):
        tdsp.EmbeddingBagCollectionSharder2D("sgd")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="fused parameters are given twice"):
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
    with pytest.raises(UnsupportedError, match=text):
        check_optimizers(model, fused_params, AVERAGED, device)


@pytest.mark.parametrize("name", ["optimizer_state_dtypes", "extra_optimizer_config"])
def test_what_a_rule_on_tensors_lacks_is_refused(name: str) -> None:
    model = build(ModelSpec())
    params = {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM, name: {"momentum1": "fp16"}}
    with pytest.raises(UnsupportedError, match=f"{name}=.* is unknown to .* on a CPU"):
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
    with pytest.raises(UnsupportedError, match=text):
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
    # The sharder's arguments are for tables without their own optimizer.
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


def plain_updates(
    optimizer: EmbOptimType, grads: list[list[float]], weights: list[float], *, decay: float
) -> tuple[list[float], list[float], list[float]]:
    """Return a row's weights and moments after its gradients, by FBGEMM's formulas."""
    (beta1, beta2, rate, eps), dim = FORMULA, len(weights)
    is_row_wise = "PARTIAL" in optimizer.name
    first, second = [0.0] * dim, [0.0] * (1 if is_row_wise else dim)
    for step, grad in enumerate(grads, 1):
        squares = [g * g for g in grad]
        if is_row_wise:
            squares = [sum(squares) / dim]
        first = [beta1 * m + (1 - beta1) * g for m, g in zip(first, grad, strict=True)]
        second = [beta2 * v + (1 - beta2) * q for v, q in zip(second, squares, strict=True)]
        roots = [math.sqrt(v / (1 - beta2**step)) + eps for v in second]
        changes = [
            m / (1 - beta1**step) / roots[0 if is_row_wise else column] + decay * w
            for column, (m, w) in enumerate(zip(first, weights, strict=True))
        ]
        if "LAMB" in optimizer.name:
            ratio = math.dist(weights, [0.0] * dim) / math.dist(changes, [0.0] * dim)
            changes = [ratio * change for change in changes]
        weights = [w - rate * change for w, change in zip(weights, changes, strict=True)]
    return weights, first, second


FORMULA = tuple(torch.tensor([0.9, 0.999, 0.1, 1e-8]).tolist())
"""FBGEMM's betas, the rate and eps, as its kernels take them: in float32."""


def ruled_tbe(optimizer: EmbOptimType, dtype: SparseType = SparseType.FP32, **options: Any) -> Tbe:
    params = {"optimizer": optimizer, "learning_rate": 0.1, **options}
    tbe = Tbe(
        [(5, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        weights_precision=dtype,
        **params_to_build(params, dtype, torch.device("cpu")),
    )
    assert adopt_optimizer(tbe, params)
    tbe.split_embedding_weights()[0].copy_(torch.arange(20.0).view(5, 4) / 20 + 0.25)
    return tbe


def step_of(tbe: Tbe, ids: list[int], grad: torch.Tensor) -> None:
    """Look up one bag, whose gradient updates its rows."""
    updating = DirectLookup(tbe, RULES_WITHOUT_KERNEL[tbe.optimizer])
    batch = torch.tensor(ids), torch.tensor([0, len(ids)])
    run = without_update(tbe, lambda: tbe(*batch), is_training=True)
    updating.lookup(run).backward(grad[None])


@pytest.mark.parametrize("decay", [0.0, 0.125])
@pytest.mark.parametrize("optimizer", RULES_WITHOUT_KERNEL, ids=lambda optimizer: optimizer.name)
def test_a_rule_without_a_kernel_follows_fbgemms_formula(
    optimizer: EmbOptimType, decay: float
) -> None:
    """This includes a row that is twice in a bag: its gradients are summed."""
    tbe = ruled_tbe(optimizer, weight_decay=decay)
    start = tbe.split_embedding_weights()[0].clone()
    grads = [upstream_gradient(torch.empty(4), seed) for seed in range(5)]
    for grad in grads:
        step_of(tbe, [1, 3, 1], grad)
    (state,) = optimizer_states(tbe)
    weights = tbe.split_embedding_weights()[0]
    assert list(state) == ["exp_avg", "exp_avg_sq"]
    for row, times in ((1, 2), (3, 1)):
        summed = [(times * grad).tolist() for grad in grads]
        plain = plain_updates(optimizer, summed, start[row].tolist(), decay=decay)
        for own, expected in zip((weights, *state.values()), plain, strict=True):
            wanted = torch.tensor(expected)
            torch.testing.assert_close(own[row].view(-1), wanted, rtol=2e-6, atol=1e-7)
    others = [0, 2, 4]
    assert torch.equal(weights[others], start[others])
    assert not any(moment[others].any() for moment in state.values())
    assert iteration_of(tbe) == 5


def test_a_row_that_rests_has_the_iteration_of_all() -> None:
    """Its moments don't decay meanwhile, and their bias is corrected by the world's count."""
    tbe = ruled_tbe(EmbOptimType.ADAM)
    start = tbe.split_embedding_weights()[0][2].clone()
    for ids in ([2], [0], [0], [2]):
        step_of(tbe, ids, torch.ones(4))
    beta1, beta2, rate, eps = FORMULA
    weight = start.clone()
    first = second = 0.0
    for step in (1, 4):
        first, second = beta1 * first + (1 - beta1), beta2 * second + (1 - beta2)
        root = math.sqrt(second / (1 - beta2**step)) + eps
        weight -= rate * first / (1 - beta1**step) / root
    torch.testing.assert_close(tbe.split_embedding_weights()[0][2], weight, rtol=1e-6, atol=1e-7)


def test_an_accumulated_step_counts_once_if_a_backward_comes() -> None:
    tbe = ruled_tbe(EmbOptimType.ADAM)
    capture = RowCapture(tbe, ["t"])

    def looked_up() -> torch.Tensor:
        batch = torch.tensor([1]), torch.tensor([0, 1])
        return capture.lookup(without_update(tbe, lambda: tbe(*batch), is_training=True), None)

    for num_steps, has_backward in ((1, True), (1, False), (2, True)):
        capture.accumulate()
        looked_up()
        output = looked_up()
        if has_backward:
            output.sum().backward()
        steps = [pending.gradients().step.iteration for pending in capture.take()]
        assert steps == ([num_steps] if has_backward else [])
        assert iteration_of(tbe) == num_steps


def test_evaluations_count_no_iteration() -> None:
    tbe = ruled_tbe(EmbOptimType.ADAM)
    with torch.no_grad():
        batch = torch.tensor([1]), torch.tensor([0, 1])
        without_update(tbe, lambda: tbe(*batch), is_training=False)()
    assert iteration_of(tbe) == 0
    assert tbe.optimizer is EmbOptimType.ADAM


@pytest.mark.parametrize("row", [0.0, 1.0])
def test_lamb_stays_finite_without_a_gradient_or_a_weight(row: float) -> None:
    tbe = ruled_tbe(EmbOptimType.LAMB)
    tbe.split_embedding_weights()[0].fill_(row)
    step_of(tbe, [1], torch.full((4,), 1.0 - row))
    assert torch.equal(tbe.split_embedding_weights()[0], torch.full((5, 4), row))


@pytest.mark.parametrize("optimizer", RULES_WITHOUT_KERNEL, ids=lambda optimizer: optimizer.name)
def test_rules_in_half_precision_round_once(optimizer: EmbOptimType) -> None:
    half, full = ruled_tbe(optimizer, SparseType.FP16), ruled_tbe(optimizer)
    for tbe in (half, full):
        tbe.split_embedding_weights()[0].copy_(torch.arange(20).view(5, 4) / 16 + 0.25)
        step_of(tbe, [1, 3], torch.tensor([0.5, -1.0, 2.0, 0.25]))
    rounded = full.split_embedding_weights()[0].half()
    assert torch.equal(half.split_embedding_weights()[0], rounded)
