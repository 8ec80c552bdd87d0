"""Rows that are spread: a bijection, and an even one."""

import pytest
import torch
from hypothesis import given, strategies as st

import torchrec_2dsp as tdsp
from torchrec_2dsp.plan.parameter_sharding import MAX_ROWS, RowSpread


@given(st.integers(1, 3_000))
def test_every_row_has_a_position_of_its_own(num_rows: int) -> None:
    spread = RowSpread(num_rows)
    rows = torch.arange(num_rows, dtype=torch.int32)
    positions = spread.positions(rows)
    assert positions.sort().values.tolist() == rows.tolist()
    assert spread.rows(positions).tolist() == rows.tolist()


@given(st.integers(1, MAX_ROWS), st.floats(0, 1))
def test_the_largest_tables_don_t_overflow(num_rows: int, share: float) -> None:
    row = min(num_rows - 1, int(share * num_rows))
    spread = RowSpread(num_rows)
    (position,) = spread.positions(torch.tensor([row])).tolist()
    assert position == row * spread.step % num_rows
    assert spread.rows(torch.tensor([position])).tolist() == [row]


@given(st.integers(1_000, 2_000_000), st.integers(2, 64), st.integers(100, 10_000), st.floats(0, 1))
def test_neighbours_are_shared_evenly(
    num_rows: int, num_owners: int, run: int, start: float
) -> None:
    """Of any run of rows, each owner has its share, up to a few."""
    first = int(start * (num_rows - 1))
    rows = torch.arange(first, min(first + run, num_rows))
    rows_per_owner = -(-num_rows // num_owners)
    owners = RowSpread(num_rows).positions(rows) // rows_per_owner
    counts = torch.bincount(owners, minlength=num_owners)
    shares = (num_rows - rows_per_owner * torch.arange(num_owners)).clamp(0, rows_per_owner)
    assert (counts - shares / num_rows * rows.numel()).abs().max() <= 12


def test_more_rows_are_refused() -> None:
    with pytest.raises(
        tdsp.errors.UnsupportedError, match="3,037,000,499 at most; use owners='block'"
    ):
        RowSpread(MAX_ROWS + 1)
