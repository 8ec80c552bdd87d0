"""Find the plan for the ranks that run: measure them, search, and say what was found.

Loaded only where no plan is given: a model with a plan needs none of the planner's modules.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, StorageReservation
from torchrec.distributed.types import ModuleSharder

from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.measuring.cache import calibration_of_world
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import Exchange
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.plan.sync import EXACT_SYNC, SyncConfig
from torchrec_2dsp.planner.explanation import Explanation
from torchrec_2dsp.planner.planner2d import Planner2D


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a user knows or demands of a plan; everything else is measured or searched."""

    batch_size: int | None = None
    precision: "Transport | str | Sequence[Transport | str]" = "exact"
    exchange: "Exchange | str | Sequence[Exchange | str] | None" = None
    calibration: Calibration | str | Path | None = None
    mesh: Mesh2D | None = None
    sync: SyncConfig = EXACT_SYNC
    constraints: Mapping[str, ParameterConstraints] | None = None
    access: AccessStats | None = None
    storage_reservation: StorageReservation | None = None


def find_plan(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]], device: torch.device, wishes: Wishes
) -> tuple[Plan2D, Explanation | None]:
    """Search the plan on rank 0, and print there what was found.

    Returns:
        The plan on all ranks, and the reasons on rank 0.

    Collectives:
        Those of `calibration_of_world` without a calibration, and one broadcast of the plan.
    """
    world = world_group()
    local_world_size = get_local_size(world.size())
    calibration = wishes.calibration
    if calibration is None:
        calibration = calibration_of_world(world, local_world_size=local_world_size, device=device)
    elif not isinstance(calibration, Calibration):
        calibration = Calibration.load(calibration)
    memory = {"cpu": "ddr_cap_bytes"}.get(device.type, "hbm_cap_bytes")
    num_bytes = calibration.hardware.memory_bytes
    planner = Planner2D(
        calibration.topology(
            world.size(), local_world_size, **({memory: num_bytes} if num_bytes else {})
        ),
        wishes.batch_size,
        storage_reservation=wishes.storage_reservation,
        constraints=wishes.constraints,
        mesh=wishes.mesh,
        sync=wishes.sync,
        calibration=calibration,
        access=wishes.access,
        precision=wishes.precision,
        exchange=wishes.exchange,
    )
    plan = planner.collective_plan(module, list(sharders), world)
    if dist.get_rank(world):
        return plan, None
    explanation = planner.explain()
    print(*explanation.summary(), sep="\n", file=sys.stderr, flush=True)
    return plan, explanation
