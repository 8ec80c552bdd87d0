"""`ExactCounts`: a number for each row of a table."""

import torch
import torch.distributed as dist

from torchrec_2dsp.access.table_access import TableAccess


class ExactCounts:
    """How often each row of a table was looked up."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        """Of the table."""
        self._counts = torch.zeros(num_rows, dtype=torch.float64)

    def describe(self) -> str:
        """What other ranks must have, too."""
        return f"{self.num_rows} rows, exactly"

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
        made = ExactCounts(self.num_rows)
        made._counts.copy_(self._counts)
        dist.all_reduce(made._counts, group=group)
        return made

    def access(self, num_samples: float) -> TableAccess:
        """What was counted."""
        return TableAccess.of_counts(self._counts.numpy(), num_samples)
