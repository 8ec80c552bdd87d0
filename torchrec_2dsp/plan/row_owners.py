"""Which rank owns a row: `RowOwners`, and `RowSpread`, an order in which neighbours are far apart.

The owner of a row is its place in that order, or its number, divided by the rows of a shard.
"""

import enum
import math
from dataclasses import dataclass
from functools import cached_property

import torch

from torchrec_2dsp.errors import UnsupportedError

MAX_ROWS = math.isqrt(2**63 - 1)
"""More rows would overflow 64-bit products."""


class RowOwners(enum.Enum):
    """How the rows of a table with row exchange are dealt to the ranks of a group."""

    BLOCK = "block"
    """Blocks of consecutive rows, as TorchRec's row-wise sharding deals them."""

    HASH = "hash"
    """Neighbours have different owners, so that the rows that are used most are spread evenly
    wherever in the table they are. Checkpoints don't show it."""


def golden_step(num_rows: int) -> int:
    """A step near the golden section of a table that visits every row once.

    Of any run of consecutive steps, every part of the table gets its share, up to a few rows.

    Example:
        >>> from torchrec_2dsp.plan.row_owners import golden_step
        >>> step = golden_step(10)
        >>> [row * step % 10 for row in range(10)]
        [0, 7, 4, 1, 8, 5, 2, 9, 6, 3]
    """
    step = max(1, round(num_rows * 0.6180339887))
    while math.gcd(step, num_rows) != 1:
        step += 1
    return step


@dataclass(frozen=True)
class RowSpread:
    """A bijection between the rows of a table and their positions.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.plan.row_owners import RowSpread
        >>> spread = RowSpread(num_rows=10)
        >>> spread.positions(torch.arange(4))
        tensor([0, 7, 4, 1])
        >>> spread.rows(torch.tensor([0, 7, 4, 1]))
        tensor([0, 1, 2, 3])
    """

    num_rows: int
    """How many rows the table has."""

    def __post_init__(self) -> None:
        if self.num_rows > MAX_ROWS:
            raise UnsupportedError(
                f"rows of a table with {self.num_rows:,} rows can't be spread, of {MAX_ROWS:,} at "
                "most; use owners='block'"
            )

    @cached_property
    def step(self) -> int:
        """How far the positions of two neighbouring rows are apart."""
        return golden_step(self.num_rows)

    def positions(self, rows: torch.Tensor) -> torch.Tensor:
        """The positions of rows, int64."""
        return rows.long() * self.step % self.num_rows

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """The rows at positions, int64."""
        return positions.long() * pow(self.step, -1, self.num_rows) % self.num_rows
