"""Touched rows, against brute force; packing; and the rules for optimizer states."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from torchrec_2dsp.comms.collectives import Packed, pack, unpack
from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.replicas import row_average
from torchrec_2dsp.replicas.drift import _checksums, _named, fingerprint
from torchrec_2dsp.replicas.row_average import messages, range_ends
from torchrec_2dsp.replicas.synced_shard import (
    StateRule,
    SyncedShard,
    TableShard,
    TouchedRows,
    break_even_share,
    state_rule_for,
)

NUM_ROWS = 12
ids = st.lists(st.integers(0, NUM_ROWS - 1), max_size=20)


@given(st.lists(st.lists(ids, max_size=4), max_size=4))
@settings(deadline=None)
def test_noted_rows_have_the_values_of_the_last_sync(intervals: list[list[list[int]]]) -> None:
    """Several backwards per interval each change the rows that they note."""
    weight, moment = torch.rand(NUM_ROWS, 3), torch.rand(NUM_ROWS)
    touched = TouchedRows([weight, moment], max_share=1.0)
    for backwards in intervals:
        bases = weight.clone(), moment.clone()
        for batch in backwards:
            rows = torch.tensor(batch, dtype=torch.int64)
            touched.note(rows)
            weight[rows], moment[rows] = torch.rand(len(batch), 3), torch.rand(len(batch))
        changed = touched.changed()
        expected = sorted({row for batch in backwards for row in batch})
        assert sorted(changed.rows.tolist()) == expected
        for noted, base in zip(changed.values, bases, strict=True):
            assert torch.equal(noted, base[changed.rows])
        assert touched.bitmap().nonzero().view(-1).tolist() == expected
        touched.forget()
        assert touched.changed().rows.numel() == 0
        assert not touched.bitmap().any()


@given(st.lists(ids, min_size=1, max_size=5), st.floats(0.0, 1.0))
@settings(deadline=None)
def test_too_many_rows_are_remembered_by_the_bitmap(
    backwards: list[list[int]], share: float
) -> None:
    touched = TouchedRows([torch.rand(NUM_ROWS, 2)], max_share=share)
    for batch in backwards:
        touched.note(torch.tensor(batch, dtype=torch.int32))
    expected = {row for batch in backwards for row in batch}

    assert touched.is_overfull == (len(expected) > int(share * NUM_ROWS))
    assert set(touched.bitmap().nonzero().view(-1).tolist()) == expected
    assert touched.changed().rows.numel() == (0 if touched.is_overfull else len(expected))
    touched.forget()
    assert not touched.is_overfull
    assert not touched.bitmap().any()


def test_the_whole_shard_is_cheaper_beyond_the_break_even() -> None:
    for num_peers in (2, 3, 4, 8):
        for row_bytes in (8, 260, 1028):
            share = break_even_share(row_bytes, num_peers)
            touched = share * (row_bytes + 4) * (num_peers - 1)
            whole = 2 * (num_peers - 1) / num_peers * row_bytes
            assert 0.02 * whole < touched < 0.35 * whole
    # Wide rows cost little besides their bytes, narrow ones mostly their ids.
    shares = [break_even_share(row_bytes, 2) for row_bytes in (8, 68, 260, 1028)]
    assert shares == sorted(shares)
    assert shares[-1] / shares[0] > 5


NOTED_DTYPES = [torch.float32, torch.float16, torch.int32, torch.int64, torch.uint8, torch.float64]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from(NOTED_DTYPES))))
@settings(deadline=None)
def test_tensors_survive_packing(sizes: list[tuple[int, int, torch.dtype]]) -> None:
    tensors = [torch.randint(0, 100, size[:2]).to(size[2]) for size in sizes]
    layout = [Packed(tuple(tensor.shape), tensor.dtype) for tensor in tensors]

    buffer = pack(tensors)

    assert buffer.dtype == torch.uint8
    assert buffer.numel() == sum(entry.num_bytes for entry in layout)
    for actual, tensor in zip(unpack(buffer, layout), tensors, strict=True):
        assert actual.dtype == tensor.dtype
        assert torch.equal(actual, tensor)


def test_a_column_is_packed_as_it_reads() -> None:
    table = torch.arange(6).view(2, 3)

    (column,) = unpack(pack([table[:, 1]]), [Packed((2,), torch.int64)])

    assert column.tolist() == [1, 4]


def test_rules() -> None:
    copies = [torch.tensor([1.0, 5.0]), torch.tensor([4.0, 2.0]), torch.tensor([1.0, 2.0])]
    assert StateRule.AVERAGE.combine(copies).tolist() == [2.0, 3.0]
    assert StateRule.MAX.combine(copies).tolist() == [4.0, 5.0]
    counts = [torch.tensor([3, 2**60 + 1]), torch.tensor([4, 2])]
    assert StateRule.MAX.combine(counts).tolist() == [4, 2**60 + 1]


def test_half_precision_is_averaged_in_full() -> None:
    copies = [torch.tensor([60_000.0], dtype=torch.float16)] * 2
    average = StateRule.AVERAGE.combine(copies)
    assert average.dtype == torch.float16
    assert average.item() == 60_000.0


def test_an_unknown_state_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no rule for the optimizer state 'fancy' of table"):
        state_rule_for("fancy", "t0")


NUM_PEERS = 3
PEERS = st.lists(st.integers(0, 9_000), min_size=NUM_PEERS, max_size=NUM_PEERS)
SHARDS = st.lists(st.lists(PEERS, max_size=6), max_size=4)


@given(SHARDS)
def test_every_changed_row_is_in_one_piece(counts: list[list[list[int]]]) -> None:
    actual = messages(counts, [256] * len(counts))

    pieces = [piece for message in actual for piece in message]
    assert [piece.shard for piece in pieces] == sorted(piece.shard for piece in pieces)
    for shard, ranges in enumerate(counts):
        for peer in range(NUM_PEERS):
            sent = sum(piece.counts[peer] for piece in pieces if piece.shard == shard)
            assert sent == sum(of_range[peer] for of_range in ranges)


@given(SHARDS)
def test_a_message_is_worth_it(counts: list[list[list[int]]]) -> None:
    actual = messages(counts, [256] * len(counts))

    for message in actual:
        assert all(any(piece.counts) for piece in message)
        shards = [piece.shard for piece in message]
        assert len(set(shards)) == len(shards)
    for message in actual[:-1]:
        assert sum(sum(piece.counts) for piece in message) * 256 >= row_average._MESSAGE_BYTES


@pytest.mark.parametrize(
    ("num_rows", "range_bytes", "ends"),
    [(10, 10 * 32, [10]), (10, 4 * 32, [5, 10]), (10, 3 * 32, [3, 6, 10]), (3, 1, [1, 2, 3])],
)
def test_ranges_have_all_rows(
    num_rows: int, range_bytes: int, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_average, "_RANGE_BYTES", range_bytes)
    monkeypatch.setattr(row_average, "_MAX_RANGES", num_rows)
    touched = TouchedRows([torch.zeros(num_rows, 8)], 1.0)
    shard = SyncedShard("t", touched, (StateRule.AVERAGE,), (None,))

    assert range_ends(shard).tolist() == ends


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
    ("differs", "error_text"),
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
def test_ranges_are_those_of_the_table(differs: list[int], error_text: str) -> None:
    shard = TableShard("t0", 500, 0, {"weight": torch.zeros(10_000, 1)})
    flags = torch.zeros(10, dtype=torch.bool)
    flags[differs] = True
    assert _named(shard, flags) == error_text


def test_a_fingerprint_depends_on_the_order_of_rows() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert fingerprint(rows).item() == 17.0
    assert fingerprint(rows.flip(0)).item() == 13.0
