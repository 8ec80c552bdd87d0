"""The copies of changed rows: what travels of them, and how they become one.

Two copies are added as they are, which gives the bits of a dense average. With more of them, or in
a shorter type, what travels is the change since the last sync, whose value every peer knows: the
average is that value and the mean of the changes, which takes as much work as there are changes,
and not as there are copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrec_2dsp.replicas.state_rules import StateRule
from torchrec_2dsp.replicas.synced_shard import SyncedShard
from torchrec_2dsp.replicas.touched import Changed
from torchrec_2dsp.rows.gradients import RowSum


@dataclass(frozen=True)
class SentRows:
    """The rows of a shard that one peer has changed, and what it sends of them."""

    rows: torch.Tensor
    """Ascending."""
    values: tuple[torch.Tensor, ...]
    """For each tensor of the shard, see `rows_to_send`."""

    def part(self, places: slice) -> "SentRows":
        """Some of the rows."""
        return SentRows(self.rows[places], tuple(value[places] for value in self.values))


def _sends_change(shard: SyncedShard, index: int, num_peers: int) -> bool:
    """Whether the change of a tensor travels, or its values; the largest value isn't a sum."""
    is_shorter = shard.sent_as[index] != shard.touched.tensors[index].dtype
    return is_shorter or (num_peers > 2 and shard.rules[index] is StateRule.AVERAGE)


def rows_to_send(shard: SyncedShard, changed: Changed, num_peers: int) -> SentRows:
    """The changed rows of a shard, as they travel."""
    values = [tensor.index_select(0, changed.rows) for tensor in shard.touched.tensors]
    return SentRows(
        changed.rows,
        tuple(
            (value - base).to(sent_as) if _sends_change(shard, index, num_peers) else value
            for index, (value, base, sent_as) in enumerate(
                zip(values, changed.bases, shard.sent_as, strict=True)
            )
        ),
    )


def average_rows(shard: SyncedShard, own: Changed, peers: Sequence[SentRows]) -> int:
    """Write the average of the rows that any peer has changed; how many there are.

    Args:
        shard: of this rank.
        own: what this rank has changed.
        peers: what all have sent, in an order that is the same on every rank.
    """
    by_row = RowSum(torch.cat([peer.rows for peer in peers]))
    rows = by_row.keys
    places = by_row.places().split([peer.rows.numel() for peer in peers])
    for index, (tensor, own_base) in enumerate(zip(shard.touched.tensors, own.bases, strict=True)):
        tensor.index_copy_(0, own.rows, own_base)
        base = tensor.index_select(0, rows)
        sent = [peer.values[index] for peer in peers]
        if _sends_change(shard, index, len(peers)):
            changes = torch.cat([change.float() for change in sent])
            total = by_row.of(changes.view(len(changes), -1)).view_as(base)
            average = (total.div_(len(peers)) + base).to(tensor.dtype)
        else:
            copies = [base.index_copy(0, *one) for one in zip(places, sent, strict=True)]
            average = shard.rules[index].combine(copies)
        tensor.index_copy_(0, rows, average)
    return rows.numel()
