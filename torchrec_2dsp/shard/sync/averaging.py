"""What `WeightSync` averages: from kernels to sync actions."""

import math
from collections.abc import Callable, Sequence

import torch

from torchrec_2dsp.codecs.rows import RowCodec, Transport
from torchrec_2dsp.comms.mesh_groups import MeshGroups
from torchrec_2dsp.errors import ConfigError, UnsupportedError
from torchrec_2dsp.plan.sync import SyncedRows, SyncPolicy, WeightSync
from torchrec_2dsp.replicas.drift import CopiedShard, DriftCheck
from torchrec_2dsp.replicas.row_average import RowAverage
from torchrec_2dsp.replicas.sync_point import WeightSyncAction
from torchrec_2dsp.replicas.synced_shard import (
    UNSYNCED_STATES,
    StateRule,
    SyncedShard,
    TouchedRows,
    break_even_share,
    state_rule_for,
)
from torchrec_2dsp.replicas.whole_shard import ShardAverage
from torchrec_2dsp.shard.kernels import Kernel, TableShard


def averages(
    kernels: Sequence[Kernel], sync: WeightSync, groups: MeshGroups
) -> list[WeightSyncAction]:
    """The sync actions of these kernels, which tell them what they update."""
    if sync.moments_policy is None:
        return [_average(kernels, sync, sync.policy, groups, lambda name: True)]
    for kernel in kernels:
        for shard in kernel.shards():
            if not set(shard.tensors) - {"weight"} - UNSYNCED_STATES:
                raise ConfigError(
                    f"table {shard.table!r} has no optimizer state that "
                    f"moments_policy={sync.moments_policy} could sync; leave it out"
                )
    return [
        _average(kernels, sync, sync.policy, groups, lambda name: name == "weight"),
        _average(kernels, sync, sync.moments_policy, groups, lambda name: name != "weight"),
    ]


def _average(
    kernels: Sequence[Kernel],
    sync: WeightSync,
    policy: SyncPolicy,
    groups: MeshGroups,
    is_synced: Callable[[str], bool],
) -> WeightSyncAction:
    """The action for some of each shard's tensors."""
    num_peers, peers = groups.mesh.num_groups, groups.replica_peers
    by_kernel = [
        [synced_shard(shard, is_synced, num_peers, sync) for shard in kernel.shards()]
        for kernel in kernels
    ]
    shards = [shard for of_kernel in by_kernel for shard in of_kernel]
    if sync.rows is SyncedRows.TOUCHED:
        average = RowAverage(shards, groups.replica_rows.everyone, groups.alarm)
    else:
        average = ShardAverage(shards, peers)
    copied = copied_shards(kernels, is_synced)
    drift = DriftCheck(copied, peers, groups.alarm, sync.drift_every)
    action = WeightSyncAction(average, policy, drift)
    for kernel, shards in zip(kernels, by_kernel, strict=True):
        kernel.tell_updates(lambda rows, shards=shards: action.before_update(shards, rows))
    return action


def copied_shards(
    kernels: Sequence[Kernel], is_synced: Callable[[str], bool] = lambda name: True
) -> list[CopiedShard]:
    """The shards of these kernels, with those of their tensors that are equal after a sync."""
    return [
        CopiedShard(
            shard.table,
            shard.row,
            tuple(
                tensor
                for name, tensor in shard.tensors.items()
                if name not in UNSYNCED_STATES and is_synced(name)
            ),
        )
        for kernel in kernels
        for shard in kernel.shards()
    ]


def synced_shard(
    shard: TableShard, is_synced: Callable[[str], bool], num_peers: int, sync: WeightSync
) -> SyncedShard:
    """What an average needs to know of a shard.

    Args:
        shard: of this rank.
        is_synced: which of its tensors are averaged, by name.
        num_peers: how many copies it has.
        sync: how changed rows travel, and how many may.
    """
    names = [name for name in shard.tensors if name not in UNSYNCED_STATES and is_synced(name)]
    tensors = [shard.tensors[name] for name in names]
    rules = tuple(state_rule_for(name, shard.table) for name in names)
    codecs = tuple(
        None if rule is StateRule.MAX else _codec_of(tensor, sync.transport, shard.table)
        for tensor, rule in zip(tensors, rules, strict=True)
    )
    share = sync.dense_above
    if share is None:
        share = break_even_share(sum(tensor[:1].nbytes for tensor in tensors), num_peers)
    return SyncedShard(shard.table, TouchedRows(tensors, share), rules, codecs)


def _codec_of(tensor: torch.Tensor, transport: Transport, table: str) -> RowCodec | None:
    if transport is Transport.FP32:
        return None
    dim = math.prod(tensor.shape[1:])
    codec = transport.codec_for(dim)
    if codec.num_bytes(dim) >= dim * tensor.element_size():
        raise UnsupportedError(
            f"table {table!r} has {tensor.dtype} values, which transport={transport.value!r} "
            "wouldn't make smaller; leave the transport out"
        )
    return codec
