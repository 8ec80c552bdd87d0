"""Find the plan for the ranks that run: measure them, search, and say what was found.

Loaded only where no plan is given: a model with a plan needs none of the planner's modules.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ModuleSharder

from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.measuring.cache import calibration_of_world
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.planner.explanation import Explanation
from torchrec_2dsp.planner.planner2d import Planner2D


def find_plan(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    device: torch.device,
    *,
    calibration: Calibration | str | Path | None = None,
    **arguments: Any,
) -> tuple[Plan2D, Explanation | None]:
    """Search the plan on rank 0, and print there what was found.

    Args:
        module: the unsharded model.
        sharders: list the possible types and kernels.
        device: the tables' device.
        calibration: of these machines, a file or its name; by default they are measured.
        arguments: those of `Planner2D`, except the topology.

    Returns:
        The plan on all ranks, and the reasons on rank 0.

    Raises:
        TwoDError: the same on all ranks.

    Collectives:
        Two agreements of all ranks, those of `calibration_of_world` without a calibration, and one
        broadcast of the plan.
    """
    world = world_group()
    local_world_size = get_local_size(world.size())
    with agreeing(world) as facts:
        facts["whether there is a calibration"] = str(calibration is not None)
        if isinstance(calibration, str | Path):
            calibration = Calibration.load(calibration)
    if calibration is None:
        calibration = calibration_of_world(world, local_world_size=local_world_size, device=device)
    with agreeing(world):
        topology = calibration.topology(world.size(), local_world_size)
        planner = Planner2D(topology, calibration=calibration, **arguments)
    plan = planner.collective_plan(module, list(sharders), world)
    if dist.get_rank(world):
        return plan, None
    explanation = planner.explain()
    print(*explanation.summary(), sep="\n", file=sys.stderr, flush=True)
    return plan, explanation
