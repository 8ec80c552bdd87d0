"""A lookup that updates by itself, against FBGEMM's fused backward of a sequence."""

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from tests.support.tbe import (
    ROW_WISE,
    SEQUENCE,
    Case,
    make_ids,
    make_tbe,
    tensors_of,
    upstream_gradient,
)
from torchrec_2dsp._compat.fbgemm import EmbOptimType, SparseType, set_learning_rate
from torchrec_2dsp.rows.direct_lookup import DirectLookup
from torchrec_2dsp.rows.direct_update import RULES

ROUNDING = {SparseType.FP32: 1e-6, SparseType.FP16: 1e-3}
"""Row gradients are added in another order."""
TABLES = ((11, 8), (7, 8))


def trained(case: Case, *, direct: bool) -> list[torch.Tensor]:
    """Outputs, weights and state of some steps, two of which overlap."""
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


@pytest.mark.parametrize("precision", ROUNDING)
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
    rounding = ROUNDING[precision]
    found, expected = trained(case, direct=True), trained(case, direct=False)
    for mine, fused in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, fused, rtol=rounding, atol=rounding)


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
    """Of distinct rows that four ranks ask for; what it is there for."""
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

    fused, mine = milliseconds(direct=False), milliseconds(direct=True)
    print(f"\n{ids.numel():,} rows of 64: FBGEMM {fused:.1f} ms, by tensors {mine:.1f} ms")
    assert mine < 0.5 * fused
