"""`Space`: the loads of every choice on a mesh, and good selections if shards were dealt evenly."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.collectives import Span
from torchrec_2dsp.cost.loads import LOADS, Floats, Loads, load_weights
from torchrec_2dsp.cost.model import CostSetting, kept_bytes
from torchrec_2dsp.cost.step_cost import StepCost, rated
from torchrec_2dsp.cost.table_loads import message_type
from torchrec_2dsp.cost.workload import AlikeWork
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import Exchange, Pipeline, RowOwners
from torchrec_2dsp.planner.search.choices import Candidate, Choice, Family

Selection = NDArray[np.int64]
"""Each table's choice, by number."""

_Mask = NDArray[np.bool_]

_RESCHEDULED = 4
"""The number of best choices that are rated under other pipelines and all-to-alls."""
_LEAST_GAIN = 0.01
"""The share of a step that a pipeline or all-to-all other than the simplest must save."""
_STEP = 0.01
"""The share by which a load is raised to find its price."""
_BISECTIONS = 40
_LEAST_PRICE, _HIGHEST_PRICE = 1e-20, 1.0
"""Seconds per byte of memory."""
_EARLY = "early_from", "lagging_to", "beside_ids", "early_bytes", "lagging_bytes"
_IS_EARLY = load_weights(**dict.fromkeys(_EARLY, 1.0)) > 0
_MAX_AT_ONCE = 2**16
"""The most tables times ranks whose loads are computed together: they fit a processor's cache."""
_DIGITS = 9
"""The decimals of seconds in which choices must differ."""
_MAX_WEIGHED = 300
"""The number of tables above which a sample decides which meshes are searched closely."""
_SAMPLE = 100
"""The sample's approximate size, in tables."""


class Room(NamedTuple):
    """Bytes in a rank's memory, available or needed for tables and buffers."""

    device: float
    """The bytes on the tables' device."""

    host: float = 0.0
    """The bytes in host memory, besides a GPU's."""

    def holds(self, other: "Room") -> bool:
        """Tell whether this room suffices for ``other``."""
        return self.device >= other.device and self.host >= other.host

    def without(self, other: "Room") -> "Room":
        """Return the room that other tables leave."""
        return Room(self.device - other.device, self.host - other.host)


class Effort(NamedTuple):
    """Limits on the number of tries in a search."""

    meshes: int
    """Meshes to place."""
    selections: int
    """Selections to place on each mesh."""
    tries: int
    """Changes of single tables, on each mesh."""


_FEW_TABLES = Effort(meshes=3, selections=12, tries=2_000)
_MANY_TABLES = Effort(meshes=2, selections=1, tries=500)
"""With many tables, single ones matter little."""


@dataclass(frozen=True)
class Space:
    """Choices for all tables on one mesh, as if all ranks had an equal part of each.

    Tables come first in all arrays and choices second; if a table has fewer choices than
    another one, the rest is `numpy.inf` in ``bytes_of_rank``.
    """

    setting: CostSetting
    candidates: Sequence[Candidate]

    choices: Sequence[Sequence[Choice]]
    """Each table's choices that suit the mesh."""

    families: Sequence[Family]
    """All families, TorchRec's own exchange before the others."""

    family_of: NDArray[np.int64]
    """Each choice's family, by number."""

    loads: Floats
    """A rank's share of each load: tables, choices, `LOADS`."""

    bytes_of_rank: Floats
    """Bytes on the mean rank, buffers included."""

    bytes_of_shard: Floats
    """Bytes on the fullest rank."""

    host_bytes_of_rank: Floats
    """Bytes in the mean rank's share of its host's memory, besides a GPU's."""

    _prices: dict[bytes, Floats] = field(default_factory=dict, repr=False, compare=False)
    """Prices by their loads, because many sets of families lead to the same choices."""

    loads_by_size: dict[tuple[int, Choice], Floats] = field(
        default_factory=dict, repr=False, compare=False
    )
    """A rank's share of a table's loads with hot sets of several sizes, if requested before."""

    @classmethod
    def of(
        cls, candidates: Sequence[Candidate], setting: CostSetting, stand_for: float = 1.0
    ) -> "Space":
        """Compute the space of some tables, each of which stands for ``stand_for`` tables."""
        group = setting.group
        node_size = setting.mesh.node_group_size(setting.local_world_size)
        is_even = node_size == group.ranks_per_host
        alike = _alike(candidates, group)
        choices: list[Sequence[Choice]] = [()] * len(candidates)
        for tables in alike:
            suiting = candidates[tables[0]].suiting(group, is_even=is_even)
            for table in tables:
                choices[table] = suiting
        families = list(dict.fromkeys(choice.family for of_table in choices for choice in of_table))
        numbers = {family: number for number, family in enumerate(families)}
        shape = len(candidates), max((len(of_table) for of_table in choices), default=0)
        family_of = np.full(shape, -1)
        loads = np.zeros((*shape, len(LOADS)))
        mean, most, in_host = np.full(shape, np.inf), np.full(shape, np.inf), np.zeros(shape)
        buffers = setting.buffer_bytes
        together: dict[tuple[int, ...], Candidate] = {}
        for tables in alike:
            for number, choice in enumerate(choices[tables[0]]):
                for part in _parts(candidates, tables, choice, group):
                    candidate = together.get(part) or _together(candidates, part)
                    together[part] = candidate
                    placed = candidate.somewhere(choice, group)
                    by_rank, of_host = kept_bytes(placed, group.num_ranks)
                    mean_loads = setting.mean_loads(placed)
                    rows = list(part)
                    family_of[rows, number] = numbers[choice.family]
                    loads[rows, number] = mean_loads
                    mean[rows, number] = by_rank.mean(axis=-1) + mean_loads @ buffers
                    most[rows, number] = by_rank.max(axis=-1)
                    in_host[rows, number] = of_host.mean(axis=-1)
        return cls(
            setting,
            candidates,
            choices,
            families,
            family_of,
            loads * stand_for,
            mean * stand_for,
            most,
            in_host * stand_for,
        )

    def under(self, setting: CostSetting) -> "Space":
        """Return the space of another pipeline and all-to-all, in which rows travel early or not.

        The reverse is impossible: rows that don't travel early weren't counted.
        """
        loads = self.loads
        if self.setting.prefetches_rows and not setting.prefetches_rows:
            loads = np.where(_IS_EARLY, 0.0, loads)
        more_bytes = loads @ setting.buffer_bytes - self.loads @ self.setting.buffer_bytes
        return replace(
            self,
            setting=setting,
            loads=loads,
            bytes_of_rank=self.bytes_of_rank + more_bytes,
            _prices={},
            loads_by_size={},
        )

    def chosen(self, selection: Selection) -> list[Choice]:
        """Return each table's choice."""
        return [of_table[number] for of_table, number in zip(self.choices, selection, strict=True)]

    def sum_of(self, selection: Selection) -> Floats:
        """Return a rank's share of each of `LOADS`."""
        return np.asarray(self.loads[np.arange(len(selection)), selection].sum(axis=0), np.float64)

    def bytes_of(self, selection: Selection) -> Room:
        """Return the bytes on the mean rank."""
        chosen = np.arange(len(selection)), selection
        by_kind = self.bytes_of_rank, self.host_bytes_of_rank
        return Room(*(float(num_bytes[chosen].sum()) for num_bytes in by_kind))

    def types_of(self, selection: Selection) -> set[str]:
        """Return the message types that a selection sends."""
        numbers = np.unique(self.family_of[np.arange(len(selection)), selection])
        return {message_type(*self.families[number]) for number in numbers.tolist()}

    def in_words(self, selection: Selection) -> str:
        """Count the tables in each family, in words."""
        chosen = self.family_of[np.arange(len(selection)), selection]
        numbers, counts = np.unique(chosen, return_counts=True)
        ways = []
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            kind, exchange, transport = self.families[number]
            rows = "" if exchange is Exchange.POOLED else f", {exchange.value} exchange"
            short = "" if transport is Transport.FP32 else f" in {transport.value}"
            ways.append(f"{count:,} {kind.value.replace('_', '-')}{rows}{short}")
        return "; ".join(ways)

    def step_cost(self, of_rank: Floats, types: set[str]) -> StepCost:
        """Predict the step if every rank had these `LOADS`, in messages of some types."""
        return self.setting.step_cost(Loads.even(of_rank, types - {""}))

    def prices(self, of_rank: Floats) -> Floats:
        """Return the seconds for one more unit of each of `LOADS`, for ranks with these loads.

        They exclude costs that are paid once, for the first unit of a kind.
        """
        return np.maximum(self.prices_by_part(of_rank).sum(axis=1), 0.0)

    def prices_by_part(self, of_rank: Floats) -> Floats:
        """Return the prices separately for each part of `StepCost`: loads, parts."""
        prices = self._prices.get(of_rank.tobytes())
        if prices is None:
            prices = self._prices[of_rank.tobytes()] = self._raise_each(of_rank)
            prices.setflags(write=False)
        return prices

    def _raise_each(self, of_rank: Floats) -> Floats:
        typical = np.asarray(self.loads.max(axis=(0, 1), initial=0.0), np.float64)
        steps = np.where(of_rank > 0, of_rank, typical) * _STEP
        start = np.maximum(of_rank, steps)
        types = {message_type(*family) for family in self.families}
        base = self._parts(start, types)
        prices = np.zeros((len(LOADS), len(base)))
        for number in np.flatnonzero(steps):
            more = start.copy()
            more[number] += steps[number]
            prices[number] = (self._parts(more, types) - base) / steps[number]
        return prices

    def _parts(self, of_rank: Floats, types: set[str]) -> Floats:
        return np.array([seconds for _, seconds in self.step_cost(of_rank, types).parts()])

    @cached_property
    def seconds(self) -> tuple[Floats, ...]:
        """The seconds of each choice: for ranks without any load, and for ranks with usual loads.

        Overlapped loads cost less, which only shows if the loads beside them are known.
        """
        first = self.loads @ self.prices(np.zeros(len(LOADS)))
        cheapest = _argmin(np.where(np.isfinite(self.bytes_of_rank), first, np.inf))
        return first, self.loads @ self.prices(self.sum_of(cheapest))


def _alike(candidates: Sequence[Candidate], group: Span) -> list[list[int]]:
    """Return the numbers of tables with the same likeness and choices, grouped."""
    groups: dict[Hashable, list[int]] = {}
    for number, candidate in enumerate(candidates):
        unsaved = tuple(candidate.unsaved_types(group))
        key = candidate.work.likeness, unsaved, tuple(candidate.choices)
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _parts(
    candidates: Sequence[Candidate], tables: Sequence[int], choice: Choice, group: Span
) -> Iterator[tuple[int, ...]]:
    """Yield groups of alike tables' numbers whose loads are computed together."""
    most = 1 if choice.num_hot else max(1, _MAX_AT_ONCE // group.num_ranks)
    by_owners: dict[RowOwners, list[int]] = {}
    for table in tables:
        by_owners.setdefault(candidates[table].owners(choice, group), []).append(table)
    for of_owners in by_owners.values():
        for start in range(0, len(of_owners), most):
            yield tuple(of_owners[start : start + most])


def _together(candidates: Sequence[Candidate], part: Sequence[int]) -> Candidate:
    """Return a candidate that stands for alike tables."""
    first = candidates[part[0]]
    if len(part) == 1:
        return first
    return replace(first, work=AlikeWork.of([candidates[table].work for table in part]))


@dataclass(frozen=True)
class Selected:
    """A choice for each table, with its step and rating if all ranks had equal work."""

    selection: Selection
    cost: StepCost
    rated_s: float

    @classmethod
    def of(cls, space: Space, selection: Selection) -> "Selected":
        """Predict and rate a selection's step."""
        types = space.types_of(selection)
        cost = space.step_cost(space.sum_of(selection), types)
        return cls(selection, cost, rated(cost, types))


def chosen_on_each(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting], room: Room
) -> list[tuple[Space, list[Selected]]]:
    """Choose on each mesh; return meshes and choices that fit, best first.

    With many tables, a sample decides which meshes are searched closely.
    """
    if not is_searched_closely(candidates):
        settings = _best_settings(candidates, settings, room)
    return _on_each(candidates, settings, room)


def _on_each(
    candidates: Sequence[Candidate],
    settings: Sequence[CostSetting],
    room: Room,
    stand_for: float = 1.0,
) -> list[tuple[Space, list[Selected]]]:
    """Choose on each mesh, and choose its schedule: pipeline and all-to-all; best mesh first."""
    by_mesh: dict[Mesh2D, list[CostSetting]] = {}
    for setting in settings:
        by_mesh.setdefault(setting.mesh, []).append(setting)
    chosen = [_scheduled(candidates, alike, room, stand_for) for alike in by_mesh.values()]
    return sorted((pair for pair in chosen if pair[1]), key=lambda pair: pair[1][0].rated_s)


def _scheduled(
    candidates: Sequence[Candidate],
    settings: Sequence[CostSetting],
    room: Room,
    stand_for: float,
) -> tuple[Space, list[Selected]]:
    """Choose for all tables on a mesh, and choose one of its schedules.

    Schedules hardly change what is best for a table, so choices are found under one of them,
    rated under all, and found again under the best.
    """
    whole = Space.of(
        candidates, max(settings, key=lambda setting: setting.prefetches_rows), stand_for
    )
    # The one that can hide most, except rows, whose loads differ.
    usual = max(
        (setting for setting in settings if not setting.prefetches_rows),
        key=lambda setting: (setting.pipeline is Pipeline.SPARSE_DIST, setting.full_duplex),
        default=settings[0],
    )
    space = whole.under(usual)
    selected = selections(space, room)
    if len(settings) == 1 or not selected:
        # The simplest schedule needs the least memory.
        space = space if selected else whole.under(settings[0])
        return space, selected or selections(space, room)
    rated = [
        min(
            (
                Selected.of(other, each.selection).rated_s
                for each in selected[:_RESCHEDULED]
                if room.holds(other.bytes_of(each.selection))
            ),
            default=np.inf,
        )
        for other in map(whole.under, settings)
    ]
    enough_s = min(rated) * (1 + _LEAST_GAIN)
    best = next(each for each, seconds in zip(settings, rated, strict=True) if seconds <= enough_s)
    if best is usual:
        return space, selected
    space = whole.under(best)
    return space, selections(space, room)


def is_searched_closely(candidates: Sequence[Candidate]) -> bool:
    """Tell whether tables are few enough to search every mesh."""
    return len(candidates) <= _MAX_WEIGHED


def effort_for(candidates: Sequence[Candidate]) -> Effort:
    """Return the effort for this many tables."""
    return _FEW_TABLES if is_searched_closely(candidates) else _MANY_TABLES


def _best_settings(
    candidates: Sequence[Candidate], settings: Sequence[CostSetting], room: Room
) -> list[CostSetting]:
    """Return the best meshes for a sample with small and large tables."""
    by_size = sorted(candidates, key=lambda candidate: candidate.work.num_rows * candidate.work.dim)
    stride = len(by_size) // _SAMPLE
    sample = by_size[stride // 2 :: stride]
    weighed = _on_each(sample, settings, room, len(by_size) / len(sample))
    best = [space.setting for space, _ in weighed[: _MANY_TABLES.meshes]]
    # The sample may have seemed to fit where the whole doesn't.
    largest = max(settings, key=lambda setting: setting.mesh.group_size)
    return best if largest.mesh in [setting.mesh for setting in best] else [*best, largest]


def selections(space: Space, room: Room) -> list[Selected]:
    """Return good choices for all tables within the ranks' ``room``, best first.

    A step's cost is nearly a sum over tables, so each takes what is cheapest for it; but the first
    table in a family pays for messages and kernels that the others share. So sets of families are
    tried: all pairs, and then sets that grow from the best one while that helps.
    """
    tried: dict[frozenset[int], Selected] = {}
    # If all families together don't fit, none do.
    _try(space, room, frozenset(range(len(space.families))), tried)
    if not tried:
        return []
    for size in (1, 2):
        for families in combinations(range(len(space.families)), size):
            _try(space, room, frozenset(families), tried)
    while True:
        best = min(tried, key=lambda families: tried[families].rated_s)
        before = tried[best].rated_s
        for family in range(len(space.families)):
            _try(space, room, best | {family}, tried)
        if min(selected.rated_s for selected in tried.values()) >= before:
            break
    # Ratings that differ only by rounding keep their order.
    ordered = sorted(tried.values(), key=lambda selected: round(selected.rated_s, _DIGITS))
    return list({selected.selection.tobytes(): selected for selected in ordered}.values())


def smallest(space: Space) -> Selected:
    """Return the smallest shards, as a last resort if nothing better finds ranks."""
    return Selected.of(space, _argmin(space.bytes_of_shard + space.bytes_of_rank))


def _try(
    space: Space,
    room: Room,
    families: frozenset[int],
    tried: dict[frozenset[int], Selected],
) -> None:
    if families in tried:
        return
    allowed = _allowed(space, families, room)
    distinct: dict[bytes, Selected] = {}
    for seconds in space.seconds:
        selection = _cheapest_within(space, seconds, allowed, room)
        if selection is not None and selection.tobytes() not in distinct:
            distinct[selection.tobytes()] = Selected.of(space, selection)
    if distinct:
        tried[families] = min(distinct.values(), key=lambda selected: selected.rated_s)


def _allowed(space: Space, families: Iterable[int], room: Room) -> _Mask:
    """Mask the choices in some families that fit; for tables without any, all that fit."""
    fits = np.isfinite(space.bytes_of_rank) & (space.bytes_of_shard <= room.device)
    of_families = fits & np.isin(space.family_of, list(families))
    return np.where(of_families.any(axis=1, keepdims=True), of_families, fits)


def _cheapest_within(space: Space, seconds: Floats, allowed: _Mask, room: Room) -> Selection | None:
    """Return the cheapest choices that fit together; `None` if nothing does.

    Bisection finds the lowest price per byte of memory at which all fit.
    """
    if not allowed.any(axis=1).all():
        return None
    num_bytes = np.where(np.isfinite(space.bytes_of_rank), space.bytes_of_rank, 0.0)

    def at_price(price: float) -> Selection:
        return _argmin(np.where(allowed, seconds + price * num_bytes, np.inf))

    selection = at_price(0.0)
    if room.holds(space.bytes_of(selection)):
        return selection
    least = _argmin(np.where(allowed, num_bytes, np.inf))
    if space.bytes_of(least).device > room.device:
        return None
    low, high = _LEAST_PRICE, _HIGHEST_PRICE
    for _ in range(_BISECTIONS):
        # Prices differ by orders of magnitude.
        price = (low * high) ** 0.5
        if space.bytes_of(at_price(price)).device <= room.device:
            high = price
        else:
            low = price
    # The lowest price at which devices are full enough leaves the least for host memory.
    fitting = (each for each in (at_price(high), least) if room.holds(space.bytes_of(each)))
    return next(fitting, None)


def _argmin(values: Floats) -> Selection:
    return np.asarray(values.argmin(axis=1), np.int64)
