"""`RowAverage`: average the touched rows of table shards over the ranks that hold copies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function

from torchrec_2dsp.comms.agreement import as_ours
from torchrec_2dsp.comms.alarm import Alarm
from torchrec_2dsp.errors import SyncError, TwoDError
from torchrec_2dsp.replicas.average_transfer import AverageTransfer, messages, range_ends
from torchrec_2dsp.replicas.row_copies import SentRows, all_finite, average_rows, rows_to_send
from torchrec_2dsp.replicas.sync_report import SyncReport
from torchrec_2dsp.replicas.synced_shard import SyncedShard
from torchrec_2dsp.replicas.touched import Changed
from torchrec_2dsp.replicas.whole_shard import average_whole_shard

_LABEL = "## note rows ##"
"""The name of noting rows in profiles."""

_WHOLE = -1
"""Stands for a row count if so many rows were touched that the whole shard is averaged."""


class _OwnRows(NamedTuple):
    """The rows of a shard that this rank has changed."""

    changed: Changed
    sent: SentRows

    def part(self, places: slice) -> "_OwnRows":
        """The rows at these places."""
        return _OwnRows(self.changed.part(places), self.sent.part(places))


@dataclass(frozen=True)
class _Announced:
    """A message in flight that tells how many rows each peer sends."""

    headers: list[torch.Tensor]
    """For each peer, a row count for each range of each shard."""
    num_ranges: list[int]
    """How many ranges each shard has."""
    work: dist.Work

    def arrived(self) -> list[list[list[int]]]:
        """Row counts by shard, by range and by peer, after waiting for them."""
        self.work.wait()
        counts = torch.stack(self.headers, dim=1)
        return [shard_counts.tolist() for shard_counts in counts.split(self.num_ranges)]


class RowAverage:
    """Averages the rows that changed since the last run; then all copies are equal bit for bit.

    Each peer sends the rows that it has changed. For rows that a peer didn't send, its copy is the
    base, which every peer knows. So all compute the average of all copies, in the same order (see
    `row_copies`).
    """

    def __init__(
        self, shards: Sequence[SyncedShard], group: dist.ProcessGroup, alarm: Alarm
    ) -> None:
        """
        Args:
            shards: the averaged shards, in the same order on every rank of the group; none on a
                rank without tables.
            group: the ranks that hold copies; a full-duplex group if the backend is gloo.
            alarm: the alarm of all ranks, also of those that hold no copies of these shards.
        """
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
        """Note the rows of these shards that a backward is about to change."""
        with record_function(_LABEL):
            for shard, changing in zip(shards, rows(), strict=True):
                shard.touched.note(changing)

    def run(self) -> SyncReport:
        """Average the touched rows of all shards.

        Collectives:
            An all-reduce of 8 bytes on the alarm's group, by which an error of one rank is raised
            by all; one all-gather of a header and all-to-alls on the group, and all-reduces of the
            shards of which too many rows were touched.
        """
        own_rows: list[_OwnRows | None] = []
        error: TwoDError | None = None
        try:
            own_rows = self._collect()
        except Exception as raised:
            error = as_ours(raised, SyncError)
        check = self._alarm.check(error)
        announced = self._announce(own_rows)
        check.wait()
        if announced is None:
            return SyncReport()
        counts = announced.arrived()
        is_whole = [_WHOLE in ranges[0] for ranges in counts]
        sparse = [[] if whole else ranges for whole, ranges in zip(is_whole, counts, strict=True)]
        report = self._average_rows(own_rows, sparse)
        for shard, whole in zip(self._shards, is_whole, strict=True):
            if whole:
                report += average_whole_shard(shard, self._group)
            shard.touched.forget()
        return report

    def _collect(self) -> list[_OwnRows | None]:
        """This rank's changed rows, `None` for a shard with too many of them."""
        own_rows: list[_OwnRows | None] = []
        for shard in self._shards:
            if shard.touched.is_overfull:
                rows, is_finite = None, all(map(_is_finite, shard.touched.tensors))
            else:
                changed = shard.touched.changed()
                rows = _OwnRows(changed, rows_to_send(shard, changed, self._world_size))
                is_finite = all_finite(shard, rows.sent.values)
            if not is_finite:
                raise SyncError(
                    f"table {shard.table!r} has weights or optimizer state that are not finite; "
                    "nothing was synced. Lower the learning rate, or clip gradients"
                )
            own_rows.append(rows)
        return own_rows

    def _announce(self, own_rows: Sequence[_OwnRows | None]) -> "_Announced | None":
        """Tell the peers how many rows of each shard come, without waiting; None without shards.

        Peers ignore what is announced by a rank that couldn't collect its rows.
        """
        if not self._shards:
            return None
        all_rows = [*own_rows, *[None] * (len(self._shards) - len(own_rows))]
        counts = [_counts(*pair) for pair in zip(self._ends, all_rows, strict=True)]
        header = torch.cat(counts)
        headers = [torch.empty_like(header) for _ in range(self._world_size)]
        work = dist.all_gather(headers, header, group=self._group, async_op=True)
        assert work is not None
        return _Announced(headers, [shard_counts.numel() for shard_counts in counts], work)

    def _average_rows(
        self, own_rows: Sequence[_OwnRows | None], counts: Sequence[Sequence[Sequence[int]]]
    ) -> SyncReport:
        """Average the shards of which few rows were touched; the others have no counts here."""
        sent: list[tuple[AverageTransfer, list[Changed]]] = []
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
    """How many rows this rank sends of each range of a shard."""
    if rows is None:
        return torch.full_like(ends, _WHOLE)
    places = torch.searchsorted(rows.changed.rows, ends)
    return places.diff(prepend=places.new_zeros(1))


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite, seen by their sum in one pass; fp16 is added in float32."""
    return not tensor.is_floating_point() or bool(tensor.sum(dtype=torch.float32).isfinite())
