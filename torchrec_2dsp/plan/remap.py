"""A group's plan becomes what one world rank runs. Pure: nothing is changed in place."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.types import ShardingPlan, ShardingType

from torchrec_2dsp.plan.parameter_sharding import (
    ParameterSharding2D,
    ShardingType2D,
    TableType,
)
from torchrec_2dsp.plan.plan2d import ModulePlan2D, Plan2D


def plan_for_rank(
    plan: Plan2D, rank: int, *, device_type: str = "cpu", local_world_size: int = 1
) -> ShardingPlan:
    """The plan that world rank ``rank`` runs: world ranks, real devices and TorchRec's own types.

    Args:
        plan: left as it is.
        rank: a rank of the world.
        device_type: "cpu" or "cuda".
        local_world_size: ranks per host, for the device index of a placement.
    """
    return ShardingPlan(
        {
            path: module_plan_for_rank(
                module_plan, rank, device_type=device_type, local_world_size=local_world_size
            )
            for path, module_plan in plan.modules()
        }
    )


def module_plan_for_rank(
    plan: ModulePlan2D, rank: int, *, device_type: str, local_world_size: int
) -> ModulePlan2D:
    """The plan of one module that a world rank runs; see `plan_for_rank`."""

    def moved(shard: ShardMetadata, world_ranks: Sequence[int]) -> ShardMetadata:
        assert shard.placement is not None
        owner = world_ranks[cast(int, shard.placement.rank())]
        index = "" if device_type == "cpu" else f":{owner % local_world_size}"
        return ShardMetadata(
            shard_offsets=list(shard.shard_offsets),
            shard_sizes=list(shard.shard_sizes),
            placement=f"rank:{owner}/{device_type}{index}",
        )

    def remapped(table: ParameterSharding2D) -> ParameterSharding2D:
        world_ranks = table.mesh_in(plan.mesh).sharding_group(rank)
        spec = table.sharding_spec
        if isinstance(spec, EnumerableShardingSpec):
            spec = EnumerableShardingSpec([moved(shard, world_ranks) for shard in spec.shards])
        return replace(
            table,
            sharding_type=_runtime_type(table),
            ranks=None if table.ranks is None else [world_ranks[index] for index in table.ranks],
            sharding_spec=spec,
        )

    return ModulePlan2D(
        {name: remapped(table) for name, table in plan.tables()}, mesh=plan.mesh, sync=plan.sync
    )


def _runtime_type(table: ParameterSharding2D) -> str:
    """What a sharded module of TorchRec is told that a table's type is."""
    base = ShardingType2D(table.sharding_type).base
    if base is ShardingType.TABLE_COLUMN_WISE:
        # Column-wise on the ranks of one host: the same shards and code at run time, but
        # TorchRec's 2D state dict only knows the plain name.
        base = ShardingType.COLUMN_WISE
    return TableType(base, table.exchange, table.transport).name
