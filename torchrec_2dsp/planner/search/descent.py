"""Change one table after the other, or the largest together, while steps get shorter. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from torchrec_2dsp.cost.loads import Loads
from torchrec_2dsp.cost.memory import table_bytes
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.planner.balance import Floats
from torchrec_2dsp.planner.search.choices import Choice, rated
from torchrec_2dsp.planner.search.space import Space

_LEAST_GAIN = 1e-6
"""The share by which a change must shorten the step, so that rounding changes nothing."""

_MAX_REMEMBERED = 20_000
"""The sums of single tables are remembered up to so many tables times ranks; with more, they are
computed each time."""

RanksOf = tuple[int, ...]
"""The ranks of a table's shards, where the choice leaves them free."""


@dataclass(frozen=True)
class Sums:
    """The loads and the memory of a group's ranks for some tables."""

    loads: Floats
    """The loads, with a row for each of `LOADS` and a column for each rank."""

    table_bytes: Floats
    """Bytes of tables on each rank, without buffers."""

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.loads + other.loads, self.table_bytes + other.table_bytes)

    def __sub__(self, other: "Sums") -> "Sums":
        return Sums(self.loads - other.loads, self.table_bytes - other.table_bytes)


@dataclass(frozen=True)
class Placement:
    """A choice for each table, and where its shards lie."""

    choices: tuple[Choice, ...]
    ranks: tuple[RanksOf, ...]

    def replaced(self, table: int, choice: Choice, ranks: RanksOf = ()) -> "Placement":
        """The placement with another choice for a table."""
        return Placement(
            (*self.choices[:table], choice, *self.choices[table + 1 :]),
            (*self.ranks[:table], ranks, *self.ranks[table + 1 :]),
        )


class Descent:
    """The steps of placements; what single tables add to them is computed once."""

    def __init__(self, space: Space, prices: Floats, room: float) -> None:
        setting = space.setting
        self._space = space
        self.prices = prices
        """Seconds of a unit more of each of `LOADS`."""
        self._room = room
        self._group = setting.group
        self._buffers = setting.buffer_bytes
        self._known: dict[tuple[int, Choice, RanksOf], Sums] = {}
        self._last: tuple[Placement, Sums] | None = None

    def sums(self, placement: Placement) -> Sums:
        """The sums of all tables."""
        if self._last is not None and self._last[0] is placement:
            return self._last[1]
        sums = Sums(
            np.zeros((len(self._buffers), self._group.num_ranks)), np.zeros(self._group.num_ranks)
        )
        for table, (choice, ranks) in enumerate(
            zip(placement.choices, placement.ranks, strict=True)
        ):
            sums += self._of(table, choice, ranks)
        self._last = placement, sums
        return sums

    def sums_of(self, placement: Placement, table: int) -> Sums:
        """The sums of one table."""
        return self._of(table, placement.choices[table], placement.ranks[table])

    def step_cost(self, placement: Placement) -> StepCost:
        """The step of a placement, imbalance included."""
        return self._step_cost(self.sums(placement), placement.choices)

    def rated_s(self, placement: Placement) -> float:
        """The rating by which a placement is compared; infinite where memory doesn't suffice."""
        return self._rated_s(self.sums(placement), placement.choices)

    def bytes_by_rank(self, placement: Placement) -> Floats:
        """The bytes of each rank, buffers included."""
        sums = self.sums(placement)
        return np.asarray(sums.table_bytes + self._buffers @ sums.loads, np.float64)

    def improved(self, start: Placement, max_tries: int) -> tuple[Placement, int]:
        """The start with improvements, until nothing helps or all was tried; and the tries left.

        A start that doesn't fit, because its buffers aren't even, is left for whatever does.

        Args:
            start: what is improved.
            max_tries: steps that may be added up.
        """
        spread, max_tries = self._spread(start, max_tries)
        return self._singly(spread, max_tries)

    def _spread(self, start: Placement, max_tries: int) -> tuple[Placement, int]:
        """The start with its busiest tables spread, together, over all ranks, where that helps.

        Single changes don't find this: of two large tables on two ranks, moving one leaves the
        other rank as busy as it was.
        """
        best, placement = self.rated_s(start), start
        # Half of what may be tried is for single tables, of which there may be thousands.
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
        """The start with single tables changed, one after the other, where that helps."""
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
        """The other choices for a table, and the step with each as it is rated; those that fit."""
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
        sums = Sums(
            self._space.setting.loads([placed]).values, table_bytes(placed, self._group.num_ranks)
        )
        if len(self._space.candidates) * self._group.num_ranks <= _MAX_REMEMBERED:
            self._known[key] = sums
        return sums

    def _rated_s(self, sums: Sums, choices: Sequence[Choice]) -> float:
        """The rating by which sums are compared; infinite where memory doesn't suffice."""
        if (sums.table_bytes + self._buffers @ sums.loads > self._room).any():
            return float("inf")
        types = {choice.message_type for choice in choices}
        return rated(self._step_cost(sums, choices), types)

    def _step_cost(self, sums: Sums, choices: Sequence[Choice]) -> StepCost:
        types = {choice.message_type for choice in choices} - {""}
        loads = Loads(self._group.num_ranks, types=types)
        loads.values += np.maximum(sums.loads, 0.0)
        return self._space.setting.step_cost(loads)

    def _tries(self, table: int, others: Sums) -> Iterator[tuple[Choice, RanksOf]]:
        """All choices, on the ranks or hosts that have least to do beside a table."""
        busy = self.prices @ others.loads
        hosts = np.arange(len(busy)) // self._group.ranks_per_host
        busy_hosts = np.bincount(hosts, busy)
        by_rank = np.argsort(busy, kind="stable")
        # Ranks of a host share its link.
        by_host = np.lexsort((busy, busy_hosts[hosts]))
        first = int(busy_hosts.argmin()) * self._group.ranks_per_host
        for choice in self._space.choices[table]:
            if not choice.is_free:
                yield choice, ()
            elif choice.is_on_host:
                yield choice, tuple(range(first, first + self._group.ranks_per_host))
            else:
                parts = np.arange(choice.column_shards) % len(busy)
                orders = (tuple(order[parts].tolist()) for order in (by_rank, by_host))
                yield from ((choice, ranks) for ranks in dict.fromkeys(orders))
