"""Search which tables have one copy in the world, beside those with one in each group."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.planner.search.choices import Candidate, rated_beside
from torchrec_2dsp.planner.search.meshes import chosen_on_each, is_searched_closely, search
from torchrec_2dsp.planner.search.result import Found, SearchResult, Tried

_MESHES = 3
"""How many of the best meshes are looked at for tables with one copy."""
_PATIENCE = 2
"""After so many sets that are no better, larger ones aren't tried."""


def search_copies(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting], room: float
) -> SearchResult:
    """The best placements, with as many copies of each table as are best, or are demanded.

    What a copy in each group costs, in memory and to keep it equal to the others, grows with its
    table. So it is the largest ones that get one copy in the world instead: one of them, two, four
    and so on. Of hundreds of tables, only those for which it is demanded.

    Args:
        candidates: all tables.
        settings: the meshes.
        room: bytes that a rank has for tables and buffers.
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
    placed, tried = list(result.found), list(result.tried)
    worth_a_look = _beside_the_best(several, tried)
    draft = _most_promising(_drafts(candidates, worth_a_look, room), _best(placed))
    if draft is not None:
        more = draft.placed()
        placed += more.found
        tried += more.tried
    return SearchResult(sorted(placed, key=lambda placement: placement.rated_s), tried, room)


def _beside_the_best(settings: Sequence[CostSetting], tried: Sequence[Tried]) -> list[CostSetting]:
    """Meshes on which something else may be best: the best ones, and those where nothing fits."""
    seconds: dict[Mesh2D, float] = {}
    for attempt in tried:
        seconds[attempt.mesh] = min(attempt.seconds, seconds.get(attempt.mesh, np.inf))
    fitting = sorted(
        (setting for setting in settings if setting.mesh in seconds),
        key=lambda setting: seconds[setting.mesh],
    )
    dropped = {setting.mesh for setting in fitting[_MESHES:]}
    return [setting for setting in settings if setting.mesh not in dropped]


def _best(placed: Sequence[Found]) -> float:
    return min((result.rated_s for result in placed), default=np.inf)


def _most_promising(drafts: "Iterator[_Draft]", to_beat: float) -> "_Draft | None":
    """The best draft that may be better. Ends when larger sets of tables get worse."""
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
        if in_vain == _PATIENCE and np.isfinite(to_beat):
            break
    return best


def _as_demanded(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting]
) -> list[CostSetting]:
    """The meshes with as many groups as users demand."""
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


@dataclass(frozen=True)
class _Draft:
    """Tables that have one copy in the world, and others."""

    once: Sequence[Candidate]
    others: Sequence[Candidate]
    settings: Sequence[CostSetting]
    """The meshes that the other tables may have."""

    room: float

    @property
    def rated_s(self) -> float:
        """The rating of the best step with evenly dealt shards; infinite if they don't fit."""
        return self._rated[0][0] if self._rated else np.inf

    @property
    def best_settings(self) -> list[CostSetting]:
        """The meshes that come out best."""
        return [self.settings[number] for _, number in self._rated[:_MESHES]]

    @property
    def promising_settings(self) -> list[CostSetting]:
        """The meshes that come out best, and those that have no room as yet."""
        fitting = {number for _, number in self._rated}
        others = [setting for number, setting in enumerate(self.settings) if number not in fitting]
        return [*self.best_settings, *others]

    @cached_property
    def _rated(self) -> list[tuple[float, int]]:
        """Seconds and numbers of the meshes that fit, the best one first."""
        chosen = chosen_on_each(self.once, [self.settings[0].of_world()], self.room)
        if not chosen:
            return []
        space, (first, *_) = chosen[0]
        in_world = space.types_of(first.selection)
        room = self.room - space.bytes_of(first.selection)
        numbers = {setting.mesh: number for number, setting in enumerate(self.settings)}
        ratings: list[tuple[float, int]] = []
        for others, (best, *_) in chosen_on_each(self.others, self._beside(first.cost), room):
            types = others.types_of(best.selection)
            seconds = rated_beside(best.cost, types, in_world)
            ratings.append((seconds, numbers[others.setting.mesh]))
        return sorted(ratings)

    def placed(self) -> SearchResult:
        """The best placements of all tables."""
        in_world = search(self.once, [self.settings[0].of_world()], self.room)
        if not in_world.found:
            return in_world
        once = in_world.found[0]
        once_bytes = float(once.bytes_by_rank.max())
        result = search(
            self.others, self._beside(once.cost, self.best_settings), self.room - once_bytes
        )
        return SearchResult(
            [
                replace(placed, once=once, bytes_by_rank=placed.bytes_by_rank + once_bytes)
                for placed in result.found
            ],
            [
                replace(attempt, bytes_of_rank=attempt.bytes_of_rank + once_bytes)
                for attempt in result.tried
            ],
            self.room,
        )

    def _beside(
        self, cost: StepCost, settings: Sequence[CostSetting] | None = None
    ) -> list[CostSetting]:
        beside = replace(cost, hidden_s=0.0)
        return [replace(setting, beside=beside) for setting in settings or self.settings]


def _drafts(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting], room: float
) -> Iterator[_Draft]:
    demanded = [candidate for candidate in candidates if candidate.num_groups == 1]
    free = [candidate for candidate in candidates if candidate.num_groups is None]
    by_size = sorted(free, key=lambda candidate: -candidate.work.num_rows * candidate.work.dim)
    for size in _sizes(len(free) if is_searched_closely(candidates) else 0):
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


def _sizes(most: int) -> Iterator[int]:
    """Numbers of tables to try: none, one, two, four and so on."""
    yield 0
    size = 1
    while size <= most:
        yield size
        size *= 2


def _once(candidate: Candidate) -> Candidate | None:
    """A table as it can have one copy, `None` if it can't and needn't."""
    choices = [
        choice for choice in candidate.choices if choice.kind is not ShardingType.DATA_PARALLEL
    ]
    if not choices and candidate.num_groups == 1:
        raise PlanError(
            f"table {candidate.name!r} has num_groups=1, and nothing but data_parallel is allowed "
            "for it, which is a copy on every rank: allow other sharding_types"
        )
    return replace(candidate, choices=choices) if choices else None
