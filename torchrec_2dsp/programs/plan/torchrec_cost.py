"""The cost of a step by the plan of TorchRec's own planner."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology

from torchrec_2dsp.cost.model import CostModel, CostSetting
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.plan2d import Plan2D


def torchrec_cost(
    setting: CostSetting,
    model: nn.Module,
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints],
) -> StepCost | None:
    """A step of TorchRec's plan for one group, predicted as in ``setting``.

    Args:
        setting: calibration, workload and ranks per host count.
        model: the unsharded model.
        topology: what its planner is told of the machines.
        constraints: of which its planner is told the pooling factors.

    Returns:
        None if its planner finds no plan that fits.
    """
    pooling_constraints = {
        name: ParameterConstraints(pooling_factors=constraint.pooling_factors)
        for name, constraint in constraints.items()
    }
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=setting.workload.batch_size,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=pooling_constraints,
        debug=False,
    )
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    try:
        stock = planner.plan(model, sharders)
    except PlannerError:
        return None
    plan = Plan2D.from_stock(stock, Mesh2D(1, topology.world_size), setting.sync)
    costs = CostModel(setting.calibration, setting.local_world_size)
    return costs.step_cost(plan, setting.workload)
