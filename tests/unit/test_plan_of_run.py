"""`plan` and `simulate` accept a training run's config and its log."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from torchrec_2dsp.cost.workload import DenseWork
from torchrec_2dsp.errors import ConfigError, PlanError
from torchrec_2dsp.plan.parameter_sharding import Exchange
from torchrec_2dsp.plan.serialize import load
from torchrec_2dsp.programs.cli.app import app
from torchrec_2dsp.programs.config.config_file import load_config
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.plan import RunToPlan, planning, to_plan
from torchrec_2dsp.programs.train.config import TrainConfig

ROWS = [(f"u{number % 7}", f"i{number * number % 11}") for number in range(400)]
CONFIG = """
[data]
kind = "table"
files = ["clicks.csv"]
label = "clicked"
features = [
  { name = "user", num_rows = 50, encoding = "vocabulary", min_count = 1 },
  { name = "item", num_rows = 5_000 },
]
dense = [{ column = "price" }]
prepared = "prepared"
[loop]
global_batch_size = 40
[runs.stock]
stock = true
[runs.main]
"""


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"{number % 2},{user},{item},1.5" for number, (user, item) in enumerate(ROWS)]
    Path("clicks.csv").write_text("\n".join(["clicked,user,item,price", *lines]))
    Path("mine.toml").write_text(CONFIG)


def run(command: str, *arguments: str) -> tuple[int, str]:
    calibrated = () if "--calibration" in arguments else ("--calibration", "emulated_1gbit")
    result = CliRunner().invoke(app, [command, "--config", "mine.toml", *calibrated, *arguments])
    return result.exit_code, " ".join(result.output.split())


def source(*overrides: str, config: str = "mine.toml", run: str = "") -> RunToPlan:
    machines = ("machines.calibration=emulated_1gbit", *overrides)
    result = to_plan(config, machines, run=run)
    assert isinstance(result, RunToPlan)
    return result


def workload_of(result: RunToPlan) -> Any:
    work = planning(result)
    work.planner.search(work.model, work.sharders)
    return work.planner.explain().setting.workload


def test_a_log_is_planned_from_an_empty_folder(tmp_path: Path) -> None:
    code, text = run("plan", "--output", "plan.json")
    assert code == 0, text
    # The calibration's machines: two hosts with two ranks.
    assert "The run 'main': 40 samples per step on 4 ranks, 2 per host." in text
    assert "batch 10 per rank" in text
    assert "TorchRec's planner, given the same bandwidths" in text
    started = "to train by it: torchrun ... -m torchrec_2dsp train --config mine.toml"
    assert f"{started} --set runs.planned.plan=plan.json --only planned" in text
    changes = ("--set", "model.dense_layers=[8, 4]", "--world-size", "2")
    code, text = run("plan", "--output", "plan.json", *changes)
    assert code == 0, text
    assert "torchrun --standalone --nproc-per-node 2 -m torchrec_2dsp train --config" in text
    assert "--set 'model.dense_layers=[8, 4]' --set runs.planned.plan=plan.json --only" in text
    plan = load("plan.json")
    names = {name for _, part in plan.modules() for name, _ in part.tables()}
    assert names == {"t_user", "t_item"}
    # A vocabulary has as many rows as values, as in training.
    assert re.search(r"t_user 9 16", text)


def test_rows_are_counted_in_the_log() -> None:
    counted = source().access
    users = Counter(user for user, _ in ROWS[:360])
    assert counted["t_user"].counts.tolist() == sorted(users.values(), reverse=True)
    assert counted["t_item"].num_lookups == 360
    assert workload_of(source()).table("t_item").ids_per_sample == 1.0


def test_negatives_count_as_the_lookups_that_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrec_2dsp.programs.train.sharded._COUNTED_IDS", 20_000)
    overrides = ("data.num_items=50", "model.num_negatives=5", "data.max_length=6")
    result = source(*overrides, "model.max_length=6", config="sequence")
    batch = next(
        load_config(TrainConfig, "sequence", overrides)
        .data.dataset()
        .batches(Split.TRAIN, global_batch_size=2_000, rank=0, world_size=1)
    )
    lengths = batch.sparse_features["item"].lengths()
    table = workload_of(result).table("t_item")
    assert table.ids_per_sample == pytest.approx(float(lengths.float().mean()) + 5, rel=0.02)
    # A weight is used for each of five items; attention comes on top.
    work = planning(result)
    calibration, dense = result.machines.calibrated(), workload_of(result).dense
    layers_alone = replace(workload_of(result), tables={})
    once = DenseWork.of_model(work.model, layers_alone, calibration.kernels)
    assert 4 < dense.forward_s / once.forward_s < 10
    assert dense.gradient_bytes == once.gradient_bytes
    assert work.dense is not None


def test_the_reserved_memory_is_the_machines() -> None:
    assert workload_of(source("machines.reserved=0.5", "machines.memory_gib=0.01")).tables
    with pytest.raises(PlanError, match="memory"):
        workload_of(source("machines.reserved=0.999", "machines.memory_gib=0.01"))


def test_what_a_run_says_is_kept() -> None:
    keys = ("num_groups=2", "exchange=row", "sharding_types=['row_wise']")
    work = planning(source(*(f"runs.main.{key}" for key in keys)))
    plan = work.planner.plan(work.model, work.sharders)
    assert plan.mesh.num_groups == 2
    tables = [table for _, part in plan.modules() for _, table in part.tables()]
    assert {table.exchange for table in tables} == {Exchange.ROW}


def test_worlds_are_simulated_for_a_training_run() -> None:
    code, text = run("simulate", "--ranks", "2,4", "--set", "machines.slower.link=3")
    assert code == 0, text
    assert "Predicted, not measured, from emulated_1gbit with link x 3" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--only", "nope"), "there is no run 'nope'; the config has stock, main"),
        (("--only", "stock"), "runs.stock is TorchRec alone, so there is nothing to search"),
        (("--set", "runs.main.plan=p.json", "--only", "main"), "runs.main is trained by the plan"),
        (("--world-size", "3"), "num_ranks=3 is no multiple of ranks_per_host=2"),
        (("--world-size", "6"), "loop.global_batch_size=40 is not a multiple of the 6 ranks"),
        (("--calibration", ""), "mine.toml doesn't say on which machines it would be trained"),
        (("--calibration", "nope"), "emulated_1gbit, emulated_1gbit_per_rank, emulated_200mbit"),
        (("--config", "plan", "--only", "main"), "plan is a config for plan, which has no runs"),
        (("--config", "bench"), "bench has neither of the sections that say what a config is for"),
        (("--config", "both.toml"), "give one with [runs] for train or [machines] for plan"),
    ],
)
def test_errors_say_what_is_missing(arguments: tuple[str, ...], text: str) -> None:
    Path("both.toml").write_text(CONFIG + "[machines]\n")
    code, output = run("plan", *arguments)
    assert code == 2
    assert text in output


def test_a_run_names_its_machines() -> None:
    Path("mine.toml").write_text(CONFIG + 'calibration = "emulated_200mbit"\n')
    code, text = run("plan", "--calibration", "", "--world-size", "2", "--ranks-per-host", "1")
    assert code == 0, text
    assert "on 2 ranks, 1 per host" in text
    assert "on emulated_200mbit" in text
    with pytest.raises(ConfigError, match=r"^mine.toml: machines: num_ranks=5 is no multiple"):
        source("machines.num_ranks=5")
