"""Benchmark figures by hand, and the judge that distinguishes growing rounding from drift."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.bench_results import CONTESTANTS, STEPS_MS, bench_result, config_of, with_figures
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.judge import LossBounds, judged, loss_bounds
from torchrec_2dsp.programs.bench.results import (
    BenchResult,
    ContestantBlock,
    ContestantResult,
    Outcome,
)
from torchrec_2dsp.programs.bench.statistics import (
    compare_runs,
    interval_coverage,
    median_interval,
    speedup,
    step_time,
    summarize,
)

NUM_STEPS = 60
FALLING = 0.45 + 0.25 * np.exp(-np.arange(NUM_STEPS) / 20)
"""The losses of a reference that learns."""
SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], NUM_STEPS)
ROUNDING = SIGNS * np.minimum(1e-8 * 1.4 ** np.arange(NUM_STEPS), 2e-3)
"""Differences in the eighth digit, which grow in each step until weights are different but as good;
measured on a model with ten multi-hot features: 2e-4 after 40 steps, 1.4e-3 after 130, and 3e-5 of
the entropy."""
TWO_D = {"plain": {"kind": "stock"}, "other": {"kind": "two_d"}}
STOCK = {name: {"kind": "stock"} for name in ("plain", "repeated", "again")}


def verdicts(
    contestants: Mapping[str, Mapping[str, Any]],
    losses: Mapping[str, Any],
    **loss_section: float,
) -> dict[str, ContestantResult]:
    config = config_of(
        {name: dict(contestant) for name, contestant in contestants.items()}, loss=loss_section
    )
    trained = {name: {"losses": tuple(map(float, curve))} for name, curve in losses.items()}
    result = with_figures(bench_result(contestants=contestants, steps_ms={}), trained)
    result = judged(result, config)
    return {contestant.name: contestant for contestant in result.contestants}


def other(losses: Any, contestant: Mapping[str, Any] = TWO_D["other"]) -> ContestantResult:
    contestants = {"plain": {"kind": "stock"}, "other": contestant}
    return verdicts(contestants, {"plain": FALLING, "other": losses})["other"]


def test_rounding_that_grows_is_the_same_training() -> None:
    measured = other(FALLING + ROUNDING)

    assert np.abs(ROUNDING).max() > 1e-3, "single steps are far apart"
    assert measured.outcome is Outcome.MEASURED
    assert measured.loss_gap == pytest.approx(np.abs(ROUNDING[:10]).max(), rel=1e-6)
    assert measured.loss_bound == 1e-4
    assert measured.ne_gap == pytest.approx(ROUNDING.sum() / FALLING.sum())
    assert measured.ne_bound == 1e-3
    assert measured.reason == ""


def test_another_algorithm_shows_in_the_first_steps() -> None:
    """Its entropy over all steps would pass: it differs only at one early step."""
    wrong = FALLING + np.where(np.arange(NUM_STEPS) == 1, -5e-4, 0.0)

    measured = other(wrong)

    assert measured.outcome is Outcome.DISQUALIFIED
    assert measured.reason == (
        "its loss is up to 0.0005 from that of plain in the first 10 steps; at most 0.0001 would "
        "be rounding, so it trains something else"
    )


@pytest.mark.parametrize(("drift", "message"), [(2e-3, "0.3 % above"), (-2e-3, "0.32 % below")])
def test_an_exact_contestant_that_drifts_later_is_disqualified(drift: float, message: str) -> None:
    """Unsynced copies drift like this; a better loss also means a different training."""
    measured = other(FALLING + ROUNDING + np.where(np.arange(NUM_STEPS) >= 10, drift, 0.0))

    assert measured.loss_gap is not None
    assert measured.loss_gap < 1e-6
    assert measured.outcome is Outcome.DISQUALIFIED
    assert f"over 60 steps is {message} that of plain" in measured.reason
    assert "at most 0.1 % would be the same quality" in measured.reason


@pytest.mark.parametrize("arithmetic", ["qcomms", "transport", "row_transport", "stored_as"])
def test_contestants_that_round_are_judged_by_quality(arithmetic: str) -> None:
    contestant = {"kind": "two_d", arithmetic: "int8" if arithmetic == "stored_as" else "bf16"}
    noise = 5e-3 * SIGNS

    passed, drifted = (other(FALLING + noise + drift, contestant) for drift in (0.0, 3e-3))

    assert passed.loss_gap == pytest.approx(5e-3)
    assert passed.loss_bound is None
    assert passed.outcome is Outcome.MEASURED
    assert drifted.outcome is Outcome.DISQUALIFIED
    assert drifted.ne_gap == pytest.approx((noise.sum() + 3e-3 * NUM_STEPS) / FALLING.sum())
    assert "at most 0.3 % would be the same quality" in drifted.reason


@pytest.mark.parametrize("contestant", [{"kind": "two_d"}, {"kind": "two_d", "transport": "int4"}])
@pytest.mark.parametrize("no_number", [math.nan, math.inf])
@pytest.mark.parametrize("num_more_steps", [0, 5])
def test_a_loss_that_is_no_number_disqualifies(
    contestant: dict[str, str], no_number: float, num_more_steps: int
) -> None:
    """This includes steps that the reference didn't reach."""
    measured = other([*FALLING, *[0.5] * num_more_steps, no_number], contestant)

    assert measured.outcome is Outcome.DISQUALIFIED
    assert measured.loss_gap == measured.ne_gap == math.inf
    step = NUM_STEPS + num_more_steps + 1
    assert f"its loss is {no_number} at step {step}; all losses of plain are" in measured.reason


def test_few_steps_are_judged_as_far_as_they_go() -> None:
    for contestant in (TWO_D["other"], {"kind": "two_d", "transport": "bf16"}):
        assert other(FALLING[:3] + 1e-6, contestant).outcome is Outcome.MEASURED
        assert other(FALLING[:3] + 5e-3, contestant).outcome is Outcome.DISQUALIFIED
    assert "in the first 3 steps" in other(FALLING[:3] + 5e-3).reason


def test_only_steps_of_both_are_compared() -> None:
    assert other([*FALLING, *[0.1] * 40]).ne_gap == 0.0
    assert other(FALLING[:20]).ne_gap == 0.0


def test_the_number_of_first_steps_can_be_chosen() -> None:
    late = {"plain": FALLING, "other": FALLING + np.where(np.arange(NUM_STEPS) == 30, 2e-4, 0.0)}

    assert verdicts(TWO_D, late)["other"].outcome is Outcome.MEASURED
    assert verdicts(TWO_D, late, num_steps=31)["other"].outcome is Outcome.DISQUALIFIED


def test_repeated_stock_runs_that_are_far_apart_widen_the_bounds() -> None:
    apart = {"plain": FALLING, "repeated": FALLING * 1.002, "again": FALLING * 0.9985}
    # All begin alike.
    curves = {name: np.where(np.arange(NUM_STEPS) < 10, FALLING, apart[name]) for name in apart}
    contestants = {**STOCK, "other": {"kind": "two_d"}, "int4": {"kind": "two_d", "qcomms": "fp16"}}
    curves |= {"other": curves["repeated"], "int4": FALLING * 1.004}

    measured = verdicts(contestants, curves)

    assert {contestant.outcome for contestant in measured.values()} == {Outcome.MEASURED}
    assert measured["repeated"].ne_gap is not None
    assert measured["repeated"].ne_gap > 1e-3
    # Each repeated run is judged by the other, all others by the farther one.
    assert measured["other"].ne_bound == pytest.approx(3 * measured["repeated"].ne_gap)
    assert measured["again"].ne_bound == measured["other"].ne_bound
    strict = verdicts(contestants, curves, spread_factor=0.0)
    assert {name for name in strict if strict[name].outcome is Outcome.MEASURED} == {"plain"}


@pytest.mark.parametrize("contestants", [STOCK, {"plain": STOCK["plain"], "again": STOCK["again"]}])
def test_a_stock_run_that_drifts_excuses_nobody(contestants: dict[str, Any]) -> None:
    """It excuses neither itself nor others, with or without a third run to compare."""
    drifting = np.where(np.arange(NUM_STEPS) < 10, FALLING, FALLING * 1.02)
    curves = {"plain": FALLING, "repeated": FALLING + ROUNDING, "again": drifting}

    measured = verdicts({**contestants, "other": {"kind": "two_d"}}, {**curves, "other": drifting})

    assert measured["again"].outcome is Outcome.DISQUALIFIED
    assert measured["other"].outcome is Outcome.DISQUALIFIED
    assert measured["other"].ne_bound == 1e-3


def test_stock_runs_that_begin_otherwise_excuse_nobody() -> None:
    """They agree with each other, but don't repeat the reference."""
    elsewhere = FALLING * 1.02
    drifting = np.where(np.arange(NUM_STEPS) < 10, FALLING, elsewhere)
    curves = {"plain": FALLING, "repeated": elsewhere, "again": elsewhere, "other": drifting}

    measured = verdicts({**STOCK, "other": {"kind": "two_d"}}, curves)

    assert "in the first 10 steps" in measured["repeated"].reason
    assert measured["other"].outcome is Outcome.DISQUALIFIED
    assert measured["other"].ne_bound == 1e-3


def test_a_reference_without_a_finite_loss_is_none() -> None:
    diverged = [*FALLING[:4], math.nan]

    measured = verdicts(STOCK, {"plain": diverged, "repeated": FALLING, "again": FALLING})
    assert "plain" in measured
    assert measured["plain"].outcome is Outcome.DISQUALIFIED
    assert measured["repeated"].ne_gap == 0.0
    with pytest.raises(ConfigError, match=r"the loss of plain is nan at step 5, .*; lower optim"):
        verdicts({"plain": {"kind": "stock"}}, {"plain": diverged})


def test_without_a_reference_nothing_counts() -> None:
    config = config_of({"plain": {"kind": "stock"}})
    crashed = bench_result(
        contestants={"plain": {"kind": "stock"}}, failed={"plain": (Outcome.CRASHED, "it raised")}
    )

    with pytest.raises(ConfigError, match="no stock contestant in fp32 was measured: plain"):
        judged(crashed, config)


def test_ceilings_and_failures_are_not_judged() -> None:
    contestants = {**TWO_D, "ceiling": {"kind": "ceiling", "of": "other"}}
    config = config_of(contestants)
    result = bench_result(contestants=contestants, failed={"other": (Outcome.HUNG, "late")})

    assert judged(result, config).contestants[1:] == result.contestants[1:]


@pytest.mark.parametrize(
    ("contestant", "sharding", "loss", "ne"),
    [
        ({"kind": "stock"}, {"row_wise": 2}, 1e-4, 1e-3),
        ({"kind": "stock", "qcomms": "int8"}, {"table_wise": 2}, None, 3e-3),
        ({"kind": "stock", "qcomms": "bf16"}, {"table_wise": 2}, None, 3e-3),
        ({"kind": "stock", "qcomms": "fp16"}, {"column_wise": 2}, None, 5e-2),
        ({"kind": "stock"}, {"table_wise": 1, "column_wise": 1}, None, 5e-2),
        ({"kind": "stock", "dense": {"kind": "fp16"}}, {"row_wise": 2}, None, 2e-3),
        ({"kind": "stock", "dense": {"autocast": "bf16"}}, {"row_wise": 2}, None, 3e-3),
        ({"kind": "stock", "dense": {"kind": "thresholded"}}, {"row_wise": 2}, None, 5e-2),
        ({"kind": "two_d"}, {"2d_row_wise": 2}, 1e-4, 1e-3),
        ({"kind": "two_d"}, {"2d_grid_shard": 2}, None, 5e-2),
        ({"kind": "two_d", "qcomms": "fp16"}, {"2d_row_wise": 2}, None, 2e-3),
        ({"kind": "two_d", "transport": "bf16"}, {"2d_row_wise": 2}, None, 3e-3),
        ({"kind": "two_d", "row_transport": "int4"}, {"2d_row_wise": 2}, None, 1e-2),
        (
            {"kind": "two_d", "qcomms": "fp16", "transport": "int4"},
            {"2d_row_wise": 2},
            None,
            1e-2,
        ),
        ({"kind": "two_d", "sync": "WeightSync"}, {"2d_row_wise": 2}, None, 5e-2),
        ({"kind": "two_d", "delay": 1}, {"2d_row_wise": 2}, None, 5e-2),
        ({"kind": "stock", "ne_bound": 0.5}, {"row_wise": 2}, None, 0.5),
    ],
)
def test_who_must_train_the_same(
    contestant: dict[str, Any], sharding: dict[str, int], loss: float | None, ne: float
) -> None:
    config = config_of({"plain": {"kind": "stock"}, "one": contestant})
    assert loss_bounds(config.planned["one"], sharding, config) == LossBounds(loss, ne)


def test_a_bound_of_its_own_is_meant_as_it_is() -> None:
    """It holds whatever other contestants do, and single steps aren't compared."""
    contestants = {**STOCK, "other": {"kind": "two_d", "ne_bound": 0.01}}
    apart = np.where(np.arange(NUM_STEPS) < 10, FALLING, FALLING * 1.009)
    curves = {"plain": FALLING, "repeated": apart, "again": apart}

    for factor, outcome in ((1.009, Outcome.MEASURED), (1.011, Outcome.DISQUALIFIED)):
        measured = verdicts(contestants, {**curves, "other": FALLING * factor})
        assert measured["repeated"].outcome is Outcome.MEASURED
        assert measured["other"].ne_bound == 0.01
        assert measured["other"].outcome is outcome


@pytest.mark.parametrize("number", [1, 3])
def test_files_of_another_format_are_refused(tmp_path: Path, number: int) -> None:
    path = tmp_path / "result.json"
    bench_result().model_copy(update={"format": number}).save(path)
    with pytest.raises(ConfigError, match=r"(?s)is not the JSON of a benchmark: .*format"):
        BenchResult.load(path)


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
    # With 7 values, a resample's median is the lowest with probability 0.010 and one of the two
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
@settings(max_examples=30)
def test_another_unit_changes_times_and_no_ratio(
    steps_s: list[float], base_s: list[float], exponent: int
) -> None:
    # Powers of two don't round.
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
    # 4 ranks with 1,024 samples each in 0.1 s.
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
