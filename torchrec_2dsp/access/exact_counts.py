"""`ExactCounts`: a number for each row of a table."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from torchrec_2dsp.access.table_access import TableAccess


class ExactCounts:
    """How often each row of a table was looked up."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        """How many rows the table has."""
        self._counts = torch.zeros(num_rows, dtype=torch.float64)

    def describe(self) -> str:
        """What is counted and how, as text; counters of other ranks must say the same."""
        return f"{self.num_rows} rows, exactly"

    def empty(self) -> "ExactCounts":
        """A counter of the same table that has counted nothing."""
        return ExactCounts(self.num_rows)

    def add(self, ids: torch.Tensor) -> None:
        """Count these lookups."""
        ones = torch.ones((), dtype=torch.float64).expand(ids.numel())
        self._counts.index_add_(0, ids.long(), ones)

    def halve(self) -> None:
        """Let all lookups until now count half."""
        self._counts /= 2

    def gathered(self, group: dist.ProcessGroup) -> "ExactCounts":
        """The counts of all ranks, added.

        Collectives:
            One all-reduce.
        """
        total = ExactCounts(self.num_rows)
        total._counts.copy_(self._counts)
        dist.all_reduce(total._counts, group=group)
        return total

    def state_dict(self) -> dict[str, Any]:
        """The count of each row."""
        return {"counts": self._counts.clone()}

    def add_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add what another counter of the same table had counted."""
        self._counts += state["counts"]

    def access(self, num_samples: float) -> TableAccess:
        """The counts as statistics of the table."""
        return TableAccess.of_counts(self._counts.numpy(), num_samples)
