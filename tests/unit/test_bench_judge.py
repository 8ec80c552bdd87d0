"""The judge tells growing rounding from drift, on losses made up for it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bench_results import bench_result, config_of, with_figures
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.config import BenchConfig
from torchrec_2dsp.programs.bench.judge import LossBounds, judged, loss_bounds
from torchrec_2dsp.programs.bench.results import BenchResult, ContestantResult, Outcome

NUM_STEPS = 60
FALLING = 0.45 + 0.25 * np.exp(-np.arange(NUM_STEPS) / 20)
"""The losses of a reference that learns."""
SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], NUM_STEPS)
ROUNDING = SIGNS * np.minimum(1e-8 * 1.4 ** np.arange(NUM_STEPS), 2e-3)
"""Differences of the eighth digit, which grow in each step until they are those of other weights
that are as good; measured on a model of ten multi-hot features: 2e-4 after 40 steps, 1.4e-3 after
130, and 3e-5 of the entropy."""
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
    """Its entropy over all steps would pass: it differs in the first step alone."""
    wrong = FALLING + np.where(np.arange(NUM_STEPS) == 1, -5e-4, 0.0)

    measured = other(wrong)

    assert measured.outcome is Outcome.DISQUALIFIED
    assert measured.reason == (
        "its loss is up to 0.0005 from that of plain in the first 10 steps; at most 0.0001 would "
        "be rounding, so it trains something else"
    )


@pytest.mark.parametrize(("drift", "message"), [(2e-3, "0.3 % above"), (-2e-3, "0.32 % below")])
def test_an_exact_contestant_that_drifts_later_is_disqualified(drift: float, message: str) -> None:
    """Copies that are no longer synced drift so; a better loss is another training as well."""
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
    """Also in a step that the reference didn't reach."""
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
    # All of them begin alike.
    curves = {name: np.where(np.arange(NUM_STEPS) < 10, FALLING, apart[name]) for name in apart}
    contestants = {**STOCK, "other": {"kind": "two_d"}, "int4": {"kind": "two_d", "qcomms": "fp16"}}
    curves |= {"other": curves["repeated"], "int4": FALLING * 1.004}

    measured = verdicts(contestants, curves)

    assert {contestant.outcome for contestant in measured.values()} == {Outcome.MEASURED}
    assert measured["repeated"].ne_gap is not None
    assert measured["repeated"].ne_gap > 1e-3
    # Each of the repeated ones is judged by the other, all others by the farther one.
    assert measured["other"].ne_bound == pytest.approx(3 * measured["repeated"].ne_gap)
    assert measured["again"].ne_bound == measured["other"].ne_bound
    strict = verdicts(contestants, curves, spread_factor=0.0)
    assert {name for name in strict if strict[name].outcome is Outcome.MEASURED} == {"plain"}


@pytest.mark.parametrize("contestants", [STOCK, {"plain": STOCK["plain"], "again": STOCK["again"]}])
def test_a_stock_run_that_drifts_excuses_nobody(contestants: dict[str, Any]) -> None:
    """Neither itself nor others, whether there is a third one to tell or not."""
    drifting = np.where(np.arange(NUM_STEPS) < 10, FALLING, FALLING * 1.02)
    curves = {"plain": FALLING, "repeated": FALLING + ROUNDING, "again": drifting}

    measured = verdicts({**contestants, "other": {"kind": "two_d"}}, {**curves, "other": drifting})

    assert measured["again"].outcome is Outcome.DISQUALIFIED
    assert measured["other"].outcome is Outcome.DISQUALIFIED
    assert measured["other"].ne_bound == 1e-3


def test_stock_runs_that_begin_otherwise_excuse_nobody() -> None:
    """They agree with each other, but are no repetitions of the reference."""
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


def bounds_of(contestant: dict[str, Any], sharding: dict[str, int]) -> LossBounds:
    config: BenchConfig = config_of({"plain": {"kind": "stock"}, "one": contestant})
    return loss_bounds(config.planned["one"], sharding, config)


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
    contestant: dict[str, object], sharding: dict[str, int], loss: float | None, ne: float
) -> None:
    assert bounds_of(contestant, sharding) == LossBounds(loss, ne)


def test_a_bound_of_its_own_is_meant_as_it_is() -> None:
    """Whatever others do; and single steps are not compared."""
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
