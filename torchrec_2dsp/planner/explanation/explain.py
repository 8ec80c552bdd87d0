"""The reasons for a plan, from what its search has found."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from torchrec_2dsp.cost.loads import Ranks
from torchrec_2dsp.cost.sent import sent_weights
from torchrec_2dsp.planner.explanation.explanation import Explanation
from torchrec_2dsp.planner.explanation.table_line import TableLine
from torchrec_2dsp.planner.search.descent import Descent
from torchrec_2dsp.planner.search.result import Found, SearchResult, Tried
from torchrec_2dsp.planner.search.space import Space

_MAX_COMPARED = 500
"""How many tables are compared with what else they could be: those that take longest."""


def explain(result: SearchResult) -> Explanation:
    """The reasons why the best placement that a search has found is best."""
    best = result.found[0]
    tables, busy = _explained(best, result.room)
    if best.once is not None:
        in_world, busy_in_world = _explained(best.once, result.room)
        tables += [replace(line, is_once=True) for line in in_world]
        # A position in a group stands for a rank of each group.
        busy = busy + busy_in_world.mean()
    return Explanation(
        setting=best.setting,
        where=best.where,
        cost=best.cost,
        memory=best.memory,
        prefetching=best.prefetching(result.room),
        tables=sorted(tables, key=lambda line: -line.seconds),
        busy_by_rank=busy,
        bytes_by_rank=best.bytes_by_rank,
        room=result.room,
        meshes=[(placed.where, placed.cost.total_s) for placed in result.found],
        front=pareto_front(result.tried),
    )


def _explained(best: Found, room: float) -> tuple[list[TableLine], Ranks]:
    """A line for each table, and for how long each rank is busy with all of them."""
    space = Space.of(best.candidates, best.setting)
    rough = Descent(space, np.zeros(0), room).sums(best.placement)
    prices = space.prices(rough.loads.mean(axis=1))
    descent = Descent(space, prices, room)
    rated_s = descent.rated_s(best.placement)
    lines = sorted(enumerate(_lines(best, descent)), key=lambda numbered: -numbered[1].seconds)
    compared = [
        _compared(line, best, descent, table, rated_s) if place < _MAX_COMPARED else line
        for place, (table, line) in enumerate(lines)
    ]
    return compared, np.asarray(prices @ rough.loads, np.float64)


def pareto_front(tried: Sequence[Tried]) -> list[Tried]:
    """The attempts that no other beats both in time and in memory, the shortest step first.

    Example:
        >>> from torchrec_2dsp import Mesh2D
        >>> from torchrec_2dsp.planner.explanation.explain import pareto_front
        >>> from torchrec_2dsp.planner.search.result import Tried
        >>> some = [Tried(Mesh2D(1, 4), *pair) for pair in ((2.0, 5.0), (3.0, 4.0), (3.5, 6.0))]
        >>> [(one.seconds, one.bytes_of_rank) for one in pareto_front(some)]
        [(2.0, 5.0), (3.0, 4.0)]
    """
    front: list[Tried] = []
    for point in sorted(tried, key=lambda point: (point.seconds, point.bytes_of_rank)):
        if not front or point.bytes_of_rank < front[-1].bytes_of_rank:
            front.append(point)
    return front


def _lines(best: Found, descent: Descent) -> Iterator[TableLine]:
    sent = sent_weights(best.setting)
    for table, (candidate, choice) in enumerate(
        zip(best.candidates, best.placement.choices, strict=True)
    ):
        loads = descent.sums_of(best.placement, table).loads.mean(axis=1)
        yield TableLine(
            name=candidate.name,
            num_rows=candidate.work.num_rows,
            dim=candidate.work.dim,
            choice=choice,
            hot_share=candidate.work.hot_share(choice.num_hot),
            sent_bytes=float(sent @ loads),
            seconds=float(descent.prices @ loads),
        )


def _compared(
    line: TableLine, best: Found, descent: Descent, table: int, rated_s: float
) -> TableLine:
    others = descent.alternatives(best.placement, table)
    if not others:
        return line
    choice, seconds = min(others, key=lambda other: other[1])
    return replace(line, runner_up=choice, lost_by_s=seconds - rated_s)
