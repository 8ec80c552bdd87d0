"""`Enumerator2D`: 2D sharding types as options for TorchRec's planner, priced with their sync.

`search_as_torchrec` plans with these options and TorchRec's own proposers.

The sync's price is deliberately simple: bytes over bandwidth, no latency, no overlap with other
work, rows hit evenly. It compares sharding types; it doesn't predict a step's time.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.shard_estimators import get_num_poolings
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Shard,
    SharderDataMap,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingType

from torchrec_2dsp._compat.torchrec import sharder_data_of
from torchrec_2dsp.cost.workload import optimizer_of, state_bytes_per_row
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.fits_module import check_model, check_tables
from torchrec_2dsp.plan.parameter_sharding import base_type
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.plan.sync import (
    EXACT_SYNC,
    GradientSync,
    SyncConfig,
    SyncedRows,
    WeightSync,
)
from torchrec_2dsp.planner.topology import group_topology, peer_bandwidth_bytes_per_ms
from torchrec_2dsp.planner.torchrec.adapters import (
    TYPE_ORDER,
    Partitioner2D,
    base_constraints,
    base_types,
    searched_type,
)

_KEY_BYTES = 4
"""Row numbers travel as int32."""


class Enumerator2D(EmbeddingEnumerator):
    """Lists the 2D form of each type that the sharder allows, priced with its sync.

    Any estimator runs on TorchRec's own type names; the replicas' cost is added last. Options
    have the same order in every process, so that equal ratings give equal plans.

    Example:
        >>> from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        >>> from torchrec_2dsp import Mesh2D
        >>> from torchrec_2dsp.planner.torchrec.adapters import Partitioner2D, Stats2D
        >>> from torchrec_2dsp.planner.torchrec.enumerator import Enumerator2D
        >>> from torchrec_2dsp.planner.topology import group_topology
        >>> world = Topology(world_size=4, local_world_size=4, compute_device="cuda")
        >>> mesh = Mesh2D(num_groups=2, group_size=2)
        >>> planner = EmbeddingShardingPlanner(
        ...     topology=group_topology(world, mesh),
        ...     enumerator=Enumerator2D(world, batch_size=512, mesh=mesh),
        ...     partitioner=Partitioner2D(),
        ...     stats=Stats2D(mesh=mesh),
        ... )
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool = False,
        *,
        mesh: Mesh2D,
        sync: SyncConfig = EXACT_SYNC,
    ) -> None:
        """List options for one sharding group.

        Args:
            topology: the whole world's topology.
            batch_size: samples per rank and step.
            constraints: per table, with types by TorchRec's name or by their 2D form.
            estimator: TorchRec's own by default.
            use_exact_enumerate_order: as in TorchRec.
            mesh: the ranks that repeat the plan.
            sync: how replicas stay equal.
        """
        self._stock_constraints = base_constraints(constraints)
        super().__init__(
            topology=group_topology(topology, mesh),
            batch_size=batch_size,
            constraints=self._stock_constraints,
            estimator=estimator,
            use_exact_enumerate_order=use_exact_enumerate_order,
        )
        self._mesh = mesh
        self._sync = sync
        self._bandwidth = peer_bandwidth_bytes_per_ms(topology, mesh)

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        """Return all options for all tables, under their 2D names."""
        return _named_and_ordered(super().enumerate(module, sharders))

    @property
    def last_stored_search_space(self) -> list[ShardingOption] | None:
        """The last options from `enumerate`, with which TorchRec compares a loaded plan."""
        stored = super().last_stored_search_space
        return None if stored is None else _named_and_ordered(stored)

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimate each shard's storage and time, in place; its sync counts as communication."""
        with base_types(sharding_options):
            super().populate_estimates(sharding_options)
            sharders = sharder_data_of(self)
            for option in sharding_options:
                for shard in option.shards:
                    if shard.perf is not None:
                        bwd_comms = shard.perf.bwd_comms + self._sync_ms(option, shard, sharders)
                        shard.perf = replace(shard.perf, bwd_comms=bwd_comms)

    def _sync_ms(self, option: ShardingOption, shard: Shard, sharders: SharderDataMap) -> float:
        """Price one step's sync of a shard."""
        rows, dim = shard.size
        row_bytes = dim * option.tensor.element_size()
        if base_type(option.sharding_type) == ShardingType.DATA_PARALLEL.value:
            # The gradient's all-reduce over the world equals one inside each group, and one between
            # replica peers, in which each rank reduces its share of the table.
            return self._all_reduce_ms(rows * row_bytes / self._mesh.group_size)
        if isinstance(self._sync, GradientSync):
            return self._row_sync_ms(option, rows, 1, self._sync.transport.codec.num_bytes(dim))
        data = sharders.get(option.module_type_key)
        optimizer = optimizer_of(option.tensor, {} if data is None else data.fused_params)
        state_bytes = state_bytes_per_row(optimizer, dim)
        if self._sync.moments_policy is None:
            return self._average_ms(option, rows, row_bytes + state_bytes, self._sync)
        moments = replace(self._sync, policy=self._sync.moments_policy)
        return self._average_ms(option, rows, row_bytes, self._sync) + self._average_ms(
            option, rows, state_bytes, moments
        )

    def _average_ms(
        self, option: ShardingOption, rows: int, row_bytes: int, sync: WeightSync
    ) -> float:
        """Price averaging ``row_bytes`` of each row in a shard, per step."""
        num_steps = sync.policy.steps_per_sync
        if math.isinf(num_steps) or not row_bytes:
            return 0.0
        whole_ms = self._all_reduce_ms(rows * row_bytes)
        if sync.rows is SyncedRows.ALL:
            return whole_ms / num_steps
        wire_bytes = sync.transport.codec.num_bytes(row_bytes // 4)
        return min(whole_ms, self._row_sync_ms(option, rows, num_steps, wire_bytes)) / num_steps

    def _all_reduce_ms(self, shard_bytes: float) -> float:
        """Price an all-reduce of a shard's weights and state between replica peers."""
        num_groups = self._mesh.num_groups
        return 2 * (num_groups - 1) / num_groups * shard_bytes / self._bandwidth

    def _row_sync_ms(
        self, option: ShardingOption, rows: int, num_steps: float, row_bytes: int
    ) -> float:
        """Price sending touched rows to each peer: gradients, or weights and state, and numbers.

        A shard gets its rows' lookups, which are all lookups unless the table is sharded by rows.
        """
        table_rows = option.tensor.shape[0]
        if not table_rows:
            return 0.0
        lookups_per_rank = num_steps * self._lookups_per_rank(option)
        touched_rows = min(rows, lookups_per_rank * self._mesh.group_size * rows / table_rows)
        sent_bytes = touched_rows * (row_bytes + _KEY_BYTES) * (self._mesh.num_groups - 1)
        return sent_bytes / self._bandwidth

    def _lookups_per_rank(self, option: ShardingOption) -> float:
        """Return the ids per step and rank, over all of the table's features."""
        constraint = self._stock_constraints.get(option.name)
        batch_sizes = (constraint.batch_sizes if constraint else None) or [
            option.batch_size
        ] * option.num_inputs
        num_poolings = get_num_poolings(self._stock_constraints, option)
        return sum(
            batch_size * poolings * ids_per_bag
            for batch_size, poolings, ids_per_bag in zip(
                batch_sizes, num_poolings, option.input_lengths, strict=True
            )
        )


def search_as_torchrec(
    module: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    *,
    topology: Topology,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    mesh: Mesh2D,
    sync: SyncConfig = EXACT_SYNC,
    **parts: Any,
) -> Plan2D:
    """Plan one sharding group by TorchRec's search, with the sync counted as communication.

    The arguments are `Enumerator2D`'s; ``parts`` are further ones for TorchRec's planner.
    """
    check_model(module)
    check_tables(module)
    planner = EmbeddingShardingPlanner(
        topology=group_topology(topology, mesh),
        batch_size=batch_size,
        enumerator=Enumerator2D(topology, batch_size, constraints, mesh=mesh, sync=sync),
        partitioner=Partitioner2D(),
        stats=NoopEmbeddingStats(),
        constraints=base_constraints(constraints),
        **parts,
    )
    return Plan2D.from_stock(planner.plan(module, sharders), mesh, sync)


def _named_and_ordered(options: list[ShardingOption]) -> list[ShardingOption]:
    tables: dict[str, int] = {}
    for option in options:
        option.sharding_type = searched_type(option.sharding_type)
        tables.setdefault(option.fqn, len(tables))
    options.sort(
        key=lambda option: (
            tables[option.fqn],
            TYPE_ORDER[base_type(option.sharding_type)],
            option.compute_kernel,
        )
    )
    return options
