"""The training program: exact 2D trains like one group, and the command shows it."""

import functools
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console

from tests.support.programs import torchrun
from tests.support.ranks import RankPool
from tests.support.slices import patient
from tests.support.train_runs import TREE, config_with, refusal, scalars_in
from torchrec_2dsp.plan.parameter_sharding import Exchange, RowOwners
from torchrec_2dsp.programs.cli.train_display import TrainDisplay, show_result
from torchrec_2dsp.programs.config.config_file import load_config
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.metrics import Evaluation
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.record import TrainRecord
from torchrec_2dsp.programs.train.results import (
    RunResult,
    StepsTrained,
    TensorBoardWatcher,
    TrainResult,
    TrainWatcher,
    largest_loss_gap,
)
from torchrec_2dsp.programs.train.sharded import PlannedRun

ROOT = Path(__file__).parents[2]
TINY = TREE | {
    "loop": TREE["loop"] | {"steps": 7, "eval_steps": 2, "final_steps": 4},
    "runs": {
        "one_group": {},
        "exact": {"num_groups": 2},
        "averaged": {"num_groups": 2, "sync": "WeightSync", "synced_rows": "all"},
        "rows": {
            "sharding_types": ["row_wise"],
            "exchange": "row",
            "owners": "hash",
            "hot_rows": 4,
        },
    },
}


class Recorder(TrainWatcher):
    """A watcher that records its notifications."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def run_planned(self, name: str, planned: PlannedRun, config: TrainConfig) -> None:
        self.told.append(f"{name} planned for {planned.plan.mesh}")

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        num_losses = len(progress.losses)
        self.told.append(f"{name} step {progress.step}: {num_losses} losses")

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        self.told.append(f"{name} evaluated after {evaluation.step}")

    def run_finished(self, result: RunResult) -> None:
        self.told.append(f"{result.name} finished")


def train_tiny(rank: int, world_size: int) -> tuple[TrainResult, list[str], str]:
    recorder, shown = Recorder(), io.StringIO()
    console = Console(file=shown, width=80)
    result = train(config_with(TINY), [recorder, TrainDisplay(console)])
    show_result(result, console)
    # What comes after finds the ranks in step.
    dist.barrier()
    return result, recorder.told, shown.getvalue()


@pytest.fixture(scope="module")
def trained(ranks4: RankPool) -> list[tuple[TrainResult, list[str], str]]:
    """Run the tiny program once for all tests in this module; return each rank's results."""
    return ranks4.run(train_tiny)


Trained = list[tuple[TrainResult, list[str], str]]


def test_every_rank_has_the_same_result(trained: Trained) -> None:
    first = trained[0][0]

    for result, _, _ in trained[1:]:
        assert result.planted_ne == first.planted_ne
        assert [run.losses for run in result.runs] == [run.losses for run in first.runs]
        assert [run.evaluated for run in result.runs] == [run.evaluated for run in first.runs]
        assert [run.plan for run in result.runs] == [run.plan for run in first.runs]
        assert [run.plan2d for run in result.runs] == [run.plan2d for run in first.runs]


def test_exact_2d_trains_as_one_group_and_averaging_nearly(trained: Trained) -> None:
    result = trained[0][0]
    one_group, exact, averaged, rows = result.runs
    assert result.reference is one_group

    # Float rounding: sums of 32 losses are added in another order.
    for run in (exact, rows):
        assert largest_loss_gap(run, one_group) < 1e-5
        assert run.evaluated.losses == pytest.approx(one_group.evaluated.losses, abs=1e-5)
    # The averages are other numbers, so the comparison can fail.
    assert 1e-5 < largest_loss_gap(averaged, one_group) < 0.1


def test_rows_travel_as_the_run_says(trained: Trained) -> None:
    for _, module in trained[0][0].runs[3].plan2d.modules():
        for _, table in module.tables():
            assert (table.exchange, table.owners) == (Exchange.ROW, RowOwners.HASH)
            assert table.hot_set is not None
            assert len(table.hot_set) == 4


def test_results_are_measured(trained: Trained) -> None:
    for run in trained[0][0].runs:
        assert len(run.losses) == 7
        assert run.train_loss == pytest.approx(sum(run.losses[-4:]) / 4)
        assert len(run.evaluated.losses) == 2
        assert run.samples_per_s > 0
    one_group, exact, averaged, _ = trained[0][0].runs
    assert one_group.sync_bytes_per_step == 0
    for run in trained[0][0].runs:
        assert run.rows_bytes_per_step == run.rows_fp32_bytes_per_step == 0
        assert run.sync_fp32_bytes_per_step == run.sync_bytes_per_step
    # Two copies of (100 + 33) rows of 8 floats and a moment, on two ranks each: averaging sends
    # half of one and receives as much; exact sync sends the rows that were touched.
    assert averaged.sync_bytes_per_step == pytest.approx(133 * 9 * 4 / 2, rel=0.02)
    assert 0 < exact.sync_bytes_per_step < averaged.sync_bytes_per_step


def test_watchers_are_told_in_order(trained: Trained) -> None:
    assert trained[0][1][:6] == [
        "one_group planned for Mesh2D(1x4, strided)",
        "one_group step 3: 3 losses",
        "one_group step 6: 3 losses",
        "one_group step 7: 1 losses",
        "one_group evaluated after 7",
        "one_group finished",
    ]
    assert trained[0][1][6] == "exact planned for Mesh2D(2x2, strided)"


def test_plans_progress_and_figures_are_shown_in_80_columns(trained: Trained) -> None:
    shown = trained[0][2]

    for text in (
        "exact: Mesh2D(2x2, strided), kept equal by GradientSync",
        "averaged: step 7/7  loss ",
        "averaged: held out, after step 7:  loss ",
        "lr 0.02  ",
        "0:00 left  ",
        "best so far",
    ):
        assert text in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["t_user", "100", "8"] in [line[:3] for line in lines]
    # For the run that isn't as in TorchRec, and no other.
    ends = [" ".join(line[-6:]) for line in lines if line[:1] == ["t_user"]]
    assert [end.endswith("3 row, hash owners, 4 hot") for end in ends] == [False] * 3 + [True]
    assert shown.count("exchange") == 1
    words = [" ".join(line) for line in lines]
    losses = words.index("loss loss NE AUC NE step one_group")
    assert words[losses - 1] == "run train eval eval eval best at gap to"
    runs = trained[0][0].runs
    for line, run in zip(lines[losses + 2 :], runs, strict=False):
        metrics = run.evaluated.metrics
        values = [f"{metrics[name]:.4f}" for name in ("ne", "auc", "ne")]
        assert line[:1] + line[3:7] == [run.name, *values, "7"]
    speeds = words.index("per s per step")
    assert words[speeds - 1] == "run mesh sync samples sync MB"
    assert [line[:3] for line in lines[speeds + 2 : speeds + 6]] == [
        ["one_group", "1x4", "none"],
        ["exact", "2x2", "GradientSync"],
        ["averaged", "2x2", "WeightSync"],
        ["rows", "1x4", "none"],
    ]
    assert "Gap: the largest difference of a step's train loss" in shown
    assert "…" not in shown


def test_the_closing_table_has_the_best_evaluation_and_its_step(trained: Trained) -> None:
    result = trained[0][0]
    run = result.runs[0]
    values = {2: 0.7, 4: 0.6, 7: 0.65}
    evaluations = tuple(
        Evaluation(step=step, metrics={"loss": 0.5, "ne": ne, "auc": 0.75})
        for step, ne in values.items()
    )
    run = run.model_copy(update={"evaluations": evaluations})
    shown = io.StringIO()
    show_result(result.model_copy(update={"runs": (run,)}), Console(file=shown, width=80))
    assert re.search(r"one_group .* 0\.6500 +0\.7500 +0\.6000 +4$", shown.getvalue(), re.MULTILINE)


def train_one(rank: int, world_size: int, run: str) -> str:
    shown = io.StringIO()
    console = Console(file=shown, width=80, force_terminal=True)
    show_result(train(config_with(TINY).only([run]), [TrainDisplay(console)]), console)
    return shown.getvalue()


def test_one_run_on_a_terminal_has_a_bar_and_no_gap(ranks4: RankPool) -> None:
    shown = ranks4.run(train_one, "exact")[0]

    assert "7/7" in shown
    assert "━" in shown
    assert "gap" not in shown.lower()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            {"exchange": "row", "sharding_types": ["table_wise"]},
            "exchange='row' is for tables sharded row_wise, and the plan has none: set "
            "sharding_types",
        ),
        ({"prefetch_rows": True}, "prefetch_rows is for an exchange of rows; set exchange='row'"),
        (
            {"num_groups": 3},
            "runs.odd.num_groups=3 does not divide the 4 ranks; use one of 1, 2, 4, or start "
            "another number of ranks",
        ),
    ],
)
def test_a_run_that_does_not_fit_is_refused_on_every_rank(
    ranks4: RankPool, run: dict[str, Any], message: str
) -> None:
    config = config_with(TINY, runs={"odd": run})
    assert ranks4.run(refusal, config, timeout_s=60) == [message] * 4


DEMO = ("torchrec_2dsp", "train", "--config", "configs/runs/demo.toml")
"""The demo's command, as a user starts it."""


@pytest.mark.dealt_suite(seconds=40)
def test_the_last_thing_that_torchrun_says_is_what_was_wrong() -> None:
    done = torchrun(*DEMO, "--set", "loop.steps=0")

    assert done.returncode != 0
    message = done.stderr.rpartition("Root Cause (first observed failure):")[2]
    assert re.search(r"error(?: on rank \d)?: configs/runs/demo\.toml: loop\.steps=0", message)
    assert "Traceback" not in message


@pytest.mark.dealt_suite(seconds=40)
def test_the_demo_command_trains_and_prints_the_table(tmp_path: Path) -> None:
    folder, output = tmp_path / "tensorboard", tmp_path / "record.json"
    done = torchrun(
        *DEMO,
        *("--set", "loop.steps=3", "--set", "loop.eval_steps=1", "--set", "loop.report_every=2"),
        *("--set", f"loop.tensorboard_dir={folder}", "--output", str(output)),
        *("--set", f"output.folder={tmp_path / 'runs'}"),
    )

    assert done.returncode == 0, done.stderr
    # Only the program's own output: no warnings, and nothing printed four times.
    assert done.stderr == ""
    assert done.stdout.count("step 3/3") == 3
    table = done.stdout.partition("sync MB")[2]
    assert "one_group  1x2   none" in table
    assert "exact      2x1   GradientSync" in table
    assert "averaged   2x1   WeightSync" in table
    runs = load_config(TrainConfig, ROOT / "configs" / "runs" / "demo.toml").runs
    assert sorted(path.name for path in folder.iterdir()) == sorted(runs)
    assert all(list(entry.glob("events.*")) for entry in folder.iterdir())
    record = TrainRecord.load(output)
    assert [run.name for run in record.runs] == list(runs)
    assert all([point.step for point in run.curve] == [2, 3] for run in record.runs)
    assert [run.sync_bytes_per_step > 0 for run in record.runs] == [False, True, True]
    assert TrainRecord.load(tmp_path / "runs" / "record.json") == record


@pytest.mark.dealt_suite
def test_a_user_who_stops_the_program_learns_how_to_go_on(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", *DEMO, "--only", "exact", "--set", "runs.exact.num_groups=1"),
        *("--set", "loop.steps=100_000", "--set", "loop.report_every=1"),
        *("--set", "loop.global_batch_size=8", "--set", f"checkpoint.folder={tmp_path}"),
    ]
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    world |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | world,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell lets its background programs ignore it, and they pass that on.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as program:
        try:
            assert program.stdout is not None
            assert any(": step 2/" in line for line in program.stdout)
            program.send_signal(signal.SIGINT)
            _, errors = program.communicate(timeout=patient(60))
        finally:
            program.kill()
    assert program.returncode == 130
    assert errors == (
        f"stopped; to go on from the newest checkpoint in {tmp_path}, start the same command with "
        "--resume auto\n"
    )


def train_rounded(rank: int, world_size: int, folder: str) -> RunResult:
    """Train with rounded rows and row gradients; return the run with its scalars."""
    rounded = {
        "num_groups": 2,
        "sharding_types": ["row_wise"],
        "exchange": "row",
        "row_transport": "int8",
        "transport": "bf16",
    }
    watchers = [TensorBoardWatcher(folder)] if rank == 0 else []
    result = train(config_with(TINY, runs={"rounded": rounded, "plain": {}}), watchers)
    dist.barrier()
    return result.runs[0]


@pytest.mark.dealt_suite
def test_scalars_tell_what_transports_save(ranks4: RankPool, tmp_path: Path) -> None:
    run = ranks4.run(train_rounded, str(tmp_path))[0]

    # Rows with 8 numbers become 8 bytes and a scale with two.
    assert run.rows_bytes_per_step == pytest.approx(run.rows_fp32_bytes_per_step * 10 / 32)
    # A row gradient's numbers are halved, and its row number isn't.
    assert run.sync_bytes_per_step < run.sync_fp32_bytes_per_step < 2 * run.sync_bytes_per_step
    scalars, of_plain = (scalars_in(tmp_path / name) for name in ("rounded", "plain"))
    for tag, value in {
        "bytes/rows_fp32": run.rows_fp32_bytes_per_step,
        "bytes/rows_sent": run.rows_bytes_per_step,
        "bytes/replicas_fp32": run.sync_fp32_bytes_per_step,
        "bytes/replicas_sent": run.sync_bytes_per_step,
    }.items():
        assert scalars[tag] == {7: pytest.approx(value)}
    assert not [tag for tag in of_plain if tag.startswith("bytes/")]


def train_thresholded(rank: int, world_size: int, folder: str) -> None:
    """Train with dense gradients thresholded after three steps."""
    thresholded = {"dense": {"kind": "thresholded", "density": 0.05, "warm_up": 3}}
    config = config_with(
        TINY,
        model={"dense_layers": [64], "over_layers": [64, 64]},
        loop={"steps": 6},
        runs={"thresholded": thresholded},
    )
    train(config, [TensorBoardWatcher(folder)] if rank == 0 else [])


def test_scalars_tell_what_thresholds_leave_out(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(train_thresholded, str(tmp_path))

    by_step = scalars_in(tmp_path / "thresholded")
    assert by_step["dense/density"] == {3: 0, 6: pytest.approx(0.05, rel=0.2)}
    assert by_step["dense/residual_norm"][3] == 0 < by_step["dense/residual_norm"][6]
    sent, fp32 = by_step["bytes/dense_sent"], by_step["bytes/dense_fp32"]
    assert sent[3] == fp32[3] == fp32[6] > 3 * sent[6]
