"""Plans by predicted cost for cells of the parity matrix, by either planner."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import ShardingPlan

import torchrec_2dsp as tdsp
from torchrec_2dsp.planner.torchrec.stats import Stats2D


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
    """As `Planner2D` finds it, or TorchRec's planner of this package's proposals: a stock plan."""
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
