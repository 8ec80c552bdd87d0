"""`TableAccess`: one table's lookup statistics, and `HotSet`: the rows that every rank holds."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from torchrec_2dsp.errors import ConfigError, PlanError

_Method = TypeVar("_Method", bound=Callable[..., Any])

_ALIKE = 1e-3
"""The relative difference within which counts are replaced by their mean; sums over rows change by
less than its square."""


def _remembered(method: _Method) -> _Method:
    """Keep a method's results with its object, because a search asks for them many times."""

    @wraps(method)
    def remembered(table: "TableAccess", *args: Any, **kwargs: Any) -> Any:
        results = vars(table).setdefault("_results", {})
        key = method.__name__, args, *kwargs.items()
        if key not in results:
            results[key] = method(table, *args, **kwargs)
        return results[key]

    return cast(_Method, remembered)


@dataclass(frozen=True, eq=False)
class TableAccess:
    """Lookup statistics for one table in a log.

    Every row that was looked up is *known*, with its count, unless the table had too many rows to
    count. Then the most used rows are known, and the others are the *tail*.

    Example:
        Ten lookups over three rows.

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
    """A lower bound for each known row's lookups; fractional if old lookups are discounted."""

    tail_rows: int = 0
    """The estimated number of other rows that were looked up."""

    tail_lookups: float = 0.0
    """The tail's lookups, plus those that known rows' counts lack."""

    max_error: float = 0.0
    """The largest error in a known row's count; no tail row was looked up more often."""

    @classmethod
    def of_counts(cls, counts: ArrayLike, num_samples: float) -> "TableAccess":
        """Build the statistics from every row's count."""
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

        ``tail`` describes the other rows: the fields that have a default.
        """
        # Ties go to the lower row, so that all ranks agree.
        order = np.lexsort((rows, -counts))
        return cls(num_rows, num_samples, rows[order].astype(np.int64), counts[order], **tail)

    @property
    def num_lookups(self) -> float:
        """The number of lookups in the log."""
        of_known_rows = float(self._ascending_shares[-1]) if len(self.counts) else 0.0
        return of_known_rows + self.tail_lookups

    @property
    def lookups_per_sample(self) -> float:
        """The mean number of lookups per sample."""
        return self.num_lookups / self.num_samples if self.num_samples else 0.0

    @property
    def num_used_rows(self) -> int:
        """The number of used rows; an estimate if there is a tail."""
        return len(self.rows) + self.tail_rows

    def share_of(self, num_hot: int) -> float:
        """Return a lower bound for the lookup share that the ``num_hot`` hottest rows take."""
        lookups = self._ascending_shares[: max(0, num_hot)]
        return float(lookups[-1]) / self.num_lookups if len(lookups) else 0.0

    def rows_for(self, share: float) -> int:
        """Return how many hottest rows take this lookup share."""
        num_lookups = share * self.num_lookups
        # Summation order differs from the one behind the requested share.
        num_hot = int(np.searchsorted(self._ascending_shares, num_lookups * (1 - 1e-12))) + 1
        if num_hot > len(self.rows):
            counted_share = self.share_of(len(self.rows))
            raise ConfigError(
                f"share={share}: the counted rows take {counted_share:.4g} of the lookups; "
                "ask for less, or count more rows"
            )
        return num_hot

    @_remembered
    def expected_distinct(self, num_lookups: float, *, num_hot: int = 0) -> float:
        """Estimate how many distinct rows ``num_lookups`` lookups touch on average.

        Lookups are drawn from the log uniformly and without replacement, so drawing at least the
        whole log touches every used row. Tail rows are assumed equally frequent, which makes the
        result an upper bound.

        Args:
            num_lookups: the lookups to draw, including those that hit hot rows.
            num_hot: how many hottest rows to leave out.
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
        # With more hot rows than known ones, the hot rows within the tail are unknown: count those
        # that lookups touch, drawn with replacement, beside the cold ones.
        touched = float(times @ (1 - (1 - np.minimum(counts / total, 1)) ** num_lookups))
        return max(touched, float(max(0, self.num_used_rows - num_hot)))

    @_remembered
    def without(self, num_hot: int) -> "TableAccess":
        """Return the statistics without the ``num_hot`` hottest rows."""
        return replace(self, rows=self.rows[num_hot:], counts=self.counts[num_hot:])

    @_remembered
    def share_by_block(self, num_blocks: int) -> NDArray[np.float64]:
        """Return each block's lookup share; blocks hold consecutive rows.

        Example:
            >>> from torchrec_2dsp.access.table_access import TableAccess
            >>> table = TableAccess.of_counts([6, 2, 1, 1], num_samples=10)
            >>> table.share_by_block(2)
            array([0.8, 0.2])
        """
        block_rows = -(-self.num_rows // num_blocks)
        lookups = np.bincount(self.rows // block_rows, self.counts, minlength=num_blocks)
        # The tail rows' locations are unknown.
        return np.asarray((lookups + self.tail_lookups / num_blocks) / self.num_lookups, np.float64)

    @_remembered
    def distinct_by_block(self, num_lookups: float, num_blocks: int) -> NDArray[np.float64]:
        """Estimate how many distinct rows lookups touch in each block on average."""
        blocks = self.rows // -(-self.num_rows // num_blocks)
        total = max(self.num_lookups, num_lookups)
        counts, ends = self._alike
        touched = np.repeat(1 - _absent(counts, num_lookups, total), np.diff(ends, prepend=0))
        by_block = np.bincount(blocks, touched, minlength=num_blocks)
        whole = self.expected_distinct(num_lookups)
        # The remainder belongs to the tail, or the log has fewer lookups than requested.
        return np.asarray(by_block + (whole - touched.sum()) / num_blocks, np.float64)

    @cached_property
    def _alike(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Group rows with counts equal within a thousandth: return counts and runs' ends."""
        steps = np.ceil(np.log(np.maximum(self.counts, 1e-300)) / _ALIKE)
        ends = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))[: len(steps)]
        sums = np.diff(np.append(0.0, self._ascending_shares[ends - 1]))
        return sums / np.diff(ends, prepend=0), ends

    @cached_property
    def _ascending_shares(self) -> NDArray[np.float64]:
        return self.counts.cumsum()


def _absent(counts: NDArray[np.float64], drawn: float, total: float) -> NDArray[np.float64]:
    """Return the probability that no draw hits a row with this count among ``total`` lookups.

    The hypergeometric probability, through log-binomials that stay small; counts needn't be
    integers.
    """
    # The import takes a quarter of a second, so only callers of expectations pay for it.
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
    """One table's sorted, distinct row ids; behind an id map, ids of any sign.

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

    @classmethod
    def of(cls, ids: "Iterable[int] | torch.Tensor | HotSet") -> "HotSet":
        """Build a hot set from ids in any order, with or without duplicates."""
        if isinstance(ids, HotSet):
            return ids
        return cls(tuple(sorted(set(whole_row_ids(ids)))))

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
            stats: the lookup statistics.
            table: the table's name.
            rows: how many rows; fewer if the log has fewer.
            share: choose the fewest rows that take this lookup share; instead of ``rows``.
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
        """Raise if an id lies outside a table with ``num_rows`` rows."""
        if self.row_ids[0] < 0 or self.row_ids[-1] >= num_rows:
            outside = min(self.row_ids[0], 0) or self.row_ids[-1]
            raise PlanError(
                f"hot row {outside} of table {table!r} is out of range: the table has "
                f"{num_rows} rows (0..{num_rows - 1})"
            )

    def tensor(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the ids as an int64 tensor."""
        return torch.tensor(self.row_ids, dtype=torch.int64, device=device)


def whole_row_ids(ids: "Iterable[Any] | torch.Tensor") -> list[int]:
    """Return ids as Python's integers, or raise a `PlanError`: a mask or counts aren't ids."""
    values = ids.tolist() if isinstance(ids, torch.Tensor | np.ndarray) else ids
    plain = [value.item() if hasattr(value, "item") else value for value in values]
    for value in plain:
        if isinstance(value, bool) or not isinstance(value, int):
            raise PlanError(
                f"hot row {value!r} is a {type(value).__name__}, not a row id; give integers, such "
                "as mask.nonzero().flatten() for a mask, or topk(...).indices"
            )
    return [int(value) for value in plain]
