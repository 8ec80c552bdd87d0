"""`CostModel`: predict a plan's step time and memory on calibrated machines."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.calibration import Calibration, KernelCost
from torchrec_2dsp.cost.collectives import Span
from torchrec_2dsp.cost.loads import (
    FLOAT_BYTES,
    LOADS,
    Loads,
    Placed,
    Ranks,
    load_weights,
    sum_by_rank,
)
from torchrec_2dsp.cost.step_cost import (
    NamedParts,
    Phases,
    StepCost,
    before_last_bucket,
)
from torchrec_2dsp.cost.table_loads import add_hot_rows, add_synced_rows, add_table
from torchrec_2dsp.cost.workload import DenseWork, IdMapWork, Workload
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import Pipeline
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.plan.sync import GradientSync, SyncConfig, WeightSync

_GRADIENT_COPIES = 2
"""Copies of a data-parallel table's dense gradient: itself, and the rows that a batch touches."""

_VECTOR_COPIES = 5
"""Copies of the vectors that the model receives, and of their gradients: as they arrived, in the
model's order, and joined."""

_LOOKED_UP_ID_BYTES = 48
"""An id's bytes in FBGEMM's kernels, which sort ids and note where each came from."""

_KEPT = ("weights", "optimizer_state", "hot_rows", "dense_gradients", "host_memory")
"""The parts of `MemoryCost` that also exist between steps."""


@dataclass(frozen=True, kw_only=True)
class MemoryCost(NamedParts):
    """The bytes that tables take on a rank, in addition to the dense part."""

    unit: ClassVar[str] = "bytes"

    weights_bytes: float = 0.0
    """Weights of the tables' shards."""

    optimizer_state_bytes: float = 0.0
    """Optimizer state of the tables' shards."""

    hot_rows_bytes: float = 0.0
    """Copies of hot rows, with moments."""

    dense_gradients_bytes: float = 0.0
    """Gradients of data-parallel tables."""

    batches_bytes: float = 0.0
    """Ids in all batches that a pipeline holds at a time."""

    vectors_bytes: float = 0.0
    """Rows and pooled vectors in flight, and their gradients."""

    copies_bytes: float = 0.0
    """Buffers for keeping copies of rows equal: merged gradients, or rows' earlier values."""

    host_memory_bytes: float = 0.0
    """A GPU's weights and optimizer state in host memory."""

    @property
    def total_bytes(self) -> float:
        """The sum of all parts in device memory."""
        return sum(size for _, size in self.parts()) - self.host_memory_bytes


@dataclass(frozen=True)
class CostModel:
    """Predicts steps from measured constants.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> from torchrec_2dsp.cost.model import CostModel
        >>> from torchrec_2dsp.cost.workload import TableWork, Workload
        >>> calibration = tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml")
        >>> work = TableWork(name="t", num_rows=1_000_000, dim=64, ids_per_sample=1.0)
        >>> workload = Workload(batch_size=1_024, tables={"t": work})
        >>> model = CostModel(calibration, local_world_size=2)
        >>> no_tables = tdsp.Plan2D({}, mesh=tdsp.Mesh2D(1, 4), sync=tdsp.GradientSync())
        >>> model.step_cost(no_tables, workload).total_s
        0.0
    """

    calibration: Calibration

    local_world_size: int
    """The number of ranks on a host."""

    def step_cost(self, plan: Plan2D, workload: Workload) -> StepCost:
        """Predict a plan's step."""
        in_groups, in_world = _placed(plan, workload, self.calibration.hardware.device)
        setting = self._setting(plan, workload)
        if in_world:
            world = setting.of_world()
            setting = replace(setting, beside=world.visible_cost(world.loads(in_world)))
        return setting.step_cost(setting.loads(in_groups))

    def memory_cost(self, plan: Plan2D, workload: Workload) -> MemoryCost:
        """Predict the memory that tables take on the fullest rank.

        Tables with one copy in the world count as if the same rank had most of them.
        """
        in_groups, in_world = _placed(plan, workload, self.calibration.hardware.device)
        setting = self._setting(plan, workload)
        cost = setting.memory_cost(in_groups)
        return cost + setting.of_world().memory_cost(in_world) if in_world else cost

    def _setting(self, plan: Plan2D, workload: Workload) -> "CostSetting":
        return CostSetting(
            self.calibration,
            workload,
            plan.mesh,
            plan.sync,
            self.local_world_size,
            plan.pipeline,
            plan.full_duplex,
        )


def _placed(plan: Plan2D, workload: Workload, device: str) -> tuple[list[Placed], list[Placed]]:
    """Return tables with a copy in each group, and those with one copy in the world."""
    in_groups: list[Placed] = []
    in_world: list[Placed] = []
    for _, module in plan.modules():
        for name, sharding in module.tables():
            is_once = sharding.mesh_in(plan.mesh) != plan.mesh
            tables = in_world if is_once else in_groups
            tables.append(Placed.of(workload.table(name), sharding, device))
    return in_groups, in_world


@dataclass(frozen=True)
class CostSetting:
    """Everything that a step's cost depends on, except the tables and their placement."""

    calibration: Calibration
    workload: Workload
    mesh: Mesh2D
    sync: SyncConfig
    local_world_size: int
    pipeline: Pipeline = Pipeline.SPARSE_DIST
    """The train pipeline, which decides what travels while a step computes."""

    full_duplex: bool = False
    """True if the sharding groups' all-to-alls are this package's (gloo only)."""

    beside: StepCost | None = None
    """The cost of only those tables that another mesh repeats."""

    def __str__(self) -> str:
        duplex = ", full duplex" if self.full_duplex else ""
        return f"{self.mesh}, {self.pipeline}{duplex}"

    @property
    def prefetches_rows(self) -> bool:
        """True if rows travel early; if replicas change rows, too, none do."""
        return self.pipeline is Pipeline.ROW_PREFETCH and self.mesh.num_groups == 1

    @property
    def key(self) -> tuple[Mesh2D, Pipeline, bool]:
        """Mesh, pipeline and all-to-all, which the search chooses for all tables together."""
        return self.mesh, self.pipeline, self.full_duplex

    def of_world(self) -> "CostSetting":
        """Return the setting for only the tables with one copy in the world."""
        # Nor do they hide anything: the overlap of their rows with computing isn't counted.
        is_base = self.pipeline is Pipeline.BASE
        return replace(
            self,
            workload=replace(self.workload, dense=DenseWork(), id_maps=IdMapWork()),
            mesh=Mesh2D(1, self.mesh.world_size),
            pipeline=Pipeline.BASE if is_base else Pipeline.SPARSE_DIST,
        )

    @cached_property
    def group(self) -> Span:
        """The sharding groups on their hosts."""
        return Span.of(self.mesh.rank_matrix(), self.local_world_size)

    @cached_property
    def peers(self) -> Span:
        """The replica peers on their hosts."""
        of_peers = list(zip(*self.mesh.rank_matrix(), strict=True))
        return Span.of(of_peers, self.local_world_size)

    @cached_property
    def world(self) -> Span:
        """All ranks on their hosts, as one group."""
        return Span.of_world(self.mesh.world_size, self.local_world_size)

    @cached_property
    def _codecs(self) -> dict[Transport, KernelCost]:
        return {transport: self.calibration.kernels.codec(transport) for transport in Transport}

    @cached_property
    def _phases(self) -> Phases:
        return Phases(self.calibration, self.workload, self.group, self.world, self.full_duplex)

    @cached_property
    def buffer_bytes(self) -> Ranks:
        """A rank's buffer bytes per unit in each of `LOADS`."""
        return np.sum(list(self._buffer_parts.values()), axis=0)

    @cached_property
    def _buffer_parts(self) -> dict[str, Ranks]:
        """The other parts in `MemoryCost`, as a rank's bytes per unit in each of `LOADS`.

        Sent and received tensors exist at the same time, and a pipeline has the ids of two batches;
        one that prefetches rows has ids of three, and rows of two. Copies made by TorchRec and
        autograd are measured: `python -m tests.support.memory` compares.
        """
        batches = list(Pipeline).index(self.pipeline) + 1
        num_ranks = self.group.num_ranks
        return {
            "batches": load_weights(
                whole_ids_to=2 * num_ranks * batches, lookup_ids=_LOOKED_UP_ID_BYTES
            ),
            "vectors": load_weights(
                given_bytes=_VECTOR_COPIES,
                pooled_from=2 * num_ranks,
                pooled_to=2 * num_ranks,
                rows_from=num_ranks,
                rows_to=num_ranks,
                early_from=num_ranks,
                lagging_to=num_ranks,
                moved_bytes=1,
                added_bytes=1,
                scattered=1,
                gathered=num_ranks,
                # TorchRec reorders them, both ways, before and after it adds them.
                host_scattered=5,
                across_from=2,
                across_to=2,
            ),
            "copies": load_weights(
                hot_id_bytes=1, hot_bytes_of_all=2, peer_bytes_of_all=3, averaged_bytes=1
            ),
        }

    def loads(self, tables: Iterable[Placed], *, by_rank: bool = True) -> Loads:
        """Sum the work and the messages of tables over a group's ranks.

        Unless ``by_rank``, loads that are equal on all ranks stay numbers.
        """
        loads = Loads(
            self.group.num_ranks, codecs=self._codecs, prefetches_rows=self.prefetches_rows
        )
        if not by_rank:
            loads.values = cast(Any, [0.0] * len(LOADS))
        by_training = sorted(tables, key=lambda table: not table.work.is_frozen)
        for are_frozen, alike in groupby(by_training, lambda table: table.work.is_frozen):
            for table in alike:
                add_table(loads, table, self.workload, self.group)
                add_hot_rows(loads, table, self.workload, self.world)
                add_synced_rows(loads, table, self.workload, self.peers, self.sync)
            if are_frozen:
                loads.drop_updates()
        return loads

    def mean_loads(self, table: Placed) -> Ranks:
        """Return a table's loads on the mean rank; for `AlikeWork`, a row per table."""
        loads = self.loads([table], by_rank=False).values
        means = [np.mean(load, axis=-1) if np.ndim(load) else load for load in loads]
        return np.stack(np.broadcast_arrays(*means), axis=-1)

    def memory_cost(self, tables: Sequence[Placed]) -> MemoryCost:
        """Predict the memory that tables take on a group's fullest rank."""
        loads = self.loads(tables)
        kept_bytes = sum(
            (_kept(table, loads.num_ranks) for table in tables),
            np.zeros((len(_KEPT), loads.num_ranks)),
        )
        parts = dict(zip(_KEPT, kept_bytes, strict=True))
        parts |= {name: weights @ loads.values for name, weights in self._buffer_parts.items()}
        fullest = int((sum(parts.values()) - parts["host_memory"]).argmax())
        return MemoryCost(
            **{f"{name}_bytes": float(by_rank[fullest]) for name, by_rank in parts.items()}
        )

    def step_cost(self, loads: Loads) -> StepCost:
        """Predict the step for ranks with these loads, including the cost of tables beside them."""
        visible = self.visible_cost(loads)
        if self.beside is not None:
            visible += self.beside
        late_s = 0.0
        if isinstance(self.sync, GradientSync) and self.sync.delay > 0:
            # Row gradients that may be late travel behind the next step.
            exchanged_s, _ = self._phases.sync_s(loads, self.peers, self.sync)
            late_s = min(exchanged_s, visible.total_s - visible.sync_s)
        hidden_s = self._hidden_s(visible, loads)
        return replace(visible, hidden_s=-self.calibration.hidden_share * (late_s + hidden_s))

    def _hidden_s(self, cost: StepCost, loads: Loads) -> float:
        """Return the seconds of messages that travel behind compute.

        With a pipeline, ids travel while the previous step computes, and rows may, too. Dense
        gradients travel behind the backward, bucket by bucket; the last bucket, and tables, have
        nothing left to hide behind.
        """
        beside_s = min(self._phases.beside_s(loads), cost.dense_s + cost.update_s)
        if self.pipeline is not Pipeline.BASE:
            beside_s = min(beside_s + cost.input_exchange_s, cost.compute_s)
        dense = self.workload.dense
        all_bytes = dense.gradient_bytes + float(np.max(loads.all_reduced_bytes))
        dense_s = cost.dense_exchange_s * dense.gradient_bytes / all_bytes if all_bytes else 0.0
        early_s = before_last_bucket(dense_s, dense.gradient_bytes, dense.bucket_bytes)
        return beside_s + min(early_s, dense.backward_s)

    def visible_cost(self, loads: Loads) -> StepCost:
        """Predict the step if nothing overlaps."""
        mean = self._phases.of(loads.evened())
        slowest = mean if loads.is_even else self._phases.of(loads)
        exchanged_s, applied_s = self._phases.sync_s(loads, self.peers, self.sync)
        cost = StepCost(
            **mean,
            hot_rows_s=self._phases.hot_rows_s(loads),
            id_maps_s=self._phases.id_maps_s(),
            sync_s=exchanged_s + applied_s,
            imbalance_s=sum(slowest.values()) - sum(mean.values()),
        )
        late = self.calibration.straggler_share * math.log(self.world.num_ranks)
        return replace(cost, stragglers_s=late * cost.compute_s)

    def sent_bytes(self) -> Ranks:
        """Return the bytes that a rank sends per unit in each of `LOADS`, if loads are even."""
        group, peers, world = self.group, self.peers, self.world
        others = group.num_ranks - 1
        in_host = group.ranks_per_host - 1
        per_unit = {
            **dict.fromkeys(("ids_to", "pooled_from", "pooled_to", "rows_from", "rows_to"), others),
            "scattered": others / group.num_ranks,
            "gathered": others,
            "host_scattered": in_host / group.ranks_per_host,
            "host_gathered": in_host,
            "host_rows_from": in_host,
            "host_rows_to": in_host,
            "across_from": group.num_hosts - 1,
            "across_to": group.num_hosts - 1,
            "all_reduced_bytes": 2 * (world.num_ranks - 1) / world.num_ranks,
            "hot_bytes_of_rank": world.num_ranks - 1,
            "peer_bytes_of_rank": peers.num_ranks - 1,
        }
        if isinstance(self.sync, WeightSync):
            per_unit["averaged_bytes"] = (peers.num_ranks - 1) / self.sync.policy.steps_per_sync
            moments = self.sync.moments_policy
            if moments is not None:
                per_unit["moment_bytes"] = (peers.num_ranks - 1) / moments.steps_per_sync
        return load_weights(**per_unit)


def kept_bytes(table: Placed, num_ranks: int) -> Ranks:
    """Return the bytes of a table's weights, optimizer state and hot copies on each rank.

    First the bytes on its device, then those in a GPU's host memory.
    """
    parts = _kept(table, num_ranks)
    return np.stack([parts[:-1].sum(axis=0), parts[-1]])


def _kept(table: Placed, num_ranks: int) -> NDArray[np.float64]:
    """Return a table's bytes on each rank, with a row for each of `_KEPT`."""
    work = table.work
    kept_bytes = np.zeros((len(_KEPT), *np.shape(work.num_rows)[:-1], num_ranks))
    weights, state, hot_rows, gradients, in_host_memory = kept_bytes
    if table.kind is ShardingType.DATA_PARALLEL:
        weights += work.num_rows * table.row_bytes
        state += work.num_rows * _state_bytes(table, work.dim)
        gradients += _GRADIENT_COPIES * work.num_rows * work.dim * FLOAT_BYTES
        return kept_bytes
    ranks, rows, columns = table.shards
    if table.in_host_memory:
        weights = state = in_host_memory
    weights += sum_by_rank(ranks, rows * columns * work.element_bytes, num_ranks)
    state += sum_by_rank(ranks, rows * _state_bytes(table, columns), num_ranks)
    # Hot rows of tables in 8 bits are in float32.
    is_in_8_bits = work.element_bytes not in (FLOAT_BYTES, FLOAT_BYTES / 2)
    hot_bytes = work.dim * (FLOAT_BYTES if is_in_8_bits else work.element_bytes)
    hot_rows += table.num_hot * (hot_bytes + _state_bytes(table, work.dim))
    return kept_bytes


def _state_bytes(table: Placed, columns: float | Ranks) -> float | Ranks:
    """Return a shard row's optimizer state; each part of a row has its own row-wise moment."""
    state = table.work.state_bytes_per_row
    return state if state <= FLOAT_BYTES else state * columns / table.work.dim
