"""The numbers that ranks and oracle start from."""

import itertools

import torch

from tests.fuzz.case import DTYPES, Case

LR, EPS = 0.05, 1e-2
"""``EPS`` is large enough that a gradient which cancels to rounding is no full AdaGrad step."""
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""The rate and the momentum by which ranks that meet move by the mean of their changes."""


def initial_tables(case: Case) -> dict[str, torch.Tensor]:
    """The weights of all tables, in their types."""
    return {
        name: (0.3 * _normal(case, index, (table.rows, table.dim))).to(DTYPES[table.dtype])
        for index, (name, table) in enumerate(case.tables.items())
    }


def initial_dense(case: Case) -> dict[str, torch.Tensor]:
    """The parameters of the dense part, by the names that they have in it."""
    width = sum(table.dim * len(table.features) for table in case.tables.values())
    widths = [width, *case.dense.hidden, 1]
    params = {}
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        # There is an activation between any two.
        name, index = f"layers.{2 * number}", 1_000 + 2 * number
        params[f"{name}.weight"] = 0.4 * _normal(case, index, (outputs, inputs))
        params[f"{name}.bias"] = 0.1 * _normal(case, index + 1, (outputs,))
    if case.dense.has_shortcut:
        params["shortcut.weight"] = 0.4 * _normal(case, 1_100, (1, width))
    return params


def _normal(case: Case, index: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed * 2_000 + index)
    return torch.randn(shape, generator=generator)
