"""`CostModel`: what a step of a plan takes on calibrated machines, and how much memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.coefficients import KernelCost
from torchrec_2dsp.cost.loads import Loads, Ranks
from torchrec_2dsp.cost.memory import MemoryCost, buffer_parts, memory_cost
from torchrec_2dsp.cost.phases import Phases
from torchrec_2dsp.cost.placed import Placed
from torchrec_2dsp.cost.replica_loads import add_hot_rows, add_synced_rows
from torchrec_2dsp.cost.replicas import ReplicaCost
from torchrec_2dsp.cost.span import Span
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.table_loads import add_table
from torchrec_2dsp.cost.workload import DenseWork, Workload
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.plan.sync import GradientSync, SyncConfig

_DDP_BUCKET_BYTES = 25 * 2**20
"""The size of a gradient bucket of torch's `DistributedDataParallel`."""


@dataclass(frozen=True)
class CostModel:
    """Predicts steps from constants that were measured.

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
    """The constants of the machines."""

    local_world_size: int
    """How many ranks a host has."""

    def step_cost(self, plan: Plan2D, workload: Workload) -> StepCost:
        """The cost of a plan's step."""
        in_groups, in_world = _placed(plan, workload)
        setting = self._setting(plan, workload)
        if in_world:
            world = setting.of_world()
            setting = replace(setting, beside=world.visible_cost(world.loads(in_world)))
        return setting.step_cost(setting.loads(in_groups))

    def memory_cost(self, plan: Plan2D, workload: Workload) -> MemoryCost:
        """The memory that tables take on the fullest rank.

        Tables with one copy in the world count as if the same rank had most of them.
        """
        in_groups, in_world = _placed(plan, workload)
        setting = self._setting(plan, workload)
        cost = setting.memory_cost(in_groups)
        return cost + setting.of_world().memory_cost(in_world) if in_world else cost

    def _setting(self, plan: Plan2D, workload: Workload) -> "CostSetting":
        return CostSetting(self.calibration, workload, plan.mesh, plan.sync, self.local_world_size)


def _placed(plan: Plan2D, workload: Workload) -> tuple[list[Placed], list[Placed]]:
    """Tables with a copy in each group, and those with one in the world."""
    in_groups: list[Placed] = []
    in_world: list[Placed] = []
    for _, module in plan.modules():
        for name, sharding in module.tables():
            is_once = sharding.mesh_in(plan.mesh) != plan.mesh
            tables = in_world if is_once else in_groups
            tables.append(Placed.of(workload.table(name), sharding))
    return in_groups, in_world


@dataclass(frozen=True)
class CostSetting:
    """All that the cost of a step depends on, beside the tables and where they are."""

    calibration: Calibration
    workload: Workload
    mesh: Mesh2D
    sync: SyncConfig
    local_world_size: int
    beside: StepCost | None = None
    """The cost of tables that another mesh repeats, and of nothing but those."""

    def of_world(self) -> "CostSetting":
        """The setting of tables with one copy in the world, and of nothing but those."""
        # Nor do they hide anything: that their rows may travel beside computing isn't counted.
        workload = replace(self.workload, dense=DenseWork(), prefetches_rows=False)
        return replace(self, workload=workload, mesh=Mesh2D(1, self.mesh.world_size))

    @cached_property
    def group(self) -> Span:
        """The sharding groups on their hosts."""
        return Span.of_sharding_groups(self.mesh, self.local_world_size)

    @cached_property
    def peers(self) -> Span:
        """The replica peers on their hosts."""
        return Span.of_replica_peers(self.mesh, self.local_world_size)

    @cached_property
    def world(self) -> Span:
        """All ranks on their hosts, as one group."""
        return Span.of_world(self.mesh.world_size, self.local_world_size)

    @cached_property
    def _codecs(self) -> dict[Transport, KernelCost]:
        return {transport: self.calibration.kernels.codec(transport) for transport in Transport}

    @cached_property
    def _phases(self) -> Phases:
        return Phases(self.calibration, self.workload, self.group, self.world)

    @cached_property
    def buffer_bytes(self) -> Ranks:
        """How many bytes of buffers a rank of a group has for each unit of `LOADS`."""
        return np.sum(list(self._buffer_parts.values()), axis=0)

    @cached_property
    def _buffer_parts(self) -> dict[str, Ranks]:
        return buffer_parts(self.workload, self.group.num_ranks)

    @cached_property
    def _in_group(self) -> Workload:
        """Rows that replicas change, too, can't travel beside computing."""
        prefetches = self.workload.prefetches_rows and self.mesh.num_groups == 1
        return replace(self.workload, prefetches_rows=prefetches)

    def loads(self, tables: Iterable[Placed]) -> Loads:
        """The work and the messages of a group's ranks for tables."""
        loads = Loads(self.group.num_ranks, codecs=self._codecs)
        for table in tables:
            add_table(loads, table, self._in_group, self.group)
            add_hot_rows(loads, table, self.workload, self.world)
            add_synced_rows(loads, table, self.workload, self.peers, self.sync)
        if self.calibration.hardware.device != "cpu":
            # FBGEMM alone can update rows there, all at once: no gradients come later than others.
            loads.lagging_to[:] = 0.0
        return loads

    def memory_cost(self, tables: Sequence[Placed]) -> MemoryCost:
        """The memory that tables take on the fullest rank of a group."""
        return memory_cost(tables, self.loads(tables), self._buffer_parts)

    def step_cost(self, loads: Loads) -> StepCost:
        """The step of ranks with these loads, with the cost of tables beside them."""
        visible = self.visible_cost(loads)
        if self.beside is not None:
            visible += self.beside
        late_s = 0.0
        if isinstance(self.sync, GradientSync) and self.sync.delay > 0:
            # Row gradients that may be late travel behind the next step.
            exchanged_s, _ = ReplicaCost(self.calibration).sync_s(loads, self.peers, self.sync)
            late_s = min(exchanged_s, visible.total_s - visible.sync_s)
        hidden_s = _hidden_s(visible, loads, self.workload, self._phases.beside_s(loads))
        return replace(visible, hidden_s=-self.calibration.hidden_share * (late_s + hidden_s))

    def visible_cost(self, loads: Loads) -> StepCost:
        """The step of ranks with these loads if nothing hides behind anything else."""
        mean = self._phases.of(loads.evened())
        slowest = mean if loads.is_even else self._phases.of(loads)
        replicas = ReplicaCost(self.calibration)
        exchanged_s, applied_s = replicas.sync_s(loads, self.peers, self.sync)
        return StepCost(
            **mean,
            hot_rows_s=replicas.hot_rows_s(loads, self.world),
            sync_s=exchanged_s + applied_s,
            imbalance_s=sum(slowest.values()) - sum(mean.values()),
        )


def _hidden_s(cost: StepCost, loads: Loads, workload: Workload, rows_s: float) -> float:
    """Seconds of messages that travel behind compute.

    Ids travel while the step before computes, if there is a pipeline, and so may rows. Dense
    gradients travel behind the backward, bucket by bucket; the last bucket, and tables, have
    nothing left to hide behind.
    """
    compute = cost.lookup_s + cost.rows_s + cost.dense_s + cost.update_s
    beside_s = min(rows_s, cost.dense_s)
    if workload.is_pipelined:
        beside_s = min(beside_s + cost.input_exchange_s, compute)
    gradient_bytes = workload.dense.gradient_bytes
    num_buckets = 1 + gradient_bytes // _DDP_BUCKET_BYTES
    all_bytes = gradient_bytes + float(loads.all_reduced_bytes.max())
    dense_s = cost.dense_exchange_s * gradient_bytes / all_bytes if all_bytes else 0.0
    return beside_s + min(dense_s * (1 - 1 / num_buckets), workload.dense.backward_s)
