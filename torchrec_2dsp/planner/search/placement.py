"""`Placement`: a choice and ranks for each table; improved, with hot rows, and as a plan. Pure."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.cost.loads import Floats, Loads, Ranks
from torchrec_2dsp.cost.model import CostSetting, MemoryCost, kept_bytes
from torchrec_2dsp.cost.step_cost import StepCost, rated
from torchrec_2dsp.cost.workload import TableWork
from torchrec_2dsp.plan.parameter_sharding import ParameterSharding2D, type_2d
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.planner.search.choices import Candidate, Choice
from torchrec_2dsp.planner.search.space import Room, Space

_LEAST_GAIN = 1e-6
"""The share by which a change must shorten the step, so that rounding has no effect."""
_MAX_REMEMBERED = 20_000
"""The most tables times ranks for which single tables' sums are remembered."""
_FIRST_RUN = 16
_RUN_GROWTH = 4
_MIN_GAIN = 0.2
"""The share of table time that hot rows must save, as their own part is predicted too short."""

RanksOf = tuple[int, ...]
"""The ranks of a table's shards, if the choice leaves them free."""


@dataclass(frozen=True)
class Sums:
    """Loads and memory that some tables put on a group's ranks."""

    loads: Floats
    """A row for each of `LOADS`, a column for each rank."""

    table_bytes: Floats
    """Tables' bytes without buffers, on each rank's device and in its host's memory."""

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.loads + other.loads, self.table_bytes + other.table_bytes)

    def __sub__(self, other: "Sums") -> "Sums":
        return Sums(self.loads - other.loads, self.table_bytes - other.table_bytes)


@dataclass(frozen=True)
class Placement:
    """A choice for each table, and ranks for its shards."""

    choices: tuple[Choice, ...]
    ranks: tuple[RanksOf, ...]

    def replaced(self, table: int, choice: Choice, ranks: RanksOf = ()) -> "Placement":
        """Return the placement with another choice for a table."""
        return Placement(
            (*self.choices[:table], choice, *self.choices[table + 1 :]),
            (*self.ranks[:table], ranks, *self.ranks[table + 1 :]),
        )


class Descent:
    """Shortens a placement's step by changing tables; caches single tables' sums."""

    def __init__(self, space: Space, prices: Floats, room: Room) -> None:
        setting = space.setting
        self._space = space
        self.prices = prices
        """Seconds for one more unit of each of `LOADS`."""
        self._room = room
        self._group = setting.group
        self._buffers = setting.buffer_bytes
        self._known: dict[tuple[int, Choice, RanksOf], Sums] = {}
        self._last: tuple[Placement, Sums] | None = None
        self._ratings: dict[bytes, float] = {}
        """Ratings by a digest of sums and message types, because alike tables are tried alike."""

    def sums(self, placement: Placement) -> Sums:
        """Sum loads and memory over all tables."""
        if self._last is not None and self._last[0] is placement:
            return self._last[1]
        sums = Sums(
            np.zeros((len(self._buffers), self._group.num_ranks)),
            np.zeros((len(self._room), self._group.num_ranks)),
        )
        for table in range(len(placement.choices)):
            sums += self.sums_of(placement, table)
        self._last = placement, sums
        return sums

    def sums_of(self, placement: Placement, table: int) -> Sums:
        """Return one table's loads and memory."""
        return self._of(table, placement.choices[table], placement.ranks[table])

    def step_cost(self, placement: Placement) -> StepCost:
        """Predict a placement's step, imbalance included."""
        return self._step_cost(self.sums(placement), placement.choices)

    def rated_s(self, placement: Placement) -> float:
        """Rate a placement; infinite if memory doesn't suffice."""
        return self._rated_s(self.sums(placement), placement.choices)

    def bytes_by_rank(self, placement: Placement) -> Floats:
        """Return the bytes on each rank's device, buffers included."""
        return self._bytes(self.sums(placement))

    def improved(self, start: Placement, max_tries: int) -> tuple[Placement, int]:
        """Improve the start until nothing helps or ``max_tries`` are used; return the tries left.

        A start that doesn't fit, because its buffers aren't even, is replaced by any that does.
        """
        spread, max_tries = self._spread(start, max_tries)
        return self._singly(spread, max_tries)

    def _spread(self, start: Placement, max_tries: int) -> tuple[Placement, int]:
        """Spread the busiest tables together over all ranks, if that helps.

        Single changes don't find this: with two large tables on two ranks, moving one leaves the
        other rank as busy as it was.
        """
        best, placement = self.rated_s(start), start
        # Half of the tries are for single tables, of which there may be thousands.
        max_together = max_tries // (2 * len(self._space.families))
        free = (table for table, choice in enumerate(start.choices) if choice.is_free)
        busiest_first = sorted(free, key=lambda table: -self._busy_s(start, table))
        for family in self._space.families:
            changed, sums = start, self.sums(start)
            for table in busiest_first[:max_together]:
                choices = [
                    choice for choice in self._space.choices[table] if choice.family == family
                ]
                if not choices or choices[0].is_free:
                    continue
                sums = sums - self.sums_of(changed, table) + self._of(table, choices[0], ())
                changed = changed.replaced(table, choices[0])
                seconds = self._rated_s(sums, changed.choices)
                max_tries -= 1
                if seconds < best * (1 - _LEAST_GAIN):
                    best, placement = seconds, changed
        return placement, max_tries

    def _singly(self, start: Placement, max_tries: int) -> tuple[Placement, int]:
        """Change single tables, one after another, if that helps."""
        placement, sums = start, self.sums(start)
        best = self._rated_s(sums, start.choices)
        since_gain = 0
        for table in cycle(range(len(start.choices))):
            since_gain += 1
            if since_gain > len(start.choices) or max_tries <= 0:
                break
            others = sums - self.sums_of(placement, table)
            for choice, ranks in self._tries(table, others):
                max_tries -= 1
                changed = placement.replaced(table, choice, ranks)
                tried = others + self._of(table, choice, ranks)
                seconds = self._rated_s(tried, changed.choices)
                if seconds < best * (1 - _LEAST_GAIN):
                    placement, sums, best, since_gain = changed, tried, seconds, 0
        self._last = placement, sums
        return placement, max_tries

    def alternatives(self, placement: Placement, table: int) -> list[tuple[Choice, float]]:
        """Return a table's other choices that fit, each with the step's rating."""
        others = self.sums(placement) - self.sums_of(placement, table)
        seconds_of: dict[Choice, float] = {}
        for choice, ranks in self._tries(table, others):
            if choice.family == placement.choices[table].family:
                continue
            changed = placement.replaced(table, choice, ranks)
            seconds = self._rated_s(others + self._of(table, choice, ranks), changed.choices)
            if np.isfinite(seconds):
                seconds_of[choice] = min(seconds, seconds_of.get(choice, np.inf))
        return list(seconds_of.items())

    def _busy_s(self, placement: Placement, table: int) -> float:
        return float((self.prices @ self.sums_of(placement, table).loads).max())

    def _of(self, table: int, choice: Choice, ranks: RanksOf) -> Sums:
        key = table, choice, ranks
        if key in self._known:
            return self._known[key]
        placed = self._space.candidates[table].placed(choice, ranks, self._group)
        loads = self._space.setting.loads([placed]).values
        sums = Sums(loads, kept_bytes(placed, self._group.num_ranks))
        if len(self._space.candidates) * self._group.num_ranks <= _MAX_REMEMBERED:
            self._known[key] = sums
        return sums

    def _bytes(self, sums: Sums) -> Floats:
        return np.asarray(sums.table_bytes[0] + self._buffers @ sums.loads, np.float64)

    def _fits(self, sums: Sums) -> bool:
        return self._room.holds(Room(self._bytes(sums).max(), sums.table_bytes[1].max()))

    def _rated_s(self, sums: Sums, choices: Sequence[Choice]) -> float:
        if not self._fits(sums):
            return float("inf")
        types = {choice.message_type for choice in choices}
        digest = hashlib.blake2b(repr(sorted(types)).encode(), digest_size=16)
        digest.update(sums.loads.tobytes())
        rating = self._ratings.get(digest.digest())
        if rating is None:
            rating = rated(self._step_cost(sums, choices), types)
            self._ratings[digest.digest()] = rating
        return rating

    def _step_cost(self, sums: Sums, choices: Sequence[Choice]) -> StepCost:
        types = {choice.message_type for choice in choices} - {""}
        loads = Loads(self._group.num_ranks, types=types)
        loads.values += np.maximum(sums.loads, 0.0)
        return self._space.setting.step_cost(loads)

    def _tries(self, table: int, others: Sums) -> Iterator[tuple[Choice, RanksOf]]:
        """Yield all choices, on the ranks or hosts that are least busy with other tables."""
        busy = self.prices @ others.loads
        hosts = np.arange(len(busy)) // self._group.ranks_per_host
        busy_hosts = np.bincount(hosts, busy)
        by_rank = np.argsort(busy, kind="stable")
        # A host's ranks share its link.
        by_host = np.lexsort((busy, busy_hosts[hosts]))
        hosts_in_order = np.argsort(busy_hosts, kind="stable")
        for choice in self._space.choices[table]:
            if not choice.is_free:
                yield choice, ()
            elif choice.is_on_host:
                parts = np.arange(choice.num_parts) % len(hosts_in_order)
                on_hosts = (
                    choice.ranks_on_host(host, busy[hosts == host])
                    for host in hosts_in_order[parts].tolist()
                )
                yield choice, tuple(chain.from_iterable(on_hosts))
            else:
                parts = np.arange(choice.column_shards) % len(busy)
                orders = (tuple(order[parts].tolist()) for order in (by_rank, by_host))
                yield from ((choice, ranks) for ranks in dict.fromkeys(orders))


@dataclass(frozen=True)
class Runs:
    """Runs of equally hot rows, with a number for each run."""

    tables: NDArray[np.int64]
    num_rows: Floats

    benefits: Floats
    """Seconds that each row saves; negative if it costs more than it saves."""

    num_bytes: Floats
    """Bytes that each row takes on every rank."""


def rows_by_byte(runs: Runs, room: float) -> Floats:
    """Return the rows to take from each run: best per byte first, while there is room.

    That saves the most, except for part of one row's benefit.
    """
    num_taken = np.zeros(len(runs.num_rows))
    order = np.argsort(-runs.benefits / runs.num_bytes, kind="stable")
    for run in order.tolist():
        if runs.benefits[run] <= 0:
            break
        num_taken[run] = min(float(runs.num_rows[run]), room // float(runs.num_bytes[run]))
        room -= float(num_taken[run] * runs.num_bytes[run])
    return num_taken


def with_hot_rows(space: Space, placement: Placement, descent: Descent, room: Room) -> Placement:
    """Return the placement with the hot rows that pay off, or unchanged if none do.

    Reference: P2RES, whose performance model this follows; see docs/guides/planner.md.
    """
    free_bytes = room.device - float(descent.bytes_by_rank(placement).max())
    runs = _runs(space, placement)
    while runs is not None and free_bytes > 0:
        num_taken = rows_by_byte(runs, free_bytes)
        by_table = np.bincount(runs.tables, num_taken, minlength=len(placement.choices))
        choices = [
            replace(choice, num_hot=int(num_hot)) if num_hot else choice
            for choice, num_hot in zip(placement.choices, by_table, strict=True)
        ]
        hotter = Placement(tuple(choices), placement.ranks)
        missing = float(descent.bytes_by_rank(hotter).max()) - room.device
        if missing <= 0:
            before = descent.step_cost(placement).tables_s
            after = descent.step_cost(hotter).tables_s
            return hotter if after < before * (1 - _MIN_GAIN) else placement
        # Buffers for hot rows need room as well.
        free_bytes -= missing
    return placement


def _runs(space: Space, placement: Placement) -> Runs | None:
    """Return the runs in all tables that may have hot rows; `None` if there are none."""
    loads = {
        table: _loads_by_size(space, table, choice)
        for table, choice in enumerate(placement.choices)
        if space.candidates[table].may_be_hot(choice)
    }
    if not any(len(of_sizes) > 1 for of_sizes in loads.values()):
        return None
    # Loads that only hot rows have get prices from a middle hot set.
    prices = space.prices(
        np.sum([of_sizes[len(of_sizes) // 2] for of_sizes in loads.values()], axis=0)
    )
    runs: list[tuple[int, float, float, float]] = []
    for table, by_size in loads.items():
        work = space.candidates[table].work
        sizes = np.array(_hot_set_sizes(work), dtype=np.float64)
        row_bytes = work.dim * work.element_bytes + work.state_bytes_per_row
        runs += [(table, *run, row_bytes) for run in concave_runs(sizes, by_size @ prices)]
    tables, *numbers = (np.array(column) for column in zip(*runs, strict=True))
    return Runs(tables, *numbers)


def _loads_by_size(space: Space, table: int, choice: Choice) -> Floats:
    """Return a mean rank's loads for hot sets of several sizes, wherever the table is."""
    loads = space.loads_by_size.get((table, choice))
    if loads is None:
        setting, candidate = space.setting, space.candidates[table]
        placed = (
            candidate.somewhere(replace(choice, num_hot=size), setting.group)
            for size in _hot_set_sizes(candidate.work)
        )
        loads = np.array([setting.loads([table]).values.mean(axis=1) for table in placed])
        space.loads_by_size[table, choice] = loads
    return loads


def _hot_set_sizes(work: TableWork) -> list[int]:
    """Return sizes in growing steps, from no rows to all known ones."""
    num_known = 0 if work.access is None else min(work.num_rows, len(work.access.rows))
    sizes, size = [0], _FIRST_RUN
    while size < num_known:
        sizes.append(size)
        size *= _RUN_GROWTH
    return [*sizes, num_known] if num_known else sizes


def concave_runs(sizes: Floats, costs: Floats) -> Iterator[tuple[float, float]]:
    """Yield runs with falling benefit: their rows, and the seconds that each row saves.

    A run that would save more than the previous one is joined to it, as its rows come later.
    """
    runs: list[tuple[float, float]] = []
    for num_rows, saved in zip(np.diff(sizes), -np.diff(costs), strict=True):
        runs.append((float(num_rows), float(saved)))
        while len(runs) > 1 and runs[-1][1] / runs[-1][0] > runs[-2][1] / runs[-2][0]:
            last = runs.pop()
            runs[-1] = runs[-1][0] + last[0], runs[-1][1] + last[1]
    for num_rows, saved in runs:
        yield num_rows, saved / num_rows


@lru_cache(2**14)
def _place_of(device: str, rank: int, ranks_per_host: int) -> Any:
    """Return TorchRec's placement of a rank, cached because parsing one for each shard is slow."""
    return ShardMetadata([0], [0], placement(device, rank, ranks_per_host)).placement


@dataclass(frozen=True)
class MeshPlacement:
    """The best placement on a mesh, ready to become a plan."""

    setting: CostSetting
    candidates: Sequence[Candidate]
    placement: Placement
    cost: StepCost

    bytes_by_rank: Ranks
    """Bytes on each of a group's ranks."""

    once: "MeshPlacement | None" = None
    """Tables with one copy in the world, besides these; cost and memory include them."""

    @property
    def where(self) -> str:
        """The mesh, and the number of tables with one copy besides it."""
        where = str(self.setting)
        return where if self.once is None else f"{where}, {len(self.once.candidates)} in the world"

    @cached_property
    def memory(self) -> MemoryCost:
        """The fullest rank's memory."""
        cost = self.setting.memory_cost(
            [
                candidate.placed(choice, ranks, self.setting.group)
                for candidate, choice, ranks in self._tables()
            ]
        )
        return cost if self.once is None else cost + self.once.memory

    @property
    def rated_s(self) -> float:
        """The rating for comparing placements."""
        in_world = set() if self.once is None else self.once._types()
        return rated(self.cost, self._types(), in_world)

    def _types(self) -> set[str]:
        return {choice.message_type for choice in self.placement.choices}

    def _tables(self) -> Iterator[tuple[Candidate, Choice, RanksOf]]:
        chosen = self.placement
        return zip(self.candidates, chosen.choices, chosen.ranks, strict=True)

    def plan(self, device: str) -> Plan2D:
        """Build the plan, with TorchRec's objects for each shard on "cpu" or "cuda"."""
        tables: dict[str, dict[str, ParameterSharding2D]] = {}
        for part in (self, self.once) if self.once is not None else (self,):
            for candidate, choice, ranks in part._tables():
                sharding = part._sharding(candidate, choice, ranks, device)
                if part is not self:
                    sharding = replace(sharding, num_groups=1)
                tables.setdefault(candidate.path, {})[candidate.name] = sharding
        setting = self.setting
        plan = Plan2D({}, setting.mesh, setting.sync, setting.pipeline, setting.full_duplex)
        return plan.with_tables(tables)

    def _sharding(
        self, candidate: Candidate, choice: Choice, ranks: RanksOf, device: str
    ) -> ParameterSharding2D:
        group = self.setting.group
        if not choice.is_free:
            ranks = tuple(range(group.num_ranks))
        spec = None
        if choice.kind is not ShardingType.DATA_PARALLEL:
            shapes = zip(*candidate.shapes(choice, group), ranks, strict=True)
            spec = EnumerableShardingSpec(
                [
                    ShardMetadata(
                        shard_sizes=size,
                        shard_offsets=offset,
                        placement=_place_of(device, rank, group.ranks_per_host),
                    )
                    for size, offset, rank in shapes
                ]
            )
        constraint = candidate.constraint or ParameterConstraints()
        return ParameterSharding2D(
            sharding_type=type_2d(choice.kind.value),
            compute_kernel=choice.kernel,
            ranks=list(ranks),
            sharding_spec=spec,
            cache_params=constraint.cache_params,
            enforce_hbm=constraint.enforce_hbm,
            stochastic_rounding=constraint.stochastic_rounding,
            bounds_check_mode=constraint.bounds_check_mode,
            output_dtype=constraint.output_dtype,
            key_value_params=constraint.key_value_params,
            **candidate.additions(choice, group),
        )


@dataclass(frozen=True)
class Tried:
    """A choice for all tables on a mesh, as if their shards were dealt evenly."""

    setting: CostSetting
    seconds: float
    bytes_of_rank: float
    """Bytes on a rank, buffers included."""
    ways: str = ""
    """The number of tables for each way of sharding, in words."""


@dataclass(frozen=True)
class SearchResult:
    """Placements, best first and none if nothing fits, and all attempts that fit."""

    placements: Sequence[MeshPlacement]
    tried: Sequence[Tried]
    room: Room
    """Each rank's memory for tables and buffers."""

    gain_by_int4: float = 1.0
    """The factor by which rows in 4 bits would speed up a step; 1 if they are allowed."""
