"""Which rows are held by every rank: against all subsets, and against all numbers of them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

import torchrec_2dsp as tdsp
from tests.support.costs import LINK, only_the_link
from tests.support.planning import SHARDERS, skewed, tables
from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.planner.search.choices import candidates_of
from torchrec_2dsp.planner.search.cost_search import search
from torchrec_2dsp.planner.search.placement import Found, Runs, concave_runs, rows_by_byte

ROWS = (20_000,)


def runs_of(runs: list[tuple[int, int, int]]) -> Runs:
    """From rows, benefit and bytes of each."""
    num_rows, benefits, num_bytes = np.array(runs, dtype=np.float64).T
    return Runs(np.arange(len(runs)), num_rows, benefits, num_bytes)


def best_of_all(runs: Runs, room: float) -> float:
    """What the best numbers of rows save that fit."""
    every = itertools.product(*(range(int(count) + 1) for count in runs.num_rows))
    return max(
        float(runs.benefits @ np.array(some))
        for some in every
        if runs.num_bytes @ np.array(some) <= room
    )


RUNS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(-3, 9), st.integers(1, 5)), min_size=1, max_size=4
)


@given(RUNS, st.integers(0, 30))
def test_greed_misses_less_than_one_row(runs: list[tuple[int, int, int]], room: int) -> None:
    some = runs_of(runs)
    taken = rows_by_byte(some, room)
    assert some.num_bytes @ taken <= room
    assert (taken <= some.num_rows).all()
    best = best_of_all(some, room)
    assert best - max(some.benefits.max(), 0) <= some.benefits @ taken <= best


@given(RUNS, st.integers(0, 12))
def test_among_rows_of_one_size_greed_is_best(runs: list[tuple[int, int, int]], room: int) -> None:
    some = replace(runs_of(runs), num_bytes=np.full(len(runs), 2.0))
    assert some.benefits @ rows_by_byte(some, room) == best_of_all(some, room)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8))
def test_runs_save_less_and_less_and_all_that_there_is_to_save(costs: list[float]) -> None:
    sizes = np.cumsum(np.arange(len(costs)), dtype=np.float64)
    runs = list(concave_runs(sizes, np.array(costs)))
    benefits = [benefit for _, benefit in runs]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(benefits))
    assert sum(num_rows for num_rows, _ in runs) == sizes[-1]
    saved = sum(num_rows * benefit for num_rows, benefit in runs)
    assert saved == pytest.approx(costs[0] - costs[-1], abs=1e-9)


def slow_fetch() -> tdsp.Calibration:
    """Bytes between hosts alone cost something, those of a sharding group thrice as much."""
    known = only_the_link()
    slow = known.collectives.all_to_all.model_copy(update={"link_s_per_byte": 3 * LINK})
    collectives = known.collectives.model_copy(update={"all_to_all": slow})
    return known.model_copy(update={"collectives": collectives})


def searched(
    room: float = 1e12, hot_rows: int | None = None, calibration: tdsp.Calibration | None = None
) -> Found:
    workload = Workload.of_model(tables(ROWS), batch_size=256, access=skewed(ROWS))
    constraint = {"t0": tdsp.ParameterConstraints2D(exchange="row", hot_rows=hot_rows)}
    candidates = candidates_of(tables(ROWS), SHARDERS, constraint, workload, "cpu")
    setting = CostSetting(
        calibration or slow_fetch(), workload, tdsp.Mesh2D(1, 4), tdsp.GradientSync(), 2
    )
    (found,) = search(candidates, [setting], room).found
    return found


def num_hot(found: Found) -> int:
    return found.placement.choices[0].num_hot


def test_the_number_of_hot_rows_is_near_the_best_one() -> None:
    found = searched()
    scanned = {
        count: searched(hot_rows=count).cost.total_s
        for count in (0, 8, 32, 128, 512, 2_048, 8_192, 20_000)
    }
    assert num_hot(found) > 0
    assert found.cost.total_s < 0.85 * scanned[0]
    assert found.cost.total_s <= 1.02 * min(scanned.values())


def test_hot_rows_fit_beside_the_rest() -> None:
    roomy = searched()
    without = searched(hot_rows=0)
    room = float(without.bytes_by_rank.max()) + 200_000
    tight = searched(room)
    assert 0 < num_hot(tight) < num_hot(roomy)
    assert float(tight.bytes_by_rank.max()) <= room
    assert roomy.cost.total_s < tight.cost.total_s < without.cost.total_s


@pytest.mark.parametrize("asked", [0, 7])
def test_a_number_that_is_asked_for_is_kept(asked: int) -> None:
    assert num_hot(searched(hot_rows=asked)) == asked


def test_a_small_gain_is_none() -> None:
    """What hot rows take is predicted too short, so little can't be told from nothing."""
    assert num_hot(searched(calibration=only_the_link())) == 0
