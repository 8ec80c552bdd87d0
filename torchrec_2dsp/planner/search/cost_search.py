"""`CostSearch`: the search as `Planner2D` runs it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import CommOp, ModuleSharder

from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.memory import table_bytes
from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.errors import ConfigError, PlanError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.sync import SyncConfig
from torchrec_2dsp.planner.infeasible import Shortfall, no_plan_text
from torchrec_2dsp.planner.search.candidates import candidates_of
from torchrec_2dsp.planner.search.choices import Candidate
from torchrec_2dsp.planner.search.copies import search_copies
from torchrec_2dsp.planner.search.meshes import meshes_of
from torchrec_2dsp.planner.search.result import SearchResult

logger = logging.getLogger(__name__)

MAX_GROUP_SIZE = 128
"""The size of the largest sharding groups that are tried, unless a mesh is given."""


@dataclass(frozen=True)
class CostSearch:
    """A search by cost: what it knows, and on which machines."""

    calibration: Calibration
    """The constants of the machines."""

    mesh: Mesh2D | None
    """The only mesh that is tried; `None` for all that the world allows."""

    sync: SyncConfig
    """How replicas are kept equal."""

    batch_size: int
    """Samples per rank and step."""

    constraints: Mapping[str, ParameterConstraints] | None = None
    """The user's constraints for each table."""

    access: AccessStats | None = None
    """Statistics of which rows are used how often."""

    workload: Workload | None = None
    """The work of a step; `None` for what model, constraints and statistics say."""

    transports: Sequence[Transport] = (Transport.FP32,)
    """How rows may travel, where the constraints don't say it."""

    def __post_init__(self) -> None:
        if self.workload is not None and self.access is not None:
            raise ConfigError(
                "both workload and access are given; make the workload with "
                "Workload.of_model(..., access=...), or leave it out"
            )

    def result(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]], available: Topology
    ) -> SearchResult:
        """The best placements on the most promising meshes.

        Args:
            module: the unsharded model.
            sharders: say what is possible.
            available: the world, and the memory that it has left for tables.

        Raises:
            PlanError: nothing fits.
        """
        workload = self.workload_of(module, _sharders_wire_bytes(sharders))
        device = available.compute_device
        candidates = candidates_of(
            module, sharders, self.constraints, workload, device, self.transports
        )
        settings, room = self.settings(workload, available), room_of(available)
        result = search_copies(candidates, settings, room)
        if not result.found:
            largest = max(settings, key=lambda setting: setting.mesh.group_size)
            missing = _shortfall(candidates, largest, int(room))
            raise PlanError(no_plan_text(largest.mesh, missing, ""))
        return result

    def settings(self, workload: Workload, world: Topology) -> list[CostSetting]:
        """Every mesh that is tried, and what else its cost depends on.

        Args:
            workload: what a step does.
            world: all ranks. If they are other machines than the calibrated ones, that is logged.
        """
        per_host = world.local_world_size
        differences = self.calibration.differences(
            local_world_size=per_host, device=world.compute_device
        )
        if differences:
            logger.warning(
                "calibration %s is of other machines than those that are planned for: %s",
                self.calibration.hardware.name,
                "; ".join(differences),
            )
        meshes = [self.mesh] if self.mesh else meshes_of(world.world_size, per_host, MAX_GROUP_SIZE)
        return [
            CostSetting(self.calibration, workload, mesh, self.sync, per_host) for mesh in meshes
        ]

    def workload_of(self, module: nn.Module, wire_bytes: tuple[float, float]) -> Workload:
        """The work of a step.

        Args:
            module: the unsharded model.
            wire_bytes: of a number in the forward and in the backward exchange.
        """
        if self.workload is not None:
            return self.workload
        workload = Workload.of_model(
            module, batch_size=self.batch_size, constraints=self.constraints, access=self.access
        )
        forward, backward = wire_bytes
        return replace(workload, forward_wire_bytes=forward, backward_wire_bytes=backward)


def room_of(topology: Topology) -> float:
    """Bytes that every rank has for tables and buffers."""
    kind = "ddr" if topology.compute_device == "cpu" else "hbm"
    return float(min(getattr(device.storage, kind) for device in topology.devices))


def _sharders_wire_bytes(sharders: Sequence[ModuleSharder[nn.Module]]) -> tuple[float, float]:
    """Bytes of a number that travels, with the sharders' quantised communication."""
    for sharder in sharders:
        registry = cast(Any, sharder).qcomm_codecs_registry or {}
        codecs = registry.get(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name)
        if codecs is not None:
            forward, backward = codecs.forward.quantized_dtype, codecs.backward.quantized_dtype
            return float(forward.itemsize), float(backward.itemsize)
    return 4.0, 4.0


def _shortfall(candidates: Sequence[Candidate], setting: CostSetting, room: int) -> Shortfall:
    """The memory that tables need at the least in the largest groups, against what there is."""
    group = setting.group
    on_one, on_all, buffers = {}, {}, 0
    for candidate in candidates:
        placed = [candidate.somewhere(choice, group) for choice in candidate.choices]
        bytes_by_choice = [table_bytes(table, group.num_ranks) for table in placed]
        on_one[candidate.name] = int(min(by_rank.max() for by_rank in bytes_by_choice))
        on_all[candidate.name] = int(min(by_rank.sum() for by_rank in bytes_by_choice))
        loads = (setting.loads([table]).values for table in placed)
        buffers += int(min((setting.buffer_bytes @ values).sum() for values in loads))
    table = max(on_one, key=lambda name: on_one[name])
    return Shortfall(
        table=table,
        table_bytes=on_one[table],
        rank_bytes=room,
        all_tables_bytes=sum(on_all.values()),
        group_bytes=room * group.num_ranks,
        buffer_bytes=buffers,
    )
