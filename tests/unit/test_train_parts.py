"""The training program's parts without ranks: rates, AUC, the best evaluation, display."""

import io
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim import SemisyncOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.buckets import bucket
from tests.support.train_runs import TREE, click_data, config_with, plain_metrics
from torchrec_2dsp.errors import CheckpointError, ConfigError
from torchrec_2dsp.parallel.checkpoint.address import Place
from torchrec_2dsp.parallel.train_state.state import (
    check_hyper_parameters,
    restore_hyper_parameters,
)
from torchrec_2dsp.parallel.train_state.values import (
    check_states,
    from_plain,
    load_states,
    random_state,
    restore_random_state,
    stored_member,
    to_plain,
)
from torchrec_2dsp.programs.cli.train_display import TrainDisplay, progress_text
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.config.sections import RateSchedule
from torchrec_2dsp.programs.models.optimizer import clip_
from torchrec_2dsp.programs.train.checkpoints import RunHistory, RunSettings
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.metrics import area_under_roc
from torchrec_2dsp.programs.train.record import (
    Evaluation,
    StepsTrained,
    best_of,
    num_since_best,
)
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
        # Halves from at most 900 pairs are exact.
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
        Evaluation(step=step, losses=(0.5,), metrics={metric: value})
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


SPLIT = {"splits": {"over": 0.5}, "split_threshold": "laplace"}


def test_settings_name_the_key_that_has_changed() -> None:
    def settings(**sections: Any) -> RunSettings:
        config = config_with(**sections)
        return RunSettings(config, next(iter(config.runs)))

    first = settings().state_dict()
    settings(loop={"steps": 99}, runs={"other": {"num_groups": 2}}).check_state_dict(first)
    for sections, key in (
        ({"data": {"seed": 3}}, "data.seed was 0 .* is 3 now"),
        ({"loop": {"accumulate": 2}}, "loop.accumulate was 1 .* is 2 now"),
        (
            {"optimizer": {"schedule": {"kind": "cosine"}}},
            "^optimizer.schedule.kind was .*constant",
        ),
        ({"optimizer": {"schedule": {"warm_up": 2}}}, "optimizer.schedule.warm_up was 0 .* is 2"),
        ({"data": {"features": [{"name": "user", "num_rows": 9}]}}, "data.features.0.num_rows was"),
        ({"runs": {"split": SPLIT}}, "run.split_threshold was .*exact.* is .*laplace.* now"),
        ({"runs": {"split": SPLIT | {"split_threshold": "exact"}}}, "run.splits.over was nothing"),
        ({"runs": {"scaled": {"moment_scale": 4}}}, "run.moment_scale was .*from_mesh.* is 4.0"),
    ):
        with pytest.raises(ConfigError, match=key):
            settings(**sections).check_state_dict(first)
    settings().check_state_dict({**first, "run.moment_rho": "0.01"})  # A key that is gone.
    older = {key: value for key, value in first.items() if not key.startswith("run.")}
    assert len(older) < len(first)
    settings(runs={"split": SPLIT}).check_state_dict(older)


def test_a_schedule_spans_the_planned_steps_or_those_of_the_checkpoint() -> None:
    def settings(steps: int, num_steps: int) -> RunSettings:
        schedule = {"schedule": {"kind": "cosine"}}
        return RunSettings(
            config_with(loop={"steps": steps}, optimizer=schedule), "one_group", {}, num_steps
        )

    # Earlier versions' schedules spanned loop.steps.
    older, newer = settings(90, 90).state_dict(), settings(90, 6).state_dict()
    for state, expected in ((older, 90), (newer, 6)):
        resumed = settings(90, 6)
        assert resumed.num_steps == 6
        resumed.check_state_dict(state)
        resumed.load_state_dict(state)
        assert resumed.num_steps == expected
        assert resumed.state_dict() == state
    settings(80, 6).check_state_dict(newer)
    with pytest.raises(ConfigError, match=r"loop\.steps was 90 .* is 6 now"):
        settings(80, 6).check_state_dict(older)


def test_a_log_may_move_and_be_read_otherwise() -> None:
    def settings(**keys: Any) -> RunSettings:
        log = {"kind": "table", "label": "y", "features": [{"name": "user", "num_rows": 9}]}
        return RunSettings(config_with({**TREE, "data": {**log, **keys}}), "one_group")

    held_out = {"by": "files", "files": ["late.csv"]}
    first = settings(files=["logs/a.csv", "logs/day_*.csv"], held_out=held_out).state_dict()
    # Earlier checkpoints say where the log was, and how it was read.
    earlier = {
        **first,
        "data.files": '["/home/u/logs/a.csv", "/home/u/logs/day_*.csv"]',
        "data.malformed_limit": "0",
        "data.num_ahead": "4",
        "data.prepared": '""',
    }
    moved = {"by": "files", "files": ["/new/late.csv"]}
    reading = {"malformed_limit": 3, "num_ahead": 0, "prepared": "elsewhere"}
    other = settings(files=["/new/a.csv", "s3://new/day_*.csv"], held_out=moved, **reading)
    for state in (first, earlier):
        other.check_state_dict(state)
        with pytest.raises(ConfigError, match=r'data.files was \["a.csv", "day_\*.csv"\] when'):
            settings(files=["logs/b.csv"], held_out=held_out).check_state_dict(state)


def test_a_member_that_refuses_its_state_is_named() -> None:
    settings = RunSettings(config_with(loop={"accumulate": 2}), "one_group")
    state = RunSettings(config_with(), "one_group").state_dict()
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


def test_a_progress_line_has_the_loss_over_its_steps() -> None:
    figures = {"step": 2, "seconds": 1.0, "table_lr": 0.1, "samples_per_s": 9.0}
    progress = StepsTrained.of_losses([0.2, 0.6], 0.5, memory_bytes=(1,), **figures)
    assert progress_text(progress, 4).startswith("loss 0.4000  NE 0.5771  ")


def test_the_files_of_a_log_are_named_before_they_are_read() -> None:
    shown = io.StringIO()
    display = TrainDisplay(Console(file=shown, width=80))
    display.opening(config_with())
    assert not shown.getvalue()
    data = {"kind": "criteo", "files": ["day_0.gz", "day_1.gz"]}
    display.opening(make_config(TrainConfig, {"data": data, "runs": {"main": {}}}))
    display.data_opened("9 rows to train on")
    assert shown.getvalue() == "opening day_0.gz, day_1.gz\n9 rows to train on\n"


def test_no_rank_holds_the_tables_before_they_are_sharded() -> None:
    config = config_with()
    run = next(iter(config.runs.values()))
    named = dict(make_model(config, run, click_data(config).dataset()).named_parameters())
    tables = {name for name in named if "embedding_bags" in name}
    assert tables
    assert {name for name, weight in named.items() if weight.is_meta} == tables


PLAIN: list[Any] = [
    {"a": 1, "b": [True, None, "text", 0.1 + 0.2, -math.inf], "c": {}},
    {"milestones": Counter({30: 1, 80: 2}), 3: "a number is a key", (1, 2): "or a tuple"},
    {"$tensor": "is a key of the user's"},
    ((1, (2.5,)), [()]),
    {"a.b": torch.arange(3), "a": {"b": torch.tensor(7.0)}, "header": torch.ones(1)},
    torch.tensor([1.5, -0.0, math.nan], dtype=torch.bfloat16),
    {"empty": torch.empty(0, 4, dtype=torch.int32), "none": b"", "bytes": b"\x00\xff"},
    {"array": np.arange(6, dtype=np.uint32).reshape(2, 3), "no rows": np.empty((0, 2))},
    {"scalar": np.float32(0.5), "int": np.int64(3)},
]


@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
def test_plain_values_come_back(value: Any) -> None:
    tensors = to_plain(value, "rank3.")
    assert all(name.startswith("rank3.") for name in tensors)
    assert all(tensor.numel() for tensor in tensors.values())
    assert_same(from_plain(tensors, "rank3."), value)


def assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        bits = [entry.reshape(-1).view(torch.uint8).tolist() for entry in (actual, expected)]
        assert bits[0] == bits[1]
        assert actual.shape == expected.shape
    elif isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)
    elif isinstance(expected, dict):
        assert type(actual) is type(expected)
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for entry, other in zip(actual, expected, strict=True):
            assert_same(entry, other)
    else:
        assert actual == expected


def test_what_was_stored_is_a_copy() -> None:
    tensor = torch.zeros(2)
    stored = to_plain({"a": tensor}, "")
    tensor += 1
    assert from_plain(stored, "")["a"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": {"b": {1}}}, r"a.b is a set, which a train state can't hold without a pickle; use"),
        ([object()], "0 is a object"),
        ({"x": np.array([None])}, "x is an array of object"),
    ],
)
def test_other_values_are_refused_by_name(value: object, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        to_plain(value, "")


@pytest.mark.parametrize(
    "content", [b"[", b'{"$tensor": "x"}', b'{"$unknown": 1}', b'{"$array": 1}', b"\xff"]
)
def test_damaged_values_are_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"'header' is damaged .*; load another"):
        from_plain({"header": torch.frombuffer(bytearray(content), dtype=torch.uint8)}, "")
    with pytest.raises(CheckpointError, match="damaged"):
        from_plain({}, "")


def test_random_numbers_go_on() -> None:
    def draw() -> tuple[float, float, float, float]:
        # Normal numbers are drawn in pairs, and numpy and Python keep the second one.
        return torch.rand(1).item(), np.random.normal(), random.gauss(0, 1), random.random()

    draw()
    stored = to_plain(random_state(torch.device("cpu")), "")
    expected = [draw() for _ in range(3)]
    restore_random_state(from_plain(stored, ""), torch.device("cpu"))
    assert [draw() for _ in range(3)] == expected


def counter(sketch_rows: int = 64, rows: int = 5_000) -> tdsp.RowCounter:
    tables = [
        EmbeddingBagConfig(rows, 4, name="large", feature_names=["a"]),
        EmbeddingBagConfig(50, 4, name="small", feature_names=["b"]),
    ]
    return tdsp.RowCounter(tables, exact_rows=100, sketch_rows=sketch_rows, half_life=3)


def count(counts: tdsp.RowCounter, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        large = (5_000 ** torch.rand(400, generator=generator)).long() - 1
        small = torch.randint(0, 50, (400,), generator=generator)
        ids, lengths = torch.cat([large, small]), torch.ones(800, dtype=torch.int64)
        counts.update(KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=lengths))


def seen(counts: tdsp.RowCounter) -> list[object]:
    stats = counts.stats()
    return [
        (stats[name].rows.tolist(), stats[name].counts.tolist(), stats[name].num_samples)
        for name in counts.tables
    ]


def test_a_counter_goes_on() -> None:
    """This includes a sketch that has dropped rows, in the middle of a half life."""
    through, other = counter(), counter()
    count(through, range(10))
    stored = from_plain(to_plain(through.state_dict(), ""), "")
    count(other, range(50, 52))
    other.load_state_dict(stored)
    assert seen(other) == seen(through)
    for steps in (range(10, 14), range(14, 30)):
        count(through, steps)
        count(other, steps)
        assert seen(other) == seen(through)


def test_a_counter_takes_over_several_ranks() -> None:
    ranks = [counter(), counter()]
    for rank, counts in enumerate(ranks):
        count(counts, range(10 * rank, 10 * rank + 2))
    both = counter()
    both.load_rank_states([counts.state_dict() for counts in ranks])
    totals = [
        stats["small"].num_lookups for stats in (both.stats(), *(entry.stats() for entry in ranks))
    ]
    assert totals[0] == totals[1] + totals[2] == 1600
    assert both.stats()["large"].num_lookups == 1600
    both.load_rank_states([])
    assert both.stats()["small"].num_lookups == 0


def test_a_counter_of_other_tables_is_refused() -> None:
    with pytest.raises(ConfigError, match="'large' was counted as 5000 rows, by a sketch of"):
        counter(sketch_rows=128).load_state_dict(counter().state_dict())


@pytest.mark.parametrize("place", [Path, bucket])
def test_the_newest_finished_checkpoint_is_found(
    tmp_path: Path, place: Callable[[Path], Place]
) -> None:
    folder = place(tmp_path)
    assert tdsp.latest_checkpoint(folder / "nowhere") is None
    for name in ("step_9", "step_10", "step_11", "best", "notes_12"):
        (tmp_path / name).mkdir()
    (tmp_path / "13").touch()
    assert tdsp.latest_checkpoint(folder) is None
    for name in ("step_9", "step_10", "best"):
        (tmp_path / name / ".metadata").touch()
    newest = tdsp.latest_checkpoint(folder)
    assert newest == folder / "step_10"
    assert str(newest) == f"{folder}/step_10"


@pytest.mark.parametrize("place", [Path, bucket])
def test_old_checkpoints_are_dropped_and_nothing_else(
    tmp_path: Path, place: Callable[[Path], Place]
) -> None:
    for step in (1, 2, 3, 4, 5, 6):
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "__0_0.distcp").touch()
        if step not in (3, 6):
            (tmp_path / str(step) / ".metadata").touch()
    (tmp_path / "best").mkdir()
    tdsp.drop_old_checkpoints(place(tmp_path), keep=2)
    # 6 may be a save that goes on; 3 has never been finished.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5", "6", "best"]
    tdsp.drop_old_checkpoints(tmp_path, keep=7)
    assert len(list(tmp_path.iterdir())) == 4
    with pytest.raises(ConfigError, match="keep=0 would leave no checkpoint"):
        tdsp.drop_old_checkpoints(tmp_path, keep=0)


def test_old_checkpoints_that_cannot_be_deleted_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / ".metadata").touch()

    def refuse(path: Path) -> None:
        raise PermissionError(f"{path} is read-only")

    monkeypatch.setattr("shutil.rmtree", refuse)
    tdsp.drop_old_checkpoints(tmp_path, keep=1)
    assert "can't be deleted, and stay" in caplog.text


def test_older_states_leave_groups_of_one_parameter_as_they_were_built() -> None:
    params = {"weight": nn.Parameter(torch.zeros(2))}
    first, second = (
        KeyedOptimizerWrapper(params, lambda values, lr=lr: torch.optim.SGD(values, lr=lr))
        for lr in (0.1, 0.7)
    )
    both: Any = SemisyncOptimizer(params.values(), first, second)
    older = {"weight": {"lr": 0.3}}
    for optimizer, rates in ((first, [0.3]), (both, [0.3, 0.7])):
        check_hyper_parameters(older, optimizer)
        restore_hyper_parameters(older, optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == rates


def test_what_is_in_a_dict_is_loaded_in_place() -> None:
    averages = nn.Linear(2, 2)
    files = {"open": ["a", "b"], "gone": 1}
    array, strided = np.zeros(2), torch.arange(4.0)[1::2][:1]
    member = {"averages": averages.state_dict(), "files": files, "array": array, "one": strided}
    saved = stored_member("x", member)
    with torch.no_grad():
        averages.weight.fill_(7)
    files["open"], files["new"], old_list = ["c"], 2, files["open"]
    array += 1
    wanted = from_plain(saved, "x.")
    load_states("x", member, [from_plain(saved, "x.")])
    assert averages.weight.equal(wanted["averages"]["weight"])
    assert files == {"open": ["a", "b"], "gone": 1}
    assert old_list == ["a", "b"]
    assert array.tolist() == [0, 0]
    assert wanted["one"].tolist() == [1]
    with pytest.raises(CheckpointError, match=r"is a tensor of layout torch\.sparse_coo"):
        stored_member("x", {"sparse": torch.eye(2).to_sparse()})
