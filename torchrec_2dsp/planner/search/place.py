"""Find ranks for the shards of a selection, evenly and within memory. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchrec_2dsp.cost.memory import buffer_weights, table_bytes
from torchrec_2dsp.cost.table_loads import Placed
from torchrec_2dsp.planner.balance import Bins, Items, dealt
from torchrec_2dsp.planner.search.choices import Choice
from torchrec_2dsp.planner.search.space import Floats, Selection, Space


def place(
    space: Space, selection: Selection, prices: Floats, room: float
) -> "list[Sequence[int]] | None":
    """Ranks of each table's shards, where they are free; `None` where memory doesn't suffice.

    Tables that lie on a host are dealt to hosts first, then shards to ranks.

    Args:
        space: what was chosen from.
        selection: the choices.
        prices: of `LOADS`, which say how long a shard keeps its rank busy.
        room: bytes that a rank has.
    """
    setting, choices = space.setting, space.chosen(selection)
    buffers = buffer_weights(setting)
    dealing = _Dealing(space, choices, prices, room - float(buffers @ space.sum_of(selection)))
    for table, choice in enumerate(choices):
        if not choice.is_free:
            dealing.taken += dealing.bytes_of(table, range(setting.group.num_ranks))
    on_hosts = [table for table, one in enumerate(choices) if one.is_on_host]
    on_ranks = [table for table, one in enumerate(choices) if one.is_free and not one.is_on_host]
    if not dealing.to_hosts(on_hosts) or not dealing.to_ranks(on_ranks):
        return None
    return None if (dealing.taken > dealing.room).any() else dealing.ranks


def placed(space: Space, selection: Selection, ranks: Sequence[Sequence[int]]) -> list[Placed]:
    """Tables as a selection and their ranks say."""
    group = space.setting.group
    return [
        candidate.placed(choice, some, group)
        for candidate, choice, some in zip(
            space.candidates, space.chosen(selection), ranks, strict=True
        )
    ]


@dataclass
class _Dealing:
    """What is on which rank so far."""

    space: Space
    choices: Sequence[Choice]
    prices: Floats
    room: float

    def __post_init__(self) -> None:
        self.taken = np.zeros(self.space.setting.group.num_ranks)
        self.busy = np.zeros(self.space.setting.group.num_ranks)
        self.ranks: list[Sequence[int]] = [[] for _ in self.choices]

    def bytes_of(self, table: int, ranks: Sequence[int]) -> Floats:
        """What each rank keeps of a table."""
        group = self.space.setting.group
        one = self.space.candidates[table].placed(self.choices[table], ranks, group)
        return table_bytes(one, group.num_ranks)

    def to_hosts(self, tables: Sequence[int]) -> bool:
        """Whether there is a host for each."""
        if not tables:
            return True  # Hosts may be uneven then.
        group = self.space.setting.group
        on_host = range(group.ranks_per_host)
        needs = [float(self.bytes_of(table, on_host)[0]) for table in tables]
        hosts = np.zeros(group.num_hosts)
        left = (self.room - self.taken).reshape(group.num_hosts, -1).min(axis=1)
        found = self._dealt(tables, np.array(needs), hosts, left)
        if found is None:
            return False
        for table, host in zip(tables, found, strict=True):
            first = host * group.ranks_per_host
            self.ranks[table] = range(first, first + group.ranks_per_host)
            self.taken += self.bytes_of(table, self.ranks[table])
            self.busy[first : first + group.ranks_per_host] += self._seconds(table)
        return True

    def to_ranks(self, tables: Sequence[int]) -> bool:
        """Whether there is a rank for each of their shards."""
        shards = [table for table in tables for _ in range(self.choices[table].column_shards)]
        needs = [
            float(self.bytes_of(table, [0] * self.choices[table].column_shards)[0])
            / self.choices[table].column_shards
            for table in shards
        ]
        found = self._dealt(shards, np.array(needs), self.busy, self.room - self.taken)
        if found is None:
            return False
        for table, rank in zip(shards, found, strict=True):
            self.ranks[table] = [*self.ranks[table], rank]
        np.add.at(self.taken, found, needs)
        return True

    def _dealt(
        self, tables: Sequence[int], needs: Floats, busy: Floats, left: Floats
    ) -> list[int] | None:
        if not tables:
            return []
        times = np.array([self._seconds(table) for table in tables])
        found = dealt(Items(times, needs[:, None]), Bins(busy, left[:, None]))
        return None if found is None else found.tolist()

    def _seconds(self, table: int) -> float:
        """For which a shard keeps its rank busy, or its ranks if it has a host."""
        group, choice = self.space.setting.group, self.choices[table]
        number = list(self.space.choices[table]).index(choice)
        whole = float(self.space.loads[table, number] @ self.prices) * group.num_ranks
        return whole / (group.ranks_per_host if choice.is_on_host else choice.column_shards)
