"""Sync policies: due steps, and their texts."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

import torchrec_2dsp as tdsp
from tests.support.plans import policies
from torchrec_2dsp.plan.sync import SyncPolicy, parse_policy


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (tdsp.every(1), [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (tdsp.every(4), [4, 8]),
        (tdsp.after(0, tdsp.every(4)), [4, 8]),
        (tdsp.after(3, tdsp.every(2)), [5, 7, 9]),
        (tdsp.after(1, tdsp.after(2, tdsp.every(3))), [6, 9]),
        (tdsp.after(2, tdsp.never()), []),
        (tdsp.never(), []),
    ],
    ids=str,
)
def test_due_steps(policy: SyncPolicy, steps: list[int]) -> None:
    assert [step for step in range(1, 10) if policy.is_due(step)] == steps


@given(policies)
def test_the_mean_distance_of_syncs(policy: SyncPolicy) -> None:
    num_steps = 50_000
    due = sum(policy.is_due(step) for step in range(1, num_steps + 1))

    assert due == pytest.approx(num_steps / policy.steps_per_sync, abs=20)


@given(policies)
def test_a_policy_survives_its_text(policy: SyncPolicy) -> None:
    assert parse_policy(str(policy)) == policy


def test_texts_may_be_written_with_care() -> None:
    assert parse_policy(" after( 1_000,every(4) ) ") == tdsp.after(1000, tdsp.every(4))


@pytest.mark.parametrize("text", ["", "4", "every()", "every(-1)", "after(3)", "never", "every(x)"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(tdsp.errors.ConfigError, match="is no sync policy; use every"):
        parse_policy(text)


@pytest.mark.parametrize("n", [0, -3, 1.5, True, 10**39])
def test_an_interval_is_a_positive_number(n: int) -> None:
    with pytest.raises(
        tdsp.errors.ConfigError, match=rf"every\({n}\) is no interval; use every\(1\)"
    ):
        tdsp.every(n)


@pytest.mark.parametrize("step", [-1, True, 10**39])
def test_a_start_is_a_number_and_has_a_policy(step: int) -> None:
    with pytest.raises(
        tdsp.errors.ConfigError, match=rf"after\({step}, ...\) is no number of steps"
    ):
        tdsp.after(step, tdsp.every(1))
    with pytest.raises(tdsp.errors.ConfigError, match=r"after\(5, 3\) needs a policy"):
        tdsp.after(5, 3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": 3}, r"policy=3\) is no policy; use every\(4\)"),
        ({"policy": None}, r"policy=None\) is no policy"),
        ({"moments_policy": "every(2)"}, r"moments_policy='every\(2\)'\) is no policy"),
        ({"rows": "most"}, "rows='most'. is unknown; use one of 'touched', 'all'"),
        (
            {"transport": "int3"},
            "transport='int3'. is unknown; use one of 'fp32', 'bf16', 'fp16', 'int8'",
        ),
        ({"dense_above": 1.5}, r"dense_above=1.5\) is no share of rows; use 0 to 1"),
        ({"dense_above": -0.1}, "is no share of rows"),
        ({"rows": "all", "dense_above": 0.5}, "all rows are averaged anyway"),
        ({"rows": "all", "transport": "bf16"}, "whole shards are all-reduced as they are"),
    ],
)
def test_a_config_says_what_is_wrong(fields: dict[str, object], message: str) -> None:
    with pytest.raises(tdsp.errors.ConfigError, match=message):
        tdsp.WeightSync(**fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("sync", [tdsp.GradientSync, tdsp.WeightSync])
@pytest.mark.parametrize("drift_every", [-1, True, 1.5, 10**39])
def test_a_drift_interval_is_a_number_of_syncs(sync: Any, drift_every: object) -> None:
    message = rf"Sync\(drift_every={drift_every}\) is no number of syncs"
    with pytest.raises(tdsp.errors.ConfigError, match=message):
        sync(drift_every=drift_every)


@pytest.mark.parametrize("fields", [{"transport": "int3"}, {"delay": 2}, {"delay": -1}])
def test_an_exact_config_says_what_is_wrong(fields: dict[str, object]) -> None:
    ((name, value),) = fields.items()
    with pytest.raises(
        tdsp.errors.ConfigError, match=rf"^GradientSync\({name}={value!r}\) is (n|unk)"
    ):
        tdsp.GradientSync(**fields)  # pyright: ignore[reportArgumentType]


@given(st.sampled_from(tdsp.SyncedRows))
def test_rows_may_be_given_as_text(rows: tdsp.SyncedRows) -> None:
    assert tdsp.WeightSync(rows=rows.value) == tdsp.WeightSync(rows=rows)  # pyright: ignore


def test_a_config_in_words_has_what_was_changed() -> None:
    assert str(tdsp.WeightSync()) == "WeightSync()"
    changed = tdsp.WeightSync(policy=tdsp.every(4), rows=tdsp.SyncedRows.ALL)
    assert str(changed) == "WeightSync(policy=every(4), rows=all)"
