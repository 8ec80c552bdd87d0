"""`deal_samples`: samples for ranks, so that none has more to compute than others. Pure."""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_2dsp.errors import InputError
from torchrec_2dsp.samples.shares import share_samples

Ranks = npt.NDArray[np.int64]
"""The rank of each sample."""

_SCALE = 2**30
"""The largest cost as a whole number. Sums of whole numbers are exact, so all ranks deal alike,
whatever their processors."""
_GOOD_ENOUGH = 1e-4
"""The slowest rank may take longer than the mean by this share; then nobody looks on."""


def deal_samples(
    costs: Sequence[float] | npt.NDArray[np.float64],
    num_ranks: int,
    speeds: Sequence[float] | None = None,
) -> Ranks:
    """Give each sample a rank: equal numbers of samples, costs as equal as can be.

    The most expensive samples are dealt first, each to the rank that has least to do and room. Then
    samples of the slowest rank are swapped for cheaper ones of others, as long as that helps. With
    equal speeds and numbers of samples, loads differ in the end by no more than two samples do.

    Args:
        costs: of the samples, 0 or more.
        num_ranks: how many ranks there are, at most as many as samples.
        speeds: of the ranks; faster ones get more samples, and more to compute.

    Returns:
        The rank of each sample.

    Example:
        >>> from torchrec_2dsp.samples.deal import deal_samples
        >>> deal_samples([9, 1, 1, 1, 2, 2, 8, 1], 2).tolist()
        [0, 1, 0, 1, 1, 0, 1, 0]
    """
    given = np.asarray(costs, dtype=np.float64)
    if given.size and not (np.isfinite(given).all() and given.min() >= 0):
        raise InputError("a sample's cost is negative or not finite; costs are 0 or more")
    speeds = [1.0] * num_ranks if speeds is None else list(speeds)
    counts = share_samples(len(given), speeds)
    largest = given.max(initial=0.0)
    whole = np.rint(given / largest * _SCALE).astype(np.int64) if largest else given.astype(int)
    ranks = _dealt_greedily(whole, counts, speeds)
    _swap_(ranks, whole, np.asarray(speeds))
    return ranks


def loads_of(ranks: Ranks, costs: npt.NDArray[np.float64], num_ranks: int) -> list[float]:
    """What each rank has to compute."""
    return np.bincount(ranks, weights=costs, minlength=num_ranks).tolist()


def _dealt_greedily(
    costs: npt.NDArray[np.int64], counts: Sequence[int], speeds: Sequence[float]
) -> Ranks:
    ranks = np.zeros(len(costs), dtype=np.int64)
    loads, room = [0] * len(counts), list(counts)
    heap = [(0.0, rank) for rank in range(len(counts))]
    for sample in np.argsort(-costs, kind="stable").tolist():
        _, rank = heapq.heappop(heap)
        ranks[sample] = rank
        loads[rank] += int(costs[sample])
        room[rank] -= 1
        if room[rank]:
            heapq.heappush(heap, (loads[rank] / speeds[rank], rank))
    return ranks


def _swap_(ranks: Ranks, costs: npt.NDArray[np.int64], speeds: npt.NDArray[np.float64]) -> None:
    """Swap samples of the slowest rank, in place, until no swap makes it faster."""
    loads = np.zeros(len(speeds), dtype=np.int64)
    np.add.at(loads, ranks, costs)
    mean = int(loads.sum()) / sum(speeds.tolist())
    while True:
        times = loads / speeds
        slowest = int(times.argmax())
        if times[slowest] <= mean * (1 + _GOOD_ENOUGH):
            return
        for other in np.argsort(times, kind="stable").tolist():
            pair = _best_pair(ranks, costs, speeds, loads, slowest, other)
            if pair is not None:
                break
        else:
            return
        own, theirs = pair
        difference = costs[own] - costs[theirs]
        loads[slowest] -= difference
        loads[other] += difference
        ranks[own], ranks[theirs] = other, slowest


def _best_pair(
    ranks: Ranks,
    costs: npt.NDArray[np.int64],
    speeds: npt.NDArray[np.float64],
    loads: npt.NDArray[np.int64],
    slowest: int,
    other: int,
) -> tuple[int, int] | None:
    """Two samples that make the slower of two ranks fastest if swapped; `None` if none do."""
    if other == slowest:
        return None
    own, theirs = np.flatnonzero(ranks == slowest), np.flatnonzero(ranks == other)
    theirs = theirs[np.argsort(costs[theirs], kind="stable")]
    ideal = (loads[slowest] * speeds[other] - loads[other] * speeds[slowest]) / (
        speeds[slowest] + speeds[other]
    )
    places = np.searchsorted(costs[theirs], costs[own] - ideal)
    best_time, best = loads[slowest] / speeds[slowest], None
    for near in (places - 1, places):
        near = near.clip(0, len(theirs) - 1)
        moved = costs[own] - costs[theirs[near]]
        times = np.maximum(
            (loads[slowest] - moved) / speeds[slowest], (loads[other] + moved) / speeds[other]
        )
        place = int(times.argmin())
        if times[place] < best_time:
            best_time, best = times[place], (int(own[place]), int(theirs[near[place]]))
    return best
