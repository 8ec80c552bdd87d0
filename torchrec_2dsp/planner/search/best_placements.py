"""Search the best placements: on each mesh, and with the best number of copies for each table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.cost.step_cost import StepCost, rated
from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import Pipeline
from torchrec_2dsp.planner.search.choices import Candidate
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
    Room,
    Selected,
    Space,
    chosen_on_each,
    effort_for,
    is_searched_closely,
    selections,
    smallest,
)

_SHARES = (0.97, 0.9, 0.75)
"""Shares of the memory for which tables are chosen again if their shards can't be dealt."""
_PATIENCE = 700
"""The number of tries without gain after which no other selection is placed."""
_MESHES_FOR_COPIES = 3
"""The number of best meshes that are searched for tables with one copy."""
_COPIES_PATIENCE = 2
"""The number of sets without gain after which larger ones aren't tried."""


def search_copies(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting], room: Room
) -> SearchResult:
    """Search the best placements, with the best or demanded number of copies for each table.

    A copy in each group costs memory and sync time that grow with its table, so the largest tables
    get one copy in the world instead: one table, two, four and so on. With hundreds of tables, only
    those with a demanded single copy do.
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
            f"{several[0].mesh}: leave the mesh out, or the demand for some table; tables whose "
            "copies the sync can't keep equal, by optimizer or format, count as such"
        )
    placed, tried = list(result.placements), list(result.tried)
    best_s = min((placement.rated_s for placement in placed), default=np.inf)
    draft = _most_promising(candidates, _promising(several, tried), room, best_s)
    if draft is not None:
        more = _placed_beside(*draft, room)
        placed += more.placements
        tried += more.tried
    return SearchResult(sorted(placed, key=lambda placement: placement.rated_s), tried, room)


def search(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting], room: Room
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
            space.setting,
            choice.cost.total_s,
            space.bytes_of(choice.selection).device,
            space.in_words(choice.selection),
        )
        for space, selected in chosen
        for choice in (*selected, smallest(space))
    ]
    return SearchResult(sorted(placed, key=lambda result: result.rated_s), tried, room)


def _placed(
    space: Space, selected: Sequence[Selected], room: Room, effort: Effort
) -> MeshPlacement | None:
    placed: list[MeshPlacement] = []
    for placement, descent in placements(space, selected, room, effort):
        hotter = with_hot_rows(space, placement, descent, room)
        cost, bytes_by_rank = descent.step_cost(hotter), descent.bytes_by_rank(hotter)
        placed.append(MeshPlacement(space.setting, space.candidates, hotter, cost, bytes_by_rank))
    return min(placed, key=lambda result: result.rated_s, default=None)


def placements(
    space: Space, selected: Sequence[Selected], room: Room, effort: Effort
) -> Iterator[tuple[Placement, Descent]]:
    """Yield selections with ranks for their shards, after improving single tables.

    Ends when further effort is in vain.
    """
    budget = _Budget(effort.tries)
    yield from _attempts(space, selected[: effort.selections], room, budget)
    if budget.best < np.inf:
        return
    for share in _SHARES:
        selected = selections(space, room._replace(device=share * room.device))
        yield from _attempts(space, selected[: effort.selections], room, budget)
        if budget.best < np.inf:
            break
    yield from _attempts(space, [smallest(space)], room, budget)


@dataclass
class _Budget:
    """The remaining tries, and the best step so far."""

    tries: int
    best: float = np.inf
    at_best: int = 0
    """The tries that remained at the best step."""


def _attempts(
    space: Space, selected: Sequence[Selected], room: Room, budget: _Budget
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
        rated_s = descent.rated_s(placement)
        if np.isinf(rated_s):
            continue
        if rated_s < budget.best:
            budget.best, budget.at_best = rated_s, budget.tries
        yield placement, descent


def _as_demanded(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting]
) -> list[CostSetting]:
    """Return the meshes with the number of groups that users demand."""
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
    """Return the best meshes, and those on which nothing fits, with the best mesh's schedule."""
    seconds: dict[tuple[Mesh2D, Pipeline, bool], float] = {}
    for attempt in tried:
        key = attempt.setting.key
        seconds[key] = min(attempt.seconds, seconds.get(key, np.inf))
    fitting = sorted(
        (setting for setting in settings if setting.key in seconds),
        key=lambda setting: seconds[setting.key],
    )
    best = fitting[0] if fitting else settings[-1]
    alike = [setting for setting in settings if setting.key[1:] == best.key[1:]]
    dropped = [setting for setting in fitting if setting in alike][_MESHES_FOR_COPIES:]
    return [setting for setting in alike if setting not in dropped]


def _most_promising(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting], room: Room, to_beat: float
) -> tuple[list[Candidate], list[Candidate], list[CostSetting]] | None:
    """Return the tables that should have one copy, the others, and the best meshes for these.

    Returns `None` if no set is rated better than ``to_beat``; stops when larger sets get worse.
    """
    best: tuple[list[Candidate], list[Candidate], list[CostSetting]] | None = None
    is_narrowed = False
    in_vain = 0
    for once, others in _sets_of_copies(candidates):
        ratings = _rated_beside(once, others, settings, room)
        fitting = [settings[number] for _, number in ratings[:_MESHES_FOR_COPIES]]
        in_vain += 1
        if ratings and ratings[0][0] < to_beat:
            best, to_beat, in_vain = (once, others, fitting), ratings[0][0], 0
        if ratings and not is_narrowed:
            # From now on only the best meshes, and those without room so far.
            numbers = {number for _, number in ratings}
            settings = fitting + [
                setting for number, setting in enumerate(settings) if number not in numbers
            ]
            is_narrowed = True
        if in_vain == _COPIES_PATIENCE and np.isfinite(to_beat):
            break
    return best


def _rated_beside(
    once: Sequence[Candidate],
    others: Sequence[Candidate],
    settings: Sequence[CostSetting],
    room: Room,
) -> list[tuple[float, int]]:
    """Rate steps with evenly dealt shards; return seconds and numbers of the meshes that fit."""
    chosen = chosen_on_each(once, [settings[0].of_world()], room)
    if not chosen:
        return []
    space, (first, *_) = chosen[0]
    in_world = space.types_of(first.selection)
    room = room.without(space.bytes_of(first.selection))
    numbers = {setting.mesh: number for number, setting in enumerate(settings)}
    ratings: list[tuple[float, int]] = []
    for of_others, (best, *_) in chosen_on_each(others, _beside(first.cost, settings), room):
        types = of_others.types_of(best.selection)
        seconds = rated(best.cost, types, in_world)
        ratings.append((seconds, numbers[of_others.setting.mesh]))
    return sorted(ratings)


def _placed_beside(
    once: Sequence[Candidate],
    others: Sequence[Candidate],
    settings: Sequence[CostSetting],
    room: Room,
) -> SearchResult:
    """Place tables with one copy in the world, together with the others."""
    in_world = search(once, [settings[0].of_world()], room)
    if not in_world.placements:
        return in_world
    placed_once = in_world.placements[0]
    once_bytes = float(placed_once.bytes_by_rank.max())
    room_beside = room.without(Room(once_bytes, placed_once.memory.host_memory_bytes))
    result = search(others, _beside(placed_once.cost, settings), room_beside)
    return SearchResult(
        [
            replace(placed, once=placed_once, bytes_by_rank=placed.bytes_by_rank + once_bytes)
            for placed in result.placements
        ],
        [
            replace(attempt, bytes_of_rank=attempt.bytes_of_rank + once_bytes)
            for attempt in result.tried
        ],
        room,
    )


def _beside(cost: StepCost, settings: Sequence[CostSetting]) -> list[CostSetting]:
    beside = replace(cost, hidden_s=0.0)
    return [replace(setting, beside=beside) for setting in settings]


def _sets_of_copies(
    candidates: Sequence[Candidate],
) -> Iterator[tuple[list[Candidate], list[Candidate]]]:
    """Yield tables with one copy in the world, and the others, in ever larger sets."""
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
        # If all tables have one copy in the world, that is a plan for one group.
        if in_world and others:
            yield in_world, others


def _once(candidate: Candidate) -> Candidate | None:
    """Return a table with choices for one copy; `None` if it can't and needn't have one."""
    choices = [
        choice for choice in candidate.choices if choice.kind is not ShardingType.DATA_PARALLEL
    ]
    if not choices and candidate.num_groups == 1:
        raise PlanError(
            f"table {candidate.name!r} has num_groups=1, and nothing but data_parallel is allowed "
            "for it, which is a copy on every rank: allow other sharding_types"
        )
    return replace(candidate, choices=choices) if choices else None
