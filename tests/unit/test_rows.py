"""Captured row updates that are applied later, against FBGEMM's own fused backward."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    WeightDecayMode,
)
from hypothesis import given, settings, strategies as st

from tests.support.tbe import (
    ADAGRAD,
    MEAN,
    ROW_WISE,
    SEQUENCE,
    SGD,
    SUM,
    Batch,
    Case,
    make_ids,
    make_tbe,
    tensors_of,
    upstream_gradient,
)
from torchrec_2dsp._compat import fbgemm
from torchrec_2dsp._compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    PoolingMode,
    SparseType,
    Tbe,
    iteration_of,
    learning_rate_of,
    set_learning_rate,
)
from torchrec_2dsp.errors import SyncError
from torchrec_2dsp.replicas.capture import RowCapture
from torchrec_2dsp.rows.gradients import RowSum, stable_sort
from torchrec_2dsp.rows.update import (
    RULES,
    DirectLookup,
    DirectUpdater,
    RowUpdater,
    Updater,
    quickest_updater,
)

ROUNDING = 1e-6
"""The kernel adds in another order: a few float32 roundings of values near 1."""
ROUNDINGS = {SparseType.FP32: ROUNDING, SparseType.FP16: 1e-3}
"""Bounds by the tables' type: such a difference can tip a weight near 1 to its fp16 neighbour."""

MakeUpdater = Callable[[Tbe], Updater]


def row_capture(tbe: Tbe, **options: Any) -> RowCapture:
    return RowCapture(tbe, [f"t{table}" for table in range(len(tbe.embedding_specs))], **options)


def captured(capture: RowCapture, batch: Batch) -> torch.Tensor:
    ids, offsets, weights = batch
    # The bounds check writes into the ids that it is given.
    ids = ids.clone()
    return capture.lookup(lambda: capture.tbe(ids, offsets, weights), weights)


def in_even_bags(tbe: Tbe) -> RowUpdater:
    """Return an updater that works as on a GPU, in even bags."""
    updater = RowUpdater(tbe)
    updater.in_even_bags = True
    return updater


def train_both(
    case: Case, batches: list[Batch], make_updater: MakeUpdater = RowUpdater
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train by fused and by captured steps; return weights and state after each."""
    fused, ours = make_tbe(case), make_tbe(case)
    start = tensors_of(ours)
    capture, updater = row_capture(ours), make_updater(ours)
    for seed, batch in enumerate(batches):
        ids, offsets, weights = batch
        output = fused(ids.clone(), offsets, weights)
        grad = upstream_gradient(output, seed)
        output.backward(grad)
        before = tensors_of(ours)
        own_output = captured(capture, batch)
        assert torch.equal(own_output, output) or make_updater is not RowUpdater
        own_output.backward(grad)
        assert all(map(torch.equal, tensors_of(ours), before)), "a captured backward updated"
        (backward,) = capture.take()
        updater.apply(backward.gradients())
    assert ours.optimizer_args == fused.optimizer_args
    assert iteration_of(ours) == iteration_of(fused)
    assert learning_rate_of(ours) == learning_rate_of(fused)
    after = tensors_of(ours)
    num_ids = sum(ids.numel() for ids, _, _ in batches)
    assert all(map(torch.equal, after, start)) == (num_ids == 0)
    return tensors_of(fused), after


def check(case: Case, batches: list[Batch], make_updater: MakeUpdater = RowUpdater) -> None:
    """Compare both, bit for bit where they use the same kernel in the same way."""
    expected, actual = train_both(case, batches, make_updater)
    if case.is_exact and make_updater is RowUpdater:
        assert all(map(torch.equal, actual, expected))
        return
    tolerance = ROUNDINGS[case.precision]
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


SHAPES = {
    "empty bags only": Case(max_length=0),
    "long bags": Case(batch_size=40, max_length=60),
    "clipped sequence": Case(((11, 8), (7, 8)), pooling=SEQUENCE, max_gradient=0.3),
}
"""Shapes that `cases` draws seldom or never."""


@pytest.mark.parametrize("precision", [SparseType.FP32, SparseType.FP16])
@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROW_WISE])
@pytest.mark.parametrize("shape", SHAPES)
def test_captured_steps_equal_fused_ones(
    shape: str, optimizer: EmbOptimType, precision: SparseType
) -> None:
    case = replace(SHAPES[shape], optimizer=optimizer, precision=precision)
    check(case, [make_ids(case, seed) for seed in range(3)])


@pytest.mark.parametrize("factor", [1.0, 2000.0])
def test_rows_of_a_kernel_with_half_precision_output(factor: float) -> None:
    """Only the kernel's own input is in fp16; a row's sum may not even fit that type."""
    case = replace(SHAPES["long bags"], optimizer=SGD, output=SparseType.FP16)
    fused, ours = make_tbe(case), make_tbe(case)
    batch = make_ids(case, 0)
    output, own_output = fused(*batch), captured(capture := row_capture(ours), batch)
    assert output.dtype == own_output.dtype == torch.float16
    for entry in (output, own_output):
        entry.backward(upstream_gradient(entry, 0).half() * factor)
    RowUpdater(ours).apply(capture.take()[0].gradients())
    assert all(map(torch.equal, tensors_of(ours), tensors_of(fused)))


@pytest.mark.parametrize("pooling", [SUM, MEAN, SEQUENCE])
def test_an_empty_batch_changes_nothing(pooling: PoolingMode) -> None:
    case = Case(((11, 8), (7, 8)), pooling=pooling, batch_size=0)
    expected, actual = train_both(case, [make_ids(case, 0)])
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("pooling", [SUM, SEQUENCE])
def test_ids_out_of_range_act_as_in_the_kernel(pooling: PoolingMode) -> None:
    """The bounds check turns them into row 0, which then gets their gradient."""
    case = Case(((11, 8), (7, 8)), pooling=pooling)
    ids, offsets, weights = make_ids(case, 0)
    ids[0], ids[-1] = 10**6, -3
    check(case, [(ids, offsets, weights)])


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_learning_rate_is_that_of_the_lookup(elsewhere: bool) -> None:
    """The rate is the kernel's, or comes from a given function."""
    case = Case(optimizer=ADAGRAD)
    fused, ours = make_tbe(case), make_tbe(case)
    rate = 0.0
    capture = row_capture(ours, learning_rate=lambda: rate) if elsewhere else row_capture(ours)
    for seed, rate in enumerate([0.1, 0.02, 0.3]):
        set_learning_rate(fused, rate)
        if not elsewhere:
            set_learning_rate(ours, rate)
        batch = make_ids(case, seed)
        for output in (fused(*batch), captured(capture, batch)):
            output.backward(upstream_gradient(output, seed))
    set_learning_rate(ours, 7.0)
    backwards = capture.take()
    assert len(backwards) == 3
    for backward in backwards:
        RowUpdater(ours).apply(backward.gradients())
    assert not capture.take()
    assert all(map(torch.equal, tensors_of(ours), tensors_of(fused)))
    assert learning_rate_of(ours) == 7.0


def test_the_iteration_is_that_of_the_backward() -> None:
    case = Case()
    tbe = make_tbe(case)
    capture, updater = row_capture(tbe), RowUpdater(tbe)
    for seed in range(3):
        captured(capture, make_ids(case, seed)).sum().backward()
    pending = [backward.gradients() for backward in capture.take()]
    assert [gradients.step.iteration for gradients in pending] == [1, 2, 3]
    seen = []
    tbe.register_forward_hook(lambda *_: seen.append(iteration_of(tbe)))
    for gradients in pending:
        updater.apply(gradients)
    assert seen == [1, 2, 3]
    assert iteration_of(tbe) == 3


def test_the_iteration_is_that_of_the_forward() -> None:
    """The kernel's backward uses its own forward's count, even with other forwards in between."""
    case = Case()
    capture = row_capture(make_tbe(case))
    outputs = [captured(capture, make_ids(case, seed)) for seed in range(2)]
    for output in outputs:
        output.sum().backward()
    assert [backward.lookup.iteration for backward in capture.take()] == [1, 2]


def test_weights_get_the_gradients_of_the_kernels_own_backward() -> None:
    """Tables have several dimensions, and their features aren't adjacent."""
    tables, feature_tables = ((11, 8), (7, 16), (5, 8)), (0, 1, 0, 2)
    case = Case(tables, feature_tables, weighted=True, optimizer=SGD)
    ids, offsets, weights = make_ids(case, 0)
    assert weights is not None
    own, expected = weights.clone().requires_grad_(), weights.clone().requires_grad_()
    output = captured(row_capture(make_tbe(case)), (ids, offsets, own))
    grad = upstream_gradient(output, 0)
    output.backward(grad)
    make_tbe(case)(ids, offsets, expected).backward(grad)
    assert own.grad is not None
    assert own.grad.abs().min() > 0
    torch.testing.assert_close(own.grad, expected.grad, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("tables", [((11, 8), (7, 8)), ((11, 8), (7, 16))], ids=["one", "two"])
def test_a_gradient_that_is_not_finite_is_named(
    tables: tuple[tuple[int, int], ...], bad: float
) -> None:
    """The error names the table and the row, however many dimensions the kernel has."""
    capture = row_capture(make_tbe(Case(tables)))
    ids, offsets = torch.tensor([3, 5, 2, 6]), torch.arange(5)
    output = capture.lookup(lambda: capture.tbe(ids, offsets), None)
    grad = torch.ones_like(output)
    grad[1, -1] = bad
    output.backward(grad)
    with pytest.raises(SyncError, match=r"^table 't1' has a gradient for its row 6 .* not finite"):
        capture.take()


def test_gradients_may_be_too_large_for_their_sum() -> None:
    capture = row_capture(make_tbe(case := Case()))
    output = captured(capture, make_ids(case, 0))
    output.backward(torch.full_like(output, 2e37))
    (backward,) = capture.take()
    for block in backward.gradients().blocks:
        assert bool(block.grads.isfinite().all())
        assert math.isinf(block.grads.sum().item())


def test_rows_are_distinct_and_ascending() -> None:
    capture = row_capture(make_tbe(case := Case(feature_tables=(0, 0, 1))))
    ids, offsets, _ = batch = make_ids(case, 0)
    captured(capture, batch).sum().backward()
    (backward,) = capture.take()
    second_table = int(offsets[2 * case.batch_size])
    blocks = backward.gradients().blocks
    for block, looked_up in zip(blocks, (ids[:second_table], ids[second_table:]), strict=True):
        rows, counts = looked_up.unique(return_counts=True)
        assert torch.equal(block.keys, rows)
        # A gradient with ones reaches a row as often as it was looked up.
        assert torch.equal(block.grads, counts[:, None].expand_as(block.grads).float())


@given(st.lists(st.sampled_from([0, 1, 7, 2**40, 2**62]), max_size=9))
def test_equal_numbers_are_sorted_in_their_order(numbers: list[int]) -> None:
    given_numbers = torch.tensor(numbers, dtype=torch.int64)
    expected = given_numbers.sort(stable=True)
    assert all(map(torch.equal, stable_sort(given_numbers), expected))


def test_weighted_means_have_the_gradient_of_their_forward() -> None:
    """The definition is the oracle: FBGEMM's CPU backward for weighted means forgets the mean."""
    case = Case(((11, 8),), (0,), pooling=MEAN, weighted=True)
    ids, offsets, weights = batch = make_ids(case, 0)
    tbe = make_tbe(case)
    table = tbe.split_embedding_weights()[0].clone().requires_grad_()
    bag_of = torch.arange(case.batch_size).repeat_interleave(offsets.diff())
    assert weights is not None
    share = weights / offsets.diff()[bag_of]
    expected = torch.zeros(case.batch_size, 8).index_add(0, bag_of, table[ids] * share[:, None])
    capture = row_capture(tbe)
    output = captured(capture, batch)
    torch.testing.assert_close(output, expected, rtol=ROUNDING, atol=ROUNDING)
    grad = upstream_gradient(output, 0)
    output.backward(grad)
    expected.backward(grad)
    (block,) = capture.take()[0].gradients().blocks
    assert table.grad is not None
    torch.testing.assert_close(block.grads, table.grad[block.keys], rtol=ROUNDING, atol=ROUNDING)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pooling = draw(st.sampled_from([SUM, MEAN, SEQUENCE]))
    num_tables = draw(st.integers(1, 3))
    dims = draw(st.lists(st.sampled_from([4, 8, 12, 20]), min_size=3, max_size=3))
    rows = draw(st.lists(st.integers(1, 30), min_size=3, max_size=3))
    features = draw(st.lists(st.integers(1, 3), min_size=num_tables, max_size=num_tables))
    return Case(
        tables=tuple(
            (rows[table], dims[0] if pooling is SEQUENCE else dims[table])
            for table in range(num_tables)
        ),
        feature_tables=tuple(table for table, count in enumerate(features) for _ in range(count)),
        pooling=pooling,
        optimizer=draw(st.sampled_from([SGD, ADAGRAD, ROW_WISE])),
        precision=draw(st.sampled_from([SparseType.FP32, SparseType.FP16])),
        weighted=pooling is SUM and draw(st.booleans()),
        max_gradient=draw(st.sampled_from([None, 0.5])),
        # A tiny eps would blow a rounding up where the true gradient cancels to 0.
        eps=draw(st.sampled_from([1e-2, 1.0])),
        id_type=draw(st.sampled_from([torch.int32, torch.int64])),
        batch_size=draw(st.integers(1, 9)),
        max_length=draw(st.sampled_from([1, 2, 8])),
    )


@settings(max_examples=60)
@given(cases(), st.integers(0, 10**6), st.booleans())
def test_any_kernel_and_batch(case: Case, seed: int, has_even_bags: bool) -> None:
    has_one_block = len({case.tables[table][1] for table in case.feature_tables}) == 1
    batches = [make_ids(case, seed + step) for step in range(2)]
    check(case, batches, in_even_bags if has_even_bags and has_one_block else RowUpdater)


@pytest.mark.parametrize("is_training", [False, True])
def test_adam_counts_only_what_trains_on_a_gpu(is_training: bool) -> None:
    counters = {name: torch.tensor([3]) for name in ("iter", "iter_cpu")}
    types = {"optimizer": EmbOptimType.ADAM, "weights_precision": SparseType.FP32}
    tbe: Any = SimpleNamespace(current_device="cuda", **types, **counters)

    def run() -> torch.Tensor:
        for counter in counters.values():
            counter.add_(1)
        return torch.ones(1)

    assert fbgemm.without_update(tbe, run, is_training=is_training)().item() == 1
    assert {int(counter) for counter in counters.values()} == {3 + is_training}


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_as_on_a_gpu(weighted: bool) -> None:
    keys = (torch.rand(9_000) ** 9 * 500).long()
    weights = torch.rand(keys.numel()) if weighted else None
    contributions = torch.randn(keys.numel(), 8)
    sums = RowSum(keys, weights=weights, finds_places=True)
    expected = sums.of(contributions)
    torch.testing.assert_close(
        expected.double(),
        torch.zeros(sums.keys.numel(), 8, dtype=torch.double).index_add(
            0, sums.places, contributions.double() * (1 if weights is None else weights[:, None])
        ),
        rtol=1e-4,
        atol=1e-4,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrec_2dsp.rows.gradients.sum_bags", fbgemm._sum_as_lookup)
        assert torch.equal(sums.of(contributions), expected)
        sums.is_in_parts = True
        torch.testing.assert_close(sums.of(contributions), expected, rtol=1e-4, atol=1e-4)
    assert keys.bincount().max() > 4_000
    nothing = fbgemm.sum_bags(contributions[:0], keys[:0], torch.zeros(4, dtype=torch.int64))
    assert torch.equal(nothing, torch.zeros(3, 8))


TABLES = ((11, 8), (7, 8))


def trained_by_lookups(case: Case, *, direct: bool) -> list[torch.Tensor]:
    """Return outputs, weights and state after some steps, two of which overlap."""
    tbe = make_tbe(case)
    updating = DirectLookup(tbe, RULES[case.optimizer])
    outputs: list[torch.Tensor] = []

    def lookup(seed: int) -> torch.Tensor:
        ids, offsets, _ = make_ids(case, seed)
        run: Callable[[], torch.Tensor] = lambda: tbe(ids.clone(), offsets)  # noqa: E731
        outputs.append(updating.lookup(run) if direct else run())
        return outputs[-1]

    for seed in range(3):
        output = lookup(seed)
        output.backward(upstream_gradient(output, seed))
        set_learning_rate(tbe, 0.1 / (seed + 2))
    early = lookup(4)
    late = lookup(5)
    set_learning_rate(tbe, 7.0)  # For lookups that are yet to come.
    late.backward(upstream_gradient(late, 5))
    early.backward(upstream_gradient(early, 4))
    return [*(output.detach() for output in outputs), *tensors_of(tbe)]


@pytest.mark.parametrize("precision", ROUNDINGS)
@pytest.mark.parametrize("optimizer", RULES, ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("max_gradient", [None, 0.3])
@pytest.mark.parametrize("feature_tables", [(0, 1), (0, 0, 1)], ids=str)
def test_it_trains_as_the_fused_backward_does(
    precision: SparseType,
    optimizer: EmbOptimType,
    max_gradient: float | None,
    feature_tables: tuple[int, ...],
) -> None:
    case = Case(
        TABLES,
        feature_tables,
        SEQUENCE,
        optimizer,
        precision,
        max_gradient=max_gradient,
        eps=0.01,
    )
    rounding = ROUNDINGS[precision]
    result, expected = trained_by_lookups(case, direct=True), trained_by_lookups(case, direct=False)
    for own, fused in zip(result, expected, strict=True):
        torch.testing.assert_close(own, fused, rtol=rounding, atol=rounding)


def test_nothing_is_updated_by_an_empty_batch_or_before_the_backward() -> None:
    tbe = make_tbe(Case(TABLES, (0, 1), SEQUENCE, ROW_WISE))
    before = tensors_of(tbe)
    updating = DirectLookup(tbe, RULES[ROW_WISE])
    offsets = torch.zeros(3, dtype=torch.int64)
    output = updating.lookup(lambda: tbe(torch.empty(0, dtype=torch.int64), offsets))
    output.sum().backward()
    assert output.shape == (0, 8)
    waiting = updating.lookup(lambda: tbe(torch.tensor([1, 2]), torch.tensor([0, 1, 2])))
    assert all(map(torch.equal, tensors_of(tbe), before))
    waiting.sum().backward()
    assert not torch.equal(tensors_of(tbe)[0], before[0])


@pytest.mark.slow
@pytest.mark.alone
def test_it_is_quicker_than_the_fused_backward() -> None:
    case = Case(((60_000, 64),) * 4, (0, 1, 2, 3), SEQUENCE, ROW_WISE)
    generator = torch.Generator().manual_seed(0)
    asked = [torch.randperm(60_000, generator=generator)[:3_000] for _ in range(4 * 4)]
    ids, offsets = torch.cat(asked), torch.arange(0, 16 * 3_000 + 1, 3_000)
    grad = torch.rand(ids.numel(), 64)

    def milliseconds(*, direct: bool) -> float:
        tbe = make_tbe(case)
        updating = DirectLookup(tbe, RULES[ROW_WISE])
        repeats = []
        for _ in range(12):
            start = time.perf_counter()
            output = updating.lookup(lambda: tbe(ids, offsets)) if direct else tbe(ids, offsets)
            output.backward(grad)
            repeats.append(1e3 * (time.perf_counter() - start))
        return statistics.median(repeats)

    fused, own = milliseconds(direct=False), milliseconds(direct=True)
    print(f"\n{ids.numel():,} rows of 64: FBGEMM {fused:.1f} ms, by tensors {own:.1f} ms")
    assert own < 0.5 * fused


@pytest.mark.parametrize("optimizer", RULES, ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("precision", ROUNDINGS)
@pytest.mark.parametrize("feature_tables", [(0, 1), (0, 0, 1)], ids=str)
def test_a_rule_does_what_the_kernel_does(
    optimizer: EmbOptimType, precision: SparseType, feature_tables: tuple[int, ...]
) -> None:
    case = Case(feature_tables=feature_tables, optimizer=optimizer, precision=precision, eps=0.01)
    assert isinstance(quickest_updater(make_tbe(case)), DirectUpdater)
    check(case, [make_ids(case, seed) for seed in range(4)], quickest_updater)


OTHERS: list[tuple[EmbOptimType, dict[str, Any]]] = [
    (EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD, {}),
    # Rows are bytes with a scale; the kernel counts how often each is seen.
    (ROW_WISE, {"weights_precision": SparseType.INT8}),
    (
        ROW_WISE,
        {
            "weight_decay_mode": WeightDecayMode.COUNTER,
            "counter_based_regularization": CounterBasedRegularizationDefinition(),
        },
    ),
]


def test_a_rule_is_used_where_there_is_one() -> None:
    assert isinstance(quickest_updater(make_tbe(Case())), DirectUpdater)
    for optimizer, options in OTHERS:
        tbe = Tbe(
            [(10, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)], optimizer=optimizer, **options
        )
        assert isinstance(quickest_updater(tbe), RowUpdater), (optimizer, options)
