"""`Thresholded` keeps the largest elements in both directions, and in served models."""

import copy
import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings, strategies as st

import torchrec_2dsp as tdsp
from torchrec_2dsp.dense.pipelined.activations import Activations, TensorKind
from torchrec_2dsp.dense.thresholded import ThresholdKind
from torchrec_2dsp.errors import ConfigError

KINDS: tuple[ThresholdKind, ...] = ("exact", "laplace")
every_kind = pytest.mark.parametrize("kind", KINDS)
NAN, INF = math.nan, math.inf


def activations(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def running(module: tdsp.Thresholded) -> torch.Tensor:
    """Return the running threshold in the state dict."""
    return module.state_dict()["running_threshold"]


def slow_exact(sample: list[float], density: float) -> list[float]:
    """Find a sample's largest elements one after the other."""
    num_kept = max(1, math.ceil(round(density * len(sample), 6)))
    by_size = sorted(range(len(sample)), key=lambda place: -abs(sample[place]))
    return [number if place in by_size[:num_kept] else 0.0 for place, number in enumerate(sample)]


@settings(max_examples=150)
@given(
    num_samples=st.integers(0, 9),
    dim=st.integers(1, 33),
    density=st.floats(0.01, 1.0) | st.sampled_from([0.07, 0.1, 0.25, 0.5, 2 / 32]),
    seed=st.integers(0, 10_000),
)
def test_exact_keeps_the_largest(num_samples: int, dim: int, density: float, seed: int) -> None:
    # All numbers in a sample differ, so there is one answer.
    given_numbers = activations(num_samples, dim, seed=seed)

    kept = tdsp.Thresholded(density)(given_numbers)

    expected = [slow_exact(sample, density) for sample in given_numbers.tolist()]
    assert kept.tolist() == expected
    assert kept.shape == given_numbers.shape


@given(
    num_samples=st.integers(0, 9),
    dim=st.integers(1, 33),
    density=st.floats(0.01, 0.99),
    seed=st.integers(0, 10_000),
)
def test_laplace_keeps_what_is_above_the_quantile(
    num_samples: int, dim: int, density: float, seed: int
) -> None:
    given_numbers = activations(num_samples, dim, seed=seed)

    kept = tdsp.Thresholded(density, "laplace")(given_numbers)

    flat = [abs(number) for sample in given_numbers.tolist() for number in sample]
    lowest = -math.log(density) * sum(flat) / max(1, len(flat))
    results = kept.flatten().tolist()
    for number, result in zip(given_numbers.flatten().tolist(), results, strict=True):
        # Rounding decides about a number equal to the threshold, as with a single number.
        if not math.isclose(abs(number), lowest, rel_tol=1e-5):
            assert result == (number if abs(number) > lowest else 0.0)


@every_kind
@pytest.mark.parametrize("density", [0.05, 0.1, 0.5, 0.9, 1.0])
def test_the_density_is_reached(kind: ThresholdKind, density: float) -> None:
    draws = torch.rand(500, 200, generator=torch.Generator().manual_seed(0))
    laplace = torch.distributions.Laplace(0.0, 3.0).icdf(draws * 0.999 + 0.0005)

    kept = tdsp.Thresholded(density, kind)(laplace)

    # With 100,000 numbers the error is far below a hundredth.
    assert (kept != 0).float().mean().item() == pytest.approx(density, abs=0.01)
    if kind == "exact":
        assert ((kept != 0).sum(dim=1) == math.ceil(density * 200)).all()


@every_kind
@pytest.mark.parametrize("shape", [(7,), (4, 7), (3, 4, 7)])
def test_a_sample_is_the_last_dim_and_the_input_stays(
    kind: ThresholdKind, shape: tuple[int, ...]
) -> None:
    given_numbers = activations(*shape)
    before = given_numbers.clone()

    kept = tdsp.Thresholded(0.3, kind)(given_numbers)

    assert kept.shape == given_numbers.shape
    assert torch.equal(given_numbers, before)
    flat = tdsp.Thresholded(0.3, kind)(given_numbers.reshape(-1, 7))
    assert torch.equal(kept.reshape(-1, 7), flat)


@every_kind
@pytest.mark.parametrize("training", [True, False])
def test_gradients_go_back_through_the_same_mask(kind: ThresholdKind, training: bool) -> None:
    module = tdsp.Thresholded(0.3, kind)
    module(activations(50, 11, seed=1))
    module.train(training)
    given_numbers = activations(50, 11).requires_grad_()
    upstream = activations(50, 11, seed=2)

    kept = module(given_numbers)
    kept.backward(upstream)

    mask = (kept != 0).float()
    assert 0 < mask.mean() < 1
    other = given_numbers.detach().clone().requires_grad_()
    (other * mask).backward(upstream)
    assert given_numbers.grad is not None
    assert other.grad is not None
    assert torch.equal(given_numbers.grad, other.grad)


@every_kind
def test_the_gradient_is_the_one_of_a_fixed_threshold(kind: ThresholdKind) -> None:
    """To first order, the loss changes as if the threshold were a constant."""
    torch.manual_seed(0)
    first = torch.nn.Linear(6, 20).double()
    last = torch.nn.Linear(20, 1).double()
    inputs = activations(30, 6).double()
    module = tdsp.Thresholded(0.3, kind).double()

    def loss() -> torch.Tensor:
        return torch.tanh(last(module(torch.relu(first(inputs))))).sum()

    before = loss()
    before.backward()
    assert first.weight.grad is not None
    kept = module(torch.relu(first(inputs))) != 0
    # A step so small that no number crosses the threshold.
    gradient = first.weight.grad.clone()
    step, direction = 1e-7, activations(20, 6, seed=3).double()
    with torch.no_grad():
        first.weight += step * direction
    assert torch.equal(module(torch.relu(first(inputs))) != 0, kept)
    slope = (loss() - before).item() / step
    assert slope == pytest.approx((gradient * direction).sum().item(), rel=1e-4)


def test_ties_never_let_more_through() -> None:
    kept = tdsp.Thresholded(0.25)(torch.ones(5, 8))
    assert (kept != 0).sum(dim=1).tolist() == [2] * 5
    # Ties are all above the fitted threshold, or all below.
    assert tdsp.Thresholded(0.5, "laplace")(torch.ones(5, 8)).all()
    assert not tdsp.Thresholded(0.1, "laplace")(torch.ones(5, 8)).any()


@every_kind
@pytest.mark.parametrize("shape", [(3, 8), (0, 8), (3, 0)])
def test_zeros_stay_zeros_and_nothing_may_be_empty(
    kind: ThresholdKind, shape: tuple[int, ...]
) -> None:
    zeros = torch.zeros(shape, requires_grad=True)
    module = tdsp.Thresholded(0.25, kind)
    kept = module(zeros)
    assert kept.shape == zeros.shape
    assert not kept.any()
    kept.sum().backward()
    assert zeros.grad is not None
    assert zeros.grad.isfinite().all()
    if kind == "laplace":
        assert running(module) == 0


@every_kind
@pytest.mark.parametrize("training", [True, False])
def test_what_is_not_finite_stays_visible(kind: ThresholdKind, training: bool) -> None:
    module = tdsp.Thresholded(0.3, kind)
    module(activations(20, 6))
    module.train(training)
    rows = activations(4, 6)
    rows[0, 2] = NAN
    rows[1, :5] = NAN
    rows[2, 4] = -INF

    kept = module(rows)

    assert torch.equal(kept.isnan(), rows.isnan())
    assert kept[2, 4] == -INF
    assert not kept[2:].isnan().any()


def test_a_bad_batch_does_not_stay_in_the_running_threshold() -> None:
    module, clean = (tdsp.Thresholded(0.3, "laplace") for _ in range(2))
    rows = activations(4, 6)
    clean(rows)
    rows = torch.cat([rows, torch.tensor([[NAN, INF, -INF] * 2])])
    module(rows)
    assert running(module).item() == pytest.approx(running(clean).item())
    before = running(module).clone()
    for nothing in (torch.full((2, 6), NAN), torch.empty(0, 6)):
        module(nothing)
        assert torch.equal(running(module), before)
    module(torch.full((2, 6), 1e38))
    assert running(module).isfinite()


def test_evaluation_uses_the_threshold_of_training() -> None:
    module = tdsp.Thresholded(0.1, "laplace")
    rows = activations(300, 40)
    # Before any training there is no threshold, and nothing is left out.
    assert torch.equal(module.eval()(rows), rows)

    module.train()
    first = module(rows)
    fitted = -math.log(0.1) * rows.abs().mean().item()
    assert running(module).item() == pytest.approx(fitted)
    module(3 * rows)
    expected = 0.99 * fitted + 0.01 * 3 * fitted
    assert running(module).item() == pytest.approx(expected)

    module.eval()
    kept = module(0.5 * rows)
    # By training's threshold, not the threshold for a batch half as large.
    assert torch.equal(kept != 0, 0.5 * rows.abs() > running(module))
    assert (kept != 0).sum() < (first != 0).sum() / 2
    assert running(module).item() == pytest.approx(expected)


def test_exact_does_the_same_in_evaluation() -> None:
    module, rows = tdsp.Thresholded(0.3), activations(10, 6)
    assert torch.equal(module.train()(rows), copy.deepcopy(module).eval()(rows))


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_numbers_keep_their_type(kind: ThresholdKind, dtype: torch.dtype) -> None:
    module, rows = tdsp.Thresholded(0.3, kind), activations(50, 20).to(dtype)
    for converted in (module, copy.deepcopy(module).to(dtype)):
        kept = converted(rows)
        assert kept.dtype == dtype
        assert torch.equal(kept[kept != 0], rows[kept != 0])
        assert 0.1 < (kept != 0).float().mean() < 0.5


@pytest.mark.parametrize(
    ("density", "dim", "forward", "backward"),
    [
        # 2 numbers with 4 bytes, and a bit for each of 32 places, or 16 bits for each number.
        (2 / 32, 32, 12, 8),
        # 103 numbers, and 1,024 bits, not 103 times 16.
        (0.1, 1_024, 103 * 4 + 128, 103 * 4),
        # 11 numbers, and 11 times 16 bits, not 1,024 bits.
        (0.01, 1_024, 11 * 4 + 22, 44),
        (1.0, 64, 256, 256),
        (1e-9, 64, 6, 4),
        # More numbers than 16 bits can tell apart.
        (1e-5, 2**20, 11 * 8, 44),
    ],
)
def test_the_bytes_count_numbers_and_places(
    density: float, dim: int, forward: int, backward: int
) -> None:
    module = tdsp.Thresholded(density)
    assert module.num_bytes(7, dim) == 7 * forward
    assert module.num_bytes(7, dim, backward=True) == 7 * backward


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("density", "shape"),
    [
        (2 / 32, (7, 32)),
        (0.1, (3, 2, 1_001)),
        (0.01, (5, 1_024)),
        (1e-4, (2, 40_000)),
        (1e-5, (1, 2**17)),
    ],
)
def test_kept_elements_travel_in_the_counted_bytes(
    density: float, shape: tuple[int, ...], wire: torch.dtype | None
) -> None:
    module, rows = tdsp.Thresholded(density), activations(*shape).requires_grad_()
    values, places = module.kept(rows)
    sent = Activations(values, places, whole_dim=shape[-1])
    kind = TensorKind.from_header(sent.kind.header(rows.device))
    on_wire = kind.on_wire(wire, is_gradient=False)
    message = on_wire.empty(shape[0], rows.device).copy_(sent.message(wire))
    num_rows = math.prod(shape[:-1])
    saved = 0 if wire is None else num_rows * module.num_kept(shape[-1]) * 2
    assert message.nbytes == module.num_bytes(num_rows, shape[-1]) - saved
    gradient = kind.on_wire(None, is_gradient=True).empty(shape[0], rows.device)
    assert gradient.nbytes == module.num_bytes(num_rows, shape[-1], backward=True)

    arrived = Activations.from_message(message, kind, wire).leaf(needs_gradient=True)
    expected = module(rows)
    assert torch.equal(arrived.whole(), expected if wire is None else expected.to(wire).float())
    factors = activations(*shape, seed=1)
    (factors * arrived.whole()).sum().backward()
    assert arrived.values.grad is not None
    values.backward(arrived.values.grad)
    (by_module,) = torch.autograd.grad((factors * module(rows)).sum(), rows)
    assert rows.grad is not None
    assert torch.equal(rows.grad, by_module)


@pytest.mark.parametrize("density", [0, -0.1, 1.5, NAN, INF])
def test_a_density_that_is_no_share_is_refused(density: float) -> None:
    message = f"density={density} is no share of numbers to keep; use one above 0 and at most 1"
    with pytest.raises(ConfigError, match=message):
        tdsp.Thresholded(density)


def test_an_unknown_threshold_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="threshold='normal' is unknown; use one of 'exact', 'lap"
    ):
        tdsp.Thresholded(0.1, cast(Any, "normal"))


def test_the_state_has_the_running_threshold_and_nothing_else() -> None:
    module = tdsp.Thresholded(0.1, "laplace")
    module(activations(10, 6))
    assert list(module.state_dict()) == ["running_threshold"]
    restored = tdsp.Thresholded(0.1, "laplace").eval()
    restored.load_state_dict(module.state_dict())
    rows = activations(10, 6, seed=1)
    assert torch.equal(restored(rows), module.eval()(rows))
    assert list(tdsp.Thresholded(0.1).state_dict()) == []
    assert not list(module.parameters())


def exported(module: torch.nn.Module, rows: torch.Tensor, way: str) -> Any:
    if way == "script":
        return torch.jit.script(module)
    batch = torch.export.Dim("batch")
    return torch.export.export(module, (rows,), dynamic_shapes=({0: batch},)).module()


@every_kind
@pytest.mark.parametrize("density", [0.3, 1.0])
@pytest.mark.parametrize("way", ["script", "export"])
# Upstream warns about every script, but serving in C++ still needs one.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_an_exported_module_does_the_same(way: str, kind: ThresholdKind, density: float) -> None:
    module = tdsp.Thresholded(density, kind)
    module(activations(50, 20))
    module.eval()
    serving = exported(module, activations(4, 20, seed=1), way)
    for num_samples in (1, 9):
        rows = activations(num_samples, 20, seed=2)
        assert torch.equal(serving(rows), module(rows))
    assert serving.state_dict() == module.state_dict()


@every_kind
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_script_trains_on(kind: ThresholdKind) -> None:
    module = tdsp.Thresholded(0.3, kind)
    script = torch.jit.script(copy.deepcopy(module))
    for seed in range(3):
        rows = activations(9, 20, seed=seed)
        assert torch.equal(script(rows), module(rows))
    assert script.state_dict() == module.state_dict()
