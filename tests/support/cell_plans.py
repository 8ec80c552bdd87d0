"""Plans for cells of the parity matrix: with every table sharded one way, or by predicted cost."""

from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import ShardingPlan

import torchrec_2dsp as tdsp
from tests.support.cells import Cell
from torchrec_2dsp.planner.torchrec.adapters import Stats2D

_STOCK_PLANS: dict[Hashable, ShardingPlan] = {}
"""Plans made in this process that shard every table one way."""


def plan_by_cost(
    cell: Cell, model: nn.Module, sharder: object, local_world_size: int
) -> ShardingPlan:
    """Plan within the cell's demands, by predicted cost."""
    return planned(
        model,
        sharder,
        dict(cell.demands),
        local_world_size,
        mesh=cell.mesh,
        sync=cell.sync,
        proposed=cell.proposed,
    )


def group_plan(cell: Cell, model: nn.Module, sharder: object, local_world_size: int) -> tdsp.Plan2D:
    """Plan every table the cell's way."""
    # Planning takes as long as a few steps, and many cells differ in what comes after it.
    key = (cell.mesh, cell.sharding, cell.spec, type(model), local_world_size)
    if key not in _STOCK_PLANS:
        _STOCK_PLANS[key] = group_planner(cell).plan(model, [sharder])  # type: ignore[list-item]
    plan = tdsp.Plan2D.from_stock(_STOCK_PLANS[key], cell.mesh, cell.sync)
    for table in cell.spec.tables:
        plan = tdsp.pin(
            plan,
            table.name,
            exchange=cell.exchange,
            owners=cell.owners,
            transport=cell.transport,
        )
    for name in cell.in_world:
        plan = tdsp.pin(plan, name, num_groups=1)
    for name, rows in cell.hot_rows:
        plan = tdsp.pin(plan, name, hot_rows=rows)
    return plan


def group_planner(cell: Cell) -> tdsp.Planner2D:
    """Return a planner that can only shard every table the cell's way."""
    constraints = {
        table.name: ParameterConstraints(sharding_types=[cell.sharding], min_partition=4)
        for table in cell.spec.tables
    }
    return tdsp.Planner2D(
        batch_size=8,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        mesh=cell.mesh,
        sync=cell.sync,
    )


def planned(
    model: nn.Module,
    sharder: Any,
    constraints: Mapping[str, tdsp.ParameterConstraints2D],
    local_world_size: int,
    *,
    mesh: tdsp.Mesh2D,
    sync: tdsp.GradientSync | tdsp.WeightSync,
    proposed: bool,
) -> ShardingPlan:
    """Return the plan of `Planner2D`, or of TorchRec's planner with this package's proposals."""
    calibration = tdsp.Calibration.load("configs/hardware/emulated_200mbit.toml")
    topology = calibration.topology(mesh.world_size, local_world_size=local_world_size)
    known: dict[str, Any] = {
        "topology": topology,
        "batch_size": 8,
        "storage_reservation": FixedPercentageStorageReservation(0.0),
        "constraints": dict(constraints),
    }
    if not proposed:
        planner = tdsp.Planner2D(calibration=calibration, mesh=mesh, sync=sync, **known)
        return planner.plan(model, [sharder])
    proposer = tdsp.ExchangeProposer(
        topology, calibration, mesh=mesh, sync=sync, constraints=constraints
    )
    stock = EmbeddingShardingPlanner(
        proposer=proposer,
        partitioner=tdsp.BalancedPartitioner(),
        stats=Stats2D(),
        **known,
    )
    return stock.plan(model, [sharder])
