"""What travels together: everything, once, in the order of shards and ranges."""

import pytest
import torch
from hypothesis import given, strategies as st

from torchrec_2dsp.replicas import row_average as average_transfer
from torchrec_2dsp.replicas.row_average import messages, range_ends
from torchrec_2dsp.replicas.synced_shard import StateRule, SyncedShard, TouchedRows

NUM_PEERS = 3
PEERS = st.lists(st.integers(0, 9_000), min_size=NUM_PEERS, max_size=NUM_PEERS)
SHARDS = st.lists(st.lists(PEERS, max_size=6), max_size=4)


@given(SHARDS)
def test_every_changed_row_is_in_one_piece(counts: list[list[list[int]]]) -> None:
    found = messages(counts, [256] * len(counts))

    pieces = [piece for message in found for piece in message]
    assert [piece.shard for piece in pieces] == sorted(piece.shard for piece in pieces)
    for shard, ranges in enumerate(counts):
        for peer in range(NUM_PEERS):
            sent = sum(piece.counts[peer] for piece in pieces if piece.shard == shard)
            assert sent == sum(of_range[peer] for of_range in ranges)


@given(SHARDS)
def test_a_message_is_worth_it(counts: list[list[list[int]]]) -> None:
    found = messages(counts, [256] * len(counts))

    for message in found:
        assert all(any(piece.counts) for piece in message)
        shards = [piece.shard for piece in message]
        assert len(set(shards)) == len(shards)
    for message in found[:-1]:
        assert sum(sum(piece.counts) for piece in message) * 256 >= average_transfer._MESSAGE_BYTES


@pytest.mark.parametrize(
    ("num_rows", "range_bytes", "ends"),
    [(10, 10 * 32, [10]), (10, 4 * 32, [5, 10]), (10, 3 * 32, [3, 6, 10]), (3, 1, [1, 2, 3])],
)
def test_ranges_have_all_rows(
    num_rows: int, range_bytes: int, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(average_transfer, "_RANGE_BYTES", range_bytes)
    monkeypatch.setattr(average_transfer, "_MAX_RANGES", num_rows)
    touched = TouchedRows([torch.zeros(num_rows, 8)], 1.0)
    shard = SyncedShard("t", touched, (StateRule.AVERAGE,), (None,))

    assert range_ends(shard).tolist() == ends
