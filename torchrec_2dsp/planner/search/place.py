"""Find ranks for the shards of a selection, evenly and within memory. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchrec_2dsp.cost.memory import table_bytes
from torchrec_2dsp.planner.balance import Bins, Floats, Items, dealt
from torchrec_2dsp.planner.search.choices import Choice
from torchrec_2dsp.planner.search.space import Selection, Space


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
    choices = space.chosen(selection)
    dealing = _Dealing(space, choices, prices, room)
    for table, choice in enumerate(choices):
        if not choice.is_free:
            dealing.taken += dealing.kept(table)
    on_hosts = [table for table, choice in enumerate(choices) if choice.is_on_host]
    on_ranks = [
        table for table, choice in enumerate(choices) if choice.is_free and not choice.is_on_host
    ]
    if not dealing.to_hosts(on_hosts) or not dealing.to_ranks(on_ranks):
        return None
    return None if (dealing.taken > dealing.room).any() else dealing.ranks


@dataclass
class _Dealing:
    """The ranks' tables, times and memory while shards are dealt."""

    space: Space
    choices: Sequence[Choice]
    prices: Floats
    room: float

    def __post_init__(self) -> None:
        self.taken = np.zeros(self.space.setting.group.num_ranks)
        self.busy = np.zeros(self.space.setting.group.num_ranks)
        self.ranks: list[Sequence[int]] = [[] for _ in self.choices]
        self.buffers = self.space.setting.buffer_bytes

    def kept(self, table: int) -> Floats:
        """The bytes of a table on each rank, buffers included, on the first ranks if it is free."""
        setting = self.space.setting
        placed = self.space.candidates[table].somewhere(self.choices[table], setting.group)
        return table_bytes(placed, setting.group.num_ranks) + (
            self.buffers @ setting.loads([placed]).values
        )

    def needs(self, tables: Sequence[int]) -> list[float]:
        """The bytes of a shard's ranks beyond those of all ranks, which are counted here."""
        needs: list[float] = []
        for table in tables:
            by_rank, shards = self.kept(table), self.choices[table].column_shards
            on_all = float(by_rank[-1]) if shards < len(by_rank) else 0.0
            if not self.choices[table].is_on_host and shards > 1:
                needs.append(float(by_rank.sum() - on_all * len(by_rank)) / shards)
            else:
                needs.append(float(by_rank[0]) - on_all)
            self.taken += on_all
        return needs

    def to_hosts(self, tables: Sequence[int]) -> bool:
        """Whether there is a host for each."""
        if not tables:
            return True  # Hosts may be uneven then.
        group = self.space.setting.group
        needs = self.needs(tables)
        hosts = np.zeros(group.num_hosts)
        room = (self.room - self.taken).reshape(group.num_hosts, -1).min(axis=1)
        host_of = self._dealt(tables, np.array(needs), hosts, room)
        if host_of is None:
            return False
        for table, host, need in zip(tables, host_of, needs, strict=True):
            first = host * group.ranks_per_host
            self.ranks[table] = range(first, first + group.ranks_per_host)
            self.taken[first : first + group.ranks_per_host] += need
            self.busy[first : first + group.ranks_per_host] += self._seconds(table)
        return True

    def to_ranks(self, tables: Sequence[int]) -> bool:
        """Whether there is a rank for each of their shards."""
        parts = [self.choices[table].column_shards for table in tables]
        shards = np.repeat(tables, parts).tolist()
        needs = np.repeat(self.needs(tables), parts).tolist()
        rank_of = self._dealt(shards, np.array(needs), self.busy, self.room - self.taken)
        if rank_of is None:
            return False
        for table, rank in zip(shards, rank_of, strict=True):
            self.ranks[table] = [*self.ranks[table], rank]
        np.add.at(self.taken, rank_of, needs)
        return True

    def _dealt(
        self, tables: Sequence[int], needs: Floats, busy: Floats, room: Floats
    ) -> list[int] | None:
        if not tables:
            return []
        times = np.array([self._seconds(table) for table in tables])
        bin_of = dealt(Items(times, needs[:, None]), Bins(busy, room[:, None]))
        return None if bin_of is None else bin_of.tolist()

    def _seconds(self, table: int) -> float:
        """Seconds for which a shard keeps its rank busy, or its ranks if it has a host."""
        group, choice = self.space.setting.group, self.choices[table]
        number = list(self.space.choices[table]).index(choice)
        whole = float(self.space.loads[table, number] @ self.prices) * group.num_ranks
        return whole / (group.ranks_per_host if choice.is_on_host else choice.column_shards)
