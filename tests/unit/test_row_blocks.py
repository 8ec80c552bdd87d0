"""Rows of several tables, numbered through and added up, against brute force."""

from random import Random

import torch
from hypothesis import given, strategies as st

from torchrec_2dsp._compat.fbgemm import TbeShape
from torchrec_2dsp.rows.gradients import RowSum, blocks_of

keys_of_contributions = st.lists(st.integers(0, 9), max_size=12)


@given(keys_of_contributions, st.randoms(use_true_random=False), st.booleans())
def test_contributions_are_added_by_row(keys: list[int], random: Random, weighted: bool) -> None:
    """Whole numbers have exact sums in any order."""
    contributions = torch.arange(2.0 * len(keys)).view(-1, 2)
    places = torch.tensor(random.sample(range(len(keys)), len(keys)), dtype=torch.int64)
    weights = torch.arange(float(len(keys))) if weighted else None
    dense = torch.zeros(10, 2)
    for index, key in enumerate(keys):
        dense[key] += contributions[places[index]] * (index if weighted else 1)

    rows = RowSum(torch.tensor(keys, dtype=torch.int64), places, weights)

    assert rows.keys.tolist() == sorted(set(keys))
    assert torch.equal(rows.of(contributions), dense[rows.keys])


@given(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from([4, 8])), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_a_key_stands_for_one_row(tables: list[tuple[int, int]], random: Random) -> None:
    """Numbering through and back, whatever the order of the tables' features."""
    order = random.sample(range(len(tables)), len(tables))
    num_rows, dims = zip(*tables, strict=True)
    blocks = blocks_of(TbeShape(num_rows, dims, tuple(order), False, False))

    found = {}
    for block in blocks:
        assert {dims[table] for table in block.tables} == {block.dim}
        found |= zip(block.tables, block.rows_of(torch.arange(block.num_rows)), strict=True)

    assert {table: rows.tolist() for table, rows in found.items()} == {
        table: list(range(num)) for table, num in enumerate(num_rows)
    }


def test_large_blocks_have_long_keys() -> None:
    for num_rows, dtype in ((2**31 - 1, torch.int32), (2**31, torch.int64)):
        (block,) = blocks_of(TbeShape((num_rows,), (8,), (0,), False, False))
        assert block.key_dtype is dtype
