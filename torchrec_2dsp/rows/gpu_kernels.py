"""Triton kernels for rows. Import this only to run them: Triton comes with torch for CUDA."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import gcd
from typing import Any, cast

import torch
import triton
import triton.language as tl

_NUMBERS = 1024
"""The numbers that a program updates: eight per thread in four warps."""


@dataclass(frozen=True)
class RowsInMemory:
    """A block's rows and their optimizer states, by their places in memory."""

    weights: torch.Tensor
    """All numbers in their storage; a run's row ``key`` begins at
    ``weight_starts[run] * unit + key * dim``."""
    states: torch.Tensor
    """Likewise, in units if there is a number per weight; without a state, the weights again."""
    state_columns: int
    """The numbers in a row's state: 0, 1 or the row's dim."""
    first_keys: torch.Tensor
    """Each run's first key, padded to a power of two."""
    weight_starts: torch.Tensor
    state_starts: torch.Tensor
    unit: int
    """The count of numbers that can be read at once; it divides the place of each row's first."""


def rows_in_memory(
    first_keys: Sequence[int], tensors: Sequence[tuple[torch.Tensor, ...]]
) -> RowsInMemory:
    """Locate the rows of runs of tables.

    Args:
        first_keys: each run's first key, ascending.
        tensors: each run's weights, `[rows, dim]`, and at most one state for all rows. All runs'
            weights are in one storage, and so are their states.
    """
    weights, *states = tensors[0]
    dim, device = weights.shape[1], weights.device
    columns = [dim, *(1 if state.dim() == 1 else dim for state in states)]
    starts = [
        [
            run[part].storage_offset() - first_key * width
            for first_key, run in zip(first_keys, tensors, strict=True)
        ]
        for part, width in enumerate(columns)
    ]
    unit = gcd(8, dim, *chain.from_iterable(starts[: columns.count(dim)]))
    in_units = [
        torch.tensor([start // (unit if width == dim else 1) for start in of_runs], device=device)
        for of_runs, width in zip(starts, columns, strict=True)
    ]
    missing = triton.next_power_of_2(len(first_keys)) - len(first_keys)
    filled = [*first_keys, *[torch.iinfo(torch.int64).max] * missing]
    return RowsInMemory(
        weights=_whole_storage(weights),
        states=_whole_storage(states[0] if states else weights),
        state_columns=columns[1] if states else 0,
        first_keys=torch.tensor(filled, device=device),
        weight_starts=in_units[0],
        state_starts=in_units[-1],
        unit=unit,
    )


def _whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(0).set_(tensor.untyped_storage())  # pyright: ignore[reportArgumentType]


def update_rows(
    rows: RowsInMemory, keys: torch.Tensor, grads: torch.Tensor, *, lr: float, eps: float
) -> None:
    """Update distinct rows in place, each by its gradient: float32, `[n, dim]`.

    Depending on the number of states, this is SGD, row-wise AdaGrad or AdaGrad, as in
    `torchrec_2dsp.optim`, in float32; weights are rounded to the nearest number of their type.
    """
    num_rows, dim = grads.shape
    columns = triton.next_power_of_2(dim)
    rows_of_program = max(_NUMBERS // columns, 1)
    if not num_rows:
        return
    with torch.cuda.device_of(grads):
        cast(Any, _update)[triton.cdiv(num_rows, rows_of_program),](
            keys.contiguous(),
            grads.contiguous(),
            rows.weights,
            rows.states,
            rows.first_keys,
            rows.weight_starts,
            rows.state_starts,
            num_rows,
            lr,
            eps,
            DIM=dim,
            STATE=rows.state_columns,
            RUNS=rows.first_keys.numel(),
            UNIT=rows.unit,
            ROWS=rows_of_program,
            COLUMNS=columns,
        )


@triton.jit(do_not_specialize=["num_rows"])
def _update(
    keys,
    grads,
    weights,
    states,
    first_keys,
    weight_starts,
    state_starts,
    num_rows,
    lr,
    eps,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    RUNS: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    key = tl.load(keys + row, mask=is_row, other=0).to(tl.int64)
    run = tl.zeros_like(key)
    if RUNS > 1:
        later = tl.load(first_keys + tl.arange(0, RUNS))[None, :] <= key[:, None]
        run = tl.sum(later.to(tl.int64), axis=1) - 1
    column = tl.arange(0, COLUMNS)
    is_number = is_row[:, None] & (column < DIM)[None, :]
    at = (tl.load(weight_starts + run) * UNIT + key * DIM)[:, None] + column[None, :]
    grad = tl.load(grads + row[:, None] * DIM + column[None, :], mask=is_number, other=0.0)
    weight = tl.load(weights + at, mask=is_number, other=0.0).to(tl.float32)
    if STATE == 0:
        step = lr * grad
    elif STATE == 1:
        state_at = states + tl.load(state_starts + run) + key
        moment = tl.load(state_at, mask=is_row, other=0.0)
        moment += tl.div_rn(tl.sum(grad * grad, axis=1), DIM * 1.0)
        tl.store(state_at, moment, mask=is_row)
        step = tl.div_rn(lr, tl.sqrt_rn(moment) + eps)[:, None] * grad
    else:
        state_at = (tl.load(state_starts + run) * UNIT + key * DIM)[:, None] + column[None, :]
        state_at += states
        moment = tl.load(state_at, mask=is_number, other=0.0) + grad * grad
        tl.store(state_at, moment, mask=is_number)
        step = tl.div_rn(lr * grad, tl.sqrt_rn(moment) + eps)
    tl.store(weights + at, (weight - step).to(weights.dtype.element_ty), mask=is_number)
