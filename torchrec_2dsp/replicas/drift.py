"""`DriftCheck`: compares row copies after a sync."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.alarm import Alarm, as_ours
from torchrec_2dsp.errors import SyncError, TwoDError
from torchrec_2dsp.replicas.synced_shard import TableShard
from torchrec_2dsp.rows.eight_bits import plain

_ROWS_AT_A_TIME = 2**13
_ROWS_PER_RANGE = 1024
_MAX_RANGES = 4
"""The most differing ranges that an error lists."""


class DriftCheck:
    """Compares the copies after every n-th sync (0: never), and raises on all ranks if they differ.

    Each rank sends a checksum per thousand rows; different bits have the same checksum in one
    case of 2^64. All ranks in the group list the same shards in the same order.
    """

    def __init__(
        self, shards: Sequence[TableShard], group: dist.ProcessGroup, alarm: Alarm, every: int
    ) -> None:
        self._shards = list(shards)
        self._group = group
        self._alarm = alarm
        self._every = every
        self._num_syncs = 0

    def synced(self) -> None:
        """Count a finished sync, and compare the copies if it is time.

        Collectives:
            After every n-th sync, an all-gather of 8 bytes per tensor and thousand rows on the
            group, and an all-reduce of 8 bytes on the alarm's.
        """
        self._num_syncs += 1
        if not self._every or self._num_syncs % self._every:
            return
        error: TwoDError | None = None
        try:
            self._compare()
        except Exception as raised:
            error = as_ours(raised, SyncError)
        self._alarm.check(error).wait()

    def _compare(self) -> None:
        """Raise if copies differ; peers get sums even from a rank that can't compute them."""
        if not self._shards:
            return
        tensors = [tensor for shard in self._shards for tensor in shard.tensors.values()]
        sizes = [_num_ranges(tensor) for tensor in tensors]
        # The last entry tells whether the rank has failed.
        own_sums = torch.zeros(sum(sizes) + 1, dtype=torch.int64, device=tensors[0].device)
        failure: Exception | None = None
        try:
            torch.cat([_checksums(tensor) for tensor in tensors], out=own_sums[:-1])
        except Exception as raised:
            failure, own_sums[-1] = raised, 1
        gathered = [torch.empty_like(own_sums) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, own_sums, group=self._group)
        copies = torch.stack(gathered)
        if failure is not None:
            raise failure
        if copies[:, -1].any():
            return
        differs = iter((copies != copies[0]).any(dim=0)[:-1].split(sizes))
        for shard in self._shards:
            in_shard = torch.stack([next(differs) for _ in shard.tensors]).any(dim=0)
            if in_shard.any():
                raise SyncError(
                    f"copies of table {shard.table!r} differ in rows {_named(shard, in_shard)} "
                    "after a sync; if weights were written by hand, write them on all ranks and "
                    "call model.broadcast_replicas()"
                )


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum over rows that depends on their order, in one pass."""
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    # In parts, because all rows in float64 may not fit into memory.
    for start in range(0, tensor.shape[0], _ROWS_AT_A_TIME):
        part = tensor[start : start + _ROWS_AT_A_TIME]
        rows = part.double() if part.dim() == 1 else part.sum(dim=1, dtype=torch.float64)
        places = torch.arange(start + 1, start + 1 + len(rows), device=rows.device)
        total += rows @ places.double()
    return total


def _num_ranges(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's checksums."""
    return -(-tensor.shape[0] // _ROWS_PER_RANGE) if tensor.numel() else 0


def _checksums(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum per thousand rows, which depends on every bit and on the order."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    if not tensor.numel():
        return torch.empty(0, dtype=torch.int64, device=tensor.device)
    rows = plain(tensor).reshape(tensor.shape[0], -1).contiguous().view(bits)
    sums = []
    for part in rows.split(_ROWS_PER_RANGE):
        values = part.reshape(-1).long()
        # Odd factors: a changed bit always changes the sum modulo 2^64.
        factors = torch.arange(1, 2 * values.numel(), 2, device=values.device)
        sums.append((values * (factors * factors + factors * 4)).sum())
    return torch.stack(sums)


def _named(shard: TableShard, differs: torch.Tensor) -> str:
    """Name the table's differing row ranges, adjacent ones joined."""
    ranges: list[list[int]] = []
    for number in differs.nonzero().view(-1).tolist():
        start = number * _ROWS_PER_RANGE
        end = min(start + _ROWS_PER_RANGE, shard.num_rows)
        if ranges and ranges[-1][1] == start:
            ranges[-1][1] = end
        else:
            ranges.append([start, end])
    words = [f"{shard.row + start} to {shard.row + end - 1}" for start, end in ranges[:_MAX_RANGES]]
    more = len(ranges) - _MAX_RANGES
    return ", ".join(words) + (f" and {more} more ranges" if more > 0 else "")
