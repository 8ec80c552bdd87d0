"""Triton kernels that encode and decode rows as integers in one pass; torch takes a dozen.

Import this only to run them: Triton comes with torch for CUDA.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl

_NUMBERS = 1024
"""The numbers that a program handles: eight per thread in four warps."""


def encode_rows(rows: torch.Tensor, columns: int, *, bits: int, unit: float) -> torch.Tensor:
    """Return float32 rows as integers and their scale: a row's largest number times ``unit``."""
    encoded = torch.empty((len(rows), columns), dtype=torch.int8, device=rows.device)
    _run(_encode, rows.contiguous(), encoded, rows.shape[1], bits, unit)
    return encoded.view(torch.uint8)


def decode_rows(encoded: torch.Tensor, dim: int, *, bits: int) -> torch.Tensor:
    """Return encoded rows as float32."""
    rows = torch.empty((len(encoded), dim), device=encoded.device)
    _run(_decode, encoded.contiguous().view(torch.int8), rows, dim, bits)
    return rows


def _run(
    kernel: object, source: torch.Tensor, target: torch.Tensor, dim: int, bits: int, *unit: float
) -> None:
    encoded = target if source.dtype is torch.float32 else source
    columns = max(triton.next_power_of_2(dim), 2)
    rows_of_program = max(_NUMBERS // columns, 1)
    with torch.cuda.device_of(source):
        cast(Any, kernel)[triton.cdiv(len(source), rows_of_program),](
            source,
            target,
            len(source),
            *unit,
            DIM=dim,
            STRIDE=encoded.shape[1],
            BITS=bits,
            ROWS=rows_of_program,
            COLUMNS=columns,
            enable_fp_fusion=False,  # A fused product and sum would be rounded once, not twice.
        )


@triton.jit(do_not_specialize=["num_rows"])
def _encode(
    rows,
    encoded,
    num_rows,
    unit,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    column = tl.arange(0, COLUMNS)
    is_number = is_row[:, None] & (column < DIM)[None, :]
    numbers = tl.load(rows + row[:, None] * DIM + column[None, :], mask=is_number, other=0.0)
    scale = tl.max(tl.abs(numbers), axis=1) * unit
    # Round to the nearest bfloat16, ties to even.
    scale_bits = scale.to(tl.int32, bitcast=True)
    scale_bits = (scale_bits + 0x7FFF + ((scale_bits >> 16) & 1)) >> 16
    is_nan = tl.max((numbers != numbers).to(tl.int32), axis=1) > 0
    scale_bits = tl.where(is_nan, 0x7FFF, scale_bits)
    # Smaller scales' reciprocals would be infinite; for these and infinite scales, integers are 0.
    is_normal = (scale_bits >= 0x80) & (scale_bits < 0x7F80)
    scale = (tl.where(is_normal, scale_bits, 0x3F80) << 16).to(tl.float32, bitcast=True)
    quotients = tl.where(is_normal[:, None], numbers, 0.0) * tl.div_rn(1.0, scale)[:, None]
    # Round to integers in the same way: floats of this size have no fractions.
    integers = ((quotients + 12582912.0) - 12582912.0).to(tl.int32)
    start = encoded + row * STRIDE
    if BITS == 8:
        tl.store(start[:, None] + column[None, :], integers.to(tl.int8), mask=is_number)
    else:
        first, second = tl.split(tl.reshape(integers & 15, (ROWS, COLUMNS // 2, 2)))
        pair = tl.arange(0, COLUMNS // 2)
        is_pair = is_row[:, None] & (pair < STRIDE - 2)[None, :]
        tl.store(start[:, None] + pair[None, :], (first | (second << 4)).to(tl.int8), mask=is_pair)
    tl.store(start + STRIDE - 2, scale_bits.to(tl.int8), mask=is_row)
    tl.store(start + STRIDE - 1, (scale_bits >> 8).to(tl.int8), mask=is_row)


@triton.jit(do_not_specialize=["num_rows"])
def _decode(
    encoded,
    rows,
    num_rows,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    column = tl.arange(0, COLUMNS)
    is_number = is_row[:, None] & (column < DIM)[None, :]
    start = encoded + row * STRIDE
    low = tl.load(start + STRIDE - 2, mask=is_row, other=0).to(tl.int32) & 255
    high = tl.load(start + STRIDE - 1, mask=is_row, other=0).to(tl.int32)
    scale = ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)
    if BITS == 8:
        integers = tl.load(start[:, None] + column[None, :], mask=is_number, other=0)
    else:
        pair = tl.arange(0, COLUMNS // 2)
        is_pair = is_row[:, None] & (pair < STRIDE - 2)[None, :]
        pairs = tl.load(start[:, None] + pair[None, :], mask=is_pair, other=0).to(tl.int32)
        first, second = ((pairs & 15) ^ 8) - 8, (((pairs >> 4) & 15) ^ 8) - 8
        integers = tl.reshape(tl.join(first, second), (ROWS, COLUMNS))
    numbers = integers.to(tl.float32) * scale[:, None]
    tl.store(rows + row[:, None] * DIM + column[None, :], numbers, mask=is_number)
