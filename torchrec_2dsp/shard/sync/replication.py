"""`Replication`: how a sharded module is repeated over the groups of a mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchrec_2dsp._compat.fbgemm import SplitTableBatchedEmbeddingBagsCodegen
from torchrec_2dsp.comms.mesh_groups import MeshGroups
from torchrec_2dsp.plan.sync import GradientSync, SyncConfig
from torchrec_2dsp.replicas.gradient_sync import Updater, quickest_updater
from torchrec_2dsp.rows.update import RowUpdater
from torchrec_2dsp.shard.bad_ids import BadIds


@dataclass(frozen=True)
class Replication:
    """How a sharded module is repeated."""

    groups: MeshGroups
    """The communicators of the mesh."""
    sync: SyncConfig
    """How the replicas stay equal."""
    always_capture: bool = False
    """Capture and apply rows even with one group, where the fused backward would do, and with its
    bits."""
    bad_ids: BadIds = BadIds.RAISE
    """What is done with ids that no row has."""
    tables_beside: tuple[Any, ...] = ()
    """The configs of all tables of the unsharded module, where this module runs some of them: a
    feature may look up others as well, and is held to the smallest one."""
    accumulates: bool = False
    """Capture rows so that those of several backwards can make one update."""

    @property
    def captures(self) -> bool:
        """Whether rows are captured even where nobody else has them."""
        return self.always_capture or self.accumulates

    @property
    def may_delay(self) -> bool:
        """Whether updates may be late; not where nothing but accumulation captures rows, which
        trains what a kernel does."""
        return self.groups.mesh.num_groups > 1 or self.always_capture

    @property
    def can_accumulate(self) -> bool:
        """Whether updates wait for a sync, so that it can make one of several backwards'."""
        has_replicas = self.groups.mesh.num_groups > 1
        return self.captures or (has_replicas and isinstance(self.sync, GradientSync))

    @property
    def make_updater(self) -> Callable[[SplitTableBatchedEmbeddingBagsCodegen], Updater]:
        """What applies captured rows."""
        return RowUpdater if self.always_capture else quickest_updater
