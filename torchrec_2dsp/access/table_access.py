"""`TableAccess`: one table's lookups, and `HotSet`: the rows that every rank holds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from torchrec_2dsp.errors import ConfigError, PlanError

_ALIKE = 1e-3
"""Counts within this share of each other are taken as their mean, which changes no sum over rows by
more than the square of it."""


@dataclass(frozen=True, eq=False)
class TableAccess:
    """The lookups of one table in a log.

    Every row that was looked up is *known*, with its count, unless the table had too many of them
    to count. Then the most used ones are known, and the others are the *tail*.

    Example:
        Ten lookups of three rows.

        >>> import numpy as np
        >>> from torchrec_2dsp.access.table_access import TableAccess
        >>> table = TableAccess.of_counts(np.array([0, 7, 0, 2, 1]), num_samples=5)
        >>> table.rows
        array([1, 3, 4])
        >>> table.share_of(1), table.rows_for(0.8)
        (0.7, 2)
        >>> round(table.expected_distinct(2), 3)
        1.511
    """

    num_rows: int
    """The table's number of rows."""

    num_samples: float
    """The number of samples in the log."""

    rows: NDArray[np.int64]
    """The known rows, the most used first."""

    counts: NDArray[np.float64]
    """A lower bound for each known row's lookups; not integers if old lookups count less."""

    tail_rows: int = 0
    """An estimate of how many other rows were looked up."""

    tail_lookups: float = 0.0
    """The tail's lookups, with those that the counts of known rows lack."""

    max_error: float = 0.0
    """The largest error of a known row's count; no row of the tail was looked up more often."""

    @classmethod
    def of_counts(cls, counts: ArrayLike, num_samples: float) -> "TableAccess":
        """Build the statistics from a count for each row."""
        by_row = np.asarray(counts, dtype=np.float64)
        rows = by_row.nonzero()[0]
        return cls.of_rows(len(by_row), num_samples, rows, by_row[rows])

    @classmethod
    def of_rows(
        cls,
        num_rows: int,
        num_samples: float,
        rows: NDArray[np.int64],
        counts: NDArray[np.float64],
        **tail: Any,
    ) -> "TableAccess":
        """Build the statistics from some rows' counts, in any order.

        ``tail`` is what is known of the other rows: the fields that have a default.
        """
        # Of rows that are used alike, the first is the hotter one, so that all ranks agree.
        order = np.lexsort((rows, -counts))
        return cls(num_rows, num_samples, rows[order].astype(np.int64), counts[order], **tail)

    @property
    def num_lookups(self) -> float:
        """The number of lookups in the log."""
        return self._shares_end + self.tail_lookups

    @property
    def lookups_per_sample(self) -> float:
        """The mean number of lookups per sample."""
        return self.num_lookups / self.num_samples if self.num_samples else 0.0

    @property
    def num_used_rows(self) -> int:
        """The number of rows that were looked up; with a tail, an estimate."""
        return len(self.rows) + self.tail_rows

    def share_of(self, num_hot: int) -> float:
        """Return a lower bound for the share of lookups that the ``num_hot`` hottest rows take."""
        lookups = self._ascending_shares[: max(0, num_hot)]
        return float(lookups[-1]) / self.num_lookups if len(lookups) else 0.0

    def rows_for(self, share: float) -> int:
        """Return how many of the hottest rows take this share of the lookups."""
        num_lookups = share * self.num_lookups
        # Counts are added up in another order than the wanted share was.
        num_hot = int(np.searchsorted(self._ascending_shares, num_lookups * (1 - 1e-12))) + 1
        if num_hot > len(self.rows):
            counted_share = self.share_of(len(self.rows))
            raise ConfigError(
                f"share={share}: the counted rows take {counted_share:.4g} of the lookups; "
                "ask for less, or count more rows"
            )
        return num_hot

    def expected_distinct(self, num_lookups: float, *, num_hot: int = 0) -> float:
        """Return how many distinct rows so many lookups touch on average.

        Lookups are drawn from the log without putting them back, each as probable as any other;
        so as many lookups as the log has, or more, touch every used row. The rows of a tail count
        as used alike, so that the result is at most too large.

        Args:
            num_lookups: of any rows.
            num_hot: how many of the hottest rows don't count.
        """
        total = self.num_lookups
        if not total or num_lookups <= 0:
            return 0.0
        counts, ends = self._alike
        times = np.diff(np.maximum(ends, num_hot), prepend=num_hot).astype(np.float64)
        if self.tail_rows:
            counts = np.append(counts, self.tail_lookups / self.tail_rows)
            times = np.append(times, self.tail_rows)
        if num_lookups <= total:
            return float(times @ (1 - _absent(counts, num_lookups, total)))
        # With more hot rows than known ones, which of the tail's rows are hot isn't known: those
        # that lookups touch, drawn with putting back, count beside the cold ones.
        touched = float(times @ (1 - (1 - np.minimum(counts / total, 1)) ** num_lookups))
        return max(touched, float(max(0, self.num_used_rows - num_hot)))

    def without(self, num_hot: int) -> "TableAccess":
        """Return the accesses without the ``num_hot`` hottest rows."""
        return replace(self, rows=self.rows[num_hot:], counts=self.counts[num_hot:])

    def share_by_block(self, num_blocks: int) -> NDArray[np.float64]:
        """Return each block's share of the lookups; blocks hold consecutive rows.

        Example:
            >>> from torchrec_2dsp.access.table_access import TableAccess
            >>> table = TableAccess.of_counts([6, 2, 1, 1], num_samples=10)
            >>> table.share_by_block(2)
            array([0.8, 0.2])
        """
        block_rows = -(-self.num_rows // num_blocks)
        lookups = np.bincount(self.rows // block_rows, self.counts, minlength=num_blocks)
        # Nobody knows where the rows of the tail are.
        return np.asarray((lookups + self.tail_lookups / num_blocks) / self.num_lookups, np.float64)

    def distinct_by_block(self, num_lookups: float, num_blocks: int) -> NDArray[np.float64]:
        """Return how many distinct rows of each block so many lookups touch."""
        blocks = self.rows // -(-self.num_rows // num_blocks)
        total = max(self.num_lookups, num_lookups)
        counts, ends = self._alike
        touched = np.repeat(1 - _absent(counts, num_lookups, total), np.diff(ends, prepend=0))
        by_block = np.bincount(blocks, touched, minlength=num_blocks)
        whole = self.expected_distinct(num_lookups)
        # The rest is of the tail, or of a log that is shorter than what is asked for.
        return np.asarray(by_block + (whole - touched.sum()) / num_blocks, np.float64)

    @cached_property
    def _alike(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Runs of rows with equal counts, within a thousandth: the count, and the run's end."""
        steps = np.ceil(np.log(np.maximum(self.counts, 1e-300)) / _ALIKE)
        ends = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))[: len(steps)]
        sums = np.diff(np.append(0.0, self._ascending_shares[ends - 1]))
        return sums / np.diff(ends, prepend=0), ends

    @cached_property
    def _ascending_shares(self) -> NDArray[np.float64]:
        return self.counts.cumsum()

    @property
    def _shares_end(self) -> float:
        return float(self._ascending_shares[-1]) if len(self.counts) else 0.0


def _absent(counts: NDArray[np.float64], drawn: float, total: float) -> NDArray[np.float64]:
    """Return the chance that none of ``drawn`` lookups hits a row with so many of ``total``.

    The number of ways to draw from the others over the number of ways to draw from all, binomials
    whose logarithms stay small; counts needn't be integers.
    """
    # A quarter of a second, that only those pay who ask for an expectation.
    from scipy.special import gammaln

    others = total - counts - drawn
    possible = others >= 0
    others = np.where(possible, others, 0.0)
    logarithm = (
        gammaln(total - counts + 1)
        + gammaln(total - drawn + 1)
        - gammaln(others + 1)
        - gammaln(total + 1)
    )
    return np.where(possible, np.exp(np.minimum(logarithm, 0.0)), 0.0)


@dataclass(frozen=True)
class HotSet:
    """Sorted, distinct row ids of one table.

    Example:
        >>> from torchrec_2dsp import HotSet
        >>> HotSet.of([7, 3, 7]).row_ids
        (3, 7)
    """

    row_ids: tuple[int, ...]
    """The hot rows, ascending."""

    def __post_init__(self) -> None:
        if not self.row_ids:
            raise PlanError("a HotSet needs at least one row id; leave the hot set out instead")
        strange = [value for value in self.row_ids if type(value) is not int]
        if strange:
            raise PlanError(f"HotSet row id {strange[0]!r} is not an integer")
        if any(b <= a for a, b in zip(self.row_ids, self.row_ids[1:], strict=False)):
            raise PlanError("HotSet row ids must be ascending and distinct; use HotSet.of(ids)")
        if self.row_ids[0] < 0:
            raise PlanError(f"HotSet row id {self.row_ids[0]} is negative")

    @classmethod
    def of(cls, ids: "Iterable[int] | torch.Tensor | HotSet") -> "HotSet":
        """Build a hot set from ids in any order, with or without duplicates."""
        if isinstance(ids, HotSet):
            return ids
        return cls(tuple(sorted({int(value) for value in ids})))

    @classmethod
    def from_stats(
        cls,
        stats: Mapping[str, TableAccess],
        table: str,
        *,
        rows: int | None = None,
        share: float | None = None,
    ) -> "HotSet":
        """Choose a table's most used rows.

        Args:
            stats: what was counted.
            table: the table's name.
            rows: how many rows; fewer if the log has fewer.
            share: the fewest rows that take this share of the table's lookups; instead of ``rows``.
        """
        if (rows is None) == (share is None):
            raise ConfigError(
                f"rows={rows}, share={share}: say how many rows, or which share of the lookups "
                "they take, and not both"
            )
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"share={share} must be above 0, and at most 1")
        access = stats[table]
        if not access.num_lookups:
            raise ConfigError(f"table {table!r} was never looked up, so none of its rows is hot")
        num_hot = rows if share is None else access.rows_for(share)
        assert num_hot is not None
        return cls.of(access.rows[: max(0, num_hot)].tolist())

    def __len__(self) -> int:
        return len(self.row_ids)

    def check_fits(self, table: str, num_rows: int) -> None:
        """Raise if an id lies outside a table of ``num_rows`` rows."""
        if self.row_ids[-1] >= num_rows:
            raise PlanError(
                f"hot row {self.row_ids[-1]} of table {table!r} is out of range: the table has "
                f"{num_rows} rows (0..{num_rows - 1})"
            )

    def tensor(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the ids as an int64 tensor."""
        return torch.tensor(self.row_ids, dtype=torch.int64, device=device)
