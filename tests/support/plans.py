"""Hypothesis strategies for meshes and plans."""

from dataclasses import replace

from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from hypothesis import strategies as st
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_configs import DataType

from torchrec_2dsp import (
    GradientSync,
    HotSet,
    Mesh2D,
    Plan2D,
    RankLayout,
    SyncedRows,
    Transport,
    WeightSync,
    after,
    every,
    never,
    pin,
)
from torchrec_2dsp.plan.parameter_sharding import Pipeline

layouts = st.sampled_from(RankLayout)
meshes = st.builds(Mesh2D, st.integers(1, 6), st.integers(1, 6), layouts)
policies = st.recursive(
    st.just(never()) | st.builds(every, st.integers(1, 9)),
    lambda inner: st.builds(after, st.integers(0, 9), inner),
    max_leaves=3,
)
averages = st.builds(
    WeightSync,
    policy=policies,
    moments_policy=st.none() | policies,
    transport=st.sampled_from(Transport),
    dense_above=st.none() | st.floats(0, 1),
) | st.builds(WeightSync, policy=policies, rows=st.just(SyncedRows.ALL))
merges = st.builds(GradientSync, transport=st.sampled_from(Transport), delay=st.integers(0, 1))
syncs = merges | averages
names = st.text("abcdefgh_.", min_size=1, max_size=8)


def shard(rank: int, offsets: tuple[int, int], sizes: tuple[int, int]) -> ShardMetadata:
    return ShardMetadata(list(offsets), list(sizes), f"rank:{rank}/cpu")


def sharding(
    sharding_type: ShardingType, ranks: list[int], num_rows: int, dim: int = 4
) -> ParameterSharding:
    """Return one table's stock sharding, as a planner makes it: one shard per rank."""
    shards = None
    if sharding_type is not ShardingType.DATA_PARALLEL:
        row, column = (0, dim) if sharding_type is ShardingType.COLUMN_WISE else (num_rows, 0)
        shards = [
            shard(rank, (row * index, column * index), (num_rows, dim))
            for index, rank in enumerate(ranks)
        ]
    return ParameterSharding(
        sharding_type=sharding_type.value,
        compute_kernel="dense" if shards is None else "fused",
        ranks=ranks,
        sharding_spec=None if shards is None else EnumerableShardingSpec(shards),
    )


def plan_2d(
    tables: dict[str, ParameterSharding],
    mesh: Mesh2D,
    sync: GradientSync | WeightSync | None = None,
    path: str = "ebc",
) -> Plan2D:
    """Return a plan for one module with these tables."""
    return Plan2D.from_stock(ShardingPlan({path: EmbeddingModuleShardingPlan(tables)}), mesh, sync)


@st.composite
def shardings(draw: st.DrawFn, group_size: int) -> ParameterSharding:
    sharding_type = draw(
        st.sampled_from(
            [
                ShardingType.DATA_PARALLEL,
                ShardingType.TABLE_WISE,
                ShardingType.COLUMN_WISE,
                ShardingType.ROW_WISE,
            ]
        )
    )
    ranks = list(range(group_size))
    if sharding_type is ShardingType.TABLE_WISE:
        ranks = [draw(st.sampled_from(ranks))]
    elif sharding_type is ShardingType.COLUMN_WISE:
        ranks = draw(st.lists(st.sampled_from(ranks), min_size=1, max_size=4))
    result = sharding(sharding_type, ranks, draw(st.integers(1, 20)), draw(st.integers(1, 8)))
    result.bounds_check_mode = draw(st.sampled_from([None, *BoundsCheckMode]))
    result.output_dtype = draw(st.sampled_from([None, DataType.FP32, DataType.FP16]))
    result.enforce_hbm = draw(st.sampled_from([None, True, False]))
    return result


@st.composite
def stock_plans(draw: st.DrawFn, group_size: int) -> ShardingPlan:
    """Draw a stock plan with up to two modules for one sharding group."""
    tables = st.dictionaries(names, shardings(group_size), min_size=1, max_size=3)
    modules = draw(st.dictionaries(names, tables, min_size=1, max_size=2))
    return ShardingPlan({path: EmbeddingModuleShardingPlan(plan) for path, plan in modules.items()})


@st.composite
def plans(draw: st.DrawFn) -> Plan2D:
    """Draw a valid `Plan2D`, some of its tables with hot rows."""
    mesh = draw(meshes)
    plan = Plan2D.from_stock(draw(stock_plans(mesh.group_size)), mesh, draw(syncs))
    plan = replace(plan, pipeline=draw(st.sampled_from(Pipeline)), full_duplex=draw(st.booleans()))
    for table in sorted({name for _, module in plan.modules() for name in module}):
        rows = [_num_rows(module[table]) for _, module in plan.modules() if table in module]
        if all(rows) and draw(st.booleans()):
            ids = draw(st.sets(st.integers(0, min(rows) - 1), min_size=1, max_size=4))
            transport = draw(st.sampled_from(Transport))
            plan = pin(plan, table, hot_rows=HotSet.of(ids), transport=transport)
    return plan


def _num_rows(table: ParameterSharding) -> int:
    shards = getattr(table.sharding_spec, "shards", None) or []
    return max((part.shard_offsets[0] + part.shard_sizes[0] for part in shards), default=0)
