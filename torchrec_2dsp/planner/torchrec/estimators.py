"""`ReplicaSyncEstimator`: adds what the replica sync costs to each shard's estimate."""

import math
from collections.abc import Mapping
from dataclasses import replace

from torchrec.distributed.planner.shard_estimators import get_num_poolings
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Shard,
    SharderDataMap,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.cost.optimizer_state import optimizer_of, state_bytes_per_row
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import base_type
from torchrec_2dsp.plan.sync import GradientSync, SyncConfig, SyncedRows, WeightSync
from torchrec_2dsp.planner.topology import peer_bandwidth_bytes_per_ms
from torchrec_2dsp.planner.torchrec.sync_cost import (
    data_parallel_ms,
    expected_touched_rows,
    row_sync_ms,
    weight_sync_ms,
)


class ReplicaSyncEstimator(ShardEstimator):
    """Adds the replica sync of one step to ``bwd_comms`` of shards that have an estimate.

    It runs after a performance estimator, so that TorchRec's performance models, partitioners
    and stats sum the sync like any other communication. With one sharding group it adds 0.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        mesh: Mesh2D,
        sync: SyncConfig,
    ) -> None:
        """``topology`` is that of the whole world (see `peer_bandwidth_bytes_per_ms`)."""
        self._constraints = None if constraints is None else dict(constraints)
        self._mesh = mesh
        self._sync = sync
        self._bandwidth = peer_bandwidth_bytes_per_ms(topology, mesh)

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap
    ) -> None:
        """Add the cost to every shard, in place."""
        for option in sharding_options:
            for shard in option.shards:
                if shard.perf is None:
                    continue
                sync_ms = self._sync_ms(option, shard, sharder_data_map)
                shard.perf = replace(shard.perf, bwd_comms=shard.perf.bwd_comms + sync_ms)

    def _sync_ms(
        self, option: ShardingOption, shard: Shard, sharder_data_map: SharderDataMap
    ) -> float:
        rows, dim = shard.size
        weight_bytes = rows * dim * option.tensor.element_size()
        if base_type(option.sharding_type) == ShardingType.DATA_PARALLEL.value:
            return data_parallel_ms(
                num_groups=self._mesh.num_groups,
                group_size=self._mesh.group_size,
                table_bytes=weight_bytes,
                bandwidth_bytes_per_ms=self._bandwidth,
            )
        if isinstance(self._sync, GradientSync):
            return row_sync_ms(
                num_groups=self._mesh.num_groups,
                touched_rows=self._touched_rows(option, rows),
                row_bytes=self._sync.transport.codec.num_bytes(dim),
                bandwidth_bytes_per_ms=self._bandwidth,
            )
        data = sharder_data_map.get(option.module_type_key)
        optimizer = optimizer_of(option.tensor, {} if data is None else data.fused_params)
        state_bytes = state_bytes_per_row(optimizer, dim)
        row_bytes = dim * option.tensor.element_size()
        if self._sync.moments_policy is None:
            return self._average_ms(option, rows, row_bytes + state_bytes, self._sync)
        moments = replace(self._sync, policy=self._sync.moments_policy)
        return self._average_ms(option, rows, row_bytes, self._sync) + self._average_ms(
            option, rows, state_bytes, moments
        )

    def _average_ms(
        self, option: ShardingOption, rows: int, row_bytes: int, sync: WeightSync
    ) -> float:
        """Milliseconds per step of averaging ``row_bytes`` of each of a shard's rows."""
        num_steps = sync.policy.steps_per_sync
        if math.isinf(num_steps) or not row_bytes:
            return 0.0
        whole_ms = weight_sync_ms(
            num_groups=self._mesh.num_groups,
            shard_bytes=rows * row_bytes,
            bandwidth_bytes_per_ms=self._bandwidth,
        )
        if sync.rows is SyncedRows.ALL:
            return whole_ms / num_steps
        touched_ms = row_sync_ms(
            num_groups=self._mesh.num_groups,
            touched_rows=self._touched_rows(option, rows, num_steps),
            row_bytes=sync.transport.codec.num_bytes(row_bytes // 4),
            bandwidth_bytes_per_ms=self._bandwidth,
        )
        return min(whole_ms, touched_ms) / num_steps

    def _touched_rows(self, option: ShardingOption, rows: int, num_steps: float = 1) -> float:
        return expected_touched_rows(
            shard_rows=rows,
            table_rows=option.tensor.shape[0],
            lookups_per_rank=num_steps * self._lookups_per_rank(option),
            group_size=self._mesh.group_size,
        )

    def _lookups_per_rank(self, option: ShardingOption) -> float:
        """Ids per step and rank, over all features of the table."""
        constraint = (self._constraints or {}).get(option.name)
        batch_sizes = (constraint.batch_sizes if constraint else None) or [
            option.batch_size
        ] * option.num_inputs
        num_poolings = get_num_poolings(self._constraints, option)
        return sum(
            batch_size * poolings * ids_per_bag
            for batch_size, poolings, ids_per_bag in zip(
                batch_sizes, num_poolings, option.input_lengths, strict=True
            )
        )
