"""`Cell`, one combination of the parity matrix, and its plans."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType

import torchrec_2dsp as tdsp
from tests.support.models import ModelSpec
from tests.support.planning import group_plan_of, planner_for, torchrecs_planner
from torchrec_2dsp.plan.parameter_sharding import Pipeline
from torchrec_2dsp.planner.torchrec.adapters import Stats2D

EPS = 1e-3
"""Large enough that a gradient which cancels to almost nothing, whose rounding error is then
all of it, doesn't become a full AdaGrad step."""


@dataclass(frozen=True)
class Cell:
    """One combination of the matrix."""

    mesh: tdsp.Mesh2D
    sharding: str = "row_wise"
    spec: ModelSpec = field(default_factory=ModelSpec)
    optimizer: str = "rowwise_adagrad"
    sync: tdsp.GradientSync | tdsp.WeightSync = field(default_factory=tdsp.GradientSync)
    hot_rows: tuple[tuple[str, tuple[int, ...]], ...] = ()
    accumulates: bool = False
    stock_wrapper: bool = False
    batch_sizes: tuple[int, ...] = ()
    eps: float = EPS
    seed: int = 0
    max_length: int = 4
    variable: bool = False
    """Whether batches have a batch size for each feature, see `make_variable_batch`."""
    exchange: str = "pooled"
    owners: str = "block"
    transport: str = "fp32"
    """How rows or bags travel."""
    compute_kernel: str = "fused"
    """In which memory tables lie."""
    stored_as: str = "plain"
    """The format of rows in memory."""
    output: DataType = DataType.FP32
    """The type of rows and bags that are looked up."""
    demands: tuple[tuple[str, tdsp.ParameterConstraints2D], ...] = ()
    """Of each table, in place of ``sharding``, ``exchange`` and ``hot_rows``: by predicted cost."""
    in_world: tuple[str, ...] = ()
    """Tables with one copy, on the ranks of all groups."""
    pipeline: Pipeline = Pipeline.SPARSE_DIST
    """The one that the plan wants."""
    full_duplex: bool = False
    """True for a plan whose all-to-alls are full duplex."""
    parallelized: bool = False
    """True for a plan by `parallelize`, on the cell's mesh and with its exchange."""
    proposed: bool = False
    """Whether TorchRec's planner makes the plan, of this package's proposals."""
    rounding_seed: int | None = None
    """The seed with which 16-bit tables are rounded at random; `None` for to the nearest."""

    def __str__(self) -> str:
        kind = "sequence" if self.spec.sequence else self.spec.pooling
        parts = [self.sharding, kind + ("-weighted" if self.spec.weighted else "")]
        parts += [self.optimizer, str(self.mesh), type(self.sync).__name__]
        parts += [f"{self.exchange}-exchange"] * (self.exchange != "pooled")
        parts += [self.transport] * (self.transport != "fp32")
        parts += [self.compute_kernel] * (self.compute_kernel != "fused")
        parts += ["hash"] * (self.owners == "hash") + ["demands"] * bool(self.demands)
        parts += [self.stored_as] * (self.stored_as != "plain")
        parts += ["full-duplex"] * self.full_duplex
        parts += ["rounded"] * (self.rounding_seed is not None)
        parts += ["parallelized"] * self.parallelized
        parts += ["proposed"] * self.proposed + [f"{name} once" for name in self.in_world]
        parts += ["hot"] * bool(self.hot_rows) + ["stock-dmp"] * self.stock_wrapper
        return " ".join(parts + ["VBE"] * self.variable + ["accumulates"] * self.accumulates)

    @property
    def num_values(self) -> int:
        """Weights of the tables that all ranks hold together."""
        copies = self.mesh.world_size if self.sharding == "data_parallel" else self.mesh.num_groups
        return sum(
            (1 if table.name in self.in_world else copies) * table.num_rows * table.dim
            for table in self.spec.tables
        )


_STOCK_PLANS: dict[Hashable, ShardingPlan] = {}
"""Plans made in this process that shard every table one way."""


def plan_by_cost(cell: Cell, model: nn.Module, sharder: Any, local_world_size: int) -> ShardingPlan:
    """Plan within the cell's demands, by `Planner2D` or TorchRec's planner with our proposals."""
    mesh, sync, constraints = cell.mesh, cell.sync, dict(cell.demands)
    calibration = tdsp.Calibration.load("configs/hardware/emulated_200mbit.toml")
    topology = calibration.topology(mesh.world_size, local_world_size=local_world_size)
    if not cell.proposed:
        planner = planner_for(
            mesh, topology, calibration=calibration, sync=sync, constraints=constraints
        )
        return planner.plan(model, [sharder])
    stock = torchrecs_planner(
        topology,
        proposer=tdsp.ExchangeProposer(
            topology, calibration, mesh=mesh, sync=sync, constraints=constraints
        ),
        partitioner=tdsp.BalancedPartitioner(),
        stats=Stats2D(),
        constraints=constraints,
    )
    return stock.plan(model, [sharder])


def group_plan(cell: Cell, model: nn.Module, sharder: object) -> tdsp.Plan2D:
    """Plan every table the cell's way."""
    # Planning takes as long as a few steps, and many cells differ in what comes after it.
    key = (cell.mesh, cell.sharding, cell.spec, type(model))
    if key not in _STOCK_PLANS:
        _STOCK_PLANS[key] = plan_as_torchrec(cell, model, sharder)
    plan = tdsp.Plan2D.from_stock(_STOCK_PLANS[key], cell.mesh, cell.sync)
    plan = replace(plan, pipeline=cell.pipeline, full_duplex=cell.full_duplex)
    for table in cell.spec.tables:
        plan = tdsp.pin(
            plan,
            table.name,
            exchange=cell.exchange,
            owners=cell.owners,
            transport=cell.transport,
            stored_as=cell.stored_as,
            compute_kernel=None if cell.compute_kernel == "fused" else cell.compute_kernel,
        )
    for name in cell.in_world:
        plan = tdsp.pin(plan, name, num_groups=1)
    for name, rows in cell.hot_rows:
        plan = tdsp.pin(plan, name, hot_rows=rows)
    return plan


def plan_as_torchrec(cell: Cell, model: nn.Module, sharder: Any) -> tdsp.Plan2D:
    """Plan every table the cell's way, by TorchRec's search, which knows all types."""
    return group_plan_of(
        model, cell.mesh, sharders=[sharder], constraints=types_of(cell), sync=cell.sync
    )


def types_of(cell: Cell) -> dict[str, ParameterConstraints]:
    """Return constraints by which every table is sharded the cell's way."""
    return {
        table.name: ParameterConstraints(sharding_types=[cell.sharding], min_partition=4)
        for table in cell.spec.tables
    }
