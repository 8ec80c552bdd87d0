"""`deal_samples`: samples for ranks, by cost, speed and shared ids. Pure."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from torchrec_2dsp.errors import ConfigError, InputError


def share_samples(num_samples: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return each rank's number of samples: in proportion to speeds, at least one.

    Example:
        >>> from torchrec_2dsp.samples.deal import share_samples
        >>> share_samples(16, [1.0, 1.0, 0.5, 1.0])
        (5, 5, 2, 4)
    """
    num_ranks = len(speeds)
    if num_samples < num_ranks:
        raise ConfigError(
            f"{num_samples} samples can't be shared by {num_ranks} ranks; each needs at least one"
        )
    check_speeds(speeds)
    # Shares beyond the one that each rank has anyway, so that no share falls below it.
    total = sum(speeds)
    exact = [max(1.0, num_samples * speed / total) for speed in speeds]
    counts = [int(share) for share in exact]
    while (missing := num_samples - sum(counts)) != 0:
        # The rank that is farthest below its share gets one more, or farthest above one less.
        step = 1 if missing > 0 else -1
        gaps = [step * (share - count) for share, count in zip(exact, counts, strict=True)]
        eligible = [rank for rank in range(num_ranks) if counts[rank] + step >= 1]
        best = max(eligible, key=lambda rank: (gaps[rank], -rank))
        counts[best] += step
    return tuple(counts)


def check_speeds(speeds: Sequence[float]) -> None:
    """Refuse speeds that aren't finite and above 0."""
    wrong = [speed for speed in speeds if not (np.isfinite(speed) and speed > 0)]
    if wrong:
        raise ConfigError(f"rank_speeds: {wrong[0]!r} is no speed; use finite numbers above 0")


class RankSpeeds:
    """Each rank's speed, by its batches' costs and computing times.

    All ranks get the same numbers, so they compute the same speeds.

    Example:
        >>> from torchrec_2dsp.samples.deal import RankSpeeds
        >>> speeds = RankSpeeds(2, smoothing=0.5)
        >>> speeds.update([8.0, 8.0], [0.1, 0.2])
        >>> [round(speed, 3) for speed in speeds.speeds()]
        [1.333, 0.667]
    """

    def __init__(self, num_ranks: int, smoothing: float) -> None:
        self._keep = 1 - smoothing
        self._costs, self._seconds = [0.0] * num_ranks, [0.0] * num_ranks

    def update(self, costs: Sequence[float], seconds: Sequence[float]) -> None:
        """Add each rank's cost and time; a rank's zeros are ignored."""
        for rank, (cost, time) in enumerate(zip(costs, seconds, strict=True)):
            if cost > 0 and time > 0:
                self._costs[rank] = self._keep * self._costs[rank] + cost
                self._seconds[rank] = self._keep * self._seconds[rank] + time

    def speeds(self) -> list[float]:
        """Return the speeds, 1 on average; unknown ranks have the average speed."""
        rates = [
            cost / time if time else 0.0
            for cost, time in zip(self._costs, self._seconds, strict=True)
        ]
        heard = [rate for rate in rates if rate]
        mean = sum(heard) / len(heard) if heard else 1.0
        return [rate / mean if rate else 1.0 for rate in rates]


Lengths = torch.Tensor | npt.NDArray[np.int64] | Sequence[int]
"""Each sample's length."""


@dataclass(frozen=True, kw_only=True)
class SampleCost:
    """A sample's cost: a term linear in its length, and a quadratic one.

    Attention over a history is quadratic in its length; lookups and dense layers are linear. Only
    ratios count.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> tdsp.SampleCost(linear=2.0, quadratic=0.5).of([0, 1, 4])
        tensor([ 0.0000,  2.5000, 16.0000], dtype=torch.float64)
    """

    linear: float = 1.0
    """The cost per element."""

    quadratic: float = 0.0
    """The cost per pair of elements."""

    def __post_init__(self) -> None:
        numbers = (self.linear, self.quadratic)
        if not all(np.isfinite(number) and number >= 0 for number in numbers) or not any(numbers):
            raise ConfigError(
                f"SampleCost(linear={self.linear}, quadratic={self.quadratic}) is no cost; use "
                "numbers of 0 or more, at least one of them above 0"
            )

    def of(self, lengths: Lengths) -> torch.Tensor:
        """Return each sample's cost, in float64."""
        exact = torch.as_tensor(lengths).double()
        return self.linear * exact + self.quadratic * exact.square()

    @classmethod
    def fit(cls, lengths_per_step: Sequence[Lengths], seconds: Sequence[float]) -> "SampleCost":
        """Fit the cost to measured steps, by non-negative least squares.

        The constant part of a step's time is fitted beside it and left out.

        Args:
            lengths_per_step: the lengths of the samples in each step of one rank.
            seconds: each step's computing time.

        Raises:
            ConfigError: there are fewer than three steps, or time doesn't grow with lengths.

        Example:
            >>> import torchrec_2dsp as tdsp
            >>> steps = [[1, 2], [4, 4], [8, 1], [16, 2]]
            >>> seconds = [0.1 + sum(0.02 * n + 0.001 * n * n for n in step) for step in steps]
            >>> cost = tdsp.SampleCost.fit(steps, seconds)
            >>> round(cost.linear, 6), round(cost.quadratic, 6)
            (0.02, 0.001)
        """
        # SciPy takes long to import, and only this needs it.
        from scipy.optimize import nnls

        if len(lengths_per_step) != len(seconds) or len(seconds) < 3:
            raise ConfigError(
                f"SampleCost.fit() got the lengths of {len(lengths_per_step)} steps and "
                f"{len(seconds)} times; give as many of both, at least 3"
            )
        steps = [torch.as_tensor(lengths).double() for lengths in lengths_per_step]
        sums = np.array([[1.0, float(n.sum()), float(n.square().sum())] for n in steps])
        times = np.asarray(seconds, dtype=np.float64)
        if not np.isfinite(times).all():
            raise ConfigError("SampleCost.fit() got a time that is not finite; leave that step out")
        # Columns of about one size, which the solver's tolerance is made for.
        scales = np.maximum(sums.max(axis=0), 1.0)
        solution, _ = nnls(sums / scales, times)
        _, linear, quadratic = solution / scales
        if linear == quadratic == 0:
            raise ConfigError(
                "SampleCost.fit() found no cost: these steps don't take longer with the lengths of "
                "their samples; measure more steps, of other lengths"
            )
        return cls(linear=float(linear), quadratic=float(quadratic))


Ranks = npt.NDArray[np.int64]
"""Each sample's rank."""

_SCALE = 2**30
"""The largest cost as a whole number. Sums of whole numbers are exact, so all ranks deal alike,
whatever their processors."""
_GOOD_ENOUGH = 1e-4
"""Swapping ends when the slowest rank is within this share of the mean."""


def deal_samples(
    costs: Sequence[float] | npt.NDArray[np.float64],
    num_ranks: int,
    speeds: Sequence[float] | None = None,
) -> Ranks:
    """Give each sample a rank: equal numbers of samples, and costs as equal as possible.

    The most expensive samples go first, each to the least loaded rank with room. Then samples of
    the slowest rank are swapped for cheaper ones from others, as long as that helps. With equal
    speeds and numbers of samples, final loads differ by at most as much as two samples do.

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
    """Return each rank's total cost."""
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
    """Return the swap that makes the slower of two ranks fastest, or `None`."""
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


@dataclass(frozen=True)
class SampleIds:
    """All samples' ids, one sample after the other."""

    ids: npt.NDArray[np.int64]
    """Equal numbers mean equal rows."""

    lengths: npt.NDArray[np.int64]
    """The number of ids in each sample."""

    def num_distinct(self, ranks: Ranks) -> int:
        """Return the number of distinct ids per rank, added up over the ranks."""
        _, numbers = np.unique(self.ids, return_inverse=True)
        num_ids = int(numbers.max(initial=-1)) + 1
        return len(np.unique(np.repeat(ranks, self.lengths) * num_ids + numbers))


def bring_together(
    ranks: Ranks,
    costs: npt.NDArray[np.float64],
    samples: SampleIds,
    num_ranks: int,
    tolerance: float,
) -> Ranks:
    """Swap samples with about equal cost, so that ranks need fewer distinct ids.

    Samples are sorted by cost and cut into blocks in which costs differ by at most ``tolerance``.
    Each block keeps its places on the ranks; one after the other, its samples go to the rank that
    has most of their ids already. So no rank's load grows by more than ``tolerance``.

    Example:
        >>> import numpy as np
        >>> from torchrec_2dsp.samples.deal import SampleIds, bring_together
        >>> users = SampleIds(np.array([7, 8, 7, 8]), np.ones(4, dtype=np.int64))
        >>> bring_together(np.array([0, 0, 1, 1]), np.ones(4), users, 2, 0.0).tolist()
        [0, 1, 0, 1]
    """
    shared = _useful(samples, num_ranks)
    starts = np.concatenate([[0], np.cumsum(shared.lengths)])
    together, num_ids = ranks.copy(), int(shared.ids.max(initial=-1)) + 1
    counts = np.zeros((num_ids, num_ranks), dtype=np.int32)
    np.add.at(counts, (shared.ids, np.repeat(together, shared.lengths)), 1)
    ids_of = [shared.ids[start:end] for start, end in pairwise(starts)]
    for block in _blocks(costs, tolerance):
        movable = [sample for sample in block.tolist() if len(ids_of[sample])]
        # Samples that share ids follow each other, so that they find each other's rank.
        movable.sort(key=lambda sample: int(ids_of[sample].min()))
        _place_(movable, together, counts, ids_of)
    return together if samples.num_distinct(together) < samples.num_distinct(ranks) else ranks


def _useful(samples: SampleIds, num_ranks: int) -> SampleIds:
    """Keep the ids that several samples share, renumbered, the rarest first.

    One rank needs an id that occurs once anyway, and all ranks need one in very many samples.
    """
    _, numbers = np.unique(samples.ids, return_inverse=True)
    num_ids, num_samples = int(numbers.max(initial=-1)) + 1, len(samples.lengths)
    owners = np.repeat(np.arange(num_samples), samples.lengths)
    # A sample that has an id twice needs its row once.
    pairs = np.unique(owners * num_ids + numbers)
    owners, numbers = pairs // max(1, num_ids), pairs % max(1, num_ids)
    occurrences = np.bincount(numbers, minlength=num_ids)[numbers]
    is_useful = (occurrences > 1) & (occurrences <= max(2, num_samples // num_ranks))
    by_rarity = numbers[is_useful] + occurrences[is_useful] * num_ids
    _, numbered = np.unique(by_rarity, return_inverse=True)
    return SampleIds(numbered, np.bincount(owners[is_useful], minlength=num_samples))


def _blocks(costs: npt.NDArray[np.float64], tolerance: float) -> Iterator[npt.NDArray[np.int64]]:
    """Sort samples by cost into blocks whose costs differ by at most a share."""
    order = np.argsort(-costs, kind="stable")
    descending = costs[order]
    start = 0
    while start < len(order):
        end = int(np.searchsorted(-descending, -descending[start] / (1 + tolerance), side="right"))
        end = max(end, start + 1)
        if end - start > 1:
            yield order[start:end]
        start = end


def _place_(
    block: list[int],
    together: Ranks,
    counts: npt.NDArray[np.int32],
    ids_of: list[npt.NDArray[np.int64]],
) -> None:
    """Place a block's samples with their ids, keeping its number of places on each rank.

    A nearly full rank counts for less, or the first rank would get whatever comes first.
    """
    places = np.bincount(together[block], minlength=counts.shape[1])
    for sample in block:
        counts[ids_of[sample], together[sample]] -= 1
    free = places.copy()
    for sample in block:
        overlap = np.count_nonzero(counts[ids_of[sample]], axis=0)
        score = np.where(free > 0, (1 + overlap) * (free / np.maximum(places, 1)), -1.0)
        rank = int(score.argmax())
        free[rank] -= 1
        together[sample] = rank
        counts[ids_of[sample], rank] += 1
