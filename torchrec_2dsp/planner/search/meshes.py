"""Search the best placement of a model's tables, on one mesh or on all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.mesh import Mesh2D, RankLayout
from torchrec_2dsp.planner.search.choices import Candidate
from torchrec_2dsp.planner.search.descent import Descent, Placement
from torchrec_2dsp.planner.search.hot_rows import with_hot_rows
from torchrec_2dsp.planner.search.place import place
from torchrec_2dsp.planner.search.result import Found, SearchResult, Tried
from torchrec_2dsp.planner.search.select import Selected, selections, smallest
from torchrec_2dsp.planner.search.space import Space


class Effort(NamedTuple):
    """How much a search tries on each mesh, and on how many."""

    meshes: int
    """How many meshes are placed."""
    selections: int
    """How many selections are placed on each mesh."""
    tries: int
    """Changes of single tables, on each mesh."""


_FEW_TABLES = Effort(meshes=3, selections=12, tries=2_000)
_MANY_TABLES = Effort(meshes=2, selections=1, tries=500)
"""Single tables change little there."""
_MAX_WEIGHED = 300
"""More tables than these have a sample that decides which meshes are looked at."""
_SAMPLE = 100
"""About how many tables the sample has."""
_SHARES = (0.97, 0.9, 0.75)
"""Shares of the memory for which tables are chosen again where their shards can't be dealt."""
_PATIENCE = 700
"""After so many that led to nothing better, no other selection is placed."""


def meshes_of(world_size: int, local_world_size: int, max_group_size: int) -> Iterator[Mesh2D]:
    """All meshes of a world whose groups are no larger, the smallest groups first.

    Example:
        >>> from torchrec_2dsp.planner.search.meshes import meshes_of
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


def search(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting], room: float
) -> SearchResult:
    """The best placements on the meshes that come out best.

    On every mesh, tables are chosen for as if their shards were dealt evenly. On those that come
    out best, shards get ranks, and single tables are changed while that helps.

    Args:
        candidates: all tables.
        settings: the meshes.
        room: bytes that a rank has for tables and buffers.
    """
    if not candidates:
        return SearchResult([_nothing(setting) for setting in settings[:1]], [], room)
    effort = effort_for(candidates)
    chosen = chosen_on_each(candidates, settings, room)
    placed: list[Found] = []
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


def chosen_on_each(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting], room: float
) -> list[tuple[Space, list[Selected]]]:
    """Good choices on each mesh that has some, both with the best first.

    With many tables, a sample of them decides which meshes are looked at closely.
    """
    if not is_searched_closely(candidates):
        settings = _best_settings(candidates, settings, room)
    spaces = [Space.of(candidates, setting) for setting in settings]
    chosen = [(space, selections(space, room)) for space in spaces]
    return sorted((pair for pair in chosen if pair[1]), key=lambda pair: pair[1][0].rated_s)


def is_searched_closely(candidates: Sequence[Candidate]) -> bool:
    """Whether there are few enough tables for a search of every mesh."""
    return len(candidates) <= _MAX_WEIGHED


def effort_for(candidates: Sequence[Candidate]) -> Effort:
    """How much is tried for so many tables."""
    return _FEW_TABLES if is_searched_closely(candidates) else _MANY_TABLES


def _best_settings(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting], room: float
) -> list[CostSetting]:
    """The meshes that are best for a part of the tables: small and large ones, as there are."""
    by_size = sorted(candidates, key=lambda candidate: candidate.work.num_rows * candidate.work.dim)
    stride = len(by_size) // _SAMPLE
    sample = by_size[stride // 2 :: stride]
    weighed: list[tuple[float, int]] = []
    for number, setting in enumerate(settings):
        selected = selections(Space.of(sample, setting, len(by_size) / len(sample)), room)
        weighed += [(selected[0].rated_s, number)] if selected else []
    best = sorted(weighed)[: _MANY_TABLES.meshes]
    # The sample may have seemed to fit where the whole doesn't.
    largest = max(settings, key=lambda setting: setting.mesh.group_size)
    best_settings = [settings[number] for _, number in best]
    return best_settings if largest in best_settings else [*best_settings, largest]


def placements(
    space: Space, selected: Sequence[Selected], room: float, effort: Effort
) -> Iterator[tuple[Placement, Descent]]:
    """Selections whose shards got ranks, and of which single tables were changed for the better.

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
    """How many tries were left when the best step was found."""


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


def _placed(
    space: Space, selected: Sequence[Selected], room: float, effort: Effort
) -> Found | None:
    placed: list[Found] = []
    for placement, descent in placements(space, selected, room, effort):
        hotter = with_hot_rows(space, placement, descent, room)
        cost, bytes_by_rank = descent.step_cost(hotter), descent.bytes_by_rank(hotter)
        placed.append(Found(space.setting, space.candidates, hotter, cost, bytes_by_rank))
    return min(placed, key=lambda result: result.rated_s, default=None)


def _nothing(setting: CostSetting) -> Found:
    cost = setting.step_cost(setting.loads([]))
    return Found(setting, [], Placement((), ()), cost, np.zeros(setting.group.num_ranks))
