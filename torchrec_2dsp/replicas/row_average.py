"""Average table shards' touched rows over the ranks that hold copies.

Two peers send values, whose average has the bits of a dense average. More peers, or a codec, send
changes since the last sync, when all peers had the same values: the average is those values plus
the mean change, so that the work grows with the changes, not with the copies.

If a link takes as long as the arithmetic, sending everything first would take twice as long. So
shards are cut into ranges, and ranges with few changes travel together.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function

from torchrec_2dsp.codecs.rows import EXACT, RowCodec
from torchrec_2dsp.comms.alarm import Alarm, as_ours
from torchrec_2dsp.comms.collectives import Packed, pack, start_all_to_all_ragged, unpack
from torchrec_2dsp.errors import NotFiniteError, SyncError, TwoDError
from torchrec_2dsp.replicas.sync_action import SyncReport
from torchrec_2dsp.replicas.synced_shard import ShardRows, StateRule, SyncedShard
from torchrec_2dsp.replicas.whole_shard import average_whole_shard
from torchrec_2dsp.rows.gradients import RowSum


def _sends_change(shard: SyncedShard, index: int, num_peers: int) -> bool:
    """Return whether a tensor's changes are sent instead of its values; a maximum needs values."""
    return shard.codecs[index] is not None or (
        num_peers > 2 and shard.rules[index] is StateRule.AVERAGE
    )


def rows_to_send(shard: SyncedShard, changed: ShardRows, num_peers: int) -> ShardRows:
    """Return a shard's changed rows in wire format."""
    sent = []
    parts = zip(shard.touched.tensors, changed.values, shard.codecs, shard.dims, strict=True)
    for index, (tensor, base, codec, dim) in enumerate(parts):
        value = tensor.index_select(0, changed.rows)
        if _sends_change(shard, index, num_peers):
            value = value - base
        if codec is not None:
            value = codec.encode(value.float().view(len(value), dim))
        sent.append(value)
    return ShardRows(changed.rows, tuple(sent))


def average_rows(shard: SyncedShard, own: ShardRows, peers: Sequence[ShardRows]) -> int:
    """Write the average of all rows that any peer has changed, and count them.

    ``peers`` are in the same order on every rank.
    """
    by_row = RowSum(torch.cat([peer.rows for peer in peers]), finds_places=True)
    rows = by_row.keys
    places = by_row.places.split([peer.rows.numel() for peer in peers])
    for index, (tensor, own_base) in enumerate(zip(shard.touched.tensors, own.values, strict=True)):
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


_RANGE_BYTES = 2 * 2**20
"""A range's size. At most about a fifth of a shard's rows travel singly, so less is sent."""

_MAX_RANGES = 256
"""The most ranges per shard, because every rank sends its peers a count for each."""

_MESSAGE_BYTES = 2**20
"""The bytes, from all peers together, that justify a message: below this, its overhead exceeds the
gain from an early start."""


class Piece(NamedTuple):
    """The changed rows in some ranges of a shard, sent together."""

    shard: int
    """The shard's index."""
    counts: tuple[int, ...]
    """The number of these rows that each peer has changed."""


def range_ends(shard: SyncedShard) -> torch.Tensor:
    """Return each range's end row, the same for all copies."""
    num_bytes = sum(tensor.nbytes for tensor in shard.touched.tensors)
    num_ranges = min(max(1, num_bytes // _RANGE_BYTES), _MAX_RANGES)
    numbers = torch.arange(1, num_ranges + 1, device=shard.touched.device)
    return numbers * shard.touched.num_rows // num_ranges


def messages(
    counts: Sequence[Sequence[Sequence[int]]], row_bytes: Sequence[int]
) -> list[list[Piece]]:
    """Pack changed rows, counted by shard, range and peer, into messages.

    Example:
        Two shards and two peers. A range with many changes travels alone, others travel together.

        >>> from torchrec_2dsp.replicas.row_average import messages
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
    """A message in flight from each peer to all others.

    Collectives:

    One all-to-all when it is built, not waited for.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        shards: Sequence[SyncedShard],
        own: Sequence[ShardRows],
        group: dist.ProcessGroup,
    ) -> None:
        self._pieces = pieces
        self._shards = shards
        self._layouts = [
            [part for piece in pieces for part in _layout(shards[piece.shard], piece.counts[peer])]
            for peer in range(dist.get_world_size(group))
        ]
        self._rank = dist.get_rank(group)
        buffer = pack([part for sent in own for part in (sent.rows.int(), *sent.values)])
        sizes = [sum(part.num_bytes for part in layout) for layout in self._layouts]
        self._arriving = start_all_to_all_ragged([buffer] * len(sizes), sizes, group)

    @property
    def num_bytes(self) -> int:
        """Bytes sent to other ranks."""
        return self._arriving.sent.nbytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that the codecs save on this rank."""
        plain = sum(
            part.num_bytes
            for piece in self._pieces
            for part in _layout(
                self._shards[piece.shard], piece.counts[self._rank], is_encoded=False
            )
        )
        encoded = sum(part.num_bytes for part in self._layouts[self._rank])
        return (plain - encoded) * (len(self._layouts) - 1)

    def arrived(self) -> Iterator[tuple[Piece, list[ShardRows]]]:
        """Wait, then yield each piece with every peer's rows."""
        received = [
            iter(unpack(*pair))
            for pair in zip(self._arriving.by_rank(), self._layouts, strict=True)
        ]
        for piece in self._pieces:
            num_tensors = len(self._shards[piece.shard].rules)
            yield (
                piece,
                [
                    ShardRows(next(parts).long(), tuple(next(parts) for _ in range(num_tensors)))
                    for parts in received
                ],
            )


def _layout(shard: SyncedShard, num_rows: int, *, is_encoded: bool = True) -> list[Packed]:
    """Return how rows are packed: ids, then each tensor's rows, plain or encoded."""
    values = [
        Packed((num_rows, *tensor.shape[1:]), tensor.dtype)
        if codec is None or not is_encoded
        else Packed((num_rows, codec.columns(dim)), codec.dtype)
        for tensor, codec, dim in zip(shard.touched.tensors, shard.codecs, shard.dims, strict=True)
    ]
    return [Packed((num_rows,), torch.int32), *values]


_LABEL = "## note rows ##"

_WHOLE = -1
"""Replaces a row count if enough rows were touched to average the whole shard."""


class _OwnRows(NamedTuple):
    changed: ShardRows
    sent: ShardRows

    def part(self, places: slice) -> "_OwnRows":
        return _OwnRows(self.changed.part(places), self.sent.part(places))


class RowAverage:
    """Averages the rows that changed since the last run; then all copies are equal, bit for bit.

    Each peer sends the rows that it has changed. If a peer didn't send a row, its copy is the
    base, which every peer knows. So all peers average all copies in the same order.

    All ranks in the group list the same shards in the same order; the group is full duplex on gloo.
    The alarm reaches all ranks, including those without copies.
    """

    def __init__(
        self, shards: Sequence[SyncedShard], group: dist.ProcessGroup, alarm: Alarm
    ) -> None:
        self._shards = list(shards)
        self._group = group
        self._alarm = alarm
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._ends = [range_ends(shard) for shard in shards]
        self._row_bytes = [
            sum(tensor[:1].nbytes for tensor in shard.touched.tensors) for shard in shards
        ]

    def before_update(
        self, shards: Sequence[SyncedShard], rows: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """Note the rows that a backward is about to change in these shards."""
        with record_function(_LABEL):
            for shard, changing in zip(shards, rows(), strict=True):
                shard.touched.note(changing)

    def run(self) -> SyncReport:
        """Average all shards' touched rows.

        Collectives:
            An all-reduce of 8 bytes on the alarm's group, by which all ranks raise a rank's error;
            one all-gather of a header and all-to-alls on the group, and all-reduces of the
            shards with too many touched rows.
        """
        own_rows: list[_OwnRows | None] = []
        error: TwoDError | None = None
        try:
            own_rows = self._collect()
        except Exception as raised:
            error = as_ours(raised, SyncError)
        check = self._alarm.check(error)
        if not self._shards:
            check.wait()
            return SyncReport()
        headers, work = self._announce(own_rows)
        check.wait()
        work.wait()
        by_shard = torch.stack(headers, dim=1).split([ends.numel() for ends in self._ends])
        counts = [shard_counts.tolist() for shard_counts in by_shard]
        is_whole = [_WHOLE in ranges[0] for ranges in counts]
        sparse = [[] if whole else ranges for whole, ranges in zip(is_whole, counts, strict=True)]
        report = self._average_rows(own_rows, sparse)
        for shard, whole in zip(self._shards, is_whole, strict=True):
            if whole:
                report += average_whole_shard(shard, self._group)
            shard.touched.forget()
        return report

    def _collect(self) -> list[_OwnRows | None]:
        """Return this rank's changed rows; `None` for a shard with too many."""
        own_rows: list[_OwnRows | None] = []
        for shard in self._shards:
            if shard.touched.is_overfull:
                rows, is_finite = None, all(map(_is_finite, shard.touched.tensors))
            else:
                changed = shard.touched.changed()
                rows = _OwnRows(changed, rows_to_send(shard, changed, self._world_size))
                is_finite = all(map(_is_finite, rows.sent.values, shard.codecs))
            if not is_finite:
                raise NotFiniteError(
                    f"table {shard.table!r} has weights or optimizer state that are not finite; "
                    "nothing was synced. Lower the learning rate, or clip gradients"
                )
            own_rows.append(rows)
        return own_rows

    def _announce(
        self, own_rows: Sequence[_OwnRows | None]
    ) -> tuple[list[torch.Tensor], dist.Work]:
        """Start gathering each peer's row counts, by shard and range.

        Peers ignore the announcement of a rank that failed to collect its rows.
        """
        all_rows = [*own_rows, *[None] * (len(self._shards) - len(own_rows))]
        header = torch.cat([_counts(*pair) for pair in zip(self._ends, all_rows, strict=True)])
        headers = [torch.empty_like(header) for _ in range(self._world_size)]
        work = dist.all_gather(headers, header, group=self._group, async_op=True)
        assert work is not None
        return headers, work

    def _average_rows(
        self, own_rows: Sequence[_OwnRows | None], counts: Sequence[Sequence[Sequence[int]]]
    ) -> SyncReport:
        """Average the shards with few touched rows; the others have no counts here."""
        sent: list[tuple[AverageTransfer, list[ShardRows]]] = []
        num_sent = [0] * len(self._shards)
        for pieces in messages(counts, self._row_bytes):
            parts: list[_OwnRows] = []
            for piece in pieces:
                rows, start = own_rows[piece.shard], num_sent[piece.shard]
                assert rows is not None
                num_sent[piece.shard] += piece.counts[self._rank]
                parts.append(rows.part(slice(start, num_sent[piece.shard])))
            transfer = AverageTransfer(
                pieces, self._shards, [part.sent for part in parts], self._group
            )
            sent.append((transfer, [part.changed for part in parts]))
        report = SyncReport()
        for transfer, changes in sent:
            report += SyncReport(num_bytes=transfer.num_bytes, saved_bytes=transfer.saved_bytes)
            for (piece, peers), changed in zip(transfer.arrived(), changes, strict=True):
                num_rows = average_rows(self._shards[piece.shard], changed, peers)
                report += SyncReport(num_rows=num_rows)
        for shard, ranges in zip(self._shards, counts, strict=True):
            report += SyncReport(num_tensors=len(shard.rules) if any(map(any, ranges)) else 0)
        return report


def _counts(ends: torch.Tensor, rows: _OwnRows | None) -> torch.Tensor:
    if rows is None:
        return torch.full_like(ends, _WHOLE)
    places = torch.searchsorted(rows.changed.rows, ends)
    return places.diff(prepend=places.new_zeros(1))


def _is_finite(values: torch.Tensor, codec: RowCodec | None = None) -> bool:
    """Return whether all values will be finite on arrival."""
    is_float = codec is not None or values.is_floating_point()
    return not is_float or (codec or EXACT).all_finite(values)
