"""`RowAverage`: average the touched rows of table shards over the ranks that hold copies."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import record_function

from torchrec_2dsp.comms.agreement import as_ours
from torchrec_2dsp.comms.alarm import Alarm
from torchrec_2dsp.comms.collectives import all_gather_ragged
from torchrec_2dsp.comms.packing import Packed, pack, unpack
from torchrec_2dsp.errors import SyncError, TwoDError
from torchrec_2dsp.sync.report import SyncReport
from torchrec_2dsp.sync.synced_shard import SyncedShard
from torchrec_2dsp.sync.touched import Changed
from torchrec_2dsp.sync.whole_shard import average_whole_shard

_LABEL = "## note rows ##"
"""In profiles."""

_CHUNK_BYTES = 512 * 2**10
"""Rows are averaged so many bytes at a time, so that all copies of them stay in a core's cache."""

_WHOLE = -1
"""In place of a row count: so many rows were touched that the whole shard is averaged."""


@dataclass(frozen=True)
class _PeerRows:
    """The rows of a shard that one peer has changed, and their values there."""

    rows: torch.Tensor
    """Ascending."""
    values: tuple[torch.Tensor, ...]
    """As they travel, see `_sent`."""


@dataclass(frozen=True)
class _OwnRows(_PeerRows):
    """The same for this rank."""

    bases: tuple[torch.Tensor, ...]
    """The values after the last sync."""


@dataclass(frozen=True)
class _Announced:
    """How many rows each peer sends, on its way."""

    headers: list[torch.Tensor]
    """By peer, a number for each shard."""
    work: dist.Work

    def arrived(self) -> list[list[int]]:
        """Every peer's row counts by shard."""
        self.work.wait()
        return torch.stack(self.headers).tolist()


class RowAverage:
    """Averages what changed since the last run; afterwards the copies are equal bit for bit.

    Each peer sends the rows that it has changed. For the rows that a peer didn't send, its copy
    is the base, which every peer knows. So all compute the average of all copies, in the same
    order.
    """

    def __init__(
        self, shards: Sequence[SyncedShard], group: dist.ProcessGroup, alarm: Alarm
    ) -> None:
        """
        Args:
            shards: in the same order on every rank of the group; none on a rank without tables.
            group: the ranks that hold copies, in full duplex where that makes a difference.
            alarm: of all ranks, also of those that hold no copies of these shards.
        """
        self._shards = list(shards)
        self._group = group
        self._alarm = alarm
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)

    def before_update(
        self, shards: Sequence[SyncedShard], rows: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """Note the rows of these shards that a backward is about to change."""
        with record_function(_LABEL):
            for shard, changing in zip(shards, rows(), strict=True):
                shard.touched.note(changing)

    def run(self) -> SyncReport:
        """Average.

        Collectives:
            An all-reduce of 8 bytes on the alarm's group, by which an error of one rank is raised
            by all; one all-gather of a header and one all-to-all on the group, and all-reduces of
            the shards of which too many rows were touched.
        """
        mine: list[_OwnRows | None] = []
        error: TwoDError | None = None
        try:
            mine = self._collect()
        except Exception as raised:
            error = as_ours(raised, SyncError)
        check = self._alarm.check(error)
        announced = self._announce(mine)
        check.wait()
        if announced is None:
            return SyncReport()
        counts = announced.arrived()
        is_whole = [_WHOLE in shard_counts for shard_counts in zip(*counts, strict=True)]
        report = self._average_rows(mine, counts, is_whole)
        for shard, whole in zip(self._shards, is_whole, strict=True):
            if whole:
                report += average_whole_shard(shard, self._group)
            shard.touched.forget()
        return report

    def _collect(self) -> list[_OwnRows | None]:
        """This rank's changed rows, `None` for a shard with too many of them."""
        mine: list[_OwnRows | None] = []
        for shard in self._shards:
            if shard.touched.is_overfull:
                sent, looked_at = None, shard.touched.tensors
            else:
                changed = shard.touched.changed()
                looked_at = _sent(shard, changed)
                sent = _OwnRows(changed.rows, looked_at, changed.bases)
            if not all(map(_is_finite, looked_at)):
                raise SyncError(
                    f"table {shard.table!r} has weights or optimizer state that are not finite; "
                    "nothing was synced. Lower the learning rate, or clip gradients"
                )
            mine.append(sent)
        return mine

    def _announce(self, mine: Sequence[_OwnRows | None]) -> "_Announced | None":
        """Tell the peers how many rows of each shard come, without waiting; None without shards.

        A rank that couldn't collect its rows announces none, which nobody will look at.
        """
        if not self._shards:
            return None
        counts = [_WHOLE if one is None else one.rows.numel() for one in mine]
        counts += [0] * (len(self._shards) - len(counts))
        header = torch.tensor(counts, device=self._shards[0].touched.device)
        headers = [torch.empty_like(header) for _ in range(self._world_size)]
        work = dist.all_gather(headers, header, group=self._group, async_op=True)
        assert work is not None
        return _Announced(headers, work)

    def _average_rows(
        self,
        mine: Sequence[_OwnRows | None],
        counts: Sequence[Sequence[int]],
        is_whole: Sequence[bool],
    ) -> SyncReport:
        """Average the shards of which few rows were touched."""
        sparse = [index for index, whole in enumerate(is_whole) if not whole]
        layouts = [
            [part for index in sparse for part in _layout(self._shards[index], peer[index])]
            for peer in counts
        ]
        sizes = [sum(part.num_bytes for part in layout) for layout in layouts]
        if not sum(sizes):
            return SyncReport()
        own_rows = [own for index in sparse if (own := mine[index]) is not None]
        buffer = pack([part for own in own_rows for part in (own.rows.int(), *own.values)])
        gathered = all_gather_ragged(buffer, sizes, self._group)
        received = [iter(unpack(*pair)) for pair in zip(gathered, layouts, strict=True)]
        report = SyncReport(num_bytes=buffer.nbytes * (self._world_size - 1))
        for index, own in zip(sparse, own_rows, strict=True):
            shard = self._shards[index]
            peers = [
                _PeerRows(next(parts).long(), tuple(next(parts) for _ in shard.rules))
                for parts in received
            ]
            report += _average_shard(shard, peers, self._rank, own.bases)
        return report


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are, which their sum says in one pass; fp16 is added in float32."""
    return not tensor.is_floating_point() or bool(tensor.sum(dtype=torch.float32).isfinite())


def _sent(shard: SyncedShard, changed: Changed) -> tuple[torch.Tensor, ...]:
    """The changed rows as they travel: in a shorter type, their change since the last sync."""
    values = [tensor.index_select(0, changed.rows) for tensor in shard.touched.tensors]
    return tuple(
        value if value.dtype == sent_as else (value - base).to(sent_as)
        for value, base, sent_as in zip(values, changed.bases, shard.sent_as, strict=True)
    )


def _received(base: torch.Tensor, places: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """A peer's rows, which it has sent by `_sent`; it gets the same from its own."""
    if sent.dtype == base.dtype:
        return sent
    return base.index_select(0, places) + sent.to(base.dtype)


def _layout(shard: SyncedShard, num_rows: int) -> list[Packed]:
    """How ``num_rows`` rows travel: their ids, then each tensor's rows."""
    values = [
        Packed((num_rows, *one.shape[1:]), sent_as)
        for one, sent_as in zip(shard.touched.tensors, shard.sent_as, strict=True)
    ]
    return [Packed((num_rows,), torch.int32), *values]


def _average_shard(
    shard: SyncedShard,
    peers: Sequence[_PeerRows],
    rank: int,
    bases: Sequence[torch.Tensor],
) -> SyncReport:
    """Write the average of the rows that any peer has changed."""
    tensors = shard.touched.tensors
    union = torch.unique(torch.cat([peer.rows for peer in peers]))
    if union.numel() == 0:
        return SyncReport()
    places = [torch.searchsorted(union, peer.rows) for peer in peers]
    for index, (tensor, rule) in enumerate(zip(tensors, shard.rules, strict=True)):
        for rows, start, parts in _chunks(union, places, tensor[:1].nbytes):
            base = tensor.index_select(0, rows)
            base.index_copy_(0, places[rank][parts[rank]] - start, bases[index][parts[rank]])
            copies = []
            for peer, place, part in zip(peers, places, parts, strict=True):
                here = place[part] - start
                sent = peer.values[index][part]
                copies.append(base.index_copy(0, here, _received(base, here, sent)))
            tensor.index_copy_(0, rows, rule.combine(copies))
    return SyncReport(num_tensors=len(tensors), num_rows=union.numel())


def _chunks(
    union: torch.Tensor, places: Sequence[torch.Tensor], row_bytes: int
) -> Iterator[tuple[torch.Tensor, int, list[slice]]]:
    """Parts of the union: their rows, where they start, and which of each peer's rows they have."""
    size = max(1, _CHUNK_BYTES // row_bytes)
    starts = list(range(0, union.numel(), size))
    bounds = torch.tensor([*starts, union.numel()], device=union.device)
    ends = [torch.searchsorted(place, bounds).tolist() for place in places]
    for number, start in enumerate(starts):
        parts = [slice(end[number], end[number + 1]) for end in ends]
        yield union[start : start + size], start, parts
