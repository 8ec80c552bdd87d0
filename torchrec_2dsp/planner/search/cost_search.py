"""`CostSearch`: search all tables' meshes, choices and copies by predicted step time."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import CommOp, ModuleSharder

from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.calibration import Calibration, processor_name
from torchrec_2dsp.cost.model import CostSetting, kept_bytes
from torchrec_2dsp.cost.workload import (
    ASSUMED_SKEW,
    DenseWork,
    Workload,
    small_bucket_bytes,
)
from torchrec_2dsp.errors import ConfigError, PlanError
from torchrec_2dsp.mesh import Mesh2D, RankLayout, divisors
from torchrec_2dsp.plan.parameter_sharding import Exchange, Pipeline, kinds_of
from torchrec_2dsp.plan.sync import SyncConfig
from torchrec_2dsp.planner.search.best_placements import search_copies
from torchrec_2dsp.planner.search.candidates import ANYWHERE, ON_DEVICE, candidates_of
from torchrec_2dsp.planner.search.choices import Candidate
from torchrec_2dsp.planner.search.placement import SearchResult
from torchrec_2dsp.planner.search.space import Room, chosen_on_each, is_searched_closely
from torchrec_2dsp.planner.topology import no_plan_text, shortfall_text

logger = logging.getLogger(__name__)

_MAX_GROUP_SIZE = 128
"""The largest sharding groups to try, unless a mesh is given."""


@dataclass(frozen=True)
class CostSearch:
    """A search by cost, with its knowledge and the machines."""

    calibration: Calibration

    mesh: Mesh2D | None
    """The only mesh to try; `None` for all that the world allows."""

    sync: SyncConfig

    batch_size: int
    """Samples per rank and step."""

    constraints: Mapping[str, ParameterConstraints] | None = None
    access: AccessStats | None = None

    workload: Workload | None = None
    """A step's work; `None` for that of model, constraints and statistics."""

    transports: Sequence[Transport] = (Transport.FP32,)
    """The wire formats allowed where the constraints don't name any."""

    exchanges: Sequence[Exchange] = ()
    """The exchanges allowed where the constraints don't name any; empty for all."""

    pipelines: Sequence[Pipeline] = tuple(Pipeline)
    """The train pipelines that may run the plan."""

    full_duplex: Sequence[bool] = (False, True)
    """The all-to-alls to try, if the backend has two: its own, and the full-duplex ones."""

    has_small_buckets: bool = False
    """True if dense gradients are summed in buckets of `small_bucket_bytes`."""

    def __post_init__(self) -> None:
        if self.workload is not None and self.access is not None:
            raise ConfigError(
                "both workload and access are given; make the workload with "
                "Workload.of_model(..., access=...), or leave it out"
            )

    def result(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]], available: Topology
    ) -> SearchResult:
        """Search the best placements in the ``available`` memory; a `PlanError` if nothing fits.

        Tables may be in host memory if GPU memory doesn't suffice.
        """
        workload = self.workload_of(module, _sharders_wire_bytes(sharders))
        device, room = available.compute_device, room_of(available)
        settings = self.settings(workload, available)
        has_host_memory = device == "cuda" and self.calibration.kernels.host_memory is not None
        candidates: Sequence[Candidate] = ()
        for kernels in (ON_DEVICE, ANYWHERE) if has_host_memory else (ON_DEVICE,):
            candidates_in = partial(
                candidates_of,
                *(module, sharders, self.constraints, workload, device),
                exchanges=self.exchanges,
                kernels=kernels,
                sync=self.sync,
            )
            candidates, result = self._search(settings, room, candidates_in)
            if result.placements:
                return result
        largest = max(settings, key=lambda setting: setting.mesh.group_size)
        missing = _shortfall(candidates, largest, room)
        raise PlanError(no_plan_text(largest.mesh, missing, ""))

    def _search(
        self,
        settings: Sequence[CostSetting],
        room: Room,
        candidates_in: Callable[[Sequence[Transport]], Sequence[Candidate]],
    ) -> tuple[Sequence[Candidate], SearchResult]:
        """Search with the best of the allowed transports."""

        @cache
        def rated_s(transport: Transport) -> float:
            """Rate the best choices with evenly dealt shards."""
            chosen = chosen_on_each(candidates_in((transport,)), settings, room)
            return chosen[0][1][0].rated_s if chosen else np.inf

        # One for all tables whose constraints name none: each further one needs its own messages.
        several = len(self.transports) > 1
        transport = min(self.transports, key=rated_s) if several else self.transports[0]
        candidates = candidates_in((transport,))
        self._check_exchanges(candidates)
        result = search_copies(candidates, settings, room)
        is_close = result.placements and candidates and is_searched_closely(candidates)
        if is_close and Transport.INT4 not in self.transports:
            there = [each for each in settings if each.key == result.placements[0].setting.key]
            chosen = [
                chosen_on_each(each, there, room)
                for each in (candidates, candidates_in((Transport.INT4,)))
            ]
            if all(chosen):
                exact, rounded = (each[0][1][0].rated_s for each in chosen)
                result = replace(result, gain_by_int4=exact / rounded if rounded else 1.0)
        return candidates, result

    def _check_exchanges(self, candidates: Sequence[Candidate]) -> None:
        """Raise `ConfigError` for an exchange that no table can have."""
        possible = {
            choice.exchange
            for candidate in candidates
            for choice in candidate.choices
            if choice.message_type
        }
        for exchange in self.exchanges if candidates else ():
            if exchange not in possible:
                raise ConfigError(
                    f"no table can have exchange={exchange.value!r}, which is for "
                    f"{', '.join(kinds_of(exchange))} tables; allow such sharding_types in the "
                    "constraints, or leave the exchange out"
                )

    def settings(self, workload: Workload, world: Topology) -> list[CostSetting]:
        """Return a setting for every mesh, pipeline and all-to-all, simplest first.

        Warns if machines differ from the calibrated ones.
        """
        per_host = world.local_world_size
        device = world.compute_device
        differences = self.calibration.differences(
            local_world_size=per_host,
            device=device,
            # Without a process group, the machines to plan for are others than this one.
            processor=processor_name(torch.device(device)) if dist.is_initialized() else "",
        )
        if differences:
            logger.warning(
                "calibration %s is of other machines than those that are planned for: %s",
                self.calibration.hardware.name,
                "; ".join(differences),
            )
        meshes = [self.mesh] if self.mesh else meshes_of(world.world_size, per_host)
        is_known = self.calibration.collectives.full_duplex_all_to_all is not None
        return [
            CostSetting(self.calibration, workload, mesh, self.sync, per_host, *schedule)
            for mesh in meshes
            for schedule in product(self.pipelines, self.full_duplex if is_known else (False,))
        ]

    def workload_of(self, module: nn.Module, wire_bytes: tuple[float, float]) -> Workload:
        """Return a step's work; ``wire_bytes`` are per number in forward and backward exchange."""
        if self.workload is not None:
            return self.workload
        workload = Workload.of_model(
            module,
            batch_size=self.batch_size,
            constraints=self.constraints,
            access=self.access,
            skew=ASSUMED_SKEW,
        )
        dense = DenseWork.of_model(module, workload, self.calibration.kernels)
        if self.has_small_buckets:
            dense = replace(dense, bucket_bytes=small_bucket_bytes(dense.gradient_bytes))
        forward, backward = wire_bytes
        return replace(
            workload, dense=dense, forward_wire_bytes=forward, backward_wire_bytes=backward
        )


def room_of(topology: Topology) -> Room:
    """Return every rank's bytes for tables and buffers."""
    hbm, ddr = (
        float(min(getattr(device.storage, kind) for device in topology.devices))
        for kind in ("hbm", "ddr")
    )
    return Room(ddr) if topology.compute_device == "cpu" else Room(hbm, ddr)


def _sharders_wire_bytes(sharders: Sequence[ModuleSharder[nn.Module]]) -> tuple[float, float]:
    """Return the bytes per number on the wire, including the sharders' quantised communication."""
    for sharder in sharders:
        registry = cast(Any, sharder).qcomm_codecs_registry or {}
        codecs = registry.get(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name)
        if codecs is not None:
            forward, backward = codecs.forward.quantized_dtype, codecs.backward.quantized_dtype
            return float(forward.itemsize), float(backward.itemsize)
    return 4.0, 4.0


def _shortfall(candidates: Sequence[Candidate], setting: CostSetting, room: Room) -> str:
    """Compare the least memory that tables need in the largest groups with the available memory.

    If tables may be in either memory, that of GPUs and of their hosts count together.
    """
    spills = any(choice.in_host_memory for table in candidates for choice in table.choices)
    rank_bytes = int(sum(room) if spills else room.device)
    group = setting.group
    on_one, on_all, buffers = {}, {}, 0
    for candidate in candidates:
        placed = [candidate.somewhere(choice, group) for choice in candidate.choices]
        bytes_by_choice = [kept_bytes(table, group.num_ranks).sum(axis=0) for table in placed]
        on_one[candidate.name] = int(min(by_rank.max() for by_rank in bytes_by_choice))
        on_all[candidate.name] = int(min(by_rank.sum() for by_rank in bytes_by_choice))
        loads = (setting.loads([table]).values for table in placed)
        buffers += int(min((setting.buffer_bytes @ values).sum() for values in loads))
    table = max(on_one, key=lambda name: on_one[name])
    return shortfall_text(
        table=table,
        table_bytes=on_one[table],
        rank_bytes=rank_bytes,
        all_tables_bytes=sum(on_all.values()),
        group_bytes=rank_bytes * group.num_ranks,
        buffer_bytes=buffers,
    )


def meshes_of(world_size: int, local_world_size: int) -> Iterator[Mesh2D]:
    """Yield all meshes of a world to try, smallest groups first."""
    for group_size in divisors(world_size):
        if group_size > _MAX_GROUP_SIZE:
            break
        mesh = Mesh2D(world_size // group_size, group_size)
        yield mesh
        # In one host, layouts only differ in the order of ranks.
        if 1 < group_size < world_size and world_size > local_world_size:
            yield replace(mesh, layout=RankLayout.CONTIGUOUS)
