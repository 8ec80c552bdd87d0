"""Average whole table shards: on request, or if too many rows were touched to send them singly."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torchrec_2dsp.replicas.sync_action import SyncReport
from torchrec_2dsp.replicas.synced_shard import StateRule, SyncedShard

_CHUNK_BYTES = 64 * 2**20


class ShardAverage:
    """Averages all shards, whether changed or not, as TorchRec does.

    TorchRec passes all tensors to one collective, for which gloo copies them. Here large tensors
    are averaged in place. All ranks in the group list the same shards in the same order.
    """

    def __init__(self, shards: Sequence[SyncedShard], group: dist.ProcessGroup) -> None:
        self._group = group
        by_kind: dict[tuple[torch.dtype, StateRule], list[torch.Tensor]] = defaultdict(list)
        for shard in shards:
            for tensor, rule in zip(shard.touched.tensors, shard.rules, strict=True):
                by_kind[tensor.dtype, rule].append(tensor)
        self._messages = [
            (message, _op(rule))
            for (_, rule), tensors in by_kind.items()
            for message in _joined(tensors)
        ]
        self._num_rows = sum(shard.touched.num_rows for shard in shards)

    def before_update(
        self, shards: Sequence[SyncedShard], rows: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """Do nothing: all rows are averaged."""

    def run(self) -> SyncReport:
        """Average all shards.

        Collectives:
            For each dtype and rule, a coalesced all-reduce for at most 64 MiB of tensors, and one
            for each larger tensor.
        """
        report = SyncReport(num_rows=self._num_rows)
        for tensors, op in self._messages:
            if len(tensors) == 1:
                dist.all_reduce(tensors[0], op, group=self._group)
            else:
                options = dist.AllreduceCoalescedOptions()
                options.reduceOp = op  # type: ignore[assignment]  # stub says enum
                self._group.allreduce_coalesced(tensors, options).wait()
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            report += SyncReport(len(tensors), num_bytes=_ring_bytes(num_bytes, self._group))
        return report


def average_whole_shard(shard: SyncedShard, group: dist.ProcessGroup) -> SyncReport:
    """All-reduce a shard's tensors in place.

    The mean of equal floats is certain to be that float only for a power of two of them. With
    another number of peers, rows that no peer has touched are kept unchanged.

    Collectives:
        One all-reduce per tensor; with other numbers of peers one for the bitmaps, and one per
        64 MiB of each tensor.
    """
    touched, world_size = shard.touched, dist.get_world_size(group)
    is_exact = world_size & (world_size - 1) == 0
    is_touched = None
    if not is_exact:
        is_touched = touched.bitmap().to(torch.uint8)
        dist.all_reduce(is_touched, dist.ReduceOp.MAX, group=group)
    num_bytes = 0 if is_touched is None else is_touched.nbytes
    for tensor, rule in zip(touched.tensors, shard.rules, strict=True):
        num_bytes += tensor.nbytes
        if is_touched is None:
            dist.all_reduce(tensor, _op(rule), group=group)
        else:
            _reduce_touched(tensor, rule, group, is_touched.bool())
    return SyncReport(
        num_tensors=len(touched.tensors),
        num_rows=touched.num_rows if is_touched is None else int(is_touched.sum()),
        num_bytes=_ring_bytes(num_bytes, group),
    )


def _joined(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors into messages: one larger than a chunk, or several that fit into one.

    Skip tensors without rows.
    """
    large: list[list[torch.Tensor]] = []
    small: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        if tensor.nbytes > _CHUNK_BYTES:
            large.append([tensor])
        elif tensor.nbytes:
            if tensor.nbytes > room:
                small.append([])
                room = _CHUNK_BYTES
            small[-1].append(tensor)
            room -= tensor.nbytes
    return large + small


def _op(rule: StateRule) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.MAX if rule is StateRule.MAX else dist.ReduceOp.AVG


def _ring_bytes(num_bytes: int, group: dist.ProcessGroup) -> int:
    """Return the bytes that each rank sends in a ring all-reduce."""
    world_size = dist.get_world_size(group)
    return 2 * (world_size - 1) * num_bytes // world_size


def _reduce_touched(
    tensor: torch.Tensor, rule: StateRule, group: dist.ProcessGroup, is_touched: torch.Tensor
) -> None:
    rows_per_chunk = max(1, _CHUNK_BYTES * tensor.shape[0] // max(1, tensor.nbytes))
    for start in range(0, tensor.shape[0], rows_per_chunk):
        chunk = tensor[start : start + rows_per_chunk]
        reduced = chunk.clone()
        dist.all_reduce(reduced, _op(rule), group=group)
        rows = is_touched[start : start + rows_per_chunk].nonzero().view(-1)
        chunk.index_copy_(0, rows, reduced.index_select(0, rows))
