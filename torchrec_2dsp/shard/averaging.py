"""What `WeightSync` averages: from kernels to sync actions."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.sync_config import SyncedRows, WeightSync
from torchrec_2dsp.plan.sync_policy import SyncPolicy
from torchrec_2dsp.shard.kernels import Kernel, TableShard
from torchrec_2dsp.sync.row_average import SyncedShard
from torchrec_2dsp.sync.state_rules import UNSYNCED_STATES, rule_for
from torchrec_2dsp.sync.touched import TouchedRows, break_even_share
from torchrec_2dsp.sync.weight_sync import AverageShards, AverageTouchedRows

Average = AverageShards | AverageTouchedRows


def averages(
    kernels: Sequence[Kernel], sync: WeightSync, group: dist.ProcessGroup
) -> list[Average]:
    """The sync actions of these kernels, which tell them what they update."""
    if sync.moments_policy is None:
        return [_average(kernels, sync, sync.policy, group, lambda name: True)]
    for kernel in kernels:
        for shard in kernel.shards():
            if not set(shard.tensors) - {"weight"} - UNSYNCED_STATES:
                raise ConfigError(
                    f"table {shard.table!r} has no optimizer state that "
                    f"moments_policy={sync.moments_policy} could sync; leave it out"
                )
    return [
        _average(kernels, sync, sync.policy, group, lambda name: name == "weight"),
        _average(kernels, sync, sync.moments_policy, group, lambda name: name != "weight"),
    ]


def _average(
    kernels: Sequence[Kernel],
    sync: WeightSync,
    policy: SyncPolicy,
    group: dist.ProcessGroup,
    is_synced: Callable[[str], bool],
) -> Average:
    """The action for some of each shard's tensors."""
    num_peers = dist.get_world_size(group)
    by_kernel = [
        [_synced_shard(shard, is_synced, num_peers) for shard in kernel.shards()]
        for kernel in kernels
    ]
    kind = AverageTouchedRows if sync.rows is SyncedRows.TOUCHED else AverageShards
    action = kind([shard for shards in by_kernel for shard in shards], group, policy)
    for kernel, shards in zip(kernels, by_kernel, strict=True):
        kernel.tell_updates(lambda rows, shards=shards: action.before_update(shards, rows))
    return action


def _synced_shard(
    shard: TableShard, is_synced: Callable[[str], bool], num_peers: int
) -> SyncedShard:
    names = [name for name in shard.tensors if name not in UNSYNCED_STATES and is_synced(name)]
    tensors = [shard.tensors[name] for name in names]
    return SyncedShard(
        shard.table,
        TouchedRows(tensors, break_even_share(_row_bytes(tensors), num_peers)),
        tuple(rule_for(name, shard.table) for name in names),
    )


def _row_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor[:1].nbytes for tensor in tensors)
