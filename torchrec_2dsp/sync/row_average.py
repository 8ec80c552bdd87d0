"""`RowAverage`: average the touched rows of table shards over the ranks that hold copies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.agreement import agree
from torchrec_2dsp.comms.collectives import all_gather_ragged
from torchrec_2dsp.comms.packing import Packed, pack, unpack
from torchrec_2dsp.errors import SyncError, TwoDError
from torchrec_2dsp.sync.report import SyncReport
from torchrec_2dsp.sync.state_rules import StateRule
from torchrec_2dsp.sync.touched import TouchedRows
from torchrec_2dsp.sync.whole_shard import average_whole_shard

_WHOLE = -1
"""In place of a row count: so many rows were touched that the whole shard is averaged."""


@dataclass(frozen=True)
class SyncedShard:
    """A table shard whose copies are averaged."""

    table: str
    """The table's name."""

    touched: TouchedRows
    """Its tensors, and which rows have changed."""

    rules: tuple[StateRule, ...]
    """One for each tensor."""

    def layout(self, num_rows: int) -> list[Packed]:
        """How ``num_rows`` rows travel: their ids, then each tensor's rows."""
        tensors = self.touched.tensors
        values = [Packed((num_rows, *one.shape[1:]), one.dtype) for one in tensors]
        return [Packed((num_rows,), torch.int32), *values]


@dataclass(frozen=True)
class _PeerRows:
    """The rows of a shard that one peer has changed, and their values there."""

    rows: torch.Tensor
    values: tuple[torch.Tensor, ...]


class RowAverage:
    """Averages what changed since the last run; afterwards the copies are equal bit for bit.

    Each peer sends the rows that it has changed. For the rows that a peer didn't send, its copy
    is the base, which every peer knows. So all compute the average of all copies, in the same
    order.
    """

    def __init__(self, shards: Sequence[SyncedShard], group: dist.ProcessGroup) -> None:
        """
        Args:
            shards: in the same order on every rank of the group.
            group: the ranks that hold copies.
        """
        self._shards = list(shards)
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)

    def run(self) -> SyncReport:
        """Average.

        Collectives:
            One all-gather of a header and one all-to-all on the group, and all-reduces of the
            shards of which too many rows were touched. If a rank fails before that, an agreement
            on its error, which all raise.
        """
        if not self._shards:
            return SyncReport()
        try:
            mine, problem = self._collect(), None
        except TwoDError as error:
            mine, problem = [], error
        counts = self._exchange_counts(mine, problem)
        is_whole = [_WHOLE in shard_counts for shard_counts in zip(*counts, strict=True)]
        report = self._average_rows(mine, counts, is_whole)
        for shard, whole in zip(self._shards, is_whole, strict=True):
            if whole:
                report += average_whole_shard(shard.touched, shard.rules, self._group)
            shard.touched.forget()
        return report

    def _collect(self) -> list[_PeerRows | None]:
        """This rank's changed rows, `None` for a shard with too many of them."""
        mine: list[_PeerRows | None] = []
        for shard in self._shards:
            if shard.touched.is_overfull:
                sent, tensors = None, shard.touched.tensors
            else:
                rows = shard.touched.changed().rows
                tensors = tuple(one.index_select(0, rows) for one in shard.touched.tensors)
                sent = _PeerRows(rows, tensors)
            # A sum is finite only if all that it adds up is.
            if not all(bool(one.sum().isfinite()) for one in tensors if one.is_floating_point()):
                raise SyncError(
                    f"table {shard.table!r} has weights or optimizer state that are not finite; "
                    "nothing was synced. Lower the learning rate, or clip gradients"
                )
            mine.append(sent)
        return mine

    def _exchange_counts(
        self, mine: Sequence[_PeerRows | None], problem: TwoDError | None
    ) -> list[list[int]]:
        """Every peer's row counts by shard; an error of one peer is raised by all."""
        counts = [_WHOLE if one is None else one.rows.numel() for one in mine]
        has_failed = int(problem is not None)
        device = self._shards[0].touched.device
        header = torch.tensor([has_failed, *(counts or [0] * len(self._shards))], device=device)
        headers = [torch.empty_like(header) for _ in range(self._world_size)]
        dist.all_gather(headers, header, group=self._group)
        found = torch.stack(headers).tolist()
        if any(peer[0] for peer in found):
            agree(self._group, error=problem)
        return [peer[1:] for peer in found]

    def _average_rows(
        self,
        mine: Sequence[_PeerRows | None],
        counts: Sequence[Sequence[int]],
        is_whole: Sequence[bool],
    ) -> SyncReport:
        """Average the shards of which few rows were touched."""
        sparse = [index for index, whole in enumerate(is_whole) if not whole]
        layouts = [
            [part for index in sparse for part in self._shards[index].layout(peer[index])]
            for peer in counts
        ]
        sizes = [sum(part.num_bytes for part in layout) for layout in layouts]
        if not sum(sizes):
            return SyncReport()
        sent = []
        for index in sparse:
            own = mine[index]
            assert own is not None
            sent += [own.rows.int(), *own.values]
        buffer = pack(sent)
        gathered = all_gather_ragged(buffer, sizes, self._group)
        received = [iter(unpack(*pair)) for pair in zip(gathered, layouts, strict=True)]
        report = SyncReport(num_bytes=buffer.nbytes * (self._world_size - 1))
        for index in sparse:
            shard = self._shards[index]
            peers = [
                _PeerRows(next(parts).long(), tuple(next(parts) for _ in shard.rules))
                for parts in received
            ]
            report += _average_shard(shard, peers, self._rank)
        return report


def _average_shard(shard: SyncedShard, peers: Sequence[_PeerRows], rank: int) -> SyncReport:
    """Write the average of the rows that any peer has changed."""
    touched = shard.touched
    union = torch.unique(torch.cat([peer.rows for peer in peers]))
    if union.numel() == 0:
        return SyncReport()
    places = [torch.searchsorted(union, peer.rows) for peer in peers]
    bases = touched.changed().bases
    for index, (tensor, rule) in enumerate(zip(touched.tensors, shard.rules, strict=True)):
        base = tensor.index_select(0, union)
        base.index_copy_(0, places[rank], bases[index])
        copies = [
            base.index_copy(0, place, peer.values[index])
            for place, peer in zip(places, peers, strict=True)
        ]
        tensor.index_copy_(0, union, rule.combine(copies))
    return SyncReport(num_tensors=len(touched.tensors), num_rows=union.numel())
