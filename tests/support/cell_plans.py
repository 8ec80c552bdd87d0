"""Plans by predicted cost for cells of the parity matrix, by either planner."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import ShardingPlan

import torchrec_2dsp as tdsp

BATCH_SIZE = 8


def searched_plan(
    model: nn.Module,
    sharder: Any,
    constraints: Mapping[str, tdsp.ParameterConstraints2D],
    *,
    mesh: tdsp.Mesh2D,
    sync: tdsp.GradientSync | tdsp.WeightSync,
    local_world_size: int,
) -> tdsp.Plan2D:
    """As `Planner2D` finds it on a mesh."""
    planner = tdsp.Planner2D(
        topology=_calibration().topology(mesh.world_size, local_world_size=local_world_size),
        batch_size=BATCH_SIZE,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        calibration=_calibration(),
        mesh=mesh,
        sync=sync,
    )
    return planner.plan(model, [sharder])


def proposed_plan(
    model: nn.Module,
    sharder: Any,
    constraints: Mapping[str, tdsp.ParameterConstraints2D],
    *,
    mesh: tdsp.Mesh2D,
    sync: tdsp.GradientSync | tdsp.WeightSync,
    local_world_size: int,
) -> ShardingPlan:
    """As TorchRec's planner makes it of this package's proposals: a stock plan."""
    topology = _calibration().topology(mesh.world_size, local_world_size=local_world_size)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=BATCH_SIZE,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        proposer=tdsp.ExchangeProposer(
            topology, _calibration(), mesh=mesh, sync=sync, constraints=constraints
        ),
        partitioner=tdsp.BalancedPartitioner(),
        constraints=dict(constraints),
        stats=tdsp.Stats2D(),
    )
    return planner.plan(model, [sharder])


def _calibration() -> tdsp.Calibration:
    return tdsp.Calibration.load("configs/hardware/emulated_200mbit.toml")
