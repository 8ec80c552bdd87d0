"""`Plan2D`: one group's plan, the mesh that repeats it, and how replicas stay equal; `pin`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets, placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

from torchrec_2dsp._compat.torchrec import EmbeddingComputeKernel
from torchrec_2dsp.access.table_access import HotSet, whole_row_ids
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.errors import ConfigError, PlanError, check_choice
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.fits_mesh import check_fits_mesh
from torchrec_2dsp.plan.parameter_sharding import (
    Exchange,
    ParameterSharding2D,
    Pipeline,
    ProposedType,
    RowOwners,
    RowStorage,
    ShardingType2D,
    TableType,
    num_rows,
)
from torchrec_2dsp.plan.sync import GradientSync, SyncConfig


class ModulePlan2D(EmbeddingModuleShardingPlan):
    """One module's tables, with the mesh and sync config that a sharder needs.

    TorchRec passes this object to the sharder untouched, also under a stock
    `DistributedModelParallel`.
    """

    def __init__(
        self,
        tables: Mapping[str, ParameterSharding],
        *,
        mesh: Mesh2D,
        sync: SyncConfig,
        full_duplex: bool = False,
    ) -> None:
        super().__init__(tables)
        self.mesh = mesh
        """The mesh; each of its groups runs this plan."""
        self.sync = sync
        """The config that keeps replicas equal."""
        self.full_duplex = full_duplex
        """See `Plan2D.full_duplex`."""

    def with_tables(self, tables: Mapping[str, ParameterSharding]) -> "ModulePlan2D":
        """Return the same plan for other tables."""
        return ModulePlan2D(tables, mesh=self.mesh, sync=self.sync, full_duplex=self.full_duplex)

    def run_as(self, mesh: Mesh2D, sync: SyncConfig, *, full_duplex: bool) -> "ModulePlan2D":
        """Return this plan if it has these settings already, else a copy that has them."""
        if (self.mesh, self.sync, self.full_duplex) == (mesh, sync, full_duplex):
            return self
        return ModulePlan2D(self, mesh=mesh, sync=sync, full_duplex=full_duplex)

    def tables(self) -> Iterable[tuple[str, ParameterSharding2D]]:
        """Return table names with their typed shardings."""
        return ((name, cast(ParameterSharding2D, sharding)) for name, sharding in self.items())

    def parts(self) -> "list[ModulePlan2D]":
        """Split the plan by the meshes that repeat its tables, most groups first."""
        by_mesh: dict[Mesh2D, dict[str, ParameterSharding]] = {}
        for name, table in self.tables():
            by_mesh.setdefault(table.mesh_in(self.mesh), {})[name] = table
        ordered = sorted(by_mesh, key=lambda mesh: -mesh.num_groups) or [self.mesh]
        return [
            ModulePlan2D(
                by_mesh.get(mesh, {}), mesh=mesh, sync=self.sync, full_duplex=self.full_duplex
            )
            for mesh in ordered
        ]


@dataclass
class Plan2D(ShardingPlan):
    """A `ShardingPlan` for one sharding group, run by every group of ``mesh``.

    Ranks and placements are positions inside a group (``0..group_size - 1``) and sharding types
    are the 2D forms; `torchrec_2dsp.plan.plan2d.plan_for_rank` returns a world rank's plan.
    """

    mesh: Mesh2D
    """The mesh; each of its groups runs the plan."""

    sync: SyncConfig
    """The config that keeps replicas equal."""

    pipeline: Pipeline = Pipeline.SPARSE_DIST
    """The train pipeline that `ModelParallel2D.pipeline` builds."""

    full_duplex: bool = False
    """True if all-to-alls in sharding groups send and receive at the same time, through
    `torchrec_2dsp.comms.full_duplex`. It changes no number, and nothing on NCCL."""

    def get_plan_for_module(self, module_path: str) -> ModuleShardingPlan | None:
        """Return a module's plan, with the plan's current mesh and sync config."""
        module = self.plan.get(module_path)
        if not isinstance(module, ModulePlan2D):
            return module
        return module.run_as(self.mesh, self.sync, full_duplex=self.full_duplex)

    @classmethod
    def from_stock(
        cls, plan: ShardingPlan, mesh: Mesh2D | None = None, sync: SyncConfig | None = None
    ) -> "Plan2D":
        """Convert a stock plan that was made for ``mesh.group_size`` ranks.

        Args:
            plan: a plan for one sharding group, left unchanged; a `Plan2D` keeps its pipeline and
                its ``full_duplex``.
            mesh: the mesh that repeats it; a `Plan2D` or a plan of this package's proposers has
                one.
            sync: how replicas stay equal; by default as in a `Plan2D`, as in the proposers, or
                `GradientSync` (exact).
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
        empty = cls({}, mesh, sync)
        if isinstance(plan, Plan2D):
            empty = replace(empty, pipeline=plan.pipeline, full_duplex=plan.full_duplex)
        return empty.with_tables(modules)

    def with_tables(self, modules: Mapping[str, Mapping[str, ParameterSharding2D]]) -> "Plan2D":
        """Return the same plan for other tables, by module path and name.

        All of this package's plans are built and checked here.

        Raises:
            PlanError: the mesh can't run a table.
        """
        module_plans: dict[str, ModuleShardingPlan] = {
            path: ModulePlan2D(tables, mesh=self.mesh, sync=self.sync)
            for path, tables in modules.items()
        }
        plan = replace(self, plan=module_plans)
        plan.validate()
        return plan

    def modules(self) -> Iterable[tuple[str, ModulePlan2D]]:
        """Return module paths with their typed plans."""
        return ((path, cast(ModulePlan2D, self.get_plan_for_module(path))) for path in self.plan)

    def validate(self) -> None:
        """Raise `PlanError` for the first table that this mesh can't run."""
        for path, module_plan in self.modules():
            for name, table in module_plan.tables():
                where = f"{path}.{name}" if path else name
                check_fits_mesh(where, table, table.mesh_in(self.mesh))

    def __str__(self) -> str:
        duplex = ", full-duplex all-to-alls" if self.full_duplex else ""
        return f"{self.mesh}, {self.sync}, {self.pipeline}{duplex}\n{super().__str__()}"


def _repeated(
    plan: ShardingPlan, mesh: Mesh2D | None, sync: SyncConfig | None
) -> tuple[Mesh2D, SyncConfig]:
    """Return the given mesh and sync config, or the plan's own where not given."""
    if isinstance(plan, Plan2D):
        return mesh or plan.mesh, sync or plan.sync
    proposed = _proposed_types(plan)
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


def _proposed_types(plan: ShardingPlan) -> list[ProposedType]:
    return [
        table.sharding_type
        for module in plan.plan.values()
        if isinstance(module, EmbeddingModuleShardingPlan)
        for table in module.values()
        if isinstance(table.sharding_type, ProposedType)
    ]


def is_proposed(plan: ShardingPlan) -> bool:
    """Return whether this package's proposers chose a plan inside TorchRec's planner."""
    return bool(_proposed_types(plan))


def as_plan_2d(plan: ShardingPlan | None) -> Plan2D:
    """Return the plan to run, or raise a `ConfigError` for a stock plan."""
    if isinstance(plan, Plan2D):
        return plan
    if isinstance(plan, ShardingPlan) and is_proposed(plan):
        return Plan2D.from_stock(plan)
    raise ConfigError(
        f"plan is a {type(plan).__name__}; pass Planner2D's, or Plan2D.from_stock(plan, "
        "mesh=Mesh2D.for_world(...))"
    )


def pin(
    plan: Plan2D,
    table: str,
    *,
    hot_rows: "Iterable[int] | torch.Tensor | HotSet | None" = None,
    exchange: Exchange | str | None = None,
    owners: RowOwners | str | None = None,
    transport: Transport | str | None = None,
    stored_as: RowStorage | str | None = None,
    num_groups: int | None = None,
    compute_kernel: EmbeddingComputeKernel | str | None = None,
) -> Plan2D:
    """Return a copy of ``plan`` with other choices for ``table``.

    Args:
        plan: the plan, which isn't changed.
        table: a table's name, as in its config.
        hot_rows: ids of the rows that every rank holds, in any order; behind an id map, the ids
            to which it gives rows. An empty one removes the table's hot set. By default unchanged.
        exchange: how the table's rows reach their samples, as a member of `Exchange` or its value.
            By default unchanged.
        owners: the assignment of rows to ranks, as a member of `RowOwners` or its value; for row
            exchange only. By default unchanged.
        transport: the wire format of the table's rows or pooled vectors and of their gradients, as
            a member of `Transport` or its value: fewer bytes, for rounded numbers. By
            default unchanged.
        stored_as: the format of the table's rows in memory, as a member of `RowStorage` or its
            value. By default unchanged.
        num_groups: 1 for one copy of a row-wise table, sharded over all ranks of the world, or
            the mesh's number of groups for a copy in each group. By default unchanged.
        compute_kernel: where the table's shards are stored, as a member of TorchRec's
            `EmbeddingComputeKernel` or its value: "fused" for device memory, "fused_uvm" for
            host memory, which a GPU reads and updates over its bus. By default unchanged.

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
    if compute_kernel is not None:
        check_choice("compute_kernel", compute_kernel, EmbeddingComputeKernel, error=PlanError)
        changes["compute_kernel"] = EmbeddingComputeKernel(compute_kernel).value
    for name, kind, value in (
        ("exchange", Exchange, exchange),
        ("owners", RowOwners, owners),
        ("transport", Transport, transport),
        ("stored_as", RowStorage, stored_as),
    ):
        if value is not None:
            check_choice(name, value, kind, error=PlanError)
            changes[name] = kind(value)

    def changed(sharding: ParameterSharding2D) -> ParameterSharding2D:
        sharding = replace(sharding, **changes)
        return sharding if num_groups is None else _copied(table, sharding, plan.mesh, num_groups)

    names = sorted(name for _, module_plan in plan.modules() for name in module_plan)
    if table not in names:
        raise PlanError(
            f"the plan has no table {table!r}; it has {', '.join(names) or 'no tables'}"
        )
    return plan.with_tables(
        {
            path: {
                name: changed(sharding) if name == table else sharding
                for name, sharding in module_plan.tables()
            }
            for path, module_plan in plan.modules()
        }
    )


def _hot_set_of(rows: "Iterable[int] | torch.Tensor | HotSet") -> HotSet | None:
    row_ids = rows.row_ids if isinstance(rows, HotSet) else whole_row_ids(rows)
    return HotSet.of(row_ids) if row_ids else None


def _copied(
    name: str, table: ParameterSharding2D, mesh: Mesh2D, num_groups: int
) -> ParameterSharding2D:
    """Return a row-wise table with ``num_groups`` copies."""
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


def plan_for_rank(
    plan: Plan2D, rank: int, *, device_type: str = "cpu", local_world_size: int = 1
) -> ShardingPlan:
    """Return a world rank's plan: with world ranks, devices and TorchRec's own types."""
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
    """Return a module's plan for a world rank; see `plan_for_rank`."""

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

    return plan.with_tables({name: remapped(table) for name, table in plan.tables()})


def _runtime_type(table: ParameterSharding2D) -> str:
    """Return the type name that TorchRec's sharded module sees for a table."""
    base = ShardingType2D(table.sharding_type).base
    if base is ShardingType.TABLE_COLUMN_WISE:
        # At run time, table-column-wise is column-wise on one host's ranks: the same shards and
        # code, but TorchRec's 2D state dict only knows the plain name.
        base = ShardingType.COLUMN_WISE
    return TableType(base, table.exchange, table.transport).name
