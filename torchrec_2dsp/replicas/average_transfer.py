"""`AverageTransfer`: changed rows are sent to peers in pieces, so that the first can be used early.

Where a link takes as long as the arithmetic, sending everything and then adding it up takes twice
as long as it must. So a shard's rows are cut into ranges, and ranges with few changes are sent
together.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.collectives import Arriving, start_all_gather_ragged
from torchrec_2dsp.comms.packing import Packed, pack, unpack
from torchrec_2dsp.replicas.row_copies import SentRows
from torchrec_2dsp.replicas.synced_shard import SyncedShard

_RANGE_BYTES = 2 * 2**20
"""The size of a shard's range. Rows are sent singly if at most about a fifth of them has changed;
what all copies have changed of a range is smaller."""

_MAX_RANGES = 256
"""The most ranges of a shard, because every rank tells its peers a count for each."""

_MESSAGE_BYTES = 2**20
"""The bytes, from all peers together, that are worth a message of their own: with fewer, the
overhead of a message is more than what using it early saves."""


class Piece(NamedTuple):
    """The changed rows of a shard's ranges that are sent together."""

    shard: int
    """The shard's place in the list of shards."""
    counts: tuple[int, ...]
    """For each peer, how many rows of these ranges it has changed."""


def range_ends(shard: SyncedShard) -> torch.Tensor:
    """For each range of a shard, the row after its last one, the same for all copies."""
    num_bytes = sum(tensor.nbytes for tensor in shard.touched.tensors)
    num_ranges = min(max(1, num_bytes // _RANGE_BYTES), _MAX_RANGES)
    numbers = torch.arange(1, num_ranges + 1, device=shard.touched.device)
    return numbers * shard.touched.num_rows // num_ranges


def messages(
    counts: Sequence[Sequence[Sequence[int]]], row_bytes: Sequence[int]
) -> list[list[Piece]]:
    """The pieces of each message.

    Args:
        counts: how many rows have changed, by shard, by range and by peer.
        row_bytes: the bytes of a row of each shard.

    Example:
        Two shards and two peers. A range with many changes travels alone, others go together.

        >>> from torchrec_2dsp.replicas.average_transfer import messages
        >>> for pieces in messages([[[9000, 8000], [5, 7], [6, 8]], [[1, 0]]], [256, 128]):
        ...     print(*pieces)
        Piece(shard=0, counts=(9000, 8000))
        Piece(shard=0, counts=(11, 15)) Piece(shard=1, counts=(1, 0))
    """
    by_message: list[list[Piece]] = []
    num_bytes = _MESSAGE_BYTES
    for shard, ranges in enumerate(counts):
        for peer_counts in ranges:
            if not any(peer_counts):
                continue
            if num_bytes >= _MESSAGE_BYTES:
                by_message.append([])
                num_bytes = 0
            num_bytes += sum(peer_counts) * row_bytes[shard]
            pieces = by_message[-1]
            piece = Piece(shard, tuple(peer_counts))
            if pieces and pieces[-1].shard == shard:
                before = pieces.pop()
                piece = Piece(shard, tuple(map(sum, zip(before.counts, peer_counts, strict=True))))
            pieces.append(piece)
    return by_message


class AverageTransfer:
    """One message from each peer to all others, on its way."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        shards: Sequence[SyncedShard],
        own: Sequence[SentRows],
        group: dist.ProcessGroup,
    ) -> None:
        """
        Args:
            pieces: the pieces of the message.
            shards: all shards.
            own: this rank's rows of each piece.
            group: the peers.

        Collectives:
            One all-to-all, not waited for.
        """
        self._pieces = pieces
        self._shards = shards
        self._layouts = [
            [part for piece in pieces for part in _layout(shards[piece.shard], piece.counts[peer])]
            for peer in range(dist.get_world_size(group))
        ]
        self._rank = dist.get_rank(group)
        buffer = pack([part for sent in own for part in (sent.rows.int(), *sent.values)])
        sizes = [sum(part.num_bytes for part in layout) for layout in self._layouts]
        self._arriving: Arriving = start_all_gather_ragged(buffer, sizes, group)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sends to others."""
        return self._arriving.sent.nbytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that this rank would send to others besides, were its rows not encoded."""
        plain = sum(
            part.num_bytes
            for piece in self._pieces
            for part in _layout(
                self._shards[piece.shard], piece.counts[self._rank], is_encoded=False
            )
        )
        encoded = sum(part.num_bytes for part in self._layouts[self._rank])
        return (plain - encoded) * (len(self._layouts) - 1)

    def arrived(self) -> Iterator[tuple[Piece, list[SentRows]]]:
        """Each piece with what every peer has sent of it, after waiting for the message."""
        received = [
            iter(unpack(*pair))
            for pair in zip(self._arriving.by_rank(), self._layouts, strict=True)
        ]
        for piece in self._pieces:
            num_tensors = len(self._shards[piece.shard].rules)
            yield (
                piece,
                [
                    SentRows(next(parts).long(), tuple(next(parts) for _ in range(num_tensors)))
                    for parts in received
                ],
            )


def _layout(shard: SyncedShard, num_rows: int, *, is_encoded: bool = True) -> list[Packed]:
    """How rows are packed: their ids, then each tensor's rows, as they are or encoded."""
    values = [
        Packed((num_rows, *tensor.shape[1:]), tensor.dtype)
        if codec is None or not is_encoded
        else Packed((num_rows, codec.columns(dim)), codec.dtype)
        for tensor, codec, dim in zip(shard.touched.tensors, shard.codecs, shard.dims, strict=True)
    ]
    return [Packed((num_rows,), torch.int32), *values]
