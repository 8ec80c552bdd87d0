"""What a table of a plan must be so that its mesh can run it."""

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.checks.shards import check_ranks, check_shards, names_each_rank
from torchrec_2dsp.plan.parameter_sharding import (
    ROW_EXCHANGES,
    ParameterSharding2D,
    ShardingType2D,
    kinds_of,
    num_rows,
)
from torchrec_2dsp.plan.row_owners import RowOwners


def check_fits_mesh(where: str, table: ParameterSharding2D, mesh: Mesh2D) -> None:
    """Raise `PlanError` if the groups of ``mesh`` can't run a table as its sharding says.

    Args:
        where: module path and name of the table, for messages.
        table: its sharding.
        mesh: the mesh that repeats it.
    """
    kind = ShardingType2D(table.sharding_type)
    allowed = kinds_of(table.exchange)
    if kind.base.value not in allowed:
        raise PlanError(
            f"table {where} is {kind.value}, but exchange={table.exchange.value!r} is for tables "
            f"sharded {', '.join(allowed)}: constrain it with sharding_types={[allowed[0]]} when "
            "you plan"
        )
    if table.owners is RowOwners.HASH and table.exchange not in ROW_EXCHANGES:
        raise PlanError(
            f"table {where} has owners='hash', which is for row exchange: pin it with "
            "exchange='row', or with owners='block'"
        )
    if table.num_groups not in (None, 1):
        raise PlanError(
            f"table {where} has num_groups={table.num_groups}: a table has one copy in the world, "
            "with num_groups=1, or one in each group of the plan's mesh, with None"
        )
    if kind is ShardingType2D.DATA_PARALLEL:
        _check_data_parallel(where, table, mesh)
    else:
        _check_sharded(where, table, mesh, kind)


def _check_data_parallel(where: str, table: ParameterSharding2D, mesh: Mesh2D) -> None:
    if table.num_groups is not None:
        raise PlanError(
            f"table {where} is data parallel, which is a copy on every rank, not num_groups=1: "
            "shard it another way"
        )
    if table.hot_set is not None:
        raise PlanError(
            f"table {where} is data parallel: every rank holds all its rows already; remove "
            "its hot set or shard it another way"
        )
    if table.sharding_spec is not None:
        raise PlanError(
            f"table {where} is data parallel, a copy on every rank, and has shards; remove "
            "them, or shard it another way"
        )
    if table.transport is not Transport.FP32:
        raise PlanError(
            f"table {where} is data parallel, and has transport={table.transport.value!r}: no rows "
            "of it travel; leave the transport out, or shard it another way"
        )
    if table.ranks is not None and not names_each_rank(sorted(table.ranks), mesh.group_size):
        raise PlanError(
            f"table {where} is data parallel on ranks {table.ranks}, but every rank of a "
            f"sharding group has a copy: use ranks 0..{mesh.group_size - 1}"
        )


def _check_sharded(
    where: str, table: ParameterSharding2D, mesh: Mesh2D, kind: ShardingType2D
) -> None:
    shards = getattr(table.sharding_spec, "shards", None)
    if not shards:
        raise PlanError(
            f"table {where} ({table.sharding_type}) has no shards; plan it with Planner2D, or "
            "with a stock planner for one sharding group"
        )
    ranks = [shard.placement.rank() for shard in shards] + list(table.ranks or [])
    outside = [rank for rank in ranks if rank is None or not 0 <= rank < mesh.group_size]
    if outside:
        raise PlanError(
            f"table {where} has a shard on rank {outside[0]}, but a sharding group of {mesh} has "
            f"ranks 0..{mesh.group_size - 1}; make the plan for world_size={mesh.group_size}"
        )
    check_shards(where, kind.base, shards, mesh.group_size)
    if table.ranks is not None:
        check_ranks(where, table.ranks, shards)
    if table.hot_set is not None:
        rows = num_rows(table)
        assert rows is not None
        table.hot_set.check_fits(where, rows)
