"""Changed rows on their way between peers: in pieces, so that the first can be used early.

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
"""Of a shard. Rows travel singly if at most a fifth of them or so has changed, so what all copies
have changed of a range is less."""

_MAX_RANGES = 256
"""Of a shard: every rank tells its peers a count for each."""

_MESSAGE_BYTES = 2**20
"""What is worth a message of its own, from all peers together: with fewer bytes, what messages
cost besides is more than what using them early saves."""


class Piece(NamedTuple):
    """Some ranges of a shard, side by side."""

    shard: int
    """Its place in the list."""
    counts: tuple[int, ...]
    """By peer, how many rows it has changed there."""


def range_ends(shard: SyncedShard) -> torch.Tensor:
    """The row after each range of a shard: the same for all copies."""
    num_bytes = sum(tensor.nbytes for tensor in shard.touched.tensors)
    num_ranges = min(max(1, num_bytes // _RANGE_BYTES), _MAX_RANGES)
    numbers = torch.arange(1, num_ranges + 1, device=shard.touched.device)
    return numbers * shard.touched.num_rows // num_ranges


def messages(
    counts: Sequence[Sequence[Sequence[int]]], row_bytes: Sequence[int]
) -> list[list[Piece]]:
    """What travels together.

    Args:
        counts: changed rows by shard, by range and by peer.
        row_bytes: by shard.

    Example:
        Two shards and two peers. A range with many changes travels alone, others go together.

        >>> from torchrec_2dsp.replicas.row_transfer import messages
        >>> for pieces in messages([[[9000, 8000], [5, 7], [6, 8]], [[1, 0]]], [256, 128]):
        ...     print(*pieces)
        Piece(shard=0, counts=(9000, 8000))
        Piece(shard=0, counts=(11, 15)) Piece(shard=1, counts=(1, 0))
    """
    found: list[list[Piece]] = []
    num_bytes = _MESSAGE_BYTES
    for shard, ranges in enumerate(counts):
        for of_range in ranges:
            if not any(of_range):
                continue
            if num_bytes >= _MESSAGE_BYTES:
                found.append([])
                num_bytes = 0
            num_bytes += sum(of_range) * row_bytes[shard]
            piece = Piece(shard, tuple(of_range))
            if found[-1] and found[-1][-1].shard == shard:
                before = found[-1].pop()
                piece = Piece(shard, tuple(map(sum, zip(before.counts, of_range, strict=True))))
            found[-1].append(piece)
    return found


class RowTransfer:
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
            pieces: what the message holds.
            shards: all shards.
            own: this rank's rows, by piece.
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
        buffer = pack([part for one in own for part in (one.rows.int(), *one.values)])
        sizes = [sum(part.num_bytes for part in layout) for layout in self._layouts]
        self._arriving: Arriving = start_all_gather_ragged(buffer, sizes, group)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sends to others."""
        return self._arriving.sent.nbytes

    def arrived(self) -> Iterator[tuple[Piece, list[SentRows]]]:
        """Wait; each piece, and what every peer has sent of it."""
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


def _layout(shard: SyncedShard, num_rows: int) -> list[Packed]:
    """How rows travel: their ids, then each tensor's rows."""
    values = [
        Packed((num_rows, *one.shape[1:]), sent_as)
        for one, sent_as in zip(shard.touched.tensors, shard.sent_as, strict=True)
    ]
    return [Packed((num_rows,), torch.int32), *values]
