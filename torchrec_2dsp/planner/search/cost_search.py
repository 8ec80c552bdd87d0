"""`CostSearch`: search meshes, choices and copies of all tables by predicted step time."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import CommOp, ModuleSharder, ShardingType

from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.model import CostSetting, table_bytes
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.errors import ConfigError, PlanError
from torchrec_2dsp.mesh import Mesh2D, RankLayout
from torchrec_2dsp.plan.sync import SyncConfig
from torchrec_2dsp.planner.search.choices import Candidate, candidates_of, rated_beside
from torchrec_2dsp.planner.search.place import place
from torchrec_2dsp.planner.search.placement import (
    Descent,
    MeshPlacement,
    Placement,
    SearchResult,
    Tried,
    with_hot_rows,
)
from torchrec_2dsp.planner.search.space import (
    Effort,
    Selected,
    Space,
    chosen_on_each,
    effort_for,
    is_searched_closely,
    selections,
    smallest,
)
from torchrec_2dsp.planner.topology import Shortfall, no_plan_text

logger = logging.getLogger(__name__)

_MAX_GROUP_SIZE = 128
"""The largest sharding groups that are tried, unless a mesh is given."""
_SHARES = (0.97, 0.9, 0.75)
"""Shares of the memory for which tables are chosen again where their shards can't be dealt."""
_PATIENCE = 700
"""Tries without gain after which no other selection is placed."""
_MESHES_FOR_COPIES = 3
"""The number of best meshes that are searched for tables with one copy."""
_COPIES_PATIENCE = 2
"""Sets without gain after which larger ones aren't tried."""


@dataclass(frozen=True)
class CostSearch:
    """A search by cost: its knowledge, and the machines."""

    calibration: Calibration

    mesh: Mesh2D | None
    """The only mesh that is tried; `None` for all that the world allows."""

    sync: SyncConfig

    batch_size: int
    """Samples per rank and step."""

    constraints: Mapping[str, ParameterConstraints] | None = None
    access: AccessStats | None = None

    workload: Workload | None = None
    """A step's work; `None` for what model, constraints and statistics say."""

    transports: Sequence[Transport] = (Transport.FP32,)
    """Wire formats that are allowed where the constraints don't name any."""

    def __post_init__(self) -> None:
        if self.workload is not None and self.access is not None:
            raise ConfigError(
                "both workload and access are given; make the workload with "
                "Workload.of_model(..., access=...), or leave it out"
            )

    def result(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]], available: Topology
    ) -> SearchResult:
        """Search the best placements on the most promising meshes.

        Args:
            module: the unsharded model.
            sharders: list the possible types and kernels.
            available: the world, with the memory that is left for tables.

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
        if not result.placements:
            largest = max(settings, key=lambda setting: setting.mesh.group_size)
            missing = _shortfall(candidates, largest, int(room))
            raise PlanError(no_plan_text(largest.mesh, missing, ""))
        return result

    def settings(self, workload: Workload, world: Topology) -> list[CostSetting]:
        """Return a setting for every mesh; warn where machines differ from the calibrated ones."""
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
        meshes = (
            [self.mesh] if self.mesh else meshes_of(world.world_size, per_host, _MAX_GROUP_SIZE)
        )
        return [
            CostSetting(self.calibration, workload, mesh, self.sync, per_host) for mesh in meshes
        ]

    def workload_of(self, module: nn.Module, wire_bytes: tuple[float, float]) -> Workload:
        """Return a step's work; ``wire_bytes`` per number in the forward and backward exchange."""
        if self.workload is not None:
            return self.workload
        workload = Workload.of_model(
            module, batch_size=self.batch_size, constraints=self.constraints, access=self.access
        )
        forward, backward = wire_bytes
        return replace(workload, forward_wire_bytes=forward, backward_wire_bytes=backward)


def room_of(topology: Topology) -> float:
    """Return the bytes that every rank has for tables and buffers."""
    kind = "ddr" if topology.compute_device == "cpu" else "hbm"
    return float(min(getattr(device.storage, kind) for device in topology.devices))


def _sharders_wire_bytes(sharders: Sequence[ModuleSharder[nn.Module]]) -> tuple[float, float]:
    """Return the bytes per number on the wire, with the sharders' quantised communication."""
    for sharder in sharders:
        registry = cast(Any, sharder).qcomm_codecs_registry or {}
        codecs = registry.get(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name)
        if codecs is not None:
            forward, backward = codecs.forward.quantized_dtype, codecs.backward.quantized_dtype
            return float(forward.itemsize), float(backward.itemsize)
    return 4.0, 4.0


def _shortfall(candidates: Sequence[Candidate], setting: CostSetting, room: int) -> Shortfall:
    """Compare the least memory that tables need in the largest groups with the room there is."""
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


def meshes_of(world_size: int, local_world_size: int, max_group_size: int) -> Iterator[Mesh2D]:
    """Yield all meshes of a world with groups up to a size, the smallest groups first.

    Example:
        >>> from torchrec_2dsp.planner.search.cost_search import meshes_of
        >>> [(mesh.num_groups, mesh.layout.value) for mesh in meshes_of(4, 2, 4)]
        [(4, 'strided'), (2, 'strided'), (2, 'contiguous'), (1, 'strided')]
    """
    for group_size in range(1, min(world_size, max_group_size) + 1):
        if world_size % group_size:
            continue
        mesh = Mesh2D(world_size // group_size, group_size)
        yield mesh
        # In one host, all groups are alike but for the order of ranks.
        if 1 < group_size < world_size and world_size > local_world_size:
            yield replace(mesh, layout=RankLayout.CONTIGUOUS)


def search_copies(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting], room: float
) -> SearchResult:
    """Search the best placements, with as many copies of each table as are best or demanded.

    A copy in each group costs memory and sync time that grow with its table, so the largest tables
    get one copy in the world instead: one table, two, four and so on. With hundreds of tables, only
    those for which it is demanded.
    """
    settings = _as_demanded(candidates, settings)
    one_group = [setting for setting in settings if setting.mesh.num_groups == 1]
    demanded = [candidate for candidate in candidates if candidate.num_groups == 1]
    # In one group, all tables have one copy.
    result = search(candidates, one_group if demanded else settings, room)
    several = [setting for setting in settings if setting.mesh.num_groups > 1]
    if not several:
        return result
    if len(demanded) == len(candidates) > 0 and not one_group:
        raise PlanError(
            f"all tables have num_groups=1, which is a plan for one group and not for "
            f"{several[0].mesh}: leave the mesh out, or the demand for some table"
        )
    placed, tried = list(result.placements), list(result.tried)
    best_s = min((placement.rated_s for placement in placed), default=np.inf)
    draft = _most_promising(_drafts(candidates, _promising(several, tried), room), best_s)
    if draft is not None:
        more = draft.placed()
        placed += more.placements
        tried += more.tried
    return SearchResult(sorted(placed, key=lambda placement: placement.rated_s), tried, room)


def search(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting], room: float
) -> SearchResult:
    """Choose on every mesh as if shards were dealt evenly; place them on the best meshes."""
    if not candidates:
        empty = [
            MeshPlacement(
                setting,
                [],
                Placement((), ()),
                setting.step_cost(setting.loads([])),
                np.zeros(setting.group.num_ranks),
            )
            for setting in settings[:1]
        ]
        return SearchResult(empty, [], room)
    effort = effort_for(candidates)
    chosen = chosen_on_each(candidates, settings, room)
    placed: list[MeshPlacement] = []
    for space, selected in chosen:
        best = _placed(space, selected, room, effort)
        placed += [] if best is None else [best]
        if len(placed) == effort.meshes:
            break
    tried = [
        Tried(
            space.setting.mesh,
            choice.cost.total_s,
            space.bytes_of(choice.selection),
            space.in_words(choice.selection),
        )
        for space, selected in chosen
        for choice in (*selected, smallest(space))
    ]
    return SearchResult(sorted(placed, key=lambda result: result.rated_s), tried, room)


def _placed(
    space: Space, selected: Sequence[Selected], room: float, effort: Effort
) -> MeshPlacement | None:
    placed: list[MeshPlacement] = []
    for placement, descent in placements(space, selected, room, effort):
        hotter = with_hot_rows(space, placement, descent, room)
        cost, bytes_by_rank = descent.step_cost(hotter), descent.bytes_by_rank(hotter)
        placed.append(MeshPlacement(space.setting, space.candidates, hotter, cost, bytes_by_rank))
    return min(placed, key=lambda result: result.rated_s, default=None)


def placements(
    space: Space, selected: Sequence[Selected], room: float, effort: Effort
) -> Iterator[tuple[Placement, Descent]]:
    """Yield selections with ranks for their shards and single tables improved.

    Ends when more effort is in vain.
    """
    budget = _Budget(effort.tries)
    yield from _attempts(space, selected[: effort.selections], room, budget)
    if budget.best < np.inf:
        return
    for share in _SHARES:
        selected = selections(space, share * room)
        yield from _attempts(space, selected[: effort.selections], room, budget)
        if budget.best < np.inf:
            break
    yield from _attempts(space, [smallest(space)], room, budget)


@dataclass
class _Budget:
    """The tries that are left, and the best step so far."""

    tries: int
    best: float = np.inf
    at_best: int = 0
    """The tries that were left at the best step."""


def _attempts(
    space: Space, selected: Sequence[Selected], room: float, budget: _Budget
) -> Iterator[tuple[Placement, Descent]]:
    for candidate in selected:
        if budget.best < np.inf and budget.at_best - budget.tries > _PATIENCE:
            return
        prices = space.prices(space.sum_of(candidate.selection))
        ranks = place(space, candidate.selection, prices, room)
        if ranks is None:
            continue
        descent = Descent(space, prices, room)
        start = Placement(
            tuple(space.chosen(candidate.selection)), tuple(tuple(there) for there in ranks)
        )
        placement, budget.tries = descent.improved(start, budget.tries)
        if descent.bytes_by_rank(placement).max() > room:
            continue
        rated_s = descent.rated_s(placement)
        if rated_s < budget.best:
            budget.best, budget.at_best = rated_s, budget.tries
        yield placement, descent


def _as_demanded(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting]
) -> list[CostSetting]:
    """Return the meshes with as many groups as users demand."""
    numbers = {
        candidate.num_groups: candidate.name
        for candidate in candidates
        if isinstance(candidate.num_groups, int) and candidate.num_groups > 1
    }
    fitting = [
        setting
        for setting in settings
        if all(setting.mesh.num_groups == number for number in numbers)
    ]
    if not fitting:
        demands = ", ".join(f"num_groups={number} for {name!r}" for number, name in numbers.items())
        choices = ", ".join(sorted({str(setting.mesh.num_groups) for setting in settings}, key=int))
        raise PlanError(
            f"no mesh has what the constraints ask for ({demands}): all tables that aren't in the "
            f"world once are in as many groups, and there may be {choices} here"
        )
    return fitting


def _promising(settings: Sequence[CostSetting], tried: Sequence[Tried]) -> list[CostSetting]:
    """Return the best meshes, and those on which nothing fits yet."""
    seconds: dict[Mesh2D, float] = {}
    for attempt in tried:
        seconds[attempt.mesh] = min(attempt.seconds, seconds.get(attempt.mesh, np.inf))
    fitting = sorted(
        (setting for setting in settings if setting.mesh in seconds),
        key=lambda setting: seconds[setting.mesh],
    )
    dropped = {setting.mesh for setting in fitting[_MESHES_FOR_COPIES:]}
    return [setting for setting in settings if setting.mesh not in dropped]


def _most_promising(drafts: "Iterator[_Draft]", to_beat: float) -> "_Draft | None":
    """Return the best draft that may be better; stop when larger sets of tables get worse."""
    best: _Draft | None = None
    settings: Sequence[CostSetting] = ()
    in_vain = 0
    for draft in drafts:
        draft = replace(draft, settings=settings or draft.settings)
        if not settings and draft.rated_s < np.inf:
            settings = draft.promising_settings
        in_vain += 1
        if draft.rated_s < to_beat:
            best, to_beat, in_vain = draft, draft.rated_s, 0
        if in_vain == _COPIES_PATIENCE and np.isfinite(to_beat):
            break
    return best


@dataclass(frozen=True)
class _Draft:
    """Tables with one copy in the world, and others on some meshes."""

    once: Sequence[Candidate]
    others: Sequence[Candidate]
    settings: Sequence[CostSetting]
    room: float

    @property
    def rated_s(self) -> float:
        """The best step's rating with evenly dealt shards; infinite if they don't fit."""
        return self._rated[0][0] if self._rated else np.inf

    @property
    def _best_settings(self) -> list[CostSetting]:
        return [self.settings[number] for _, number in self._rated[:_MESHES_FOR_COPIES]]

    @property
    def promising_settings(self) -> list[CostSetting]:
        """The best meshes, and those that have no room as yet."""
        fitting = {number for _, number in self._rated}
        others = [setting for number, setting in enumerate(self.settings) if number not in fitting]
        return [*self._best_settings, *others]

    @cached_property
    def _rated(self) -> list[tuple[float, int]]:
        """Seconds and numbers of the meshes that fit, the best first."""
        chosen = chosen_on_each(self.once, [self.settings[0].of_world()], self.room)
        if not chosen:
            return []
        space, (first, *_) = chosen[0]
        in_world = space.types_of(first.selection)
        room = self.room - space.bytes_of(first.selection)
        numbers = {setting.mesh: number for number, setting in enumerate(self.settings)}
        ratings: list[tuple[float, int]] = []
        beside = _beside(first.cost, self.settings)
        for others, (best, *_) in chosen_on_each(self.others, beside, room):
            types = others.types_of(best.selection)
            seconds = rated_beside(best.cost, types, in_world)
            ratings.append((seconds, numbers[others.setting.mesh]))
        return sorted(ratings)

    def placed(self) -> SearchResult:
        """Search the best placements for all tables."""
        in_world = search(self.once, [self.settings[0].of_world()], self.room)
        if not in_world.placements:
            return in_world
        once = in_world.placements[0]
        once_bytes = float(once.bytes_by_rank.max())
        beside = _beside(once.cost, self._best_settings or self.settings)
        result = search(self.others, beside, self.room - once_bytes)
        return SearchResult(
            [
                replace(placed, once=once, bytes_by_rank=placed.bytes_by_rank + once_bytes)
                for placed in result.placements
            ],
            [
                replace(attempt, bytes_of_rank=attempt.bytes_of_rank + once_bytes)
                for attempt in result.tried
            ],
            self.room,
        )


def _beside(cost: StepCost, settings: Sequence[CostSetting]) -> list[CostSetting]:
    beside = replace(cost, hidden_s=0.0)
    return [replace(setting, beside=beside) for setting in settings]


def _drafts(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting], room: float
) -> Iterator[_Draft]:
    demanded = [candidate for candidate in candidates if candidate.num_groups == 1]
    free = [candidate for candidate in candidates if candidate.num_groups is None]
    by_size = sorted(free, key=lambda candidate: -candidate.work.num_rows * candidate.work.dim)
    most = len(free) if is_searched_closely(candidates) else 0
    for size in (0, *(2**power for power in range(most.bit_length()))):
        in_world = [
            once
            for candidate in (*demanded, *by_size[:size])
            if (once := _once(candidate)) is not None
        ]
        names = {candidate.name for candidate in in_world}
        others = [candidate for candidate in candidates if candidate.name not in names]
        # If all tables are in the world once, that is a plan for one group.
        if in_world and others:
            yield _Draft(in_world, others, settings, room)


def _once(candidate: Candidate) -> Candidate | None:
    """Return a table as it can have one copy, `None` if it can't and needn't."""
    choices = [
        choice for choice in candidate.choices if choice.kind is not ShardingType.DATA_PARALLEL
    ]
    if not choices and candidate.num_groups == 1:
        raise PlanError(
            f"table {candidate.name!r} has num_groups=1, and nothing but data_parallel is allowed "
            "for it, which is a copy on every rank: allow other sharding_types"
        )
    return replace(candidate, choices=choices) if choices else None
