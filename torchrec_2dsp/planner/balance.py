"""Deal items to bins so that the fullest has little: largest differencing, then exchanges. Pure.

Reference: N. Karmarkar and R. M. Karp, The differencing method of set partitioning, UC Berkeley
report UCB/CSD 82/113, 1982.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Assignment = NDArray[np.int64]
"""The bin of each item."""

_ROUNDING = 1e-12
_MAX_EXCHANGES_PER_ITEM = 10


@dataclass(frozen=True)
class Items:
    """Things that are dealt to bins."""

    times: Floats
    """The time of each item: what is to be balanced."""

    needs: Floats
    """Bytes that each item needs of each kind of memory."""


@dataclass(frozen=True)
class Bins:
    """The bins to which items are dealt."""

    times: Floats
    """The time that each bin has already."""

    room: Floats
    """Bytes of each kind of memory that each bin has room for."""

    def loads(self, items: Items, assignment: Assignment) -> Floats:
        """The time of each bin."""
        return self.times + np.bincount(assignment, items.times, minlength=len(self.times))

    def left(self, items: Items, assignment: Assignment) -> Floats:
        """The room that is left in each bin, below zero where there is too little."""
        used = np.zeros_like(self.room)
        np.add.at(used, assignment, items.needs)
        return self.room - used


def dealt(items: Items, bins: Bins, start: Assignment | None = None) -> Assignment | None:
    """The most even assignment that is found within memory; `None` where none is.

    Args:
        items: what is dealt.
        bins: where to.
        start: what is to be improved upon; by default what greed finds.
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
    """The longest first, each to the emptiest bin with room for it; `None` where there is none.

    Example:
        >>> import numpy as np
        >>> from torchrec_2dsp.planner.balance import Bins, Items, greedy
        >>> items = Items(np.array([2.0, 3.0, 4.0]), np.ones((3, 1)))
        >>> greedy(items, Bins(np.zeros(2), np.full((2, 1), 2.0))).tolist()
        [1, 1, 0]
    """
    bin_of = np.zeros(len(items.times), dtype=np.int64)
    loads, room = bins.times.astype(np.float64), bins.room.astype(np.float64)
    for item in np.lexsort((-items.needs.sum(axis=1), -items.times)).tolist():
        fits = (room >= items.needs[item]).all(axis=1)
        if not fits.any():
            return None
        place = int(np.where(fits, loads, np.inf).argmin())
        bin_of[item] = place
        loads[place] += items.times[item]
        room[place] -= items.needs[item]
    return bin_of


def largest_differencing(times: Floats, base: Floats) -> Assignment:
    """Karmarkar and Karp's method for any number of bins; memory doesn't count.

    It begins with a partition for each item, in which one bin has it and the others have nothing,
    and joins the two partitions whose bins differ most, the fullest bin of one with the emptiest of
    the other, until there is one.

    Args:
        times: of each item.
        base: what each bin has already.

    Example:
        >>> import numpy as np
        >>> from torchrec_2dsp.planner.balance import largest_differencing
        >>> times = np.array([8.0, 7.0, 6.0, 5.0, 4.0])
        >>> bins = largest_differencing(times, np.zeros(2))
        >>> sorted(np.bincount(bins, times).tolist())
        [14.0, 16.0]
    """
    num_bins = len(base)
    order = np.argsort(-base, kind="stable")
    # Of each partition: its sums, largest first, and what is in each bin, as a tree. The number
    # in between decides ties, the same way everywhere.
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
        (place,) = [part[0] for part in parts if isinstance(part, tuple)]
        bin_of[[part for part in parts if isinstance(part, int)]] = place
    return bin_of


def within_memory(items: Items, bins: Bins, assignment: Assignment) -> Assignment | None:
    """Move items out of bins that lack room, the neediest first; `None` where that fails."""
    moved = assignment.copy()
    room, loads = bins.left(items, moved), bins.loads(items, moved)
    while (room < 0).any():
        full, kind = np.unravel_index(room.argmin(), room.shape)
        there = np.flatnonzero(moved == full)
        neediest = there[items.needs[there, kind].argmax()] if len(there) else -1
        fits = (room >= items.needs[neediest]).all(axis=1)
        if neediest < 0 or not fits.any() or not items.needs[neediest, kind]:
            return None
        target = int(np.where(fits, loads, np.inf).argmin())
        moved[neediest] = target
        room[full] += items.needs[neediest]
        room[target] -= items.needs[neediest]
        loads[full] -= items.times[neediest]
        loads[target] += items.times[neediest]
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
        for item, source, place in ((given, fullest, target), (returned, target, fullest)):
            if item >= 0:
                bin_of[item] = place
                room[source] += items.needs[item]
                room[place] -= items.needs[item]
                loads[source] -= items.times[item]
                loads[place] += items.times[item]
    return bin_of


def _exchanges(
    items: Items, room: Floats, loads: Floats, assignment: Assignment, fullest: int
) -> Iterator[tuple[float, int, int, int]]:
    """The best exchange with each other bin.

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
        # The nearer to half of the gap, the more even.
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
    """Items and the bin's number, which is in a tuple."""
    waiting = [contents]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting.extend(part)
        elif part is not None:
            yield part
