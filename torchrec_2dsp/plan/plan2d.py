"""`Plan2D`: one sharding group's plan, the mesh that repeats it, and how replicas stay equal."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)

from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.mesh.mesh2d import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import (
    ROW_EXCHANGES,
    ParameterSharding2D,
    ProposedType,
    RowOwners,
    ShardingType2D,
    kinds_of,
    num_rows,
)
from torchrec_2dsp.plan.shards import check_ranks, check_shards, names_each_rank
from torchrec_2dsp.plan.sync_config import GradientSync, SyncConfig


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
        """The mesh, whose every group runs this plan."""
        self.sync = sync
        """How the replicas stay equal."""

    def tables(self) -> Iterable[tuple[str, ParameterSharding2D]]:
        """Table names with their shardings, typed."""
        return ((name, cast(ParameterSharding2D, sharding)) for name, sharding in self.items())

    def parts(self) -> "list[ModulePlan2D]":
        """A plan for each mesh that repeats some tables, the one with most groups first."""
        by_mesh: dict[Mesh2D, dict[str, ParameterSharding]] = {}
        for name, table in self.tables():
            by_mesh.setdefault(table.mesh_in(self.mesh), {})[name] = table
        ordered = sorted(by_mesh, key=lambda mesh: -mesh.num_groups) or [self.mesh]
        return [ModulePlan2D(by_mesh.get(mesh, {}), mesh=mesh, sync=self.sync) for mesh in ordered]


@dataclass
class Plan2D(ShardingPlan):
    """A `ShardingPlan` for one sharding group, run by every group of ``mesh``.

    Ranks and placements are positions inside a group (``0..group_size - 1``) and sharding types
    are the 2D forms; `torchrec_2dsp.plan.remap.plan_for_rank` gives what a world rank runs.
    """

    mesh: Mesh2D
    """The mesh, whose every group runs the plan."""

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
        modules: dict[str, dict[str, ParameterSharding2D]] = {}
        for path, module_plan in plan.plan.items():
            if not isinstance(module_plan, EmbeddingModuleShardingPlan):
                raise PlanError(
                    f"module {path!r} has a {type(module_plan).__name__}; only plans of "
                    "embedding modules have a 2D form"
                )
            modules[path] = {
                name: ParameterSharding2D.of(table) for name, table in module_plan.items()
            }
        return cls.of_tables(modules, mesh=mesh, sync=sync)

    @classmethod
    def of_tables(
        cls,
        modules: Mapping[str, Mapping[str, ParameterSharding2D]],
        *,
        mesh: Mesh2D,
        sync: SyncConfig,
    ) -> "Plan2D":
        """The plan of these tables, by module path and name, if ``mesh`` can run it.

        Every plan that this package makes is made, and checked, here.

        Raises:
            PlanError: the mesh can't run a table.
        """
        module_plans: dict[str, ModuleShardingPlan] = {
            path: ModulePlan2D(tables, mesh=mesh, sync=sync) for path, tables in modules.items()
        }
        plan = cls(plan=module_plans, mesh=mesh, sync=sync)
        plan.validate()
        return plan

    def modules(self) -> Iterable[tuple[str, ModulePlan2D]]:
        """Module paths with their plans, typed."""
        return ((path, cast(ModulePlan2D, plan)) for path, plan in self.plan.items())

    def validate(self) -> None:
        """Raise `PlanError` at the first table that this mesh can't run."""
        for path, module_plan in self.modules():
            for name, table in module_plan.tables():
                where = f"{path}.{name}" if path else name
                _validate_table(where, table, table.mesh_in(self.mesh))

    def __str__(self) -> str:
        return f"{self.mesh}, {self.sync}\n{super().__str__()}"


def _repeated(
    plan: ShardingPlan, mesh: Mesh2D | None, sync: SyncConfig | None
) -> tuple[Mesh2D, SyncConfig]:
    """The plan's mesh and sync config, as given or else as proposers chose them."""
    kinds = [table.sharding_type for module in plan.plan.values() for table in _tables(module)]
    proposed = [kind for kind in kinds if isinstance(kind, ProposedType)]
    given = [] if mesh is None else [mesh]
    meshes = list(dict.fromkeys(given + [kind.mesh for kind in proposed]))
    if len(meshes) > 1:
        raise PlanError(
            f"a plan has one mesh, not {' and '.join(str(each) for each in meshes)}: make it again "
            "with proposers for one mesh, or leave the mesh out of from_stock"
        )
    if not meshes:
        raise PlanError("nothing says which ranks repeat the plan: pass mesh=Mesh2D.for_world(...)")
    chosen_sync = sync or (proposed[0].sync if proposed else GradientSync())
    return meshes[0], chosen_sync


def _tables(module_plan: ModuleShardingPlan) -> Iterable[ParameterSharding]:
    return module_plan.values() if isinstance(module_plan, EmbeddingModuleShardingPlan) else ()


def is_proposed(plan: ShardingPlan) -> bool:
    """Whether this package's proposers chose a plan inside TorchRec's planner."""
    return any(
        isinstance(table.sharding_type, ProposedType)
        for module in plan.plan.values()
        for table in _tables(module)
    )


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
    if table.num_groups not in (None, 1):
        raise PlanError(
            f"table {where} has num_groups={table.num_groups}: a table has one copy in the world, "
            "with num_groups=1, or one in each group of the plan's mesh, with None"
        )
    if kind is ShardingType2D.DATA_PARALLEL:
        _validate_data_parallel(where, table, mesh)
    else:
        _validate_shards(where, table, mesh, kind)


def _validate_data_parallel(where: str, table: ParameterSharding2D, mesh: Mesh2D) -> None:
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
    if table.ranks is not None and not names_each_rank(sorted(table.ranks), mesh.group_size):
        raise PlanError(
            f"table {where} is data parallel on ranks {table.ranks}, but every rank of a "
            f"sharding group has a copy: use ranks 0..{mesh.group_size - 1}"
        )


def _validate_shards(
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
