"""Even loads: against all assignments, greedy, and the bound of an integer program."""

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from torchrec_2dsp.cost.loads import Floats
from torchrec_2dsp.planner.search.place import (
    Bins,
    Items,
    improved,
    largest_differencing,
    within_memory,
)

TIMES = st.lists(st.integers(0, 30), min_size=1, max_size=7)
MEMORY = 1.0


def items_of(times: "list[int] | Floats", needs: "list[int] | Floats | None" = None) -> Items:
    found = np.asarray(times, dtype=np.float64)
    wanted = np.zeros(len(found)) if needs is None else np.asarray(needs, dtype=np.float64)
    return Items(found, wanted[:, None])


def bins_of(base: list[int], room: list[int] | None = None) -> Bins:
    rooms = np.full(len(base), MEMORY) if room is None else np.asarray(room, dtype=np.float64)
    return Bins(np.asarray(base, dtype=np.float64), rooms[:, None])


def greedy(times: Floats, num_bins: int) -> Floats:
    loads = np.zeros(num_bins)
    for time in sorted(times, reverse=True):
        loads[loads.argmin()] += time
    return loads


def best(items: Items, bins: Bins) -> float:
    """The lowest maximum of all assignments that fit; infinite without any."""
    every = itertools.product(range(len(bins.times)), repeat=len(items.times))
    found = [np.array(one) for one in every]
    return min(
        (bins.loads(items, one).max() for one in found if (bins.left(items, one) >= 0).all()),
        default=np.inf,
    )


@given(TIMES, st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_each_item_is_dealt_once_and_never_below_the_optimum(
    times: list[int], base: list[int]
) -> None:
    items, bins = items_of(times), bins_of(base)
    raw = largest_differencing(items.times, bins.times)
    better = improved(items, bins, raw)
    for one in (raw, better):
        assert one.shape == (len(times),)
        assert set(one.tolist()) <= set(range(len(base)))
        assert bins.loads(items, one).sum() == pytest.approx(sum(times) + sum(base))
    found = [bins.loads(items, one).max() for one in (raw, better)]
    assert best(items, bins) - 1e-9 <= found[1] <= found[0] + 1e-9


@given(TIMES, st.data())
def test_memory_is_kept_where_there_is_a_way(times: list[int], data: st.DataObject) -> None:
    needs = data.draw(st.lists(st.integers(0, 5), min_size=len(times), max_size=len(times)))
    room = data.draw(st.lists(st.integers(0, 12), min_size=2, max_size=2))
    items, bins = items_of(times, needs), bins_of([0, 0], room)
    kept = within_memory(items, bins, largest_differencing(items.times, bins.times))
    if kept is None:
        return
    assert (bins.left(items, kept) >= 0).all()
    better = improved(items, bins, kept)
    assert (bins.left(items, better) >= 0).all()
    assert best(items, bins) - 1e-9 <= bins.loads(items, better).max()
    assert bins.loads(items, better).max() <= bins.loads(items, kept).max() + 1e-9


def test_without_room_there_is_no_way() -> None:
    items, bins = items_of([1, 1], [3, 3]), bins_of([0, 0], [5, 2])
    assert within_memory(items, bins, np.array([0, 1])) is None
    assert within_memory(items, bins_of([0, 0], [3, 3]), np.array([0, 0])) is not None


def test_an_example_by_hand() -> None:
    """Of {8, 7, 6, 5, 4} differencing makes 16 and 14; one exchange makes both 15."""
    items, bins = items_of([8, 7, 6, 5, 4]), bins_of([0, 0])
    raw = largest_differencing(items.times, bins.times)
    assert sorted(bins.loads(items, raw)) == [14, 16]
    assert sorted(bins.loads(items, improved(items, bins, raw))) == [15, 15]


def bound(times: Floats, num_bins: int) -> float:
    """What no assignment can be below, by HiGHS."""
    num = len(times)
    # Variables: the highest load, then for each item and bin whether it is there.
    goal = np.zeros(1 + num * num_bins)
    goal[0] = 1
    each_once = np.zeros((num, len(goal)))
    below = np.zeros((num_bins, len(goal)))
    below[:, 0] = -1
    for item, place in itertools.product(range(num), range(num_bins)):
        each_once[item, 1 + item * num_bins + place] = 1
        below[place, 1 + item * num_bins + place] = times[item]
    found = milp(
        goal,
        constraints=[LinearConstraint(each_once, 1, 1), LinearConstraint(below, -np.inf, 0)],
        integrality=np.array([0] + [1] * (num * num_bins)),
        bounds=Bounds(0, np.array([np.inf] + [1.0] * (num * num_bins))),  # type: ignore[arg-type]
        options={"time_limit": 2.0},
    )
    return float(found.mip_dual_bound)


@pytest.mark.parametrize("seed", range(4))
def test_differencing_is_near_the_bound_of_the_integer_program(seed: int) -> None:
    generator = np.random.default_rng(seed)
    times = generator.lognormal(0, 0.8, 20)
    num_bins = 3
    items, bins = items_of(times), bins_of([0] * num_bins)
    better = improved(items, bins, largest_differencing(times, bins.times))
    lowest = max(bound(times, num_bins), times.max())
    assert lowest - 1e-6 <= bins.loads(items, better).max() <= 1.02 * lowest


def test_most_random_tables_are_dealt_more_evenly_than_by_greed() -> None:
    """Raw, without exchanges."""
    wins = losses = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        times = generator.lognormal(0, 0.8, 60)
        raw = np.bincount(largest_differencing(times, np.zeros(8)), times, minlength=8).max()
        greed = greedy(times, 8).max()
        wins += raw < greed * (1 - 1e-9)
        losses += raw > greed * (1 + 1e-9)
    assert wins >= 60 > 10 > losses
