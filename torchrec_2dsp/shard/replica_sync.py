"""`ReplicaSync` keeps a sharded module's copies equal; `OneUpdate` watches its updates."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_2dsp._compat.fbgemm import HAS_ROW_WISE_MOMENT, EmbOptimType
from torchrec_2dsp._compat.tensors import running_backward
from torchrec_2dsp.codecs.rows import EXACT, RowCodec, Transport
from torchrec_2dsp.comms.failure_detection import naming_faults
from torchrec_2dsp.comms.groups import MeshGroups
from torchrec_2dsp.errors import ConfigError, SyncError, UnsupportedError
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.plan.sync import GradientSync, SyncConfig, SyncedRows, SyncPolicy, WeightSync
from torchrec_2dsp.replicas.drift import DriftCheck, fingerprint
from torchrec_2dsp.replicas.gradient_sync import GradientSyncAction
from torchrec_2dsp.replicas.row_average import RowAverage
from torchrec_2dsp.replicas.sync_action import SyncAction, SyncReason
from torchrec_2dsp.replicas.sync_point import SyncPoint, WeightSyncAction
from torchrec_2dsp.replicas.synced_shard import (
    UNSYNCED_STATES,
    StateRule,
    SyncedShard,
    TableShard,
    TouchedRows,
    break_even_share,
    state_rule_for,
)
from torchrec_2dsp.replicas.whole_shard import ShardAverage
from torchrec_2dsp.rows.eight_bits import parts_of
from torchrec_2dsp.shard.batch import BadIds
from torchrec_2dsp.shard.kernels import Kernel
from torchrec_2dsp.shard.optimizers import is_data_parallel
from torchrec_2dsp.shard.stages import BatchNotes, Output, Stage


@dataclass(frozen=True)
class Replication:
    """A sharded module's copies: their mesh, their sync, and what depends on these."""

    groups: MeshGroups
    sync: SyncConfig
    bad_ids: BadIds = BadIds.RAISE
    tables_beside: tuple[Any, ...] = ()
    """All the unsharded module's table configs, if this module runs only some: a feature that looks
    up other tables, too, is limited by the smallest table."""
    accumulates: bool = False
    """True to capture rows, so that several backwards can make one update."""
    are_frozen: bool = False
    """True if the tables are frozen: copies stay unchanged, and nothing is captured."""

    @property
    def updates_at_once(self) -> bool:
        """True if each backward updates its rows, and no replica changes them."""
        return self.groups.mesh.num_groups == 1 and not (self.accumulates or self.are_frozen)

    @property
    def can_accumulate(self) -> bool:
        """True if updates wait for a sync, which can merge several backwards, or never come."""
        has_replicas = self.groups.mesh.num_groups > 1
        merges = has_replicas and isinstance(self.sync, GradientSync)
        return self.are_frozen or self.accumulates or merges


def averages(
    kernels: Sequence[Kernel], sync: WeightSync, groups: MeshGroups
) -> list[WeightSyncAction]:
    """Return the kernels' sync actions, and let the kernels announce their updates to these."""
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
    """Return the sync action for the shards' tensors that ``is_synced`` selects."""
    num_peers, peers = groups.mesh.num_groups, groups.replica_peers
    by_kernel = [
        [_synced_shard(shard, is_synced, num_peers, sync) for shard in kernel.shards()]
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
        kernel.tell_updates(lambda rows, shards=shards: average.before_update(shards, rows))
    return action


def copied_shards(
    kernels: Sequence[Kernel], is_synced: Callable[[str], bool] = lambda name: True
) -> list[TableShard]:
    """Return the kernels' shards, with the tensors that are equal after a sync."""
    return [shard.synced(is_synced) for kernel in kernels for shard in kernel.shards()]


def _synced_shard(
    shard: TableShard, is_synced: Callable[[str], bool], num_peers: int, sync: WeightSync
) -> SyncedShard:
    """Describe a shard for averaging."""
    synced = shard.synced(is_synced).tensors
    tensors = list(synced.values())
    rules = tuple(state_rule_for(name, shard.table) for name in synced)
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


logger = logging.getLogger(__name__)


class ReplicaSync(Stage):
    """A sharded module's sync point, and its copies on the replica peers."""

    def __init__(
        self,
        kernels: Sequence[Kernel],
        plan: ModulePlan2D,
        replication: Replication,
        actions_beside: Sequence[SyncAction],
        broadcast: Callable[[], None],
    ) -> None:
        self.sync_point = SyncPoint(
            [*replica_actions(kernels, plan, replication), *actions_beside],
            can_hold=replication.can_accumulate,
        )
        """The point where this module's replicas are made equal."""
        self._kernels = list(kernels)
        self._groups: MeshGroups = replication.groups
        self._broadcast = broadcast
        self._has_looked_up = False

    def before_lookup(self, notes: BatchNotes) -> None:
        """Sync what is due; before the first lookup, make replicas start equal."""
        self.reach(SyncReason.LOOKUP if notes.is_training else SyncReason.READ)
        if not self._has_looked_up:
            self._has_looked_up = True
            if self._replicas_differ():
                logger.warning("replicas start from different weights: taking the first group's")
                self._broadcast()

    @property
    def is_behind(self) -> bool:
        """True if a sync is pending."""
        return self.sync_point.pending

    def before_read(self) -> None:
        """Apply pending updates.

        Collectives:
            A sync's, if a backward is pending.
        """
        self.reach(SyncReason.READ)

    def reach(self, reason: SyncReason) -> None:
        """Sync what is due; errors name the rank that failed."""
        with naming_faults(self._groups.board):
            self.sync_point.reach(reason)

    @torch.no_grad()
    def broadcast_shards(self) -> None:
        """Send the first sharding group's shards to its replica peers.

        Collectives:
            One broadcast per table shard and state tensor on the "replicate" axis.
        """
        for tensor in self._tensors():
            for part in parts_of(tensor):
                dist.broadcast(part, group_src=0, group=self._groups.replica_peers)

    @torch.no_grad()
    def _replicas_differ(self) -> bool:
        """Return on all ranks whether any copies differ, comparing one number per tensor.

        Collectives:
            An all-gather on "replicate", and an all-reduce of 8 bytes in the world.
        """
        num_groups, tensors = self._groups.mesh.num_groups, self._tensors()
        if num_groups == 1:
            return False
        num_different = torch.zeros(1, dtype=torch.int64, device=self._groups.alarm.device)
        if tensors:
            own = torch.stack([fingerprint(tensor) for tensor in tensors])
            peers = [torch.empty_like(own) for _ in range(num_groups)]
            dist.all_gather(peers, own, group=self._groups.replica_peers)
            num_different += sum(not torch.equal(peer, peers[0]) for peer in peers)
        # A peer whose own shards are equal still has rows to move if others' aren't.
        dist.all_reduce(num_different, group=self._groups.world)
        return bool(num_different)

    def _tensors(self) -> list[torch.Tensor]:
        """Return this rank's weights and optimizer state, as views."""
        return [
            tensor
            for kernel in self._kernels
            for shard in kernel.shards()
            for tensor in shard.tensors.values()
        ]


class OneUpdate:
    """Refuses backwards in which a row would get two updates, or an uncounted update.

    It warns of backwards without a step between them, which accumulate gradients in the dense part.
    """

    def __init__(
        self,
        fused_params: Mapping[str, Mapping[str, Any]],
        plan: ModulePlan2D,
        sync_point: SyncPoint,
    ) -> None:
        sgd = EmbOptimType.EXACT_SGD
        self._optimizers = {params.get("optimizer", sgd) for params in fused_params.values()}
        self._sync_point = sync_point
        # Two SGD steps equal one with the sum.
        self._is_linear = self._optimizers <= {sgd}
        is_captured = sync_point.can_hold or all(is_data_parallel(plan, name) for name in plan)
        self._may_look_up_twice = self._is_linear or is_captured
        self._backward: int | None = None
        """The number of the latest backward."""
        self._knows_steps = self._has_warned = False
        self._is_stepped = True
        """True if a step came after the latest update."""

    def stepped(self) -> None:
        """Note that an optimizer step ends or begins."""
        self._knows_steps = self._is_stepped = True

    def check(self, notes: BatchNotes) -> None:
        """Note the backward of a batch's lookup."""
        backward = running_backward()
        if notes.backward not in (None, backward):
            raise UnsupportedError(
                "a second backward through one lookup would update its rows twice; add the "
                "losses and call backward() once, or look the batch up again"
            )
        is_new = notes.backward is None
        if is_new and backward == self._backward and not self._may_look_up_twice:
            raise UnsupportedError(
                "two lookups of a collection reach one backward, which would update rows of both "
                "twice; make its sharder with accumulates=True, which adds their gradients up, or "
                "look the joined batches up at once"
            )
        if is_new and backward != self._backward and not self._sync_point.is_held:
            self._note_update()
        notes.backward = self._backward = backward
        if not notes.is_training and not self._optimizers.isdisjoint(HAS_ROW_WISE_MOMENT):
            raise UnsupportedError(
                "Adam and LAMB don't count a lookup in eval mode as a step, so its backward can't "
                "update tables; call model.train(), then eval() of what is to stay as it is"
            )

    def _note_update(self) -> None:
        """Warn once if a step has a second update."""
        if self._knows_steps and not (self._is_stepped or self._is_linear or self._has_warned):
            self._has_warned = True
            if dist.get_rank() == 0:
                logger.warning(
                    "tables are updated in each of two backwards without a step between; to train "
                    "as in one step on the sum, take batches from tdsp.accumulate(model, batches)"
                )
        self._is_stepped = False


class LookupsInStep(Stage):
    """Raises an error if only some ranks evaluate, or if only some ranks' losses reach a lookup.

    Such ranks would wait for each other in different collectives.
    """

    def __init__(self, groups: MeshGroups, tables: Sequence[str]) -> None:
        self._groups = groups
        self._number, self._num_lookups = groups.board.activity.num_modules, 0
        groups.board.activity.num_modules += 1
        self._tables = ", ".join(tables)
        self._was_training = False
        self._forward_in_step = -1
        self.is_step_left = False
        """True if `accumulate` was left before dense gradients were reduced."""

    def before_ids_travel(self, notes: BatchNotes, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Agree that earlier forwards get no backward, and that an evaluation begins.

        Collectives:
            `Alarm.step_outside`'s, in either case.
        """
        self.is_step_left = False
        activity = self._groups.board.activity
        if any(activity.awaited[name] < activity.num_forwards for name in self._awaited()):
            self.end_step()
        if self._was_training and not notes.is_training:
            self._groups.alarm.step_outside()
        self._was_training = notes.is_training
        return batch

    @property
    def is_in_step(self) -> bool:
        """True if this forward already has a lookup whose backward hasn't come."""
        return self._forward_in_step == self._groups.board.activity.num_forwards

    def before_lookup(self, notes: BatchNotes) -> None:
        """Note that a step has begun."""
        if notes.is_training and torch.is_grad_enabled():
            self._forward_in_step = self._groups.board.activity.num_forwards

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """Await a training lookup's backward."""
        parts = [output] if isinstance(output, KeyedTensor) else output.values()
        if notes.is_training and any(part.values().requires_grad for part in parts):
            self._num_lookups += 1
            activity = self._groups.board.activity
            notes.lookup = f"{self._number}/{self._num_lookups}/{activity.num_forwards}"
            activity.awaited[notes.lookup] = activity.num_forwards
            if len(activity.awaited) > _MOST_AWAITED:
                del activity.awaited[next(iter(activity.awaited))]
        return output

    def before_backward(self, notes: BatchNotes) -> None:
        """Note that the backward has come."""
        self._forward_in_step = -1
        activity = self._groups.board.activity
        activity.backward_of = notes.lookup
        activity.awaited.pop(notes.lookup, None)

    def end_step(self) -> None:
        """Agree that this module's lookups so far get no backward.

        Raises:
            SyncError: other ranks run one, or `accumulate` was left before the last one.

        Collectives:
            `Alarm.step_outside`'s, if this rank awaits a backward.
        """
        if self.is_step_left:
            raise SyncError(
                "accumulate() was left before its last backward, so the dense gradients of this "
                "step aren't added up over the ranks; let its loop end, or call zero_grad() "
                "in place of sync() and step()"
            )
        board, awaited = self._groups.board, self._awaited()
        if not awaited:
            return
        alone = SyncError(
            f"no loss has reached this rank's lookup of tables {self._tables[:200]}, but other "
            "ranks' losses have; skip the backward on all ranks, or on none: multiply a loss that "
            "is not to count by 0"
        )
        with naming_faults(board, "a step without a backward"):
            self._groups.alarm.step_outside(alone)
        for name in awaited:
            del board.activity.awaited[name]

    def _awaited(self) -> list[str]:
        names = self._groups.board.activity.awaited
        return [name for name in names if name.startswith(f"{self._number}/")]


_MOST_AWAITED = 1_000
"""The most lookups to note where neither optimizer nor wrapper tells when a step ends."""


def replica_actions(
    kernels: Sequence[Kernel], plan: ModulePlan2D, replication: Replication
) -> list[SyncAction]:
    """Return the actions that keep copies equal; the same on all ranks, with tables or without."""
    if replication.are_frozen or all(is_data_parallel(plan, name) for name in plan):
        return []
    groups, sync = replication.groups, replication.sync
    if isinstance(sync, GradientSync):
        if groups.mesh.num_groups == 1 and not replication.accumulates:
            return []
        peers, codec = groups.replica_rows, sync.transport.codec
        copied = copied_shards(kernels)
        # From here on, backwards no longer update these kernels.
        captures = [kernel.capture_rows(peers, codec) for kernel in kernels]
        action = GradientSyncAction(
            captures,
            groups.alarm,
            DriftCheck(copied, groups.replica_peers, groups.alarm, sync.drift_every),
            # Without replicas no update is late.
            delay=sync.delay if groups.mesh.num_groups > 1 else 0,
            is_layered=peers.is_layered,
        )
        return [action]
    actions: list[SyncAction] = []
    if replication.accumulates:
        updates = GradientSyncAction(
            [kernel.capture_rows(None, EXACT) for kernel in kernels],
            groups.alarm,
            precedes_average=True,
        )
        actions.append(updates)
    if groups.mesh.num_groups > 1:
        actions += averages(kernels, sync, groups)
    return actions
