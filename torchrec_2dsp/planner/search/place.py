"""Deal shards to ranks evenly and within memory: largest differencing, then exchanges. Pure.

Reference: N. Karmarkar and R. M. Karp, The differencing method of set partitioning, UC Berkeley
report UCB/CSD 82/113, 1982.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrec_2dsp.cost.loads import Floats
from torchrec_2dsp.cost.model import kept_bytes
from torchrec_2dsp.planner.search.space import Room, Selection, Space

Assignment = NDArray[np.int64]
"""The bin of each item."""

_ROUNDING = 1e-12
_MAX_EXCHANGES_PER_ITEM = 10


def place(
    space: Space, selection: Selection, prices: Floats, room: Room
) -> "list[Sequence[int]] | None":
    """Return ranks for each table's free shards; `None` if memory doesn't suffice.

    Tables within a host are first dealt to hosts, then their shards to ranks. ``prices`` for
    `LOADS` determine how long a shard keeps its rank busy.
    """
    choices = space.chosen(selection)
    is_in_host = any(choice.in_host_memory for choice in choices)
    dealing = _Dealing(space, selection, prices, np.array(room if is_in_host else room[:1]))
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
    selection: Selection
    prices: Floats
    room: Floats
    """Bytes of each kind of memory on a rank: its device's, and its host's if it is used."""

    def __post_init__(self) -> None:
        self.choices = self.space.chosen(self.selection)
        self.group = self.space.setting.group
        self.taken = np.zeros((self.group.num_ranks, len(self.room)))
        self.busy = np.zeros(self.group.num_ranks)
        self.ranks: list[Sequence[int]] = [[] for _ in self.choices]

    def kept(self, table: int) -> Floats:
        """Return a table's bytes with buffers: ranks (the first if it is free), kinds of memory."""
        setting = self.space.setting
        placed = self.space.candidates[table].somewhere(self.choices[table], self.group)
        buffers = setting.buffer_bytes @ setting.loads([placed]).values
        on_device, in_host = kept_bytes(placed, self.group.num_ranks)
        by_kind = on_device + buffers, in_host
        return np.stack(by_kind[: len(self.room)], axis=1)

    def parts(self, tables: Sequence[int]) -> tuple[list[int], Floats]:
        """Return each part's table and needed bytes; take the bytes that are on all bins."""
        needs = np.zeros((len(tables), len(self.room)))
        for number, table in enumerate(tables):
            bins, parts = self.kept(table), self.choices[table].num_parts
            if self.choices[table].is_on_host:
                # The fullest rank of each host.
                bins = bins.reshape(self.group.num_hosts, -1, len(self.room)).max(axis=1)
            on_all = bins[-1] if parts < len(bins) else np.zeros(len(self.room))
            needs[number] = (bins.sum(axis=0) - on_all * len(bins)) / parts
            self.taken += on_all
        repeats = [self.choices[table].num_parts for table in tables]
        return np.repeat(tables, repeats).tolist(), np.repeat(needs, repeats, axis=0)

    def to_hosts(self, tables: Sequence[int]) -> bool:
        """Deal tables to hosts; tell whether there is room."""
        if not tables:
            return True  # Hosts may be uneven then.
        num_hosts, per_host = self.group.num_hosts, self.group.ranks_per_host
        parts, needs = self.parts(tables)
        room = (self.room - self.taken).reshape(num_hosts, per_host, -1).min(axis=1)
        host_of = self._dealt(parts, needs, np.zeros(num_hosts), room)
        if host_of is None:
            return False
        for table, host, need in zip(parts, host_of, needs, strict=True):
            busy = self.busy.reshape(num_hosts, per_host)[host]
            ranks = self.choices[table].ranks_on_host(host, busy)
            self.ranks[table] = [*self.ranks[table], *ranks]
            used = np.unique(ranks)
            self.taken[used] += need
            self.busy[used] += self._seconds(table) * per_host / len(used)
        return True

    def to_ranks(self, tables: Sequence[int]) -> bool:
        """Deal shards to ranks; tell whether there is room."""
        parts, needs = self.parts(tables)
        rank_of = self._dealt(parts, needs, self.busy, self.room - self.taken)
        if rank_of is None:
            return False
        for table, rank in zip(parts, rank_of, strict=True):
            self.ranks[table] = [*self.ranks[table], rank]
        np.add.at(self.taken, rank_of, needs)
        return True

    def _dealt(
        self, tables: Sequence[int], needs: Floats, busy: Floats, room: Floats
    ) -> list[int] | None:
        if not tables:
            return []
        times = np.array([self._seconds(table) for table in tables])
        bin_of = dealt(Items(times, needs), Bins(busy, room))
        return None if bin_of is None else bin_of.tolist()

    def _seconds(self, table: int) -> float:
        """Return the seconds for which a part keeps its rank, or all ranks on its host, busy."""
        choice, loads = self.choices[table], self.space.loads[table, self.selection[table]]
        whole = float(loads @ self.prices) * self.group.num_ranks / choice.num_parts
        return whole / (self.group.ranks_per_host if choice.is_on_host else 1)


@dataclass(frozen=True)
class Items:
    """Items to deal to bins."""

    times: Floats
    """Each item's time, which is to be balanced."""

    needs: Floats
    """Each item's needed bytes: items, kinds of memory."""


@dataclass(frozen=True)
class Bins:
    """The bins to which items are dealt."""

    times: Floats
    """Each bin's time so far."""

    room: Floats
    """Each bin's room in bytes: bins, kinds of memory."""

    def loads(self, items: Items, assignment: Assignment) -> Floats:
        """Return each bin's time."""
        return self.times + np.bincount(assignment, items.times, minlength=len(self.times))

    def left(self, items: Items, assignment: Assignment) -> Floats:
        """Return the room left in each bin, negative if there is too little."""
        used = np.zeros_like(self.room)
        np.add.at(used, assignment, items.needs)
        return self.room - used


def dealt(items: Items, bins: Bins, start: Assignment | None = None) -> Assignment | None:
    """Return the most even assignment within memory; `None` if none is found.

    ``start`` is an assignment to improve on, by default the greedy one.
    """
    start = greedy(items, bins) if start is None else start
    differenced = within_memory(items, bins, largest_differencing(items.times, bins.times))
    assignments = [
        improved(items, bins, candidate)
        for candidate in (start, differenced)
        if candidate is not None
    ]
    return min(
        assignments, key=lambda assignment: float(bins.loads(items, assignment).max()), default=None
    )


def greedy(items: Items, bins: Bins) -> Assignment | None:
    """Deal the longest items first, each to the emptiest bin with room; `None` if there is none."""
    bin_of = np.zeros(len(items.times), dtype=np.int64)
    loads, room = bins.times.astype(np.float64), bins.room.astype(np.float64)
    for item in np.lexsort((-items.needs.sum(axis=1), -items.times)).tolist():
        fits = (room >= items.needs[item]).all(axis=1)
        if not fits.any():
            return None
        target = int(np.where(fits, loads, np.inf).argmin())
        bin_of[item] = target
        loads[target] += items.times[item]
        room[target] -= items.needs[item]
    return bin_of


def largest_differencing(times: Floats, base: Floats) -> Assignment:
    """Partition by Karmarkar and Karp's method for any number of bins, ignoring memory.

    It begins with a partition for each item, in which one bin has it and the others have nothing.
    It joins the two partitions whose bins differ most, the fullest bin of one with the emptiest of
    the other, until only one is left. ``base`` is each bin's time so far.

    Example:
        >>> import numpy as np
        >>> from torchrec_2dsp.planner.search.place import largest_differencing
        >>> times = np.array([8.0, 7.0, 6.0, 5.0, 4.0])
        >>> bins = largest_differencing(times, np.zeros(2))
        >>> sorted(np.bincount(bins, times).tolist())
        [14.0, 16.0]
    """
    num_bins = len(base)
    order = np.argsort(-base, kind="stable")
    # A partition has sums, largest first, and each bin's contents, as a tree. The number in
    # between breaks ties, the same way everywhere.
    heap: list[tuple[float, int, Floats, list[Any]]] = [
        (-float(base.max() - base.min()), -1, base[order], [(int(place),) for place in order])
    ]
    for number, time in enumerate(times.tolist()):
        sums = np.zeros(num_bins)
        sums[0] = time
        spread = time if num_bins > 1 else 0.0
        heap.append((-spread, number, sums, [number] + [None] * (num_bins - 1)))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, more, more_bins = heapq.heappop(heap)
        _, number, less, less_bins = heapq.heappop(heap)
        sums = more + less[::-1]
        order = np.argsort(-sums, kind="stable")
        joined = [[more_bins[place], less_bins[num_bins - 1 - place]] for place in order]
        sums = sums[order]
        heapq.heappush(heap, (float(sums[-1] - sums[0]), number, sums, joined))
    bin_of = np.zeros(len(times), dtype=np.int64)
    for contents in heap[0][3]:
        parts = list(_leaves(contents))
        (target,) = [part[0] for part in parts if isinstance(part, tuple)]
        bin_of[[part for part in parts if isinstance(part, int)]] = target
    return bin_of


def within_memory(items: Items, bins: Bins, assignment: Assignment) -> Assignment | None:
    """Move items out of bins that lack room, neediest first; return `None` if that fails."""
    moved = assignment.copy()
    room, loads = bins.left(items, moved), bins.loads(items, moved)
    while (room < 0).any():
        full, kind = np.unravel_index(room.argmin(), room.shape)
        there = np.flatnonzero(moved == full)
        neediest = int(there[items.needs[there, kind].argmax()]) if len(there) else -1
        fits = (room >= items.needs[neediest]).all(axis=1)
        if neediest < 0 or not fits.any() or not items.needs[neediest, kind]:
            return None
        target = int(np.where(fits, loads, np.inf).argmin())
        _move(items, neediest, int(full), target, moved, room, loads)
    return moved


def improved(items: Items, bins: Bins, assignment: Assignment) -> Assignment:
    """Move an item out of the fullest bin, or exchange it for a smaller one, while that helps."""
    bin_of = assignment.copy()
    room, loads = bins.left(items, bin_of), bins.loads(items, bin_of)
    for _ in range(_MAX_EXCHANGES_PER_ITEM * len(bin_of)):
        fullest = int(loads.argmax())
        best = min(
            _exchanges(items, room, loads, bin_of, fullest),
            default=None,
            key=lambda exchange: exchange[0],
        )
        if best is None or best[0] >= loads[fullest] * (1 - _ROUNDING):
            break
        _, given, returned, target = best
        _move(items, given, fullest, target, bin_of, room, loads)
        if returned >= 0:
            _move(items, returned, target, fullest, bin_of, room, loads)
    return bin_of


def _move(
    items: Items,
    item: int,
    source: int,
    target: int,
    bin_of: Assignment,
    room: Floats,
    loads: Floats,
) -> None:
    """Move an item between bins, in place."""
    bin_of[item] = target
    room[source] += items.needs[item]
    room[target] -= items.needs[item]
    loads[source] -= items.times[item]
    loads[target] += items.times[item]


def _exchanges(
    items: Items, room: Floats, loads: Floats, assignment: Assignment, fullest: int
) -> Iterator[tuple[float, int, int, int]]:
    """Yield the best exchange with each other bin.

    Each is the higher of both loads afterwards, the item that goes there, the item that comes back
    (-1 for nothing), and the bin.
    """
    movable = np.flatnonzero(assignment == fullest)
    for target in np.argsort(loads, kind="stable").tolist():
        gap = loads[fullest] - loads[target]
        if target == fullest or gap <= 0:
            continue
        theirs = np.append(np.flatnonzero(assignment == target), -1)
        times = np.append(items.times, 0.0)[theirs]
        needs = np.vstack([items.needs, np.zeros(items.needs.shape[1])])[theirs]
        change = items.times[movable][:, None] - times[None, :]
        more = items.needs[movable][:, None, :] - needs[None, :, :]
        fits = ((room[target] >= more) & (room[fullest] >= -more)).all(axis=2)
        # The closer to half of the gap, the more even.
        height = np.where(fits & (change > 0), np.maximum(gap - change, change), np.inf)
        if height.size == 0 or not np.isfinite(height.min()):
            continue
        given, returned = np.unravel_index(height.argmin(), height.shape)
        yield (
            float(loads[target] + height[given, returned]),
            int(movable[given]),
            int(theirs[returned]),
            target,
        )


def _leaves(contents: Any) -> Iterator[Any]:
    """Yield items, and the bin's number, which is in a tuple."""
    waiting = [contents]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting.extend(part)
        elif part is not None:
            yield part
