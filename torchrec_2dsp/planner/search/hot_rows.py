"""The rows that every rank should hold: those that save most time for their bytes. Pure.

Reference: P2RES, whose performance model this follows; see docs/guides/planner.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from torchrec_2dsp.cost.workload import TableWork
from torchrec_2dsp.planner.balance import Floats
from torchrec_2dsp.planner.search.choices import Choice
from torchrec_2dsp.planner.search.descent import Descent, Placement, RanksOf
from torchrec_2dsp.planner.search.space import Space

_FIRST_RUN = 16
_RUN_GROWTH = 4
MIN_GAIN = 0.2
"""The share of the tables' time that hot rows must save: their own part is predicted too short."""


@dataclass(frozen=True)
class Runs:
    """Rows that are alike, a number for each run."""

    tables: NDArray[np.int64]
    """The number of the table."""

    num_rows: Floats
    benefits: Floats
    """Seconds that each row saves; below zero where it costs more than it saves."""

    num_bytes: Floats
    """Bytes that each row takes on every rank."""


def rows_by_byte(runs: Runs, room: float) -> Floats:
    """How many rows of each run to take: the best for their bytes first, while there is room.

    That is the most that can be saved but for a part of one row's benefit, as it would be the most
    if the last row could be taken in part.

    Example:
        >>> import numpy as np
        >>> from torchrec_2dsp.planner.search.hot_rows import Runs, rows_by_byte
        >>> runs = Runs(
        ...     tables=np.array([0, 0, 1]),
        ...     num_rows=np.array([2.0, 8.0, 5.0]),
        ...     benefits=np.array([9.0, 1.0, 4.0]),
        ...     num_bytes=np.array([1.0, 1.0, 2.0]),
        ... )
        >>> rows_by_byte(runs, room=9.0).tolist()
        [2.0, 1.0, 3.0]
    """
    num_taken = np.zeros(len(runs.num_rows))
    order = np.argsort(-runs.benefits / runs.num_bytes, kind="stable")
    for run in order.tolist():
        if runs.benefits[run] <= 0:
            break
        num_taken[run] = min(float(runs.num_rows[run]), room // float(runs.num_bytes[run]))
        room -= float(num_taken[run] * runs.num_bytes[run])
    return num_taken


def with_hot_rows(space: Space, placement: Placement, descent: Descent, room: float) -> Placement:
    """The placement with the hot rows that pay, itself where none do.

    Args:
        space: what was chosen from.
        placement: of all tables.
        descent: knows its step.
        room: bytes that a rank has for all.
    """
    free_bytes = room - float(descent.bytes_by_rank(placement).max())
    runs = _runs(space, placement)
    while runs is not None and free_bytes > 0:
        hotter = _with(placement, runs, rows_by_byte(runs, free_bytes))
        missing = float(descent.bytes_by_rank(hotter).max()) - room
        if missing <= 0:
            before, after = (
                descent.step_cost(candidate).tables_s for candidate in (placement, hotter)
            )
            return hotter if after < before * (1 - MIN_GAIN) else placement
        # What hot rows send and receive needs room as well.
        free_bytes -= missing
    return placement


def _with(placement: Placement, runs: Runs, num_taken: Floats) -> Placement:
    by_table = np.bincount(runs.tables, num_taken, minlength=len(placement.choices))
    return Placement(
        tuple(
            replace(choice, num_hot=int(num_hot)) if num_hot else choice
            for choice, num_hot in zip(placement.choices, by_table, strict=True)
        ),
        placement.ranks,
    )


def _runs(space: Space, placement: Placement) -> Runs | None:
    """Runs of all tables that may have hot rows; `None` without any."""
    loads = {
        table: _loads_by_size(space, table, choice, ranks)
        for table, (choice, ranks) in enumerate(
            zip(placement.choices, placement.ranks, strict=True)
        )
        if space.candidates[table].may_be_hot(choice)
    }
    if not any(len(of_sizes) > 1 for of_sizes in loads.values()):
        return None
    # Prices of what only hot rows need are found where there are some.
    prices = space.prices(
        np.sum([of_sizes[len(of_sizes) // 2] for of_sizes in loads.values()], axis=0)
    )
    runs: list[tuple[int, float, float, float]] = []
    for table, by_size in loads.items():
        work = space.candidates[table].work
        sizes = np.array(_sizes(work), dtype=np.float64)
        row_bytes = work.dim * work.element_bytes + work.state_bytes_per_row
        runs += [(table, *run, row_bytes) for run in concave_runs(sizes, by_size @ prices)]
    tables, *numbers = (np.array(column) for column in zip(*runs, strict=True))
    return Runs(tables, *numbers)


def _loads_by_size(space: Space, table: int, choice: Choice, ranks: RanksOf) -> Floats:
    """The loads of a mean rank, for hot sets of several sizes."""
    setting = space.setting
    return np.array(
        [
            setting.loads(
                [
                    space.candidates[table].placed(
                        replace(choice, num_hot=size), ranks, setting.group
                    )
                ]
            ).values.mean(axis=1)
            for size in _sizes(space.candidates[table].work)
        ]
    )


def _sizes(work: TableWork) -> list[int]:
    """Sizes of hot sets in growing steps, from none to all rows that are known."""
    num_known = 0 if work.access is None else min(work.num_rows, len(work.access.rows))
    sizes, size = [0], _FIRST_RUN
    while size < num_known:
        sizes.append(size)
        size *= _RUN_GROWTH
    return [*sizes, num_known] if num_known else sizes


def concave_runs(sizes: Floats, costs: Floats) -> Iterator[tuple[float, float]]:
    """Runs of falling benefit: rows of each, and what each row saves.

    A run that would save more than the one before it is joined to it, as its rows come later.
    """
    runs: list[tuple[float, float]] = []
    for num_rows, saved in zip(np.diff(sizes), -np.diff(costs), strict=True):
        runs.append((float(num_rows), float(saved)))
        while len(runs) > 1 and runs[-1][1] / runs[-1][0] > runs[-2][1] / runs[-2][0]:
            last = runs.pop()
            runs[-1] = runs[-1][0] + last[0], runs[-1][1] + last[1]
    for num_rows, saved in runs:
        yield num_rows, saved / num_rows
