"""Figures of a benchmark: against values computed by hand, and what must hold for all of them."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.bench_results import CONTESTANTS, STEPS_MS, bench_result
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.results import ContestantBlock, ContestantResult, Outcome
from torchrec_2dsp.programs.bench.statistics import (
    compare_runs,
    interval_coverage,
    median_interval,
    speedup,
    step_time,
    summarize,
)

BLOCKS_S = st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=9)
CRASHED = (Outcome.CRASHED, "out of memory")
ONE_MORE: dict[str, Any] = {**CONTESTANTS, "second_floor": {"kind": "ceiling", "of": "stock"}}


def contestant(*steps_s: float, first_round: int = 0) -> ContestantResult:
    blocks = tuple(
        ContestantBlock(round=index, num_steps=3, step_s=step_s, foreign_load=0.0, probe_s=1e-3)
        for index, step_s in enumerate(steps_s, first_round)
    )
    return ContestantResult(
        name="one", description="", kind="stock", outcome=Outcome.MEASURED, blocks=blocks
    )


def test_step_times_by_hand() -> None:
    step = step_time(contestant(0.4, 0.1, 0.2, 0.3, 0.2))

    assert (step.min_s, step.median_s, step.max_s) == (0.1, 0.2, 0.4)
    assert step.spread == pytest.approx(1.5)
    # Of 5 values, a resample's median is the lowest with probability 0.058, so the interval
    # reaches both ends.
    assert (step.low_s, step.high_s) == (0.1, 0.4)


def test_an_interval_leaves_out_what_is_too_rare() -> None:
    # Of 7 values, a resample's median is the lowest with probability 0.010 and one of the two
    # lowest with 0.10: the interval goes from the second to the second last.
    assert median_interval([7, 1, 6, 2, 5, 3, 4]) == (2, 6)


@pytest.mark.parametrize("num_values", [5, 7, 9])
def test_an_interval_covers_the_median_as_often_as_it_says(num_values: int) -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(400):
        low, high = median_interval(rng.exponential(size=num_values).tolist())
        hits += low <= math.log(2) <= high

    assert hits / 400 == pytest.approx(interval_coverage(num_values), abs=0.04)


def test_an_interval_depends_on_the_seed_alone() -> None:
    # Many and even, so that the interval's ends lie between many pairs of values.
    values = [1.1**power for power in range(40)]
    assert median_interval(values, seed=3) == median_interval(values, seed=3)
    assert len({median_interval(values, seed=seed) for seed in range(20)}) > 1


def test_a_contestant_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'one' counts as measured but has no blocks.*again"):
        step_time(contestant())


def test_ratios_are_paired_by_round() -> None:
    # The base's rounds 0..3 and the other's 2..4 have 2 and 3 in common.
    base = contestant(9.0, 9.0, 3.0, 8.0)
    actual = speedup(contestant(2.0, 2.0, 1.0, first_round=2), base)

    assert actual is not None
    assert actual.factor == pytest.approx((1.5 + 4.0) / 2)
    assert (actual.low, actual.high) == (1.5, 4.0)


def test_there_is_no_ratio_without_a_common_round() -> None:
    assert speedup(contestant(1.0), contestant(1.0, first_round=1)) is None


@given(steps_s=BLOCKS_S, base_s=BLOCKS_S, exponent=st.integers(-5, 5))
@settings(max_examples=30, deadline=None)
def test_another_unit_changes_times_and_no_ratio(
    steps_s: list[float], base_s: list[float], exponent: int
) -> None:
    # A power of two, which rounds nothing.
    unit = 2.0**exponent
    scaled, scaled_base = ([value * unit for value in values] for values in (steps_s, base_s))
    before, after = step_time(contestant(*steps_s)), step_time(contestant(*scaled))

    assert after.median_s == before.median_s * unit
    assert (after.low_s, after.high_s) == (before.low_s * unit, before.high_s * unit)
    assert after.spread == before.spread
    assert speedup(contestant(*scaled), contestant(*scaled_base)) == speedup(
        contestant(*steps_s), contestant(*base_s)
    )


def test_a_summary_by_hand() -> None:
    steps_ms = {
        "stock": [200.0] * 5,
        "stock_duplex": [160.0] * 5,
        "exact_2d": [100.0] * 5,
        "floor": [80.0] * 5,
    }
    summary = summarize(bench_result(steps_ms=steps_ms))

    assert (summary.best_stock, summary.best_plain_stock) == ("stock_duplex", "stock")
    ours = summary.contestants["exact_2d"]
    # 4 ranks of 1,024 samples in 0.1 s.
    assert ours.samples_per_s == pytest.approx(40_960)
    assert ours.over_best_stock is not None
    assert ours.over_best_stock.factor == pytest.approx(1.6)
    assert ours.over_plain_stock is not None
    assert ours.over_plain_stock.factor == pytest.approx(2.0)
    assert ours.share_of_ceiling == pytest.approx(0.8)
    assert ours.link_bytes == pytest.approx(1.2e6)
    assert ours.sent_bytes == pytest.approx(2.9e6)


def test_the_best_are_the_fastest_that_were_measured_and_the_first_of_equals() -> None:
    even = {**STEPS_MS, "stock_duplex": STEPS_MS["stock"], "second_floor": [90.0] * 7}
    assert summarize(bench_result(steps_ms=even)).best_stock == "stock"
    assert summarize(bench_result(steps_ms=even, contestants=ONE_MORE)).ceiling == "second_floor"
    without = summarize(bench_result(failed={"stock_duplex": CRASHED, "floor": CRASHED}))
    assert (without.best_stock, without.ceiling) == ("stock", None)
    assert without.contestants["exact_2d"].share_of_ceiling is None
    assert "floor" not in without.contestants


def test_without_stock_there_are_no_ratios() -> None:
    summary = summarize(bench_result(failed={"stock_duplex": CRASHED, "stock": CRASHED}))
    assert (summary.best_stock, summary.best_plain_stock) == (None, None)
    ratios = [contestant.over_best_stock for contestant in summary.contestants.values()]
    assert ratios == [None, None]


def scaled(**factors: float) -> dict[str, list[float]]:
    return {
        name: [step * factors.get(name, 1.0) for step in steps] for name, steps in STEPS_MS.items()
    }


def test_medians_apart_are_found_in_whichever_run() -> None:
    runs = [bench_result(steps_ms=scaled(floor=factor)) for factor in (1.0, 1.06, 0.95)]

    assert compare_runs(runs).apart == ("floor",)
    assert compare_runs(runs, tolerance=0.12).passed
    assert compare_runs(runs[:2]).passed


def test_overlapping_intervals_have_no_order() -> None:
    steps_ms = {**STEPS_MS, "stock_duplex": [step + 1 for step in STEPS_MS["stock"]]}
    turned = {**STEPS_MS, "stock_duplex": [step - 1 for step in STEPS_MS["stock"]]}
    assert compare_runs([bench_result(steps_ms=steps_ms), bench_result(steps_ms=turned)]).passed


def test_a_failure_in_one_run_is_no_agreement() -> None:
    failed = bench_result(failed={"exact_2d": CRASHED})

    assert compare_runs([bench_result(), failed]).apart == ("exact_2d",)
    assert compare_runs([failed, failed]).passed


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"network": "5 Gbit/s"}, "network is '5 Gbit/s' instead of '1 Gbit/s'"),
        ({"machine": {"cores": "4"}}, "machine.cores is '4' instead of '2'"),
        ({"overrides": {"model": {"dim": 32}}}, "config.model.dim is 32 instead of 16"),
        ({"contestants": ONE_MORE, "steps_ms": scaled()}, "config.contestants.second_floor is"),
    ],
)
def test_other_benchmarks_are_not_compared(other: dict[str, Any], message: str) -> None:
    if "contestants" in other:
        other = {**other, "failed": {"second_floor": CRASHED}}
    with pytest.raises(ConfigError, match=message):
        compare_runs([bench_result(), bench_result(**other)])


def test_when_a_run_was_and_what_its_links_did_may_differ() -> None:
    later = bench_result(when="2026-03-02 12:00", command="again", link_speeds={"all": 9e7})
    assert compare_runs([bench_result(), later]).passed


def test_one_run_and_a_negative_tolerance_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 run can't be compared; give at least two"):
        compare_runs([bench_result()])
    with pytest.raises(ConfigError, match=r"tolerance=-0.1 must be at least 0"):
        compare_runs([bench_result(), bench_result()], tolerance=-0.1)
