"""`CostModel`: what a step of a plan takes on calibrated machines."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from torchrec_2dsp.cost import traffic
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.coefficients import CollectiveCost
from torchrec_2dsp.cost.loads import Loads, Ranks
from torchrec_2dsp.cost.replica_loads import add_hot_rows, add_synced_rows
from torchrec_2dsp.cost.replicas import ReplicaCost
from torchrec_2dsp.cost.span import Span
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.table_loads import Placed, add_table
from torchrec_2dsp.cost.workload import DenseWork, Workload
from torchrec_2dsp.mesh.mesh2d import Mesh2D
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.plan.sync_config import GradientSync, SyncConfig

_DDP_BUCKET_BYTES = 25 * 2**20
"""Of torch's `DistributedDataParallel`."""


@dataclass(frozen=True)
class CostModel:
    """Predicts steps from constants that were measured.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> calibration = tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml")
        >>> work = tdsp.TableWork(name="t", num_rows=1_000_000, dim=64, ids_per_sample=1.0)
        >>> workload = tdsp.Workload(batch_size=1_024, tables={"t": work})
        >>> model = tdsp.CostModel(calibration, local_world_size=2)
        >>> no_tables = tdsp.Plan2D({}, mesh=tdsp.Mesh2D(1, 4), sync=tdsp.GradientSync())
        >>> model.step_cost(no_tables, workload).total_s
        0.0
    """

    calibration: Calibration
    """Of the machines."""

    local_world_size: int
    """Ranks per host."""

    def step_cost(self, plan: Plan2D, workload: Workload) -> StepCost:
        """What a step of a plan takes."""
        in_groups: list[Placed] = []
        in_world: list[Placed] = []
        for _, module in plan.modules():
            for name, sharding in module.tables():
                is_once = sharding.mesh_in(plan.mesh) != plan.mesh
                some = in_world if is_once else in_groups
                some.append(Placed.of(workload.table(name), sharding))
        setting = Setting(self.calibration, workload, plan.mesh, plan.sync, self.local_world_size)
        if in_world:
            world = setting.of_world()
            setting = replace(setting, beside=world.visible_cost(world.loads(in_world)))
        return setting.step_cost(setting.loads(in_groups))


@dataclass(frozen=True)
class Setting:
    """All that a step's cost depends on, beside what is where."""

    calibration: Calibration
    workload: Workload
    mesh: Mesh2D
    sync: SyncConfig
    local_world_size: int
    beside: StepCost | None = None
    """Of tables that another mesh repeats, and of nothing but those."""

    def of_world(self) -> "Setting":
        """Of tables with one copy in the world, and of nothing but those."""
        workload = replace(self.workload, dense=DenseWork())
        return replace(self, workload=workload, mesh=Mesh2D(1, self.mesh.world_size))

    @cached_property
    def group(self) -> Span:
        """Of the sharding groups."""
        return Span.of_sharding_groups(self.mesh, self.local_world_size)

    @cached_property
    def peers(self) -> Span:
        """Of the replica peers."""
        return Span.of_replica_peers(self.mesh, self.local_world_size)

    @cached_property
    def world(self) -> Span:
        """Of all ranks."""
        return Span.of_world(self.mesh.world_size, self.local_world_size)

    def loads(self, tables: Iterable[Placed]) -> Loads:
        """What the ranks of a group have to do for tables."""
        loads = Loads(self.group.num_ranks)
        for table in tables:
            add_table(loads, table, self.workload, self.group)
            add_hot_rows(loads, table, self.workload, self.world)
            add_synced_rows(loads, table, self.workload, self.peers, self.sync)
        return loads

    def step_cost(self, loads: Loads) -> StepCost:
        """What it takes them, and what is beside."""
        visible = self.visible_cost(loads)
        if self.beside is not None:
            visible += self.beside
        late_s = 0.0
        if isinstance(self.sync, GradientSync) and self.sync.delay > 0:
            # Row gradients that may be late travel behind the next step.
            exchanged_s, _ = ReplicaCost(self.calibration).sync_s(loads, self.peers, self.sync)
            late_s = min(exchanged_s, visible.total_s - visible.sync_s)
        return replace(visible, hidden_s=-late_s - _hidden_s(visible, loads, self.workload))

    def visible_cost(self, loads: Loads) -> StepCost:
        """What it takes them if nothing hides behind anything else."""
        phases = _Phases(self.calibration, self.workload, self.group, self.world)
        mean = phases.of(loads.evened())
        slowest = mean if loads.is_even else phases.of(loads)
        replicas = ReplicaCost(self.calibration)
        exchanged_s, applied_s = replicas.sync_s(loads, self.peers, self.sync)
        return StepCost(
            **mean,
            hot_rows_s=replicas.hot_rows_s(loads, self.world),
            sync_s=exchanged_s + applied_s,
            imbalance_s=sum(slowest.values()) - sum(mean.values()),
        )


@dataclass(frozen=True)
class _Phases:
    """Seconds of each part of a step, of the slowest rank."""

    calibration: Calibration
    workload: Workload
    span: Span
    world: Span

    def of(self, loads: Loads) -> dict[str, float]:
        """By the names of `StepCost`."""
        return {
            "input_exchange_s": self._input_s(loads),
            "lookup_s": self._lookup_s(loads),
            "rows_s": self._rows_s(loads),
            "forward_exchange_s": self._forward_s(loads),
            "dense_s": self.workload.dense.forward_s + self.workload.dense.backward_s,
            "backward_exchange_s": self._backward_s(loads),
            "dense_exchange_s": self._dense_exchange_s(loads),
            "update_s": self._update_s(loads),
        }

    @property
    def _all_to_all(self) -> CollectiveCost:
        return self.calibration.all_to_all(full_duplex=self.workload.full_duplex)

    def _input_s(self, loads: Loads) -> float:
        """How many ids there will be, lengths of bags, and ids."""
        if not loads.types:
            return 0.0
        short = self._all_to_all.seconds(self.span, traffic.Traffic(0.0, 0.0))
        return self._turns_s(
            short + len(loads.types) * (short + self._exchange_s(loads.ids_to) / len(loads.types))
        )

    def _lookup_s(self, loads: Loads) -> float:
        lookup = self.calibration.kernels.lookup
        seconds = lookup.seconds(loads.lookup_ids, loads.lookup_bytes)
        return float(seconds.max()) + self._num_kernels(loads) * lookup.base_s

    def _update_s(self, loads: Loads) -> float:
        kernels = self.calibration.kernels
        seconds = kernels.update.seconds(loads.update_ids, loads.update_bytes)
        dense = kernels.dense_update.seconds(np.zeros_like(seconds), loads.dense_bytes)
        return float((seconds + dense).max()) + self._num_kernels(loads) * kernels.update.base_s

    def _rows_s(self, loads: Loads) -> float:
        kernels = self.calibration.kernels
        sort = kernels.sort.seconds(loads.sorted_ids, 0.0)
        no_items = np.zeros_like(sort)
        moved = kernels.gather.seconds(no_items, loads.gathered_bytes)
        added = kernels.add.seconds(no_items, loads.added_bytes)
        return float((sort + moved + added).max())

    def _forward_s(self, loads: Loads) -> float:
        scatter = self.calibration.collectives.reduce_scatter
        return self._turns_s(
            self._exchange_s(loads.pooled_from),
            self._exchange_s(loads.rows_from),
            self._brought_s(scatter, traffic.reduce_scatter, self.span, loads.scattered),
            self._brought_s(
                scatter, traffic.reduce_scatter, self.span.inside_hosts(), loads.host_scattered
            ),
            self._between_places_s(loads.across_from),
            self._in_host_s(loads.host_rows_from),
            self._apart_s(loads),
        ) + self._hops_s(loads.across_from)

    def _backward_s(self, loads: Loads) -> float:
        gather = self.calibration.collectives.all_gather
        return self._turns_s(
            self._exchange_s(loads.pooled_to),
            self._exchange_s(loads.rows_to),
            self._brought_s(gather, traffic.all_gather, self.span, loads.gathered),
            self._brought_s(
                gather, traffic.all_gather, self.span.inside_hosts(), loads.host_gathered
            ),
            self._between_places_s(loads.across_to),
            self._in_host_s(loads.host_rows_to),
            self._apart_s(loads),
        ) + self._hops_s(loads.across_to)

    def _hops_s(self, across: Ranks) -> float:
        """What goes in two hops, inside hosts and between them, is waited for twice."""
        return self.calibration.turn_s if across.any() else 0.0

    def _turns_s(self, *exchanges: float) -> float:
        """Exchanges one after the other; ranks come to the first one from computing."""
        return sum(exchanges) + (self.calibration.turn_s if any(exchanges) else 0.0)

    def _apart_s(self, loads: Loads) -> float:
        """What it takes that tables of each type are exchanged apart from those of another."""
        together = sum(
            one.any()
            for one in (
                loads.pooled_from,
                loads.rows_from,
                loads.scattered,
                loads.host_scattered,
                loads.host_rows_from,
            )
        )
        short = self._all_to_all.seconds(self.span, traffic.Traffic(0.0, 0.0))
        return max(0, len(loads.types) - int(together)) * short

    def _dense_exchange_s(self, loads: Loads) -> float:
        """Data-parallel tables have an all-reduce of their own, after that of the dense part."""
        return sum(
            self._reduced_s(num_bytes)
            for num_bytes in (
                self.workload.dense.gradient_bytes,
                float(loads.all_reduced_bytes.max()),
            )
        )

    def _reduced_s(self, num_bytes: float) -> float:
        if not num_bytes:
            return 0.0
        reduce = self.calibration.collectives.all_reduce
        return self._turns_s(reduce.seconds(self.world, traffic.all_reduce(self.world, num_bytes)))

    def _exchange_s(self, to_each: Ranks) -> float:
        if not to_each.any():
            return 0.0
        return self._all_to_all.seconds(self.span, traffic.all_to_all_from(self.span, to_each))

    def _between_places_s(self, to_each: Ranks) -> float:
        if not to_each.any():
            return 0.0
        moved = traffic.places_to_all(self.span, to_each)
        return self._all_to_all.seconds(self.span.across_hosts(), moved)

    def _in_host_s(self, to_each: Ranks) -> float:
        if not to_each.any():
            return 0.0
        inside = self.span.inside_hosts()
        return self._all_to_all.seconds(inside, traffic.all_to_all(inside, float(to_each.max())))

    @staticmethod
    def _brought_s(
        cost: CollectiveCost,
        moved: Callable[[Span, float], traffic.Traffic],
        span: Span,
        brought: Ranks,
    ) -> float:
        if not brought.any():
            return 0.0
        return cost.seconds(span, moved(span, float(brought.max())))

    @staticmethod
    def _num_kernels(loads: Loads) -> int:
        return len(loads.types) + bool(loads.dense_bytes.any())


def _hidden_s(cost: StepCost, loads: Loads, workload: Workload) -> float:
    """What happens behind compute.

    Ids travel while the step before computes, if there is a pipeline. Dense gradients travel behind
    the backward, bucket by bucket; the last bucket, and tables, have nothing left to hide behind.
    """
    compute = cost.lookup_s + cost.rows_s + cost.dense_s + cost.update_s
    ids = min(cost.input_exchange_s, compute) if workload.is_pipelined else 0.0
    gradient_bytes = workload.dense.gradient_bytes
    num_buckets = 1 + gradient_bytes // _DDP_BUCKET_BYTES
    all_bytes = gradient_bytes + float(loads.all_reduced_bytes.max())
    dense_s = cost.dense_exchange_s * gradient_bytes / all_bytes if all_bytes else 0.0
    return ids + min(dense_s * (1 - 1 / num_buckets), workload.dense.backward_s)
