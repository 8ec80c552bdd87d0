"""Stochastic rounding of rows in 16 bits, the same on all ranks and devices.

A number is rounded to one of its two neighbours, up with a probability that makes the mean exact.
Draws aren't a stream: each is a hash of a seed, the step, the table, the row and the column. So
copies of a row draw the same numbers, wherever they are and however tables are sharded.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchrec_2dsp.rows.gradients import Block

HALF_TYPES = (torch.float16, torch.bfloat16)
"""The types that rows are rounded to."""

_LANES = 4
"""The number of draws in a 64-bit hash."""
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def _mixed_(words: torch.Tensor) -> torch.Tensor:
    """Mix 64-bit words in place (SplitMix64's finaliser), so that each bit depends on all bits."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        words.bitwise_xor_((words >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(multiplier)
    return words.bitwise_xor_((words >> 31).bitwise_and_(2**33 - 1))


@dataclass(frozen=True)
class RoundedTable:
    """A kernel's table as its draws see it: by the whole table's name, rows and columns."""

    name: str
    first_column: int
    numbers: Callable[[torch.Tensor], torch.Tensor]
    """Returns the whole table's row numbers for the kernel's rows."""

    def draws(self, rows: torch.Tensor, num_columns: int, *, seed: int, step: int) -> torch.Tensor:
        """Draw 16 bits for each number in the kernel's ``rows`` at a step, `[rows, columns]`."""
        key = hashlib.sha256(f"{seed} {step} {self.name}".encode()).digest()[:8]
        row_words = _mixed_(self.numbers(rows) + int.from_bytes(key, "little", signed=True))
        skipped, end = self.first_column % _LANES, self.first_column + num_columns
        groups = torch.arange(
            self.first_column // _LANES, math.ceil(end / _LANES), device=rows.device
        )
        # Flat, because a single column has no stride by which it could be viewed.
        draws = _mixed_((row_words[:, None] + groups).view(-1)).view(torch.int16)
        num_draws = _LANES * groups.numel()
        return draws.view(rows.numel(), num_draws)[:, skipped : skipped + num_columns]


@dataclass(frozen=True)
class StochasticRounding:
    """Draws for a kernel's rows."""

    seed: int
    tables: tuple[RoundedTable, ...]
    """The kernel's tables, by number."""

    def draws(self, block: Block, keys: torch.Tensor, step: int) -> torch.Tensor:
        """Draw 16 bits for each number in the rows with ascending ``keys``, `[keys, dim]`."""
        parts = zip(block.tables, block.rows_of(keys), strict=True)
        return torch.cat(
            [
                self.tables[table].draws(rows, block.dim, seed=self.seed, step=step)
                for table, rows in parts
            ]
        )


def rounded(values: torch.Tensor, draws: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 values to a 16-bit type, up if a draw is large enough.

    The mean over all draws is the value. Only for float16's subnormal numbers, the distance to
    neighbours counts in steps of 2^-13. NaN, and values too large for the type, are rounded to
    the nearest, as torch does.

    Args:
        values: float32.
        draws: 16 random bits for each value, as int16.
        dtype: float16 or bfloat16.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.rows.rounding import rounded
        >>> draws = torch.tensor([0, 0x3FFF, 0x4000, -1]).to(torch.int16)
        >>> rounded(torch.full((4,), 1 + 3 * 2**-9), draws, torch.bfloat16).tolist()
        [1.0, 1.0, 1.0078125, 1.0078125]
    """
    kind = torch.finfo(dtype)
    num_dropped = round(math.log2(kind.eps / torch.finfo(torch.float32).eps))
    sizes = values.abs()
    # Subnormal numbers are as far apart as the smallest normal ones, next to which they are put.
    offsets = torch.where(sizes < kind.tiny, kind.tiny, 0.0)
    bits = (sizes + offsets).view(torch.int32)
    bits += (draws.int() & 0xFFFF) >> (16 - num_dropped)
    bits &= -(1 << num_dropped)
    results = (bits.view(torch.float32) - offsets).copysign_(values)
    return torch.where(sizes <= kind.max, results, values).to(dtype)
