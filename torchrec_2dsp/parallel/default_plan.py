"""The plan if the user gives none: TorchRec's search for one sharding group, run on rank 0."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ModuleSharder

from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import base_type
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.planner.planner2d import Planner2D
from torchrec_2dsp.planner.topology import world_topology

logger = logging.getLogger(__name__)


def plan_by_default(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]], device: torch.device
) -> Plan2D:
    """What `DistributedModelParallel` would plan by itself, as a plan for one sharding group.

    Nothing is known of the network or of how often rows are used, so no table is replicated.

    Args:
        module: the model.
        sharders: this package's sharders.
        device: the device of the tables, of which only the type counts.

    Collectives:
        One broadcast of a pickled object from rank 0 of the world.
    """
    mesh = Mesh2D(1, dist.get_world_size())
    planner = Planner2D(topology=world_topology(mesh, device.type), mesh=mesh)
    plan = planner.collective_plan(module, list(sharders), world_group())
    if dist.get_rank() == 0:
        logger.info(
            "no plan was given, so TorchRec's search made one for %s: %s; Planner2D with a "
            "calibration chooses mesh, exchanges and hot rows as well",
            mesh,
            _in_words(plan),
        )
    return plan


def _in_words(plan: Plan2D) -> str:
    kinds = Counter(
        base_type(table.sharding_type)
        for _, module in plan.modules()
        for _, table in module.tables()
    )
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no tables"
