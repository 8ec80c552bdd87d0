"""Samples with the same ids on one rank, without making any rank slower than agreed. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from torchrec_2dsp.samples.deal import Ranks


@dataclass(frozen=True)
class SampleIds:
    """The ids of all samples, one sample after the other."""

    ids: npt.NDArray[np.int64]
    """All ids; equal numbers mean equal rows."""

    lengths: npt.NDArray[np.int64]
    """How many ids each sample has."""

    def num_distinct(self, ranks: Ranks) -> int:
        """How many distinct ids the ranks have, added up over the ranks."""
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
    """Let samples of about equal cost change places, so that ranks need fewer distinct ids.

    Samples are sorted by cost and cut into blocks in which costs differ by at most ``tolerance``.
    Each block keeps its places on the ranks; its samples are put, one after the other, to where
    most of their ids are already. So no rank's load grows by more than ``tolerance``.

    Args:
        ranks: the balanced deal, which isn't changed.
        costs: of the samples.
        samples: their ids.
        num_ranks: how many ranks there are.
        tolerance: by which share costs in a block may differ.

    Returns:
        The rank of each sample, those given if they need no more distinct ids.

    Example:
        >>> import numpy as np
        >>> from torchrec_2dsp.samples.shared_ids import SampleIds, bring_together
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
    """The ids that several samples share, numbered through, the rarest first.

    An id that occurs once is needed by one rank in any case, and one that occurs in very many
    samples is needed by all.
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
    """Samples by cost, in blocks whose costs differ by at most this share."""
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
    """Put the samples of a block to where their ids are, in as many places as it has on each rank.

    A rank that is nearly full counts for less, or the first rank would get whatever comes first.
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
