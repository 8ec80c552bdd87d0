"""Stochastic rounding and 8-bit rows, against plain Python and against float32 tensors."""

import copy
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any, cast

import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tests.support.rounding import draw, neighbours, rounded_one
from tests.support.tbe import MEAN, SEQUENCE, SUM, Case, make_ids, make_tbe
from torchrec_2dsp._compat.fbgemm import (
    PoolingMode,
    SparseType,
    adopt_lookup,
    last_lookup,
    params_to_build,
    updates_by_rule,
)
from torchrec_2dsp.rows.eight_bits import EightBitRows, RowStore, decoded, encoded, plain
from torchrec_2dsp.rows.gradients import sources_of_bags
from torchrec_2dsp.rows.rounding import HALF_TYPES, RoundedTable, rounded
from torchrec_2dsp.rows.update import DirectUpdater, quickest_updater

TABLE = RoundedTable("t_user", 0, lambda rows: rows)
SIZES = [0.0, 1e-12, 3e-8, 5.97e-8, 1e-6, 6.1e-5, 6.2e-5, 1e-3, 0.1, 0.9999, 1.0, 3.14159, 1e3, 6e4]
"""float16 is subnormal below 6.1e-5, and ends at 65,504."""


def draws_of(seed: int, step: int, rows: list[int], num_columns: int) -> torch.Tensor:
    return TABLE.draws(torch.tensor(rows, dtype=torch.int64), num_columns, seed=seed, step=step)


def test_draws_are_those_of_plain_python() -> None:
    rows = [0, 1, 7, 2**31, 2**40 + 3]
    for seed, step in ((0, 1), (0, 2), (9, 1), (-1, 10**9)):
        drawn = draws_of(seed, step, rows, 10).int() & 0xFFFF
        wanted = [[draw(seed, step, "t_user", row, column) for column in range(10)] for row in rows]
        assert drawn.tolist() == wanted


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_a_few_rows_of_four_columns(num_rows: int) -> None:
    drawn = draws_of(0, 1, list(range(num_rows)), 4)
    assert torch.equal(drawn, draws_of(0, 1, [0, 1, 2], 8)[:num_rows, :4])


@pytest.mark.parametrize("first", [1, 2, 3, 4, 8, 13])
def test_a_column_shard_draws_its_part_of_the_tables(first: int) -> None:
    whole = draws_of(3, 5, [0, 4, 9], 24)
    shard = RoundedTable("t_user", first, lambda rows: rows + 4)
    part = shard.draws(torch.tensor([0, 5]), 11, seed=3, step=5)
    assert torch.equal(part, whole[1:, first : first + 11])


def test_each_part_of_the_key_counts() -> None:
    base = draws_of(0, 1, [0], 64)
    other_table = RoundedTable("t_item", 0, lambda rows: rows).draws(
        torch.tensor([0]), 64, seed=0, step=1
    )
    others = [draws_of(1, 1, [0], 64), draws_of(0, 2, [0], 64), draws_of(0, 1, [1], 64)]
    for drawn in (*others, other_table):
        assert (drawn == base).sum() < 3


def test_draws_are_even_and_bits_don_t_depend_on_one_another() -> None:
    drawn = draws_of(0, 1, list(range(4096)), 64)
    values = (drawn.double() % 65_536) / 65_536
    num = values.numel()
    assert abs(values.mean() - 0.5) < 5 * math.sqrt(1 / 12 / num)
    bits = (drawn.int()[..., None] >> torch.arange(16) & 1).view(-1, 16).double()
    assert (bits.mean(dim=0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(num)
    following = draws_of(0, 2, list(range(4096)), 64)
    neighbouring = [(values[:, 1:], values[:, :-1]), (values[1:], values[:-1])]
    neighbouring.append((values, (following.double() % 65_536) / 65_536))
    for first, second in neighbouring:
        joined = torch.stack([first.flatten(), second.flatten()])
        assert abs(torch.corrcoef(joined)[0, 1]) < 5 / math.sqrt(joined.shape[1])


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_rounding_is_that_of_exact_fractions(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(SIZES).repeat(40)
    values = sizes * (1 + torch.rand(sizes.shape, generator=generator) / 16)
    values *= torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
    bits = torch.randint(0, 2**16, values.shape, generator=generator)
    if dtype is torch.float16:
        # Between subnormal numbers, fractions count in steps of 2^-13 of their distance.
        small = values.abs() < 2**-14
        values = torch.where(small, (values * 2.0**37).round() / 2.0**37, values)
    own = rounded(values, bits.to(torch.int16), dtype)
    wanted = [
        rounded_one(value, drawn, dtype)
        for value, drawn in zip(values.tolist(), bits.tolist(), strict=True)
    ]
    assert own.tolist() == wanted
    assert own.dtype is dtype


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("value", [2e-7, 3e-5, -0.01, 0.123456, -1.0001, 777.7])
def test_the_mean_over_all_draws_is_the_value(dtype: torch.dtype, value: float) -> None:
    exact = torch.tensor(value)
    all_draws = torch.arange(2**16).to(torch.int16)
    results = rounded(exact.expand(2**16), all_draws, dtype)
    lower, upper = neighbours(exact.item(), dtype)
    assert set(results.tolist()) == {lower, upper}
    # Half the steps into which float32 divides the distance between two subnormal numbers.
    bound = abs(upper - lower) * 2**-14 if abs(value) < 2**-14 else 0.0
    assert abs(results.double().mean().item() - exact.item()) <= bound


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_numbers_of_the_type_stay_and_the_ends_are_as_torchs(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for bits in (0, 1, 0x7FFF, -1):
        draws = torch.full(every.shape, bits, dtype=torch.int16)
        again = rounded(every.float(), draws, dtype)
        is_number = ~every.isnan()
        assert torch.equal(again.view(torch.int16)[is_number], every.view(torch.int16)[is_number])
        assert bool(again[~is_number].isnan().all())
        largest = torch.finfo(dtype).max
        beyond = torch.tensor([largest * (1 + 2**-13), -largest * (1 + 2**-9), math.inf, -math.inf])
        assert torch.equal(rounded(beyond, draws[:4], dtype), beyond.to(dtype))


@pytest.mark.parametrize(
    ("pooling", "weighted"), [(SUM, False), (SUM, True), (MEAN, False), (SEQUENCE, False)]
)
def test_rows_in_bf16_are_summed_in_float32(
    pooling: PoolingMode, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lookup matches FBGEMM's on equal float32 tables, except for the order of additions."""
    tables = ((11, 8), (7, 8), (5, 8))
    case = Case(tables, (0, 0, 1, 2), pooling, weighted=weighted, max_length=9)
    plain, in_bf16 = make_tbe(case), make_tbe(replace(case, precision=SparseType.BF16))
    assert not updates_by_rule(plain)
    adopt_lookup(plain)
    adopt_lookup(in_bf16)
    assert updates_by_rule(in_bf16)
    for weight, exact in zip(
        in_bf16.split_embedding_weights(), plain.split_embedding_weights(), strict=True
    ):
        assert weight.dtype is torch.bfloat16
        weight.copy_(exact)
        exact.copy_(weight)
    for step in range(3):
        batch = make_ids(case, step)
        expected = plain(*batch)
        # What isn't made where the ids are doesn't go with them.
        with torch.device("meta"), monkeypatch.context() as patch:
            # Each of these would wait for a GPU.
            patch.setattr(torch.Tensor, "__int__", None, raising=False)
            output = in_bf16(*batch)
        assert output.dtype is torch.float32
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
        ids, offsets = last_lookup(in_bf16)
        assert torch.equal(ids, batch[0])
        assert torch.equal(offsets, batch[1])
    if not weighted:
        # A batch without samples, and one without ids.
        for offsets in (torch.zeros(1, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)):
            no_ids = torch.zeros(0, dtype=torch.int64)
            assert in_bf16(no_ids, offsets).abs().sum() == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_device_looks_up_rows_in_bf16_by_fbgemm(device: str) -> None:
    """FBGEMM's GPU kernels lack that type; a tensor on the meta device stands for a GPU."""
    case, place = Case(precision=SparseType.BF16), torch.device(device)
    tbe = make_tbe(case, place, **params_to_build({}, case.precision, place))
    adopt_lookup(tbe)
    assert "forward" in vars(tbe)
    assert isinstance(quickest_updater(tbe), DirectUpdater)


def test_shares_of_means_are_float32_whatever_the_default_type() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        _, shares = sources_of_bags(torch.tensor([[3]]), None, 3, is_mean=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert shares is not None
    assert shares.dtype == torch.float32


FLOATS = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-1, 1, width=32) | st.just(0.0)
ROWS = arrays("float32", st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=FLOATS)


def in_python(row: list[float], draws: list[int] | None) -> list[float]:
    """Round a row with exact fractions."""
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
    # Steps plus draw are rounded to float32, which may reach the next whole number.
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
