"""`pin`: a plan with one table's row exchange, owners, hot rows or copies chosen by hand."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets, placement
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.access.hot_set import HotSet
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import (
    Exchange,
    ParameterSharding2D,
    ShardingType2D,
    num_rows,
)
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.plan.row_owners import RowOwners

_Choice = TypeVar("_Choice", Exchange, RowOwners, Transport)


def pin(
    plan: Plan2D,
    table: str,
    *,
    hot_rows: "Iterable[int] | torch.Tensor | HotSet | None" = None,
    exchange: Exchange | str | None = None,
    owners: RowOwners | str | None = None,
    transport: Transport | str | None = None,
    num_groups: int | None = None,
) -> Plan2D:
    """A copy of ``plan`` with another choice for ``table``.

    Args:
        plan: left as it is.
        table: a table's name, as in its config.
        hot_rows: ids of the rows that every rank holds, in any order; an empty one removes the
            table's hot set. By default it stays.
        exchange: how the table's rows reach their samples, as a member of `Exchange` or its value.
            By default it stays.
        owners: which rank has which rows, as a member of `RowOwners` or its value; for row exchange
            only. By default they stay.
        transport: how the table's rows or pooled vectors, and their gradients, look on the wire, as
            a member of `Transport` or its value: fewer bytes, for numbers that are rounded. By
            default it stays.
        num_groups: 1 for one copy of a row-wise table, which lies on all ranks of the world, or as
            many as the plan's mesh has for one copy in each. By default they stay.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> plan = tdsp.Plan2D({}, mesh=tdsp.Mesh2D(2, 2), sync=tdsp.GradientSync())
        >>> tdsp.pin(plan, "t_user", hot_rows=[0, 1])
        Traceback (most recent call last):
        ...
        torchrec_2dsp.errors.PlanError: the plan has no table 't_user'; it has no tables
    """
    changes: dict[str, Any] = {}
    if hot_rows is not None:
        changes["hot_set"] = _hot_set_of(hot_rows)
    if exchange is not None:
        changes["exchange"] = _member(Exchange, "exchange", exchange)
    if owners is not None:
        changes["owners"] = _member(RowOwners, "owners", owners)
    if transport is not None:
        changes["transport"] = _member(Transport, "transport", transport)

    def changed(sharding: ParameterSharding2D) -> ParameterSharding2D:
        sharding = replace(sharding, **changes)
        return sharding if num_groups is None else _copied(table, sharding, plan.mesh, num_groups)

    modules: dict[str, dict[str, ParameterSharding2D]] = {}
    is_in_plan = False
    for path, module_plan in plan.modules():
        tables = dict(module_plan.tables())
        if table in tables:
            is_in_plan = True
            tables[table] = changed(tables[table])
        modules[path] = tables
    if not is_in_plan:
        names = sorted(name for _, module_plan in plan.modules() for name in module_plan)
        raise PlanError(
            f"the plan has no table {table!r}; it has "
            + (", ".join(names) if names else "no tables")
        )
    return Plan2D.of_tables(modules, mesh=plan.mesh, sync=plan.sync)


def with_transport(plan: Plan2D, transport: Transport) -> Plan2D:
    """A copy of ``plan`` whose tables all travel in one way, but for data-parallel ones."""
    modules = {
        path: {
            name: table
            if table.sharding_type == ShardingType2D.DATA_PARALLEL.value
            else replace(table, transport=transport)
            for name, table in module_plan.tables()
        }
        for path, module_plan in plan.modules()
    }
    return Plan2D.of_tables(modules, mesh=plan.mesh, sync=plan.sync)


def _member(kind: type[_Choice], name: str, value: _Choice | str) -> _Choice:
    try:
        return kind(value)
    except ValueError as error:
        choices = ", ".join(repr(member.value) for member in kind)
        raise PlanError(f"{name}={value!r} is unknown; use one of {choices}") from error


def _hot_set_of(rows: "Iterable[int] | torch.Tensor | HotSet") -> HotSet | None:
    row_ids = rows if isinstance(rows, HotSet) else [int(row) for row in rows]
    return HotSet.of(row_ids) if row_ids else None


def _copied(
    name: str, table: ParameterSharding2D, mesh: Mesh2D, num_groups: int
) -> ParameterSharding2D:
    """A row-wise table with so many copies."""
    if num_groups not in (1, mesh.num_groups):
        raise PlanError(
            f"num_groups={num_groups} for table {name!r} in a plan for {mesh}: use 1, or "
            f"{mesh.num_groups}"
        )
    spec = table.sharding_spec
    rows = num_rows(table)
    if table.sharding_type != ShardingType2D.ROW_WISE.value or rows is None:
        raise PlanError(
            f"table {name!r} is {table.sharding_type}, and only the shards of row-wise tables can "
            "be dealt to other ranks by hand: constrain it with sharding_types=['row_wise'] when "
            "you plan"
        )
    assert isinstance(spec, EnumerableShardingSpec)
    copied = replace(table, num_groups=None if num_groups == mesh.num_groups else num_groups)
    num_ranks = copied.mesh_in(mesh).group_size
    columns, device = spec.shards[0].shard_sizes[1], str(spec.shards[0].placement).split("/")[1]
    sizes, offsets = calculate_shard_sizes_and_offsets(
        torch.empty(rows, columns, device="meta"),
        num_ranks,
        num_ranks,
        ShardingType.ROW_WISE.value,
    )
    shards = [
        ShardMetadata(
            shard_offsets=offset,
            shard_sizes=size,
            placement=placement(device.split(":")[0], rank, num_ranks),
        )
        for rank, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
    ]
    return replace(
        copied, ranks=list(range(num_ranks)), sharding_spec=EnumerableShardingSpec(shards)
    )
