"""Stochastic rounding in plain Python: one number at a time, with unbounded integers."""

import hashlib
import struct
from fractions import Fraction

import torch

_WORD = 2**64


def mixed(word: int) -> int:
    """Mix a 64-bit word with SplitMix64's finalizer."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % _WORD
    return word ^ (word >> 31)


def draw(seed: int, step: int, table: str, row: int, column: int) -> int:
    """Return the 16 random bits for one number in a table at a step."""
    key = int.from_bytes(hashlib.sha256(f"{seed} {step} {table}".encode()).digest()[:8], "little")
    word = mixed((mixed((key + row) % _WORD) + column // 4) % _WORD)
    return word >> (16 * (column % 4)) & 0xFFFF


def neighbours(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return a type's two numbers around a finite value in its range: towards zero, and away."""
    below = torch.tensor(abs(value), dtype=torch.float64)
    nearest = below.to(dtype)
    bits = nearest.view(torch.int16)
    lower = nearest if nearest.double() <= below else (bits - 1).view(dtype)
    upper = lower if lower.double() == below else (lower.view(torch.int16) + 1).view(dtype)
    sign = -1.0 if struct.pack(">d", value)[0] & 0x80 else 1.0
    return sign * lower.item(), sign * upper.item()


def rounded_one(value: float, bits: int, dtype: torch.dtype) -> float:
    """Round a float32 value away from zero if its fractional part plus its 16 bits reach 1."""
    lower, upper = neighbours(value, dtype)
    if lower == upper:
        return lower
    share = (Fraction(value) - Fraction(lower)) / (Fraction(upper) - Fraction(lower))
    num_kept = 16 if dtype is torch.bfloat16 else 13
    return upper if share + Fraction(bits >> (16 - num_kept), 2**num_kept) >= 1 else lower


def rounded_rows(
    values: torch.Tensor, dtype: torch.dtype, *, seed: int, step: int, table: str, rows: list[int]
) -> torch.Tensor:
    """Round these rows of a whole table with the draws for a step."""
    return torch.tensor(
        [
            [
                rounded_one(value, draw(seed, step, table, row, column), dtype)
                for column, value in enumerate(of_row)
            ]
            for row, of_row in zip(rows, values.tolist(), strict=True)
        ],
        dtype=dtype,
    ).view(len(rows), values.shape[1])
