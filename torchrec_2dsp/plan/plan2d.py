"""`Plan2D`: one sharding group's plan, the mesh that repeats it, and how replicas stay equal."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)

from torchrec_2dsp.access.hot_set import HotSet
from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.mesh.mesh2d import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import (
    ROW_EXCHANGES,
    Exchange,
    ParameterSharding2D,
    ProposedType,
    RowOwners,
    ShardingType2D,
    kinds_of,
    num_rows,
)
from torchrec_2dsp.plan.sync_config import GradientSync, SyncConfig

_Choice = TypeVar("_Choice", Exchange, RowOwners)


class ModulePlan2D(EmbeddingModuleShardingPlan):
    """One module's tables, with the mesh and the sync config that a sharder needs.

    TorchRec hands this object to the sharder untouched, also under a stock
    `DistributedModelParallel`.
    """

    def __init__(
        self, tables: Mapping[str, ParameterSharding], *, mesh: Mesh2D, sync: SyncConfig
    ) -> None:
        super().__init__(tables)
        self.mesh = mesh
        """Which ranks repeat this plan."""
        self.sync = sync
        """How the replicas stay equal."""

    def tables(self) -> Iterable[tuple[str, ParameterSharding2D]]:
        """Table names with their shardings, typed."""
        return ((name, cast(ParameterSharding2D, sharding)) for name, sharding in self.items())


@dataclass
class Plan2D(ShardingPlan):
    """A `ShardingPlan` for one sharding group, run by every group of ``mesh``.

    Ranks and placements are positions inside a group (``0..group_size - 1``) and sharding types
    are the 2D forms; `torchrec_2dsp.plan.remap.plan_for_rank` gives what a world rank runs.
    """

    mesh: Mesh2D
    """Which ranks repeat the plan."""

    sync: SyncConfig
    """How the replicas stay equal."""

    @classmethod
    def from_stock(
        cls, plan: ShardingPlan, mesh: Mesh2D | None = None, sync: SyncConfig | None = None
    ) -> "Plan2D":
        """The 2D form of a stock plan that was made for ``mesh.group_size`` ranks.

        Args:
            plan: a plan for one sharding group, left as it is.
            mesh: the mesh that repeats it; a plan of this package's proposers knows it.
            sync: how replicas stay equal: as these proposers were told, or else `GradientSync`
                (exact).
        """
        mesh, sync = _repeated(plan, mesh, sync)
        modules: dict[str, ModuleShardingPlan] = {}
        for path, module_plan in plan.plan.items():
            if not isinstance(module_plan, EmbeddingModuleShardingPlan):
                raise PlanError(
                    f"module {path!r} has a {type(module_plan).__name__}; only plans of "
                    "embedding modules have a 2D form"
                )
            modules[path] = ModulePlan2D(
                {name: ParameterSharding2D.of(table) for name, table in module_plan.items()},
                mesh=mesh,
                sync=sync,
            )
        made = cls(plan=modules, mesh=mesh, sync=sync)
        made.validate()
        return made

    def modules(self) -> Iterable[tuple[str, ModulePlan2D]]:
        """Module paths with their plans, typed."""
        return ((path, cast(ModulePlan2D, plan)) for path, plan in self.plan.items())

    def validate(self) -> None:
        """Raise `PlanError` at the first table that this mesh can't run."""
        for path, module_plan in self.modules():
            for name, table in module_plan.tables():
                _validate_table(f"{path}.{name}" if path else name, table, self.mesh)

    def __str__(self) -> str:
        return f"{self.mesh}, {self.sync}\n{super().__str__()}"


def _repeated(
    plan: ShardingPlan, mesh: Mesh2D | None, sync: SyncConfig | None
) -> tuple[Mesh2D, SyncConfig]:
    """On which mesh, and kept equal how: as given, or as proposers chose."""
    kinds = [table.sharding_type for module in plan.plan.values() for table in _tables(module)]
    proposed = [kind for kind in kinds if isinstance(kind, ProposedType)]
    given = [] if mesh is None else [mesh]
    meshes = list(dict.fromkeys(given + [kind.mesh for kind in proposed]))
    if len(meshes) > 1:
        raise PlanError(
            f"a plan has one mesh, not {' and '.join(str(one) for one in meshes)}: make it again "
            "with proposers for one mesh, or leave the mesh out of from_stock"
        )
    if not meshes:
        raise PlanError("nothing says which ranks repeat the plan: pass mesh=Mesh2D.for_world(...)")
    told = sync or (proposed[0].sync if proposed else GradientSync())
    return meshes[0], told


def _tables(module_plan: ModuleShardingPlan) -> Iterable[ParameterSharding]:
    return module_plan.values() if isinstance(module_plan, EmbeddingModuleShardingPlan) else ()


def is_proposed(plan: ShardingPlan) -> bool:
    """Whether this package's proposers chose a plan inside TorchRec's planner."""
    return any(
        isinstance(table.sharding_type, ProposedType)
        for module in plan.plan.values()
        for table in _tables(module)
    )


def pin(
    plan: Plan2D,
    table: str,
    *,
    hot_rows: "Iterable[int] | torch.Tensor | HotSet | None" = None,
    exchange: Exchange | str | None = None,
    owners: RowOwners | str | None = None,
) -> Plan2D:
    """A copy of ``plan`` with another exchange, other owners or other hot rows for ``table``.

    Args:
        plan: left as it is.
        table: a table's name, as in its config.
        hot_rows: ids of the rows that every rank holds, in any order; an empty one removes the
            table's hot set. By default it stays.
        exchange: how the table's rows reach their samples, as a member of `Exchange` or its value.
            By default it stays.
        owners: which rank has which rows, as a member of `RowOwners` or its value; for row exchange
            only. By default they stay.

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
    modules: dict[str, ModuleShardingPlan] = {}
    found = False
    for path, module_plan in plan.modules():
        tables = dict(module_plan.tables())
        if table in tables:
            found = True
            tables[table] = replace(tables[table], **changes)
        modules[path] = ModulePlan2D(tables, mesh=plan.mesh, sync=plan.sync)
    if not found:
        names = sorted(name for _, module_plan in plan.modules() for name in module_plan)
        raise PlanError(
            f"the plan has no table {table!r}; it has "
            + (", ".join(names) if names else "no tables")
        )
    made = replace(plan, plan=modules)
    made.validate()
    return made


def _member(kind: type[_Choice], name: str, value: _Choice | str) -> _Choice:
    try:
        return kind(value)
    except ValueError as error:
        known = ", ".join(repr(one.value) for one in kind)
        raise PlanError(f"{name}={value!r} is unknown; use one of {known}") from error


def _hot_set_of(rows: "Iterable[int] | torch.Tensor | HotSet") -> HotSet | None:
    known = rows if isinstance(rows, HotSet) else [int(row) for row in rows]
    return HotSet.of(known) if known else None


def _validate_table(where: str, table: ParameterSharding2D, mesh: Mesh2D) -> None:
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
    if kind is ShardingType2D.DATA_PARALLEL:
        if table.hot_set is not None:
            raise PlanError(
                f"table {where} is data parallel: every rank holds all its rows already; remove "
                "its hot set or shard it another way"
            )
        return
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
    if table.hot_set is not None:
        rows = num_rows(table)
        assert rows is not None
        table.hot_set.check_fits(where, rows)
