"""Hot rows: a replica on every rank, alongside TorchRec's own (cold) path.

Cold shards keep their full row space, with a *home* for every hot row. Hot ids are removed from a
batch before TorchRec distributes it, and looked up in the local replica. Their gradients are merged
over all ranks. Before a state read, replicas are written home, so state dicts are TorchRec's.
"""

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    data_type_to_sparse_type,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
    Tbe,
    adopt_lookup,
    adopt_optimizer,
    params_to_build,
    starts_of,
    table_tensors,
    without_update,
)
from torchrec_2dsp._compat.tensors import running_backward
from torchrec_2dsp.access.table_access import HotSet
from torchrec_2dsp.codecs.rows import RowCodec
from torchrec_2dsp.comms.groups import MeshGroups, Peers
from torchrec_2dsp.errors import PlanError, SyncError, UnsupportedError
from torchrec_2dsp.plan.parameter_sharding import ParameterSharding2D
from torchrec_2dsp.plan.sync import GradientSync, SyncConfig
from torchrec_2dsp.replicas.capture import RowCapture
from torchrec_2dsp.replicas.drift import DriftCheck
from torchrec_2dsp.replicas.gradient_sync import GradientSyncAction
from torchrec_2dsp.replicas.synced_shard import TableShard
from torchrec_2dsp.rows.eight_bits import EightBitRows
from torchrec_2dsp.shard.kernels import OWN_PARAMS, Kernel
from torchrec_2dsp.shard.stages import (
    BatchNotes,
    HotBatch,
    HotIds,
    Stage,
    split_hot_rows,
)

RowsOf = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns a table's rows that belong to ids now, ascending; some ids may have no row."""


class HotSets:
    """The module's hot sets: those that new batches use, and those that the replicas hold.

    They differ from a refresh until the first lookup with the new sets, and again when a pipeline
    looks up a batch that was split before.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        tables: Mapping[str, ParameterSharding2D],
        device: torch.device,
    ) -> None:
        self._device = device
        self.by_table = {
            config.name: hot_set
            for config in configs
            if (hot_set := tables[config.name].hot_set) is not None
        }
        """The sets that new batches use."""
        self._configs = {config.name: config for config in configs if config.name in self.by_table}
        self._num_slots = {name: len(hot_set) for name, hot_set in self.by_table.items()}
        """The number of hot rows that the plan allows each table."""
        self._rows_of: RowsOf | None = None
        """Maps hot sets' ids to rows; `None` if they are rows already."""
        self.newest = self._ids()
        self.held = self.newest
        self._before_newest: deque[Mapping[str, HotSet]] = deque()
        """The sets for the next batches, one each, before batches use the newest sets."""
        self._waiting: list[weakref.ref[HotBatch]] = []
        """Batches that were split but not looked up yet, as in pipelines."""

    def split(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, HotBatch]:
        """Split a batch into cold features and hot ids."""
        ids = self._ids(self._before_newest.popleft()) if self._before_newest else self.newest
        cold, batch = split_hot_rows(features, ids)
        self._waiting = [*self._still_waiting(), weakref.ref(batch)]
        return cold, batch

    def numbers(self, table: str, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows that the replicas hold in these slots."""
        return self.held.by_table[table][slots]

    def looked_up(self, batch: HotBatch) -> None:
        """Note that a batch has been looked up."""
        self._waiting = [other for other in self._still_waiting() if other() is not batch]

    @property
    def older(self) -> list[Mapping[str, HotSet]]:
        """The waiting batches' sets, up to the last batch that doesn't have the newest sets."""
        batches = [other() for other in self._still_waiting()]
        sets = [batch.ids.hot_sets for batch in batches if batch is not None]
        sets += self._before_newest
        while sets and sets[-1] is self.by_table:
            sets.pop()
        return sets

    def put_before_newest(self, older: Sequence[Mapping[str, HotSet]]) -> None:
        """Let the next batches use older sets, one each: those that were `older` at a save."""
        for hot_sets in older:
            self.check(hot_sets)
        self._before_newest = deque({**self.by_table, **sets} for sets in older)

    def _still_waiting(self) -> list["weakref.ref[HotBatch]"]:
        return [batch for batch in self._waiting if batch() is not None]

    def check(self, hot_sets: Mapping[str, HotSet]) -> None:
        """Raise unless the sets fit their tables; sets of other modules' tables are ignored."""
        for name, hot_set in self._own(hot_sets).items():
            num_slots = self._num_slots[name]
            if self._rows_of is None:
                hot_set.check_fits(name, self._configs[name].num_embeddings)
            if len(hot_set) > num_slots:
                raise PlanError(
                    f"table {name!r} was planned with {num_slots} hot rows and has no room "
                    f"for {len(hot_set)}; refresh it with fewer, as by HotSet.from_stats(..., "
                    f"rows={num_slots}), or pin more when you plan"
                )

    def renew(self, hot_sets: Mapping[str, HotSet]) -> None:
        """Let new batches use these sets; unnamed tables keep theirs, others are ignored."""
        self.check(hot_sets)
        self.by_table = self.by_table | self._own(hot_sets)
        self.newest = self._ids()

    def name_ids(self, hot_sets: Mapping[str, HotSet], rows_of: "RowsOf") -> None:
        """Interpret these sets, and later ones, as ids instead of rows."""
        self._rows_of = rows_of
        self.renew(hot_sets)
        self.held = self.newest

    def follow_map(self) -> None:
        """Let new batches use the current rows of the sets' ids, as the map may have changed."""
        ids = self._ids()
        rows = zip(ids.by_table.values(), self.newest.by_table.values(), strict=True)
        if not all(torch.equal(new, old) for new, old in rows):
            self.newest = ids

    def _own(self, hot_sets: Mapping[str, HotSet]) -> dict[str, HotSet]:
        return {name: hot_set for name, hot_set in hot_sets.items() if name in self.by_table}

    def _ids(self, hot_sets: Mapping[str, HotSet] | None = None) -> HotIds:
        hot_sets = self.by_table if hot_sets is None else hot_sets
        by_table = {name: rows.tensor(self._device) for name, rows in hot_sets.items()}
        if self._rows_of is not None:
            by_table = {name: self._rows_of(name, ids) for name, ids in by_table.items()}
        by_feature = {
            feature: by_table[name]
            for name, config in self._configs.items()
            for feature in config.feature_names
        }
        return HotIds(by_table, by_feature, hot_sets)


@dataclass(frozen=True)
class HotSlice:
    """One column shard's hot rows: column-wise tables have one row-wise moment per column shard."""

    table: str
    num_rows: int
    column: int
    num_columns: int
    features: tuple[str, ...]
    data_type: DataType
    is_sequence: bool
    """True for one row per id, false for one sum per bag."""


def hot_slices(
    configs: Sequence[BaseEmbeddingConfig], tables: Mapping[str, ParameterSharding2D]
) -> list[HotSlice]:
    """Return all column shards of tables with a hot set, in the module's order."""
    slices = []
    for config in configs:
        table = tables[config.name]
        if table.hot_set is None:
            continue
        is_sequence = not hasattr(config, "pooling")
        shards = getattr(table.sharding_spec, "shards", [])
        columns = sorted({(shard.shard_offsets[1], shard.shard_sizes[1]) for shard in shards})
        slices += [
            HotSlice(
                config.name,
                len(table.hot_set),
                start,
                size,
                tuple(config.feature_names),
                config.data_type,
                is_sequence,
            )
            for start, size in columns
        ]
    return slices


class HotTbe:
    """Holds replicas with the same optimizer and data type in one fused kernel."""

    def __init__(
        self,
        slices: Sequence[HotSlice],
        fused_params: dict[str, Any],
        device: torch.device,
        *,
        peers: Peers,
        codec: RowCodec,
        learning_rate: Callable[[Sequence[HotSlice]], float],
    ) -> None:
        self.slices = list(slices)
        """The kernel's tables."""
        on_cpu = device.type == "cpu"
        # Moments merged over all ranks are exact: no moment scale here.
        own = {name: value for name, value in fused_params.items() if name not in OWN_PARAMS}
        precision = data_type_to_sparse_type(slices[0].data_type)
        tbe = Tbe(
            embedding_specs=[
                (
                    hot.num_rows,
                    hot.num_columns,
                    EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE,
                    ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA,
                )
                for hot in slices
            ],
            feature_table_map=[index for index, hot in enumerate(slices) for _ in hot.features],
            pooling_mode=PoolingMode.NONE if slices[0].is_sequence else PoolingMode.SUM,
            weights_precision=precision,
            device=device,
            **params_to_build(own, precision, device),
        )
        adopt_lookup(tbe)
        adopt_optimizer(tbe, own)
        self.capture = RowCapture(
            tbe,
            [hot.table for hot in slices],
            lambda: learning_rate(self.slices),
            peers,
            codec,
        )
        """The kernel, and its gradients until they are merged."""

    def shards(self) -> list[TableShard]:
        """Return the slices as shards, whose rows are the hot sets' slots."""
        pairs = zip(self.slices, table_tensors(self.capture.tbe), strict=True)
        return [TableShard(hot.table, 0, hot.column, tensors) for hot, tensors in pairs]

    def lookup(self, batch: HotBatch, *, is_training: bool) -> dict[str, torch.Tensor]:
        """Look up each feature's hot rows, columns joined: summed per bag, or one per id."""
        looked_up = [(hot, name) for hot in self.slices for name in hot.features]
        hot_features = [batch.features[name] for _, name in looked_up]
        ids = torch.cat([feature.slots for feature in hot_features])
        lengths = torch.cat([feature.lengths for feature in hot_features])
        offsets = starts_of(lengths)
        parts = [feature.weights for feature in hot_features if feature.weights is not None]
        # Sequences ignore a batch's weights.
        weights = torch.cat(parts) if parts and not self.slices[0].is_sequence else None
        tbe = self.capture.tbe
        run = without_update(tbe, lambda: tbe(ids, offsets, weights), is_training=is_training)
        output = self.capture.lookup(run, weights) if torch.is_grad_enabled() else run()
        if self.slices[0].is_sequence:
            columns = output.split([feature.slots.numel() for feature in hot_features])
        else:
            columns = output.split([hot.num_columns for hot, _ in looked_up], dim=1)
        pooled: dict[str, list[torch.Tensor]] = {}
        for (_, name), part in zip(looked_up, columns, strict=True):
            pooled.setdefault(name, []).append(part)
        return {
            name: parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            for name, parts in pooled.items()
        }


Tensors = Mapping[str, torch.Tensor]


class HotRows(Stage):
    """A sharded module's replicated rows."""

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        tables: Mapping[str, Any],
        fused_params: Mapping[str, dict[str, Any]],
        kernels: Sequence[Kernel],
        groups: MeshGroups,
        sync: SyncConfig,
        device: torch.device,
        complete_state: Callable[[], None],
    ) -> None:
        self._complete_state = complete_state
        self._groups = groups
        self._kernels = list(kernels)
        gradients = sync if isinstance(sync, GradientSync) else GradientSync()
        self._sync, self._gradients = sync, gradients
        self.tbes = [
            HotTbe(
                slices,
                fused_params[slices[0].table],
                device,
                peers=groups.hot_rows,
                codec=gradients.transport.codec,
                learning_rate=self._home_learning_rate,
            )
            for slices in _by_kernel(hot_slices(configs, tables), fused_params)
        ]
        """The kernels that hold the replicas."""
        self.sets = HotSets(configs, tables, device)
        # The replicas are empty until they are read from home.
        self._stale = True
        self._dirty = False
        self._in_backward: tuple[int, HotIds | None] = -1, None
        """The latest backward, and its lookups' hot ids."""
        self._keep_homes_exactly()

    def action(self) -> GradientSyncAction:
        """Return the sync action that merges the replicas' gradients over all ranks."""
        alarm, peers = self._groups.alarm, self._groups.hot_rows
        copies = [
            replace(replica, table=f"{replica.table} (hot rows)") for replica in self._replicas()
        ]
        return GradientSyncAction(
            [tbe.capture for tbe in self.tbes],
            alarm,
            DriftCheck(copies, peers.everyone, alarm, self._sync.drift_every),
            delay=self._gradients.delay,
            is_layered=peers.is_layered,
            on_update=self._mark_dirty,
        )

    def before_ids_travel(self, notes: BatchNotes, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the batch without hot ids."""
        cold, notes.hot = self.sets.split(batch)
        return cold

    def before_lookup(self, notes: BatchNotes) -> None:
        """Load the rows that were hot when the batch was split.

        Collectives:
            `Tables2D.complete_state`'s, if the replicas hold other rows, as after a refresh.
        """
        if notes.hot is not None:
            self._hold(notes.hot.ids)

    def before_accumulating(self) -> None:
        """Load a refresh's rows now, because the state can't be completed later.

        Collectives:
            `before_lookup`'s.
        """
        self._hold(self.sets.newest)

    def _hold(self, ids: HotIds) -> None:
        if ids is not self.sets.held:
            self._complete_state()
            self.sets.held = ids
            self.after_write()

    def while_rows_travel(self, notes: BatchNotes) -> None:
        """Look up each feature's hot rows: `[batch, dim]` for bags, `[ids, dim]` for sequences."""
        if notes.hot is None:
            return
        self.sets.looked_up(notes.hot)
        for tbe in self.tbes:
            notes.hot_output |= tbe.lookup(notes.hot, is_training=notes.is_training)

    def before_backward(self, notes: BatchNotes) -> None:
        """Load the rows that the lookup read, as others may have been loaded since."""
        (last, last_ids), number = self._in_backward, running_backward()
        self._in_backward = number, getattr(notes.hot, "ids", None)
        if last == number and last_ids is not self._in_backward[1]:
            raise UnsupportedError(
                "a backward reaches lookups with different hot rows, which id maps or a refresh "
                "have changed between two forwards; look the batches up in one forward, or call "
                "backward() for each"
            )
        self.before_lookup(notes)

    def after_write(self) -> None:
        """Read the replicas from their homes again before their next use."""
        self._stale, self._dirty = True, False
        self._keep_homes_exactly()

    def kernels(self) -> list[Tbe]:
        """Return the FBGEMM modules of the replicas' kernels."""
        return [tbe.capture.tbe for tbe in self.tbes]

    def replicas(
        self, rows: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[TableShard, torch.Tensor, torch.Tensor]]:
        """Yield each hot slice, its slots that hold some of these rows, and a flag for each row."""
        for replica in self._replicas():
            if replica.table in rows:
                held = self.sets.held.by_table[replica.table]
                of_table = rows[replica.table].to(held.device)
                is_held = torch.isin(of_table, held)
                yield replica, torch.searchsorted(held, of_table[is_held]), is_held

    def _replicas(self) -> list[TableShard]:
        return [replica for tbe in self.tbes for replica in tbe.shards()]

    @torch.no_grad()
    def before_read(self) -> None:
        """Copy the replicas into this rank's shards if they are newer."""
        if not self._dirty:
            return
        for replica, home, slots, rows in self._homes():
            for name, tensor in home.items():
                # Hidden from autograd: no lookup reads a hot row at home.
                tensor.data[rows] = replica[name][slots]
        self._dirty = False

    @torch.no_grad()
    def before_use(self) -> None:
        """Fill the replicas from the sharding group's shards if these are newer.

        Collectives:
            One all-reduce per hot table's weight and state on the "shard" axis: owners
            contribute their rows, the others zeros.
        """
        if not self._stale:
            return
        tensors = [tensor for replica in self._replicas() for tensor in replica.tensors.values()]
        for tensor in tensors:
            tensor.zero_()
        for replica, home, slots, rows in self._homes():
            for name, tensor in home.items():
                replica[name][slots] = tensor[rows]
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._groups.sharding_group)
        self._stale = self._dirty = False

    def _keep_homes_exactly(self) -> None:
        """Keep hot rows from being rounded when they are written home."""
        for _, home, _, rows in self._homes():
            weight = home["weight"]
            if isinstance(weight, EightBitRows):
                weight.store.keep_exactly(rows)

    def _homes(self) -> Iterator[tuple[Tensors, Tensors, torch.Tensor, torch.Tensor]]:
        """Yield each local hot slice's replica, home, slots and rows."""
        shards = [shard for kernel in self._kernels for shard in kernel.shards()]
        for replica in self._replicas():
            for shard in shards:
                if (shard.table, shard.column) != (replica.table, replica.column):
                    continue
                ids = self.sets.held.by_table[shard.table].to(shard.device)
                slots = ((ids >= shard.row) & (ids < shard.row + shard.num_rows)).nonzero()
                slots = slots.squeeze(1)
                yield replica.tensors, shard.tensors, slots, ids[slots] - shard.row

    def _home_learning_rate(self, slices: Sequence[HotSlice]) -> float:
        """Return the tables' learning rate on this rank; NaN without a shard."""
        tables = {hot.table for hot in slices}
        rates = {
            kernel.user_learning_rate
            for kernel in self._kernels
            if any(table.name in tables for table in kernel.table_configs)
        }
        if len(rates) > 1:
            raise SyncError(
                f"the tables {', '.join(sorted(tables))} have hot rows in one kernel but learning "
                f"rates {sorted(rates)}; give them one schedule, or different fused parameters"
            )
        return rates.pop() if rates else math.nan

    def _mark_dirty(self) -> None:
        self._dirty = True


def _by_kernel(
    slices: Sequence[HotSlice], fused_params: Mapping[str, dict[str, Any]]
) -> list[list[HotSlice]]:
    """Group slices by TBE: same optimizer, data type and, for sequences, width."""
    grouped: dict[str, list[HotSlice]] = defaultdict(list)
    for hot in slices:
        params = sorted(fused_params[hot.table].items())
        # A kernel's sequences share one width.
        width = hot.num_columns if hot.is_sequence else None
        grouped[repr((params, hot.data_type, width))].append(hot)
    return list(grouped.values())
