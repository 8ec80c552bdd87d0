"""Ids in few bytes: what fits comes back, and what doesn't is no table's row."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from torchrec_2dsp.codecs.ids import num_id_bytes, pack_ids, unpack_ids

ROWS = st.one_of(st.integers(1, 70_000), st.integers(1, 2**40))


@given(ROWS, st.sampled_from([torch.int32, torch.int64]), st.data())
def test_ids_come_back(num_rows: int, dtype: torch.dtype, data: st.DataObject) -> None:
    highest = min(num_rows - 1, torch.iinfo(dtype).max)
    ids = data.draw(st.lists(st.integers(0, highest)))
    num_bytes = num_id_bytes(num_rows)
    if num_bytes <= dtype.itemsize:
        packed = pack_ids(torch.tensor([0, *ids, highest], dtype=dtype)[1:], num_bytes)
        assert packed.shape == (len(ids) + 1, num_bytes)
        assert unpack_ids(packed).tolist() == [*ids, highest]


@given(ROWS, st.integers(-(2**62), -1) | st.integers(0, 2**62))
def test_an_id_without_a_row_stays_one(num_rows: int, beyond: int) -> None:
    bad = beyond if beyond < 0 else num_rows + beyond
    num_bytes = num_id_bytes(num_rows)
    (arrived,) = unpack_ids(pack_ids(torch.tensor([bad]), num_bytes)).tolist()
    assert arrived >= num_rows


@pytest.mark.parametrize("num_bytes", range(1, 6))
def test_the_bytes_grow_where_the_last_number_is_needed(num_bytes: int) -> None:
    most = 256**num_bytes - 1
    assert num_id_bytes(most) == num_bytes
    assert num_id_bytes(most + 1) == num_bytes + 1
    np.testing.assert_array_equal(
        num_id_bytes(np.array([1.0, most, most + 1])), [1, num_bytes, num_bytes + 1]
    )
