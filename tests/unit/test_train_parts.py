"""What the training program computes without ranks: rates, AUC, the best evaluation, display."""

import io
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tests.support.train_runs import click_data, config_with, plain_metrics
from torchrec_2dsp.errors import CheckpointError, ConfigError
from torchrec_2dsp.parallel.train_state.values import check_states
from torchrec_2dsp.programs.cli.app import app
from torchrec_2dsp.programs.cli.train_display import TrainDisplay
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.config.sections import RateSchedule
from torchrec_2dsp.programs.models.optimizer import clip_
from torchrec_2dsp.programs.train.checkpoints import RunHistory, RunSettings
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.metrics import area_under_roc
from torchrec_2dsp.programs.train.record import Evaluation, best_of, num_since_best
from torchrec_2dsp.programs.train.sharded import make_model


def rates(num_steps: int = 8, **values: object) -> list[float]:
    schedule = RateSchedule.model_validate(values)
    return [schedule.multiplier(step, num_steps) for step in range(num_steps)]


def test_rates_follow_their_schedule() -> None:
    assert rates() == [1.0] * 8
    assert rates(warm_up=4) == [0.25, 0.5, 0.75, 1.0] + [1.0] * 4
    assert rates(kind="linear") == [1 - step / 8 for step in range(8)]
    assert rates(kind="linear", decay_steps=2, final=0.5) == [1.0, 0.75] + [0.5] * 6
    assert rates(kind="step", step_every=3, factor=0.5) == [1.0] * 3 + [0.5] * 3 + [0.25] * 2
    cosine = rates(kind="cosine", warm_up=4, final=0.2)
    assert cosine[4] == 1.0
    assert cosine[6] == pytest.approx(0.6)
    assert cosine == sorted(cosine[:4]) + sorted(cosine[4:], reverse=True)
    # A run that is longer than its schedule ends at the bottom.
    assert rates(12, kind="cosine", decay_steps=5)[5:] == [0.0] * 7


@pytest.mark.parametrize("num_levels", [2, 5, 10_000])
def test_the_area_counts_pairs_and_halves_of_equal_ones(num_levels: int) -> None:
    generator = torch.Generator().manual_seed(num_levels)
    for _ in range(20):
        logits = torch.randint(num_levels, (60,), generator=generator) / num_levels - 0.5
        labels = (torch.rand(60, generator=generator) < 0.3).float()
        # Halves of at most 900 pairs are exact.
        assert area_under_roc(logits, labels) == plain_metrics(logits, labels)["auc"]


def test_an_area_without_pairs_is_no_number() -> None:
    ones = torch.ones(3)
    for scores, labels in (
        (ones, ones),
        (ones, 0 * ones),
        (ones[:0], ones[:0]),
        (ones / 0 * 0, ones),
    ):
        assert math.isnan(area_under_roc(scores, labels))


def evaluations(*values: float, metric: str = "ne") -> list[Evaluation]:
    return [
        Evaluation(step=step, losses=(0.5,), click_rate=0.2, metrics={metric: value})
        for step, value in enumerate(values, 1)
    ]


@pytest.mark.parametrize(
    ("values", "metric", "best", "num_since"),
    [
        ((0.9, 0.8, 0.85), "ne", 2, 1),
        ((0.9, 0.8, 0.8), "ne", 2, 1),
        ((0.7, 0.8, 0.75), "auc", 2, 1),
        ((math.nan, 0.8, math.nan), "ne", 2, 1),
        ((math.nan, math.nan), "ne", None, 2),
        ((), "ne", None, 0),
    ],
)
def test_the_best_evaluation_is_the_first_that_none_beats(
    values: tuple[float, ...], metric: str, best: int | None, num_since: int
) -> None:
    seen = evaluations(*values, metric=metric)
    first = best_of(seen, metric)
    assert (None if first is None else first.step) == best
    assert num_since_best(seen, metric) == num_since


def test_gradients_are_scaled_to_a_norm() -> None:
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    assert clip_(gradients, 10.0) == 5.0
    assert torch.equal(gradients[0], torch.tensor([3.0, 0.0]))
    clip_(gradients, 1.0)
    # The small number that torch adds to a norm, too, is 1e-6.
    assert torch.cat([part.reshape(-1) for part in gradients]).tolist() == pytest.approx(
        [0.6, 0.0, 0.8], abs=1e-6
    )
    assert clip_([torch.zeros(2)], 1.0) == 0.0


def test_settings_name_the_key_that_has_changed() -> None:
    first = RunSettings(config_with()).state_dict()
    RunSettings(config_with(loop={"steps": 99})).check_state_dict(first)
    for sections, key in (
        ({"data": {"seed": 3}}, "data.seed was 0 .* is 3 now"),
        ({"loop": {"accumulate": 2}}, "loop.accumulate was 1 .* is 2 now"),
        ({"optimizer": {"schedule": {"warm_up": 2}}}, "optimizer.schedule.warm_up was 0 .* is 2"),
        ({"data": {"features": [{"name": "user", "num_rows": 9}]}}, "data.features.0.num_rows was"),
    ):
        with pytest.raises(ConfigError, match=key):
            RunSettings(config_with(**sections)).check_state_dict(first)


def test_a_member_that_refuses_its_state_is_named() -> None:
    settings = RunSettings(config_with(loop={"accumulate": 2}))
    state = RunSettings(config_with()).state_dict()
    with pytest.raises(CheckpointError, match=r"^'settings' in the train state can't be loaded: "):
        check_states("settings", settings, [state])


def test_an_empty_history_comes_back() -> None:
    history = RunHistory()
    history.evaluations = evaluations(0.5, math.inf)
    other = RunHistory()
    other.load_state_dict(history.state_dict())
    assert (other.losses, other.evaluations) == ([], history.evaluations)
    assert other.seconds == 0


def test_a_run_that_goes_on_says_where() -> None:
    shown = io.StringIO()
    TrainDisplay(Console(file=shown, width=80)).run_resumed("main", Path("saved/main/last/40"), 40)
    assert shown.getvalue() == "main: going on at step 40, from saved/main/last/40\n"


def test_the_files_of_a_log_are_named_before_they_are_read() -> None:
    shown = io.StringIO()
    display = TrainDisplay(Console(file=shown, width=80))
    display.opening(config_with())
    assert not shown.getvalue()
    data = {"kind": "criteo", "files": ["day_0.gz", "day_1.gz"]}
    display.opening(make_config(TrainConfig, {"data": data, "runs": {"main": {}}}))
    display.data_opened("9 rows to train on")
    assert shown.getvalue() == "opening day_0.gz, day_1.gz\n9 rows to train on\n"


def test_the_command_refuses_steps_that_are_none() -> None:
    done = CliRunner().invoke(app, ["train", "--config", "demo", "--profile", "20"])
    assert done.exit_code == 2
    assert "--profile '20' names no steps; give the first and the last, such as" in done.stderr


def test_no_rank_holds_the_tables_before_they_are_sharded() -> None:
    config = config_with()
    run = next(iter(config.runs.values()))
    named = dict(make_model(config, run, click_data(config)).named_parameters())
    tables = {name for name in named if "embedding_bags" in name}
    assert tables
    assert {name for name, weight in named.items() if weight.is_meta} == tables
