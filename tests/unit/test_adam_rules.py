"""Rules on tensors for optimizers that FBGEMM has on CUDA only, against its formulas by hand."""

import math
from typing import Any

import pytest
import torch

from tests.support.tbe import upstream_gradient
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
    without_update,
)
from torchrec_2dsp.rows.update import RULES_WITHOUT_KERNEL, DirectLookup


def plain_updates(
    optimizer: EmbOptimType, grads: list[list[float]], weights: list[float], *, decay: float
) -> tuple[list[float], list[float], list[float]]:
    """FBGEMM's formulas in plain Python: a row's weights and moments after its gradients."""
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
    """Also for a row that comes twice in a bag: its gradients are one sum."""
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
    """Moments don't decay meanwhile, and their bias is corrected by the world's count."""
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
