"""`Space`: what every choice of every table adds to a step, as one array."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.loads import LOADS, Loads
from torchrec_2dsp.cost.memory import table_bytes
from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.table_loads import message_type
from torchrec_2dsp.plan.parameter_sharding import Exchange
from torchrec_2dsp.planner.balance import Floats
from torchrec_2dsp.planner.search.choices import Candidate, Choice, Family

Selection = NDArray[np.int64]
"""The number of a choice, for each table."""


@dataclass(frozen=True)
class Space:
    """Choices of all tables on one mesh, as if all ranks had an equal part of each.

    Tables come first in all arrays and choices second; where a table has fewer choices than
    another one, the rest is `numpy.inf` in ``bytes_of_rank``.
    """

    setting: CostSetting
    candidates: Sequence[Candidate]
    choices: Sequence[Sequence[Choice]]
    """The choices of each table that the mesh has a use for."""

    families: Sequence[Family]
    """All that there are, TorchRec's own exchange before the others."""

    family_of: NDArray[np.int64]
    """The number of each choice's family."""

    loads: Floats
    """A rank's share of each of `LOADS`: tables, choices, loads."""

    bytes_of_rank: Floats
    """Bytes that a rank keeps in the mean, buffers included."""

    bytes_of_shard: Floats
    """Bytes of the rank that keeps most."""

    _prices: dict[bytes, Floats] = field(default_factory=dict, repr=False, compare=False)
    """Prices by the loads they are for: many sets of families come to the same choices."""

    @classmethod
    def of(
        cls, candidates: Sequence[Candidate], setting: CostSetting, stand_for: float = 1.0
    ) -> "Space":
        """The space of tables that are to be sharded.

        Args:
            candidates: the tables.
            setting: the mesh, and all else that costs depend on.
            stand_for: for how many tables each of them stands.
        """
        group = setting.group
        node_size = setting.mesh.node_group_size(setting.local_world_size)
        is_even = node_size == group.ranks_per_host
        choices = [
            [choice for choice in candidate.choices if choice.suits(group, is_even=is_even)]
            or [choice for choice in candidate.choices if choice.works(is_even=is_even)]
            for candidate in candidates
        ]
        families = list(dict.fromkeys(choice.family for of_table in choices for choice in of_table))
        numbers = {family: number for number, family in enumerate(families)}
        shape = len(candidates), max((len(of_table) for of_table in choices), default=0)
        family_of = np.full(shape, -1)
        loads = np.zeros((*shape, len(LOADS)))
        mean, most = np.full(shape, np.inf), np.full(shape, np.inf)
        buffers = setting.buffer_bytes
        for table, (candidate, of_table) in enumerate(zip(candidates, choices, strict=True)):
            for number, choice in enumerate(of_table):
                placed = candidate.somewhere(choice, group)
                by_rank = table_bytes(placed, group.num_ranks)
                mean_loads = setting.loads([placed]).values.mean(axis=1)
                family_of[table, number] = numbers[choice.family]
                loads[table, number] = mean_loads
                mean[table, number] = by_rank.mean() + buffers @ mean_loads
                most[table, number] = by_rank.max()
        return cls(
            setting,
            candidates,
            choices,
            families,
            family_of,
            loads * stand_for,
            mean * stand_for,
            most,
        )

    def chosen(self, selection: Selection) -> list[Choice]:
        """The choice of each table."""
        return [of_table[number] for of_table, number in zip(self.choices, selection, strict=True)]

    def sum_of(self, selection: Selection) -> Floats:
        """A rank's share of each of `LOADS`."""
        return np.asarray(self.loads[np.arange(len(selection)), selection].sum(axis=0), np.float64)

    def bytes_of(self, selection: Selection) -> float:
        """Bytes that a rank keeps in the mean."""
        return float(self.bytes_of_rank[np.arange(len(selection)), selection].sum())

    def cost_of(self, selection: Selection) -> StepCost:
        """The cost of a step, if all ranks had the same to do."""
        return self._step_cost(self.sum_of(selection), self.types_of(selection))

    def types_of(self, selection: Selection) -> set[str]:
        """The types of the messages that a selection sends."""
        numbers = np.unique(self.family_of[np.arange(len(selection)), selection])
        return {message_type(*self.families[number]) for number in numbers.tolist()}

    def in_words(self, selection: Selection) -> str:
        """How many tables a selection shards in which way."""
        chosen = self.family_of[np.arange(len(selection)), selection]
        numbers, counts = np.unique(chosen, return_counts=True)
        ways = []
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            kind, exchange, transport = self.families[number]
            rows = "" if exchange is Exchange.POOLED else f", {exchange.value} exchange"
            short = "" if transport is Transport.FP32 else f" in {transport.value}"
            ways.append(f"{count:,} {kind.value.replace('_', '-')}{rows}{short}")
        return "; ".join(ways)

    def step_cost(self, of_rank: Floats, choices: Iterable[Choice]) -> StepCost:
        """The cost of a step if all ranks had ``of_rank`` to do.

        Args:
            of_rank: of each of `LOADS`.
            choices: of all tables.
        """
        return self._step_cost(of_rank, {choice.message_type for choice in choices})

    def prices(self, of_rank: Floats) -> Floats:
        """Seconds that one unit more of each of `LOADS` takes, for ranks with ``of_rank`` to do.

        What is paid once, for the first unit of its kind, isn't in them.
        """
        return np.maximum(self.prices_by_part(of_rank).sum(axis=1), 0.0)

    def prices_by_part(self, of_rank: Floats) -> Floats:
        """The prices of all loads, apart for each part of `StepCost`: loads, parts."""
        prices = self._prices.get(of_rank.tobytes())
        if prices is None:
            prices = self._prices[of_rank.tobytes()] = self._found_prices(of_rank)
            prices.setflags(write=False)
        return prices

    def _found_prices(self, of_rank: Floats) -> Floats:
        steps = np.where(of_rank > 0, of_rank, self._typical()) * _STEP
        start = np.maximum(of_rank, steps)
        types = {message_type(*family) for family in self.families}
        base = _parts_of(self._step_cost(start, types))
        prices = np.zeros((len(LOADS), len(base)))
        for number in np.flatnonzero(steps):
            more = start.copy()
            more[number] += steps[number]
            prices[number] = (_parts_of(self._step_cost(more, types)) - base) / steps[number]
        return prices

    @cached_property
    def first_prices(self) -> Floats:
        """The prices for ranks that have nothing to do yet."""
        return self.prices(np.zeros(len(LOADS)))

    def _step_cost(self, of_rank: Floats, types: set[str]) -> StepCost:
        loads = Loads.even(self.setting.group.num_ranks, of_rank, types - {""})
        return self.setting.step_cost(loads)

    def _typical(self) -> Floats:
        return np.asarray(self.loads.max(axis=(0, 1), initial=0.0), np.float64)


_STEP = 0.01
"""The share of a load by which it is raised to find its price."""


def _parts_of(cost: StepCost) -> Floats:
    return np.array([seconds for _, seconds in cost.parts()])
