"""What sharded modules have in common: their replicas, and the one place where they sync."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_2dsp._compat.fbgemm import SplitTableBatchedEmbeddingBagsCodegen
from torchrec_2dsp._compat.shardings import lookups_of
from torchrec_2dsp.comms.mesh_groups import MeshGroups
from torchrec_2dsp.comms.naming_faults import naming_faults
from torchrec_2dsp.plan.parameter_sharding import base_type
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.plan.sync_config import GradientSync
from torchrec_2dsp.replicas.drift import DriftCheck, fingerprint
from torchrec_2dsp.replicas.gradient_sync import GradientSyncAction
from torchrec_2dsp.replicas.sync_point import SyncAction, SyncPoint
from torchrec_2dsp.replicas.sync_reason import SyncReason
from torchrec_2dsp.shard.averaging import averages, copied_shards
from torchrec_2dsp.shard.batch.batch_check import BatchCheck
from torchrec_2dsp.shard.kernels import EmbeddingBagKernel, EmbeddingKernel, Kernel
from torchrec_2dsp.shard.replication import Replication
from torchrec_2dsp.shard.row_exchange.arrangement import RowArrangement, arrangement_of
from torchrec_2dsp.shard.synced_optimizer import SyncedOptimizer

_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
logger = logging.getLogger(__name__)


class ReplicatedModule:
    """A mixin for TorchRec's sharded modules: kernels, sync point, equal replicas at start."""

    _sync_point: SyncPoint | None = None
    _replication: Replication
    _arrangement: RowArrangement | None = None
    _batch_check: BatchCheck
    _has_looked_up = False
    num_loads = 0
    """How often weights have been written otherwise than by training."""

    def _init_replication(
        self: Any,
        replication: Replication,
        unsharded: Any,
        plan: ModulePlan2D,
        actions: list[SyncAction],
    ) -> None:
        """Call at the end of the constructor; ``actions`` are synced besides the replicas."""
        self._replication = replication
        alone = replication.groups.mesh.num_groups == 1
        self._updates_at_once = alone and not replication.captures
        if replication.keep_weights and torch.device(unsharded.device).type != "meta":
            self.load_state_dict(unsharded.state_dict(), strict=False)
        self._sync_point = SyncPoint([*self._replica_actions(plan), *actions])
        self._arrangement = arrangement_of(plan, self.kernels(), replication.groups.sharding_group)
        self._optim = SyncedOptimizer(
            self._optim,
            before_step=lambda: self._reach(SyncReason.STEP),
            before_change=lambda: self._reach(SyncReason.READ),
            before_read=self.complete_state,
            after_load=self._state_loaded,
            beside=self._kernels_beside(),
        )
        self.register_state_dict_pre_hook(lambda module, *_: module.complete_state())
        # DistributedModelParallel loads without post-hooks, so the pre-hook does both.
        self._register_load_state_dict_pre_hook(lambda *_: self._before_load())

    @property
    def groups(self) -> MeshGroups:
        """The communicators of the module's mesh."""
        return self._replication.groups

    @property
    def sync_point(self) -> SyncPoint:
        """Where this module's replicas are made equal."""
        assert self._sync_point is not None, "the module is still being constructed"
        return self._sync_point

    @property
    def num_bad_ids(self) -> int:
        """Ids of this rank so far that their tables had no rows for, see `BadIds`."""
        return self._batch_check.ids.num_bad

    @num_bad_ids.setter
    def num_bad_ids(self, count: int) -> None:
        self._batch_check.ids.num_bad = count

    def kernels(self: Any) -> list[Kernel]:
        """The fused kernels of this rank."""
        return list(_kernels(lookups_of(self)))

    def tbes(self) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
        """FBGEMM's part of all fused kernels of this rank, also of those for hot rows."""
        return [kernel.tbe for kernel in self.kernels()] + self._kernels_beside()

    @torch.no_grad()
    def broadcast_replicas(self: Any) -> None:
        """Give every sharding group the tables and the optimizer state of the first one.

        The sharder does it, because ranks that start from different seeds would otherwise
        train different tables. Weights written between construction and the first lookup
        (``model.apply(init_weights)``) are compared and broadcast again then; call it yourself
        when you write weights later.

        Collectives:
            One broadcast per table shard and state tensor on the "replicate" axis, one per
            data-parallel table on the world.
        """
        self._broadcast_shards()
        for lookup in lookups_of(self):
            if isinstance(lookup, DistributedDataParallel):
                for param in lookup.parameters():
                    world = self._replication.groups.world
                    dist.broadcast(param.detach(), group_src=0, group=world)

    @torch.no_grad()
    def _broadcast_shards(self: Any) -> None:
        self.complete_state()
        peers = self._replication.groups.replica_peers
        for tensor in self._replica_tensors():
            dist.broadcast(tensor, group_src=0, group=peers)
        self._state_loaded()

    def _before_lookup(self: Any) -> None:
        """Sync what is due; before the first lookup, make sure that replicas start equal.

        An evaluation sees equal replicas, whatever the policy.
        """
        is_training = self.training and torch.is_grad_enabled()
        self._reach(SyncReason.LOOKUP if is_training else SyncReason.READ)
        if not self._has_looked_up:
            self._has_looked_up = True
            if self._replicas_differ():
                logger.warning("replicas start from different weights: taking the first group's")
                self._broadcast_shards()
        self._make_rows_ready()

    def _watch_backward(
        self: Any, awaitable: Any, before: Callable[[], None] = lambda: None
    ) -> Any:
        """Tell the sync point when the output gets its gradient, before any kernel does.

        Every rank has an output, also one that holds no table.

        Args:
            awaitable: the output.
            before: called first.
        """

        def watch(output: Any) -> Any:
            parts = [output] if isinstance(output, KeyedTensor) else output.values()
            for part in parts:
                values = part.values()
                if values.requires_grad:
                    values.register_hook(lambda grad: self._backward_begins(before))
            return output

        if torch.is_grad_enabled():
            awaitable.callbacks.append(watch)
        return awaitable

    def _backward_begins(self, before: Callable[[], None]) -> None:
        self.groups.board.activity.begin("the backward")
        # The state may have been read since the lookup, and other hot rows looked up.
        before()
        self._make_rows_ready()
        self.sync_point.backward_seen()

    def _make_rows_ready(self) -> None:
        """Let every row lie where training looks for it; the state may have been read or loaded.

        Whatever reads or writes rows of the kernels in training calls it first.

        Collectives:
            Those of `RowArrangement.by_owner`, and of `HotRows.read_home` after a load.
        """
        self._state_read()
        if self._arrangement is not None:
            self._arrangement.by_owner()

    @torch.no_grad()
    def _replicas_differ(self: Any) -> bool:
        """Compare the replica peers' tensors by one number each (an all-gather on "replicate")."""
        groups: MeshGroups = self._replication.groups
        tensors = self._replica_tensors()
        if groups.mesh.num_groups == 1 or not tensors:
            return False
        mine = torch.stack([fingerprint(tensor) for tensor in tensors])
        peers = [torch.empty_like(mine) for _ in range(groups.mesh.num_groups)]
        dist.all_gather(peers, mine, group=groups.replica_peers)
        return any(not torch.equal(peer, peers[0]) for peer in peers)

    def _replica_tensors(self: Any) -> list[torch.Tensor]:
        """Weights and optimizer state of this rank's shards, as views."""
        return [
            tensor
            for kernel in self.kernels()
            for shard in kernel.shards()
            for tensor in shard.tensors.values()
        ]

    def _replica_actions(self: Any, plan: ModulePlan2D) -> list[SyncAction]:
        """The same on all ranks, also on those that hold no table."""
        if all(base_type(table.sharding_type) == _DATA_PARALLEL for _, table in plan.tables()):
            return []
        replication: Replication = self._replication
        groups, kernels = replication.groups, self.kernels()
        sync = replication.sync
        if isinstance(sync, GradientSync):
            if groups.mesh.num_groups == 1 and not replication.captures:
                return []
            peers, transport = groups.replica_rows, sync.transport.dtype
            copied = copied_shards(kernels)
            action = GradientSyncAction(
                [kernel.capture_rows(peers, transport) for kernel in kernels],
                groups.alarm,
                DriftCheck(copied, groups.replica_peers, groups.alarm, sync.drift_every),
                delay=sync.delay,
                is_layered=peers.is_layered,
                make_updater=replication.make_updater,
            )
            return [action]
        actions: list[SyncAction] = []
        if replication.delays_moment:
            alone = [kernel.capture_rows(None, torch.float32) for kernel in kernels]
            updates = GradientSyncAction(
                alone,
                groups.alarm,
                make_updater=replication.make_updater,
                precedes_average=True,
            )
            actions.append(updates)
        if groups.mesh.num_groups > 1:
            actions += averages(kernels, sync, groups)
        return actions

    def _before_load(self) -> None:
        self.complete_state()
        self._state_loaded()

    def complete_state(self) -> None:
        """Bring weights and optimizer state up to date, before they are read or written.

        Collectives:
            Those of a sync, if a backward is pending, and of `RowArrangement.by_number`.
        """
        with naming_faults(self.groups.board):
            self._reach(SyncReason.READ)
            if self._arrangement is not None:
                self._arrangement.by_number()

    def _reach(self, reason: SyncReason) -> None:
        if self._sync_point is not None:
            with naming_faults(self.groups.board):
                self._sync_point.reach(reason)

    def _state_loaded(self) -> None:
        """Weights or optimizer state are written by hand, or from a checkpoint."""
        self.num_loads += 1

    def _state_read(self) -> None:
        """Before a lookup: take over what was loaded, while rows lie by number if it was."""

    def _kernels_beside(self) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
        """Kernels beside those of TorchRec's lookups."""
        return []


def _kernels(lookups: list[torch.nn.Module]) -> Iterator[Kernel]:
    # TorchRec keeps lookups in plain lists, where `modules()` doesn't find them.
    for lookup in lookups:
        if isinstance(lookup, DistributedDataParallel):
            continue
        for module in lookup.modules():
            if isinstance(module, (EmbeddingBagKernel, EmbeddingKernel)):
                yield module
