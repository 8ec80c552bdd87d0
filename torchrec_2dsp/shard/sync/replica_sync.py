"""`ReplicaSync`: copies of tables start equal, and sync in one place."""

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.codecs.rows import EXACT
from torchrec_2dsp.comms.mesh_groups import MeshGroups
from torchrec_2dsp.comms.notice_board import naming_faults
from torchrec_2dsp.plan.parameter_sharding import base_type
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.plan.sync import GradientSync
from torchrec_2dsp.replicas.drift import DriftCheck, fingerprint
from torchrec_2dsp.replicas.gradient_sync import GradientSyncAction
from torchrec_2dsp.replicas.sync_point import SyncAction, SyncPoint
from torchrec_2dsp.replicas.sync_report import SyncReason
from torchrec_2dsp.shard.batch.notes import BatchNotes
from torchrec_2dsp.shard.kernels import Kernel
from torchrec_2dsp.shard.stages import Stage
from torchrec_2dsp.shard.sync.averaging import averages, copied_shards
from torchrec_2dsp.shard.sync.replication import Replication

logger = logging.getLogger(__name__)


class ReplicaSync(Stage):
    """The sync point of a sharded module, and its copies on the replica peers."""

    def __init__(
        self,
        kernels: Sequence[Kernel],
        plan: ModulePlan2D,
        replication: Replication,
        actions_beside: Sequence[SyncAction],
        broadcast: Callable[[], None],
    ) -> None:
        """
        Args:
            kernels: this rank's kernels.
            plan: the plan of the module.
            replication: how the module is repeated.
            actions_beside: what is synced besides the replicas.
            broadcast: gives every sharding group the tables of the first one.
        """
        self.sync_point = SyncPoint(
            [*replica_actions(kernels, plan, replication), *actions_beside],
            can_hold=replication.can_accumulate,
        )
        """Where this module's replicas are made equal."""
        self._kernels = list(kernels)
        self._groups: MeshGroups = replication.groups
        self._broadcast = broadcast
        self._has_looked_up = False

    def before_lookup(self, notes: BatchNotes) -> None:
        """Sync what is due; before the first lookup, make sure that replicas start equal.

        An evaluation sees equal replicas, whatever the policy.
        """
        self.reach(SyncReason.LOOKUP if notes.is_training else SyncReason.READ)
        if not self._has_looked_up:
            self._has_looked_up = True
            if self._replicas_differ():
                logger.warning("replicas start from different weights: taking the first group's")
                self._broadcast()

    def before_read(self) -> None:
        """Apply what is pending.

        Collectives:
            Those of a sync, if a backward is pending.
        """
        self.reach(SyncReason.READ)

    def reach(self, reason: SyncReason) -> None:
        """Sync what is due; errors name the rank that failed."""
        with naming_faults(self._groups.board):
            self.sync_point.reach(reason)

    @torch.no_grad()
    def broadcast_shards(self) -> None:
        """Give the replica peers the shards of the first sharding group.

        Collectives:
            One broadcast per table shard and state tensor on the "replicate" axis.
        """
        for tensor in self._tensors():
            dist.broadcast(tensor, group_src=0, group=self._groups.replica_peers)

    @torch.no_grad()
    def _replicas_differ(self) -> bool:
        """Compare the replica peers' tensors by one number each (an all-gather on "replicate")."""
        num_groups, tensors = self._groups.mesh.num_groups, self._tensors()
        if num_groups == 1 or not tensors:
            return False
        own = torch.stack([fingerprint(tensor) for tensor in tensors])
        peers = [torch.empty_like(own) for _ in range(num_groups)]
        dist.all_gather(peers, own, group=self._groups.replica_peers)
        return any(not torch.equal(peer, peers[0]) for peer in peers)

    def _tensors(self) -> list[torch.Tensor]:
        """Weights and optimizer state of this rank's shards, as views."""
        return [
            tensor
            for kernel in self._kernels
            for shard in kernel.shards()
            for tensor in shard.tensors.values()
        ]


def replica_actions(
    kernels: Sequence[Kernel], plan: ModulePlan2D, replication: Replication
) -> list[SyncAction]:
    """What keeps copies equal; the same on all ranks, also on those that hold no table.

    Args:
        kernels: this rank's kernels, whose backwards are captured where updates wait for a sync.
        plan: the plan of the module.
        replication: how the module is repeated.
    """
    data_parallel = ShardingType.DATA_PARALLEL.value
    if all(base_type(table.sharding_type) == data_parallel for _, table in plan.tables()):
        return []
    groups, sync = replication.groups, replication.sync
    if isinstance(sync, GradientSync):
        if groups.mesh.num_groups == 1 and not replication.captures:
            return []
        peers, codec = groups.replica_rows, sync.transport.codec
        copied = copied_shards(kernels)
        # From here on, backwards no longer update these kernels.
        captures = [kernel.capture_rows(peers, codec) for kernel in kernels]
        action = GradientSyncAction(
            captures,
            groups.alarm,
            DriftCheck(copied, groups.replica_peers, groups.alarm, sync.drift_every),
            delay=sync.delay if replication.may_delay else 0,
            is_layered=peers.is_layered,
            make_updater=replication.make_updater,
        )
        return [action]
    actions: list[SyncAction] = []
    if replication.accumulates:
        updates = GradientSyncAction(
            [kernel.capture_rows(None, EXACT) for kernel in kernels],
            groups.alarm,
            make_updater=replication.make_updater,
            precedes_average=True,
        )
        actions.append(updates)
    if groups.mesh.num_groups > 1:
        actions += averages(kernels, sync, groups)
    return actions
