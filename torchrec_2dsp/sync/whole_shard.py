"""Average whole table shards, where too many of their rows were touched to send these alone."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchrec_2dsp.sync.report import SyncReport
from torchrec_2dsp.sync.state_rules import StateRule
from torchrec_2dsp.sync.touched import TouchedRows

_CHUNK_BYTES = 64 * 2**20


def average_whole_shard(
    touched: TouchedRows, rules: Sequence[StateRule], group: dist.ProcessGroup
) -> SyncReport:
    """All-reduce the tensors of a shard in place.

    The mean of equal floats is that float only for a power of two of them. With another number of
    peers, the rows that nobody has touched are kept as they are.

    Collectives:
        One all-reduce per tensor; with other numbers of peers one of the bitmaps, and one per
        64 MiB of each tensor.
    """
    world_size = dist.get_world_size(group)
    is_exact = world_size & (world_size - 1) == 0
    is_touched = None
    if not is_exact:
        is_touched = touched.bitmap().to(torch.uint8)
        dist.all_reduce(is_touched, dist.ReduceOp.MAX, group=group)
    num_bytes = 0 if is_touched is None else is_touched.nbytes
    for tensor, rule in zip(touched.tensors, rules, strict=True):
        num_bytes += tensor.nbytes
        if is_touched is None:
            _reduce(tensor, rule, group)
        else:
            _reduce_touched(tensor, rule, group, is_touched.bool())
    # What an all-reduce moves at best, as a ring does.
    ring_share = 2 * (world_size - 1) / world_size
    return SyncReport(
        num_tensors=len(touched.tensors),
        num_rows=touched.num_rows if is_touched is None else int(is_touched.sum()),
        num_bytes=int(ring_share * num_bytes),
    )


def _reduce(tensor: torch.Tensor, rule: StateRule, group: dist.ProcessGroup) -> None:
    op = dist.ReduceOp.MAX if rule is StateRule.MAX else dist.ReduceOp.AVG
    dist.all_reduce(tensor, op, group=group)


def _reduce_touched(
    tensor: torch.Tensor, rule: StateRule, group: dist.ProcessGroup, is_touched: torch.Tensor
) -> None:
    rows_per_chunk = max(1, _CHUNK_BYTES * tensor.shape[0] // max(1, tensor.nbytes))
    for start in range(0, tensor.shape[0], rows_per_chunk):
        chunk = tensor[start : start + rows_per_chunk]
        reduced = chunk.clone()
        _reduce(reduced, rule, group)
        rows = is_touched[start : start + rows_per_chunk].nonzero().view(-1)
        chunk.index_copy_(0, rows, reduced.index_select(0, rows))
