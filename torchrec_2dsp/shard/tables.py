"""`Tables2D`: stages around TorchRec's sharded module, and its tables' state."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_2dsp._compat.fbgemm import (
    Tbe,
    has_own_rows,
    keeps_untouched_rows,
    set_iteration,
    set_rounding,
)
from torchrec_2dsp._compat.shardings import (
    fused_params_of,
    lookups_of,
    output_dists_of,
    shardings_of,
    wrap_optimizer,
)
from torchrec_2dsp._compat.tensors import Upstream, without_base
from torchrec_2dsp._compat.torchrec import jagged_features
from torchrec_2dsp.comms.failure_detection import naming_faults
from torchrec_2dsp.comms.groups import MeshGroups
from torchrec_2dsp.errors import NotFiniteError, UnsupportedError
from torchrec_2dsp.plan.fits_module import has_weights
from torchrec_2dsp.plan.parameter_sharding import (
    ParameterSharding2D,
    RowOwners,
    RowSpread,
    num_rows,
)
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.plan.sync import GradientSync
from torchrec_2dsp.replicas.sync_action import SyncAction, SyncReason
from torchrec_2dsp.replicas.sync_point import SyncPoint
from torchrec_2dsp.replicas.synced_shard import TableShard
from torchrec_2dsp.rows.rounding import HALF_TYPES, RoundedTable, StochasticRounding
from torchrec_2dsp.shard.batch import BatchCheck, OneBatchSize, features_of
from torchrec_2dsp.shard.codecs import pack_size, shard_widths
from torchrec_2dsp.shard.data_parallel import kernels_by_kind, whole_tables_action
from torchrec_2dsp.shard.hot_rows import HotRows, HotSets
from torchrec_2dsp.shard.initial_tables import EvictedRows, is_drawn_alike
from torchrec_2dsp.shard.kernels import ROUNDING_SEED, Kernel
from torchrec_2dsp.shard.optimizers import is_data_parallel
from torchrec_2dsp.shard.replica_sync import LookupsInStep, OneUpdate, ReplicaSync, Replication
from torchrec_2dsp.shard.row_exchange.exchange import row_exchanges
from torchrec_2dsp.shard.row_exchange.stages import RowPrefetch, arrangement_of
from torchrec_2dsp.shard.shardings import completed_input, widen_contexts
from torchrec_2dsp.shard.stages import (
    BagContext,
    BatchNotes,
    ClipGradients,
    Output,
    SequenceContext,
    Stage,
    StrayGradients,
)

Module = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection
CHANGEABLE = ("eps", "beta1", "beta2", "weight_decay", "lower_bound")
"""The hyper-parameters, besides the learning rate, that FBGEMM can change."""
Context = TypeVar("Context", BagContext, SequenceContext)


class Tables2D:
    """A sharded module's tables, repeated over a mesh's groups."""

    def __init__(
        self,
        module: Module,
        unsharded: Any,
        configs: list[Any],
        plan: ModulePlan2D,
        replication: Replication,
        device: torch.device,
        outputs: Stage,
    ) -> None:
        self.module = module
        self.groups: MeshGroups = replication.groups
        self.table_names = sorted(plan)
        """The table names, in the same order on all ranks."""
        self.are_frozen = replication.are_frozen
        """True if the tables are frozen."""
        self._kernels, self._whole_tables = kernels_by_kind(lookups_of(module))
        all_configs = replication.tables_beside or configs
        is_weighted, alarm = has_weights(unsharded), self.groups.alarm
        self._batch_check = BatchCheck(all_configs, replication.bad_ids, alarm, is_weighted)
        # Each part of a module checks the whole batch.
        self._counts_bad_ids = self.table_names[0] == min(config.name for config in all_configs)
        hot_rows = self._make_hot_rows(configs, plan, replication, device)
        self.hot_sets: HotSets = hot_rows.sets
        self.hot_rows = hot_rows if self.hot_sets.by_table else None
        """The replicated hot rows, if any."""
        self.prefetch = RowPrefetch(
            row_exchanges(lookups_of(module), output_dists_of(module)),
            updates_at_once=replication.updates_at_once,
            before_use=self._before_use,
        )
        self.replicas = ReplicaSync(
            self._kernels,
            plan,
            replication,
            list(self._actions_beside(replication)),
            self._broadcast_shards,
        )
        """The stage that keeps the tables' copies equal."""
        self.one_update = OneUpdate(fused_params_of(module), plan, self.sync_point)
        """The check that rows get only one update in a step."""
        self.in_step = LookupsInStep(self.groups, self.table_names)
        """The check that either all ranks train a lookup, or none."""
        arrangement = arrangement_of(plan, self._kernels, self.groups)
        self.stages: list[Stage] = [
            OneBatchSize(all_configs, _pack_size(module, plan)),
            *([] if self.are_frozen else [StrayGradients(table_modules(module), self.tbes())]),
            self.in_step,
            self._batch_check,
            self._clipping(configs, plan),
            outputs,
            *([] if self.hot_rows is None else [self.hot_rows]),
            *([] if arrangement is None else [arrangement]),
            self.replicas,
            self.prefetch,
        ]
        """The work around TorchRec's, in this order; see `Stage`."""
        self._configs, self._arrangement = configs, arrangement
        self._features = features_of(all_configs)
        self._watch_state()

    def _clipping(self, configs: list[Any], plan: ModulePlan2D) -> ClipGradients:
        """Return the stage that clips outputs' gradients."""
        num_groups = plan.mesh.num_groups if isinstance(plan.sync, GradientSync) else 1
        fused_params = fused_params_of(self.module)
        bounds = {
            output: fused_params[config.name].get("max_gradient", 1.0)
            for config, outputs in zip(configs, get_embedding_names_by_table(configs), strict=True)
            for output in outputs
            if fused_params.get(config.name, {}).get("gradient_clipping")
            and not is_data_parallel(plan, config.name)
        }
        return ClipGradients(bounds, plan.mesh.group_size * num_groups)

    def _make_hot_rows(
        self, configs: list[Any], plan: ModulePlan2D, replication: Replication, device: torch.device
    ) -> HotRows:
        """Build the hot rows, if any, and let all kernels round alike."""
        tables, fused_params = dict(plan.tables()), fused_params_of(self.module)
        hot_rows = HotRows(
            configs,
            tables,
            fused_params,
            self._kernels,
            self.groups,
            replication.sync,
            device,
            self.complete_state,
        )
        _round_updates(self.kernels(), hot_rows, tables, fused_params)
        return hot_rows

    def _actions_beside(self, replication: Replication) -> Iterator[SyncAction]:
        """Yield the sync actions for rows that all ranks hold, and for early rows."""
        if self.hot_rows is not None:
            yield self.hot_rows.action()
        if self._whole_tables:
            drift_every = replication.sync.drift_every
            yield whole_tables_action(self._whole_tables, self.groups, drift_every)
        yield self.prefetch.lagging

    def reset_evicted_rows(self, seed: int) -> EvictedRows:
        """Reset, from now on, the rows that id maps give to other ids; return the stage."""
        stage = EvictedRows(
            self._configs, self.kernels(), self._arrangement, self.hot_rows, self._before_use, seed
        )
        self.stages.append(stage)
        return stage

    def keep_weights(self, unsharded: Any) -> None:
        """Copy the unsharded module's weights, if it has any."""
        # A module's own ``device`` stays what it was built with, even if the module was moved.
        if not any(weight.is_meta for weight in unsharded.parameters()):
            self.module.load_state_dict(unsharded.state_dict(), strict=False)

    def take_drawn_rows(self, unsharded: Any) -> None:
        """Keep rows that were just drawn where they are, if they are interchangeable.

        Collectives:
            An all-reduce of 8 bytes over the world, if rows are spread over owners.
        """
        # Replicas of hot rows are read by number.
        if self._arrangement is not None and self.hot_rows is None:
            self._arrangement.take_drawn_rows(is_drawn_alike(unsharded))

    def _watch_state(self) -> None:
        """Complete the module's state for every reader and writer."""
        wrap_optimizer(self.module, lambda stock: SyncedOptimizer(stock, self))
        self.module.register_state_dict_pre_hook(lambda *_: self.complete_state())
        # DistributedModelParallel loads without post-hooks, so the pre-hook does both.
        self.module.register_load_state_dict_pre_hook(lambda *_: self._before_load())

    @property
    def sync_point(self) -> SyncPoint:
        """The point where replicas are made equal."""
        return self.replicas.sync_point

    @property
    def num_bad_ids(self) -> int:
        """The number of bad ids on this rank so far, see `BadIds`."""
        return self._batch_check.ids.num_bad if self._counts_bad_ids else 0

    @num_bad_ids.setter
    def num_bad_ids(self, count: int) -> None:
        self._batch_check.ids.num_bad = count

    def kernels(self) -> list[Kernel]:
        """Return this rank's fused kernels, except hot rows' kernels."""
        return [*self._kernels, *self._whole_tables]

    def tbes(self) -> list[Tbe]:
        """Return the FBGEMM modules in this rank's fused kernels and hot rows' kernels."""
        return [kernel.tbe for kernel in self.kernels()] + self.hot_tbes()

    def send_ids(self, ctx: Context, features: Any, send: Callable[[Context, Any], Any]) -> Any:
        """Let each stage see the batch, then distribute its ids by ``send``.

        Collectives:
            The stages', then TorchRec's.
        """
        notes = ctx.notes
        notes.is_training = self.module.training and torch.is_grad_enabled()
        features = jagged_features(features, self._features)
        for stage in self.stages:
            features = stage.before_ids_travel(notes, features)
        notes.asked = send(ctx, features)
        notes.shardings = cast(list[Any], ctx.sharding_contexts)
        widen_contexts(notes.shardings, shardings_of(self.module))
        return notes.asked

    def look_up(self, ctx: Context, arrived: Any, look_up: Callable[[Context, Any], Any]) -> Any:
        """Look up a batch by ``look_up`` and in the stages; all rows travel concurrently.

        Collectives:
            The stages' and TorchRec's.
        """
        notes = ctx.notes
        notes.is_training = self.module.training and torch.is_grad_enabled()
        arrived, notes.asked = completed_input(notes, arrived), None
        for stage in self.stages:
            stage.before_lookup(notes)
        for stage in self.stages:
            arrived = stage.on_arrival(notes, arrived)
        self._before_use()
        if torch.is_grad_enabled():
            for kernel in self.kernels():
                # Passes the learning rate on, which may be set after the optimizer's own calls.
                kernel.fused_optimizer.zero_grad()
        awaitable = look_up(ctx, arrived)
        for stage in self.stages:
            stage.while_rows_travel(notes)
        watches_backward = torch.is_grad_enabled()

        def complete(output: Output) -> Output:
            for stage in reversed(self.stages):
                output = stage.on_output(notes, output)
            if watches_backward:
                if isinstance(output, KeyedTensor):
                    bags = without_base(output.values())
                    output = KeyedTensor(output.keys(), output.length_per_key(), bags)
                self._watch_backward(notes, output)
            return output

        awaitable.callbacks.append(complete)
        return awaitable

    def complete_state(self) -> None:
        """Bring weights and optimizer state up to date, before they are read or written.

        Collectives:
            Each stage's before a read: a sync's, if a backward is pending, and all-to-alls if rows
            move to where state dicts show them; before these an all-reduce of 8 bytes.
        """
        is_behind = any(stage.is_behind for stage in self.stages)
        with naming_faults(self.groups.board, "a read of the state" if is_behind else None):
            if is_behind:
                self.groups.alarm.step_outside()
            for stage in reversed(self.stages):
                stage.before_read()

    @torch.no_grad()
    def broadcast_replicas(self) -> None:
        """Send tables and optimizer state from the first sharding group to the others.

        The sharder calls it, because ranks with different seeds would train different tables.
        Weights written before the first lookup are broadcast then; call it after later writes.

        Collectives:
            One broadcast per table shard and state tensor on the "replicate" axis; on the world for
            data-parallel tables.
        """
        self._broadcast_shards()
        for kernel in self._whole_tables:
            for shard in kernel.shards():
                for tensor in shard.tensors.values():
                    dist.broadcast(tensor, group_src=0, group=self.groups.world)

    def _broadcast_shards(self) -> None:
        self.complete_state()
        self.replicas.broadcast_shards()
        self.after_write()

    def _watch_backward(self, notes: BatchNotes, output: Output) -> None:
        """Run `_backward_begins` when the output, which every rank has, gets its gradient."""
        parts = [output] if isinstance(output, KeyedTensor) else output.values()
        for part in parts:
            values = part.values()
            if values.requires_grad:
                begin = partial(self._backward_begins, notes, Upstream(values))
                values.register_hook(begin)

    def _backward_begins(self, notes: BatchNotes, lookup: Upstream, _: torch.Tensor) -> None:
        self.groups.board.activity.begin("the backward")
        if lookup.is_reached():
            self.one_update.check(notes)
        for stage in self.stages:
            stage.before_backward(notes)
        self._before_use()
        self.sync_point.backward_seen()

    def _before_use(self) -> None:
        """Put rows where training finds them. All training by the kernels calls it first."""
        for stage in self.stages:
            stage.before_use()

    def expect_load(self) -> None:
        """Bring the state up to date, unless it isn't finite: loading will replace it.

        Collectives:
            `complete_state`'s.
        """
        if self._arrangement is not None:
            # Drawn rows needn't move before a load.
            self._arrangement.before_load()
        while True:
            try:
                return self.complete_state()
            except NotFiniteError:
                if not self.sync_point.drop():
                    raise

    def _before_load(self) -> None:
        self.expect_load()
        self.after_write()

    def after_write(self) -> None:
        """Note that weights or optimizer state were written other than by training."""
        for stage in self.stages:
            stage.after_write()

    def hot_tbes(self) -> list[Tbe]:
        """Return the FBGEMM modules in the hot rows' kernels."""
        return [] if self.hot_rows is None else self.hot_rows.kernels()


class SyncedOptimizer(CombinedOptimizer):
    """TorchRec's combined optimizer behind a module's sync point.

    Captured updates keep their lookup's learning rate, even if a step passes another one to the
    kernels meanwhile. Other changes come after them, and a reader sees the complete state.
    """

    def __init__(self, stock: CombinedOptimizer, tables: "Tables2D") -> None:
        self._tables = tables
        super().__init__(list(stock.optimizers))

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Sync what is due, then pass the learning rate to the kernels."""
        self._tables.in_step.is_step_left = False
        self._tables.one_update.stepped()
        self._tables.replicas.reach(SyncReason.BACKWARD_OVER)
        super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        """Sync what is due, then pass the learning rate to the kernels."""
        self._tables.in_step.end_step()
        self._tables.one_update.stepped()
        self._tables.replicas.reach(SyncReason.BACKWARD_OVER)
        super().step(closure)

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The complete state; reading it is a sync point."""
        self._tables.complete_state()
        return super().state

    def post_load_state_dict(self) -> None:
        """Note that TorchRec has loaded a state dict."""
        super().post_load_state_dict()
        self._tables.after_write()

    def set_optimizer_step(self, step: int) -> None:
        """Sync what is pending, then set the iteration."""
        self._tables.replicas.reach(SyncReason.READ)
        for tbe in self._tables.tbes():
            set_iteration(tbe, step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Sync what is pending, then change the running kernels."""
        self._tables.replicas.reach(SyncReason.READ)
        for tbe in self._tables.tbes():
            if params_dict.get("weight_decay") and keeps_untouched_rows(tbe):
                raise UnsupportedError(
                    f"weight_decay={params_dict['weight_decay']} can't be set while these tables "
                    "train: they were built without one; give it to the sharder, in fused_params"
                )
        self._change_kernels(params_dict)
        # The kernels take the learning rate from here at the next training lookup, and a train
        # state takes all hyper-parameters.
        for group in cast(list[dict[str, Any]], self.param_groups):
            group.update(params_dict)

    def restore_hyper_parameters(self) -> None:
        """Pass `update_hyper_parameters`' values, which a train state has kept, to the kernels."""
        for group in cast(list[dict[str, Any]], self.param_groups):
            self._change_kernels({name: group[name] for name in CHANGEABLE if name in group})

    def _change_kernels(self, params_dict: dict[str, Any]) -> None:
        super().update_hyper_parameters(params_dict)
        for tbe in self._tables.hot_tbes():
            tbe.update_hyper_parameters(params_dict)


def table_modules(module: Module) -> nn.ModuleDict:
    """Return a sharded module's tables by name, as PyTorch sees them."""
    bags = isinstance(module, ShardedEmbeddingBagCollection)
    return module.embedding_bags if bags else module.embeddings


def _pack_size(module: Module, plan: ModulePlan2D) -> int:
    """Return how many numbers codecs encode together; 1 if every row fills whole packs."""
    size = pack_size(module.qcomm_codecs_registry)
    widths = shard_widths(table for _, table in plan.tables())
    return size if any(width % size for width in widths) else 1


def _round_updates(
    kernels: Sequence[Kernel],
    hot_rows: HotRows,
    tables: Mapping[str, ParameterSharding2D],
    fused_params: Mapping[str, Mapping[str, Any]],
) -> None:
    """Let kernels round stochastically where their tables' fused parameters ask for it.

    FBGEMM's rounding draws different numbers on each rank, and its CPU kernels omit it. Here rules
    on tensors update such tables on every device, and round by `torchrec_2dsp.rows.rounding`.
    """
    for kernel in kernels:
        shards = kernel.shards()
        rounded = [
            RoundedTable(shard.table, shard.column, _numbers(shard, tables[shard.table]))
            for shard in shards
        ]
        _round(kernel.tbe, rounded, fused_params)
    for hot_tbe in hot_rows.tbes:
        rounded = [
            RoundedTable(hot.table, hot.column, partial(hot_rows.sets.numbers, hot.table))
            for hot in hot_tbe.slices
        ]
        _round(hot_tbe.capture.tbe, rounded, fused_params)


def _round(
    tbe: Tbe,
    tables: Sequence[RoundedTable],
    fused_params: Mapping[str, Mapping[str, Any]],
) -> None:
    # A kernel's tables have equal parameters.
    params = fused_params[tables[0].name]
    is_half = tbe.weights_precision.as_dtype() in HALF_TYPES
    if params.get("stochastic_rounding") and (is_half or has_own_rows(tbe)):
        set_rounding(tbe, StochasticRounding(int(params.get(ROUNDING_SEED, 0)), tuple(tables)))


def _numbers(
    shard: TableShard, sharding: ParameterSharding2D
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from a shard's rows, as stored for training, to the table's."""
    rows = num_rows(sharding)
    if sharding.owners is not RowOwners.HASH or rows is None:
        return lambda local_rows: local_rows + shard.row
    spread = RowSpread(rows)
    return lambda local_rows: spread.rows(local_rows + shard.row)
