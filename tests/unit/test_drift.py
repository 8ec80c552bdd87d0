"""Checksums of rows, and how differing rows are named."""

import pytest
import torch
from hypothesis import given, strategies as st

from torchrec_2dsp.replicas.drift import CopiedShard, _checksums, _named

DTYPES = [torch.float32, torch.float16, torch.int64, torch.uint8]


@given(st.integers(1, 3000), st.sampled_from([1, 4]), st.sampled_from(DTYPES), st.data())
def test_one_changed_bit_changes_one_sum(
    num_rows: int, dim: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = torch.zeros((num_rows, dim), dtype=dtype)
    row = data.draw(st.integers(0, num_rows - 1))
    column = data.draw(st.integers(0, dim - 1))
    before = _checksums(tensor)
    tensor[row, column] = 1
    changed = (_checksums(tensor) != before).nonzero().view(-1).tolist()
    assert changed == [row // 1024]


def test_rows_that_have_changed_places_change_the_sum() -> None:
    tensor = torch.rand(100, 4)
    swapped = tensor[torch.tensor([1, 0, *range(2, 100)])]
    assert not torch.equal(_checksums(tensor), _checksums(swapped))


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ([0], "500 to 1523"),
        ([0, 1, 3], "500 to 2547, 3572 to 4595"),
        ([9], "9716 to 10499"),
        (
            [0, 2, 4, 6, 8],
            "500 to 1523, 2548 to 3571, 4596 to 5619, 6644 to 7667 and 1 more ranges",
        ),
    ],
)
def test_ranges_are_those_of_the_table(differs: list[int], said: str) -> None:
    shard = CopiedShard("t0", 500, (torch.zeros(10_000, 1),))
    flags = torch.zeros(10, dtype=torch.bool)
    flags[differs] = True
    assert _named(shard, flags) == said
