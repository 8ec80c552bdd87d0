"""Stochastic rounding against plain Python, number by number, and its distribution."""

import math
from dataclasses import replace

import pytest
import torch

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
        # What is between subnormal numbers counts in steps of 2^-13 of their distance.
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
    # Half of the steps into which float32 divides the distance of two subnormal numbers.
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
    """As FBGEMM looks up float32 tables with the same numbers, in another order of additions."""
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
            # A GPU is waited for by each of these.
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
    """Its kernels for GPUs, which a tensor on the meta device stands for, have no such type."""
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
