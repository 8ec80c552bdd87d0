"""Rows in 8 bits: their numbers against plain Python, and as tensors against float32."""

import copy
import math
from fractions import Fraction
from typing import Any, cast

import fbgemm_gpu  # noqa: F401
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torchrec_2dsp.rows.eight_bits import EightBitRows, RowStore, decoded, encoded, plain

FLOATS = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-1, 1, width=32) | st.just(0.0)
ROWS = arrays("float32", st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=FLOATS)


def in_python(row: list[float], draws: list[int] | None) -> list[float]:
    """Round a row by fractions, which are exact."""
    low, high = Fraction(min(row)), Fraction(max(row))
    least, exponent = max((high - low) / 254, max(abs(low), abs(high)) / 2**23), -126
    while least > Fraction(2) ** exponent:
        exponent += 1
    scale = Fraction(2) ** exponent
    smallest = math.floor(low / scale) * scale
    rounded = []
    for place, number in enumerate(row):
        # float32 takes the difference, which is rounded where numbers are far apart.
        difference = torch.tensor(number) - torch.tensor(float(smallest))
        steps = Fraction(difference.item()) / scale
        code = round(steps) if draws is None else math.floor(steps + Fraction(draws[place], 2**16))
        rounded.append(float(smallest + min(code, 255) * scale))
    return rounded


@given(rows=ROWS, seed=st.integers(0, 2**32))
def test_rows_are_rounded_as_in_plain_python(rows: Any, seed: int) -> None:
    values = torch.from_numpy(rows)
    draws = torch.randint(0, 2**16, values.shape, generator=torch.Generator().manual_seed(seed))
    nearest, at_random = encoded(values), encoded(values, draws.to(torch.int16))
    assert decoded(nearest).tolist() == [in_python(row, None) for row in values.tolist()]
    wanted = [in_python(*pair) for pair in zip(values.tolist(), draws.tolist(), strict=True)]
    # The sum of steps and draw is rounded to float32, which may reach the next whole number.
    gaps = (decoded(at_random).double() - torch.tensor(wanted).double()).abs()
    steps = (
        at_random[:, -8:-4]
        .clone(memory_format=torch.contiguous_format)
        .view(torch.float32)
        .double()
    )
    assert (gaps <= steps).all()
    assert (gaps == 0).double().mean() > 0.5


@given(rows=ROWS, seed=st.integers(0, 2**32))
def test_what_is_read_is_written_back_unchanged(rows: Any, seed: int) -> None:
    draws = torch.randint(0, 2**16, rows.shape, generator=torch.Generator().manual_seed(seed))
    for given_draws in (None, draws.to(torch.int16)):
        kept = decoded(encoded(torch.from_numpy(rows), given_draws))
        for other_draws in (None, draws.flip(0).to(torch.int16)):
            assert torch.equal(decoded(encoded(kept, other_draws)), kept)


def test_fbgemm_reads_the_same_rows() -> None:
    packed = encoded(torch.randn(20, 12))
    assert torch.equal(torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(packed), decoded(packed))


def test_draws_make_the_mean_exact() -> None:
    row = torch.tensor([[0.0, 0.3, 0.7123, 1.0]])
    draws = torch.arange(0, 2**16, 16).to(torch.int16)[:, None].expand(-1, 4)
    mean = decoded(encoded(row.expand(len(draws), -1), draws)).double().mean(dim=0)
    torch.testing.assert_close(mean, row[0].double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_seen(bad: float) -> None:
    rows = torch.tensor([[1.0, bad, 2.0], [1.0, 1.5, 2.0]])
    kept = decoded(encoded(rows))
    assert kept[0].isnan().all()
    assert kept[1].tolist() == [1.0, 1.5, 2.0]


def rows_of(values: torch.Tensor) -> EightBitRows:
    num_rows, dim = values.shape
    store = RowStore.zeros(num_rows, dim, values.device)
    store.write(torch.arange(len(values)), values)
    return EightBitRows(store)


CHANGES: dict[str, Any] = {
    "copy_": lambda rows: rows.copy_(torch.ones(6, 4)),
    "uniform_": lambda rows: rows.uniform_(-1, 1, generator=torch.Generator().manual_seed(1)),
    "fill_": lambda rows: rows.fill_(2.5),
    "mul_": lambda rows: rows.mul_(2.0),
    "zero_ a part": lambda rows: rows[2:4].zero_(),
    "copy_ a part": lambda rows: rows.narrow(0, 1, 3)[1:].copy_(torch.ones(2, 4)),
    "put": lambda rows: rows.__setitem__(torch.tensor([4, -6]), torch.ones(2, 4)),
    "put by a mask": lambda rows: rows.__setitem__(torch.arange(6) > 3, torch.tensor(1.0)),
    "put in data": lambda rows: rows.data.__setitem__(torch.tensor([1]), torch.ones(1, 4)),
    "index_copy_": lambda rows: rows.index_copy_(0, torch.tensor([5, 0]), torch.ones(2, 4)),
    "index_add_": lambda rows: rows.index_add_(0, torch.tensor([5, 0]), rows.new_ones(2, 4)),
    "add_ itself": lambda rows: rows.add_(rows),
    "columns": lambda rows: rows.index_fill_(1, torch.tensor([1]), 0.5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_those_of_float32(name: str) -> None:
    rows = rows_of(torch.randn(6, 4))
    wanted = plain(rows)
    with torch.no_grad():
        CHANGES[name](rows)
        CHANGES[name](wanted)
    assert not torch.equal(plain(rows), torch.randn(6, 4))
    torch.testing.assert_close(plain(rows), decoded(encoded(wanted)), rtol=0, atol=0)


def test_reads_are_those_of_float32() -> None:
    rows = rows_of(torch.randn(6, 4))
    values = plain(rows)
    numbers = torch.tensor([3, 0, 3])
    for read in (
        lambda rows: rows.index_select(0, numbers),
        lambda rows: rows.index_select(1, numbers),
        lambda rows: rows[numbers],
        lambda rows: rows[1:5][numbers],
        lambda rows: rows[1:5].clone(),
        lambda rows: rows.sum(dim=0),
        lambda rows: rows.detach().double(),
        lambda rows: rows.isfinite().all(),
        lambda rows: torch.cat([rows, rows]),
    ):
        assert torch.equal(read(rows), read(values))
    assert rows[:0].numel() == 0
    assert not rows.is_pinned()


@pytest.mark.parametrize(
    "view",
    [
        lambda rows: rows[3],
        lambda rows: rows[:, 1:],
        lambda rows: rows[::2],
        lambda rows: rows.view(-1),
        lambda rows: rows.t(),
        lambda rows: torch.add(torch.ones(6, 4), 1.0, out=rows),
        lambda rows: torch._foreach_add_([rows], 1.0),
    ],
)
def test_views_whose_writes_would_be_lost_are_refused(view: Any) -> None:
    with pytest.raises(NotImplementedError, match="by their numbers"):
        view(rows_of(torch.randn(6, 4)))


def test_some_rows_are_kept_exactly() -> None:
    values = torch.randn(6, 4)
    rows = rows_of(values)
    rows.store.keep_exactly(torch.tensor([4, 1]))
    with torch.no_grad():
        rows.copy_(values)
    assert torch.equal(rows[torch.tensor([1, 4])], values[[1, 4]])
    assert torch.equal(rows[torch.tensor([0, 2, 3, 5])], decoded(encoded(values[[0, 2, 3, 5]])))
    rows.store.keep_exactly(torch.tensor([4]))
    assert torch.equal(rows[torch.tensor([1])], decoded(encoded(values[[1]])))
    assert torch.equal(rows[torch.tensor([4])], values[[4]])


def staged(rows: EightBitRows) -> Any:
    """Copy rows as DCP's asynchronous saves do."""
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    return cast(Any, DefaultStager(options).stage({"rows": rows}))["rows"]


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        staged,
        lambda rows: torch.from_numpy(rows.numpy()),
        lambda rows: torch.tensor(rows.tolist()),
        torch.from_dlpack,
        lambda rows: rows.new_empty(rows.shape).copy_(rows),
    ],
)
def test_a_copy_is_exact_and_of_its_own(copied: Any) -> None:
    values = torch.rand(7, 8)
    rows = EightBitRows(RowStore.zeros(7, 8, torch.device("cpu")))
    rows.store.keep_exactly(torch.tensor([2, 5]))
    rows.copy_(values)
    part = rows[1:6]
    expected = plain(part)
    assert torch.equal(expected[1], values[2])

    copy_of_part = copied(part)
    rows.zero_()

    assert torch.equal(plain(copy_of_part), expected)
