"""Every dense wrapper with every table sharding, against one process."""

import pytest

from tests.support.pipelining import FORMS, TABLES, ProductCell, run_product
from tests.support.ranks import RankPool
from tests.support.slices import Deal

ROUNDING = 3e-6
"""Losses, weights and table moments: float32 sums in another order, over ten AdaGrad steps, whose
first ones divide rounding by small roots. The largest seen are half as large.
"""
MOMENT_ROUNDING = 6e-6
"""Dense moments are sums of squares, with twice the error."""
ON_FOUR_RANKS = [form for form in FORMS if form not in ("PP, TP, FSDP", "PP zero bubble, TP, FSDP")]
"""All forms except those with one pipeline on four ranks, which share no layers."""
ON_EIGHT_RANKS = [form for form in FORMS if form != "TP"]
"""All forms except four ranks per layer: hosts have two."""

COPIES = {"FSDP": 1, "FSDP at once": 1, "FSDP, gathered once": 1, "HSDP": 2}
"""The number of copies of the dense part on all ranks together, in some forms."""


def check(ranks: RankPool, cells: list[ProductCell]) -> None:
    for cell in cells:
        of_ranks = ranks.run(run_product, cell)
        assert sum(gap.num_values for gap in of_ranks) > 0
        if copies := COPIES.get(cell.form):
            held = sum(gap.held_share for gap in of_ranks)
            assert copies <= held < 1.2 * copies, (cell, held)
        for gap in of_ranks:
            assert gap.num_moments > 0, cell
            assert gap.tables < ROUNDING, (cell, gap)
            assert gap.dense_moment < MOMENT_ROUNDING, (cell, gap)


def test_a_few_of_all(ranks4: RankPool, dealt: Deal) -> None:
    names = list(TABLES)
    cells = [
        ProductCell(form, names[number % len(names)], 1 + 3 * (number % 3 == 0))
        for number, form in enumerate(ON_FOUR_RANKS)
    ]
    check(ranks4, dealt(cells))


@pytest.mark.slow
@pytest.mark.parametrize("num_batches", [1, 4])
@pytest.mark.parametrize("form", ON_FOUR_RANKS)
def test_four_ranks(ranks4: RankPool, form: str, num_batches: int) -> None:
    cells = [ProductCell(form, tables, num_batches) for tables in TABLES]
    check(ranks4, cells)


@pytest.mark.slow
@pytest.mark.parametrize("num_batches", [1, 4])
@pytest.mark.parametrize("form", ON_EIGHT_RANKS)
def test_eight_ranks(ranks8: RankPool, form: str, num_batches: int) -> None:
    cells = [ProductCell(form, tables, num_batches) for tables in TABLES]
    check(ranks8, cells)
