"""What sharded modules have in common: their replicas, and the one place where they sync."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchrec_2dsp._compat.fbgemm import optimizer_states
from torchrec_2dsp._compat.torchrec import get_gradient_division
from torchrec_2dsp.mesh.groups import MeshGroups
from torchrec_2dsp.plan.sync_config import GradientSync, SyncConfig
from torchrec_2dsp.rows.merge import RowMerge
from torchrec_2dsp.shard.kernels import EmbeddingBagKernel, EmbeddingKernel, Kernel
from torchrec_2dsp.shard.synced_optimizer import SyncedOptimizer
from torchrec_2dsp.sync.gradient_sync import MergeRowGradients
from torchrec_2dsp.sync.point import SyncAction, SyncPoint
from torchrec_2dsp.sync.weight_sync import AverageWeights


@dataclass(frozen=True)
class Replication:
    """How a sharded module is repeated."""

    groups: MeshGroups
    """The communicators of the mesh."""
    sync: SyncConfig
    """How the replicas stay equal."""
    always_capture: bool = False
    """Capture and apply rows even with one group, where the fused backward would do."""
    keep_weights: bool = False
    """Take over the weights of the unsharded module."""


class ReplicatedModule:
    """A mixin for TorchRec's sharded modules: kernels, sync point, equal replicas at start."""

    _sync_point: SyncPoint | None = None

    def _init_replication(
        self: Any, replication: Replication, unsharded: Any, actions: list[SyncAction]
    ) -> None:
        """Call at the end of the constructor; ``actions`` are synced besides the replicas."""
        self._replication = replication
        if replication.keep_weights and torch.device(unsharded.device).type != "meta":
            self.load_state_dict(unsharded.state_dict(), strict=False)
        self._sync_point = SyncPoint([*self._replica_actions(), *actions])
        self._optim = SyncedOptimizer(
            self._optim,
            before_step=self._sync_pending,
            before_read=self._complete_state,
            after_load=self._state_loaded,
            on_update_hyper_parameters=self._hyper_parameters_updated,
        )
        self.register_state_dict_pre_hook(lambda module, *_: module._complete_state())
        # DistributedModelParallel loads without post-hooks, so the pre-hook does both.
        self._register_load_state_dict_pre_hook(lambda *_: self._before_load())
        self.broadcast_replicas()

    @property
    def sync_point(self) -> SyncPoint:
        """Where this module's replicas are made equal."""
        assert self._sync_point is not None, "the module is still being constructed"
        return self._sync_point

    def kernels(self: Any) -> list[Kernel]:
        """The fused kernels of this rank."""
        return list(_kernels(self._lookups))

    @torch.no_grad()
    def broadcast_replicas(self: Any) -> None:
        """Give every sharding group the tables and the optimizer state of the first one.

        Construction does it, because ranks that start from different seeds would otherwise
        average different tables. Call it after you have written weights by hand.

        Collectives:
            One broadcast per table shard and state tensor on the "replicate" axis, one per
            data-parallel table on the world.
        """
        groups: MeshGroups = self._replication.groups
        for kernel in self.kernels():
            tbe = kernel.emb_module
            states = [tensor for table in optimizer_states(tbe) for tensor in table.values()]
            for tensor in [*tbe.split_embedding_weights(), *states]:
                dist.broadcast(tensor, group_src=0, group=groups.replica_peers)
        for lookup in self._lookups:
            if isinstance(lookup, DistributedDataParallel):
                for param in lookup.parameters():
                    dist.broadcast(param.detach(), group_src=0, group=groups.world)
        self._state_loaded()

    def _replica_actions(self: Any) -> list[SyncAction]:
        replication: Replication = self._replication
        groups, kernels = replication.groups, self.kernels()
        if isinstance(replication.sync, GradientSync):
            if groups.mesh.num_groups == 1 and not replication.always_capture:
                return []
            for kernel in kernels:
                kernel.captures = True
            captures = [kernel.capture for kernel in kernels]
            merge = RowMerge(captures, groups.replica_peers, average=get_gradient_division())
            return [MergeRowGradients(merge)]
        if groups.mesh.num_groups == 1:
            return []
        average = AverageWeights([kernel.emb_module for kernel in kernels], groups.replica_peers)
        for kernel in kernels:
            kernel.on_backward = average.mark_backward
        return [average]

    def _sync_pending(self) -> None:
        if self._sync_point is not None:
            self._sync_point.sync()

    def _before_load(self) -> None:
        self._sync_pending()
        self._state_loaded()

    def _complete_state(self) -> None:
        """Before weights or optimizer state are read."""
        self._sync_pending()

    def _state_loaded(self) -> None:
        """Weights or optimizer state are written by hand, or from a checkpoint."""

    def _hyper_parameters_updated(self, params: dict[str, Any]) -> None:
        """After hyper-parameters of the running kernels were changed."""


def _kernels(lookups: list[torch.nn.Module]) -> Iterator[Kernel]:
    # TorchRec keeps lookups in plain lists, where `modules()` doesn't find them.
    for lookup in lookups:
        if isinstance(lookup, DistributedDataParallel):
            continue
        for module in lookup.modules():
            if isinstance(module, (EmbeddingBagKernel, EmbeddingKernel)):
                yield module
