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
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.checks.fits_mesh import check_fits_mesh
from torchrec_2dsp.plan.parameter_sharding import ParameterSharding2D, ProposedType
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
                check_fits_mesh(where, table, table.mesh_in(self.mesh))

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
