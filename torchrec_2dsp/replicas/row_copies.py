"""What peers send of their changed rows, and how the average of all copies is computed.

Two peers send values, whose average has the bits of a dense average. With more peers, or in a
shorter form, they send changes since the last sync, after which every peer has the same values. The
average is these values plus the mean of the changes, so that the work grows with the number of
changes, and not of copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrec_2dsp.codecs.rows import EXACT
from torchrec_2dsp.replicas.state_rules import StateRule
from torchrec_2dsp.replicas.synced_shard import SyncedShard
from torchrec_2dsp.replicas.touched import Changed
from torchrec_2dsp.rows.gradients import RowSum


@dataclass(frozen=True)
class SentRows:
    """The rows of a shard that one peer has changed, and what it sends of them."""

    rows: torch.Tensor
    """The row ids, ascending."""
    values: tuple[torch.Tensor, ...]
    """For each tensor of the shard, these rows' values or changes."""

    def part(self, places: slice) -> "SentRows":
        """The rows at these places."""
        return SentRows(self.rows[places], tuple(value[places] for value in self.values))


def _sends_change(shard: SyncedShard, index: int, num_peers: int) -> bool:
    """Whether changes of a tensor are sent instead of values; a maximum needs values."""
    return shard.codecs[index] is not None or (
        num_peers > 2 and shard.rules[index] is StateRule.AVERAGE
    )


def all_finite(shard: SyncedShard, values: Sequence[torch.Tensor]) -> bool:
    """Whether all that is sent of a shard is finite when it comes."""
    return all(
        (EXACT if codec is None else codec).all_finite(value)
        for codec, value in zip(shard.codecs, values, strict=True)
        if codec is not None or value.is_floating_point()
    )


def rows_to_send(shard: SyncedShard, changed: Changed, num_peers: int) -> SentRows:
    """The changed rows of a shard, as they are sent."""
    sent = []
    parts = zip(shard.touched.tensors, changed.bases, shard.codecs, shard.dims, strict=True)
    for index, (tensor, base, codec, dim) in enumerate(parts):
        value = tensor.index_select(0, changed.rows)
        if _sends_change(shard, index, num_peers):
            value = value - base
        if codec is not None:
            value = codec.encode(value.float().view(len(value), dim))
        sent.append(value)
    return SentRows(changed.rows, tuple(sent))


def average_rows(shard: SyncedShard, own: Changed, peers: Sequence[SentRows]) -> int:
    """Write the average of all rows that a peer has changed, and return how many there are.

    Args:
        shard: this rank's shard.
        own: the rows that this rank has changed.
        peers: what all peers have sent, in an order that is the same on every rank.
    """
    by_row = RowSum(torch.cat([peer.rows for peer in peers]))
    rows = by_row.keys
    places = by_row.places().split([peer.rows.numel() for peer in peers])
    for index, (tensor, own_base) in enumerate(zip(shard.touched.tensors, own.bases, strict=True)):
        tensor.index_copy_(0, own.rows, own_base)
        base = tensor.index_select(0, rows)
        sent = [peer.values[index] for peer in peers]
        if _sends_change(shard, index, len(peers)):
            codec, dim = shard.codecs[index] or EXACT, shard.dims[index]
            changes = torch.cat(sent)
            changes = changes.view(len(changes), codec.columns(dim))
            total = by_row.of(codec.decode(changes, dim)).view_as(base)
            average = (total.div_(len(peers)) + base).to(tensor.dtype)
        else:
            copies = [base.index_copy(0, *peer) for peer in zip(places, sent, strict=True)]
            average = shard.rules[index].combine(copies)
        tensor.index_copy_(0, rows, average)
    return rows.numel()
