"""Hot rows: a replica on every rank beside TorchRec's own (cold) path.

Cold shards keep their full row space, with a *home* for every hot row. Hot ids leave the features
before TorchRec distributes them, and are looked up in the local replica. Their gradients are merged
over all ranks. Before the state is read, replicas are written home, so state dicts are TorchRec's.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_sparse_type
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
    optimizer_states,
)
from torchrec_2dsp.codecs.rows import RowCodec
from torchrec_2dsp.comms.mesh_groups import MeshGroups, Peers
from torchrec_2dsp.errors import SyncError
from torchrec_2dsp.plan.parameter_sharding import ParameterSharding2D
from torchrec_2dsp.plan.sync import GradientSync, SyncConfig
from torchrec_2dsp.replicas.capture import RowCapture
from torchrec_2dsp.replicas.drift import CopiedShard, DriftCheck
from torchrec_2dsp.replicas.gradient_sync import GradientSyncAction
from torchrec_2dsp.shard.hot_sets import HotBatch, HotIds, HotSets
from torchrec_2dsp.shard.kernels import MOMENT_SCALE, Kernel
from torchrec_2dsp.shard.stages import BatchNotes, Stage


@dataclass(frozen=True)
class HotSlice:
    """The hot rows of one column shard.

    A column-wise table keeps one row-wise moment per column shard, so its replicas are split alike.
    """

    table: str
    num_rows: int
    column: int
    num_columns: int
    features: tuple[str, ...]
    is_sequence: bool
    """Whether they get a row per id instead of a sum per bag."""


def hot_slices(
    configs: Sequence[BaseEmbeddingConfig], tables: Mapping[str, ParameterSharding2D]
) -> list[HotSlice]:
    """Return the column shards of all tables with a hot set, in the module's order."""
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
                is_sequence,
            )
            for start, size in columns
        ]
    return slices


class HotTbe:
    """Holds replicas that share an optimizer and a data type, in one fused kernel."""

    def __init__(
        self,
        slices: Sequence[HotSlice],
        fused_params: dict[str, Any],
        data_type: Any,
        device: torch.device,
        *,
        peers: Peers,
        codec: RowCodec,
        learning_rate: Callable[[Sequence[HotSlice]], float],
    ) -> None:
        self.slices = list(slices)
        """One table of the kernel each."""
        on_cpu = device.type == "cpu"
        tbe = SplitTableBatchedEmbeddingBagsCodegen(
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
            weights_precision=data_type_to_sparse_type(data_type),
            device=device,
            # Merged over all ranks the moments are exact: no moment scale here.
            **{name: value for name, value in fused_params.items() if name != MOMENT_SCALE},
        )
        self.capture = RowCapture(
            tbe,
            [hot.table for hot in slices],
            lambda: learning_rate(self.slices),
            peers,
            codec,
        )
        """The kernel, and the gradients that wait for their merge."""

    def tensors(self) -> list[dict[str, torch.Tensor]]:
        """Return each slice's weight and optimizer state, by name, as views."""
        tbe = self.capture.tbe
        return [
            {"weight": weight, **state}
            for weight, state in zip(
                tbe.split_embedding_weights(), optimizer_states(tbe), strict=True
            )
        ]

    def lookup(self, batch: HotBatch) -> dict[str, torch.Tensor]:
        """Look up each feature's hot rows, columns joined: summed by bag, or one per id."""
        looked_up = [(hot, name) for hot in self.slices for name in hot.features]
        hot_features = [batch.features[name] for _, name in looked_up]
        ids = torch.cat([feature.slots for feature in hot_features])
        lengths = torch.cat([feature.lengths for feature in hot_features])
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        parts = [feature.weights for feature in hot_features if feature.weights is not None]
        # A batch's weights mean nothing to sequences.
        weights = torch.cat(parts) if parts and not self.slices[0].is_sequence else None
        tbe = self.capture.tbe
        if torch.is_grad_enabled():
            output = self.capture.lookup(lambda: tbe(ids, offsets, weights), weights)
        else:
            output = tbe(ids, offsets, weights)
        if self.slices[0].is_sequence:
            columns = output.split([feature.slots.numel() for feature in hot_features])
        else:
            columns = output.split([hot.num_columns for hot, _ in looked_up], dim=1)
        pooled: dict[str, list[torch.Tensor]] = {}
        for (_, name), part in zip(looked_up, columns, strict=True):
            pooled.setdefault(name, []).append(part)
        return {name: torch.cat(parts, dim=1) for name, parts in pooled.items()}


Tensors = dict[str, torch.Tensor]


class HotRows(Stage):
    """The replicated rows of one sharded module."""

    needs_keyed_jagged = True

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
        self._tbes = [
            HotTbe(
                slices,
                params,
                data_type,
                device,
                peers=groups.hot_rows,
                codec=gradients.transport.codec,
                learning_rate=self._home_learning_rate,
            )
            for (params, data_type), slices in _by_kernel(
                hot_slices(configs, tables), configs, fused_params
            )
        ]
        self.sets = HotSets(configs, tables, device)
        # Until they are read from home, the replicas hold nothing.
        self._stale = True
        self._dirty = False

    def action(self) -> GradientSyncAction:
        """Return the sync action that merges the replicas' gradients over all ranks."""
        alarm, peers = self._groups.alarm, self._groups.hot_rows
        copies = [
            CopiedShard(f"{hot.table} (hot rows)", 0, tuple(tensors.values()))
            for tbe in self._tbes
            for hot, tensors in zip(tbe.slices, tbe.tensors(), strict=True)
        ]
        return GradientSyncAction(
            [tbe.capture for tbe in self._tbes],
            alarm,
            DriftCheck(copies, peers.everyone, alarm, self._sync.drift_every),
            delay=self._gradients.delay,
            is_layered=peers.is_layered,
            on_update=self._mark_dirty,
        )

    def before_ids_travel(
        self, notes: BatchNotes, features: KeyedJaggedTensor
    ) -> KeyedJaggedTensor:
        """Return the batch without hot ids."""
        cold, notes.hot = self.sets.split(features)
        return cold

    def before_lookup(self, notes: BatchNotes) -> None:
        """Load the rows that were hot when the batch was split.

        Collectives:
            Those of a complete state, if the replicas hold others, as after a refresh.
        """
        if notes.hot is not None:
            self._hold(notes.hot.ids)

    def before_accumulating(self) -> None:
        """Load a refresh's rows now; later the state can't be completed.

        Collectives:
            Those of `before_lookup`.
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
        for tbe in self._tbes:
            notes.hot_output |= tbe.lookup(notes.hot)

    def before_backward(self, notes: BatchNotes) -> None:
        """Load the rows that the lookup read; meanwhile others may have been loaded."""
        self.before_lookup(notes)

    def after_write(self) -> None:
        """Read the replicas from their homes again before their next use."""
        self._stale, self._dirty = True, False

    def kernels(self) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
        """Return the kernels that hold the replicas."""
        return [tbe.capture.tbe for tbe in self._tbes]

    @torch.no_grad()
    def before_read(self) -> None:
        """Copy the replicas into this rank's shards, if they are newer."""
        if not self._dirty:
            return
        for replica, home, slots, rows in self._homes():
            for name, tensor in home.items():
                # Unseen by autograd: no lookup reads a hot row at home.
                tensor.data[rows] = replica[name][slots]
        self._dirty = False

    @torch.no_grad()
    def before_use(self) -> None:
        """Fill the replicas from the sharding group's shards, if those are newer.

        Collectives:
            One all-reduce per weight and state of each hot table on the "shard" axis: owners
            contribute their rows, the others zeros.
        """
        if not self._stale:
            return
        for tbe in self._tbes:
            for tensors in tbe.tensors():
                for tensor in tensors.values():
                    tensor.zero_()
        for replica, home, slots, rows in self._homes():
            for name, tensor in home.items():
                replica[name][slots] = tensor[rows]
        for tbe in self._tbes:
            for tensors in tbe.tensors():
                for tensor in tensors.values():
                    dist.all_reduce(tensor, group=self._groups.sharding_group)
        self._stale = self._dirty = False

    def _homes(self) -> Iterator[tuple[Tensors, Tensors, torch.Tensor, torch.Tensor]]:
        """Yield replica, home, slots and rows of each hot slice on this rank."""
        shards = [shard for kernel in self._kernels for shard in kernel.shards()]
        for tbe in self._tbes:
            for hot, replica in zip(tbe.slices, tbe.tensors(), strict=True):
                for shard in shards:
                    if (shard.table, shard.column) != (hot.table, hot.column):
                        continue
                    ids = self.sets.held.by_table[hot.table].to(shard.device)
                    slots = ((ids >= shard.row) & (ids < shard.row + shard.num_rows)).nonzero()
                    slots = slots.squeeze(1)
                    yield replica, shard.tensors, slots, ids[slots] - shard.row

    def _home_learning_rate(self, slices: Sequence[HotSlice]) -> float:
        """Return the tables' learning rate on this rank; NaN without a shard."""
        tables = {hot.table for hot in slices}
        rates = {
            kernel.user_learning_rate
            for kernel in self._kernels
            if tables & {shard.table for shard in kernel.shards()}
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
    slices: Sequence[HotSlice],
    configs: Sequence[BaseEmbeddingConfig],
    fused_params: Mapping[str, dict[str, Any]],
) -> list[tuple[tuple[dict[str, Any], Any], list[HotSlice]]]:
    """Group slices by TBE: equal optimizer, data type and, for sequences, width."""
    data_types = {config.name: config.data_type for config in configs}
    grouped: dict[str, list[HotSlice]] = defaultdict(list)
    for hot in slices:
        params = fused_params[hot.table]
        # Sequences of one kernel have one width.
        width = hot.num_columns if hot.is_sequence else None
        grouped[repr((sorted(params.items()), data_types[hot.table], width))].append(hot)
    return [
        ((fused_params[members[0].table], data_types[members[0].table]), members)
        for members in grouped.values()
    ]
