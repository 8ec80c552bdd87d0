"""`HotSet`: the rows of one table that every rank keeps a replica of."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.errors import ConfigError, PlanError


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
        """A hot set from ids in any order, duplicates allowed; one that is one already."""
        if isinstance(ids, HotSet):
            return ids
        return cls(tuple(sorted({int(value) for value in ids})))

    @classmethod
    def from_stats(
        cls,
        stats: AccessStats,
        table: str,
        *,
        rows: int | None = None,
        share: float | None = None,
    ) -> "HotSet":
        """The rows of a table that are used most.

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
        """The ids as an int64 tensor."""
        return torch.tensor(self.row_ids, dtype=torch.int64, device=device)
