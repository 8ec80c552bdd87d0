"""A training program's plan and output: the run's folder, traces and scalars."""

import json
import re
import time
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from tests.support.rank_worker import marking_spans
from tests.support.ranks import RankPool
from tests.support.train_runs import TREE, config_with, refusal, scalars_in, train_in_folder
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.parameter_sharding import Pipeline
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.plan.serialize import load, save
from torchrec_2dsp.plan.sync import WeightSync
from torchrec_2dsp.programs.config.config_file import load_config, make_config
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig
from torchrec_2dsp.programs.models.planned import true_access
from torchrec_2dsp.programs.plan import planning, to_plan
from torchrec_2dsp.programs.run_report.contents import RunContents
from torchrec_2dsp.programs.run_report.page import run_page
from torchrec_2dsp.programs.traces import StepPhase, marked_step
from torchrec_2dsp.programs.train import program
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.record import ProgressFile, TrainRecord, read_progress
from torchrec_2dsp.programs.train.results import RunFolder, TensorBoardWatcher, TrainResult
from torchrec_2dsp.programs.train.sharded import PlannedRun
from torchrec_2dsp.programs.train.steps import (
    PipelinedSteps,
    StepProfiler,
    middle_steps,
    profiled_steps,
)

OPTIMIZER = {"schedule": {"kind": "linear"}}


def in_folder(folder: Path, runs: dict[str, Any]) -> TrainConfig:
    return config_with(
        loop={"eval_every": 4},
        optimizer=OPTIMIZER,
        output={"folder": str(folder)},
        runs=runs,
    )


def plan_and_repeat(rank: int, world_size: int, folder: Path) -> tuple[TrainResult, TrainResult]:
    """Train with a plan chosen by cost, then again with the plan file that this run saved."""
    if rank == 0:
        true_access(make_config(SyntheticConfig, TREE["data"])).save(folder / "access.parquet")
    planned = in_folder(
        folder / "planned",
        {
            "planned": {"calibration": "emulated_1gbit", "access": str(folder / "access.parquet")},
            "stated": {"num_groups": 2},
        },
    )
    first = train(planned, _watchers(rank, planned, folder / "scalars"))
    plan = folder / "planned" / "planned" / "plan.json"
    repeated = in_folder(folder / "repeated", {"repeated": {"plan": str(plan)}})
    watchers = _watchers(rank, repeated, folder / "more_scalars")
    with marking_spans():
        return first, train(repeated, watchers, profiled=range(2, 4))


def _watchers(rank: int, config: TrainConfig, scalars: Path) -> list[Any]:
    if rank:
        return []
    return [RunFolder(config.output.folder, config), TensorBoardWatcher(scalars)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def trained(ranks2: RankPool, folder: Path) -> tuple[TrainResult, TrainResult]:
    return ranks2.run(plan_and_repeat, folder, timeout_s=200)[0]


def one_by_one(rank: int, world_size: int, config: TrainConfig) -> None:
    for name in ("first", "second", "first"):
        train_in_folder(rank, world_size, config.only([name]))


def test_runs_that_are_trained_one_by_one_share_a_folder(ranks2: RankPool, tmp_path: Path) -> None:
    config = in_folder(tmp_path, {"first": {}, "second": {"num_groups": 2}})
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "explanation.txt").write_text("Why an earlier plan was as it was.")
    ranks2.run(one_by_one, config)
    together = load_config(TrainConfig, tmp_path / "config.toml")
    assert together == config
    record = TrainRecord.load(tmp_path / "record.json")
    assert sorted(run.name for run in record.runs) == ["first", "second"]
    assert record.config == config.model_dump(mode="json")
    assert [bool(part.curve) for part in RunContents.read(tmp_path).runs] == [True, True]
    assert [part.explanation for part in RunContents.read(tmp_path).runs] == ["", ""]

    first = config.only(["first"])
    message = "has the run 'second', which another config or number of ranks trained; use another"
    other = first.model_copy(update={"loop": first.loop.model_copy(update={"steps": 9})})
    with pytest.raises(ConfigError, match=message):
        RunFolder(tmp_path, other)
    elsewhere = Mock(plan=Mock(mesh=Mock(world_size=4)))
    with pytest.raises(ConfigError, match=message):
        RunFolder(tmp_path, first).run_planned("first", elsewhere, first)
    assert load_config(TrainConfig, tmp_path / "config.toml") == config
    # No run is lost if all are retrained.
    whole = config.model_copy(update={"loop": other.loop})
    anew = RunFolder(tmp_path, whole)
    assert load_config(TrainConfig, tmp_path / "config.toml") == config
    planned = PlannedRun(load(tmp_path / "first" / "plan.json"), tables={}, num_steps=9)
    for runs in (["first"], ["first", "second"]):
        anew.run_planned(runs[-1], planned, whole)
        assert load_config(TrainConfig, tmp_path / "config.toml") == whole.only(runs)


def start_twice(rank: int, world_size: int, config: TrainConfig) -> list[Any]:
    """Train a run and start another, which is refused; return its progress after each."""
    folder, texts = Path(config.output.folder), []
    for report_every in (1, 2):
        loop = config.loop.model_copy(update={"report_every": report_every})
        config = config.model_copy(update={"loop": loop})
        try:
            train_in_folder(rank, world_size, config)
        except ConfigError as error:
            texts.append(str(error))
        texts.append(read_progress(folder / "first"))
    return texts


def test_a_start_that_is_refused_leaves_a_runs_files(ranks2: RankPool, tmp_path: Path) -> None:
    config = in_folder(tmp_path / "out", {"first": {}})
    checkpoint = config.checkpoint.model_copy(update={"folder": str(tmp_path / "saved")})
    config = config.model_copy(update={"checkpoint": checkpoint})
    progress, text, after = ranks2.run(start_twice, config)[0]
    assert progress
    assert progress == after
    assert "is newer than step 0, at which this run would begin" in text
    assert load_config(TrainConfig, tmp_path / "out" / "config.toml").loop.report_every == 1


def test_a_plan_by_cost_is_explained_and_can_be_repeated(
    trained: tuple[TrainResult, TrainResult], folder: Path
) -> None:
    first, repeated = trained
    planned, stated = first.runs
    assert repeated.runs[0].plan2d == planned.plan2d
    assert repeated.runs[0].losses == planned.losses
    # Float rounding: sums of 32 losses are added in another order.
    assert stated.losses == pytest.approx(planned.losses, abs=1e-5)
    assert "ms" in planned.explanation
    assert "t_user" in planned.explanation
    assert not stated.explanation
    assert planned.explanation in (folder / "planned/planned/explanation.txt").read_text()
    assert not (folder / "planned/stated/explanation.txt").exists()


def test_the_plan_command_finds_the_plan_that_is_trained(trained: Any, folder: Path) -> None:
    planned = trained[0].runs[0]
    machines = ["machines.num_ranks=2", "machines.ranks_per_host=2"]
    work = planning(to_plan(str(folder / "planned" / "config.toml"), machines, run="planned"))
    assert work.planner.plan(work.model, work.sharders) == planned.plan2d
    assert str(work.planner.explain()) == planned.explanation


def test_the_folder_has_the_config_and_a_record_of_everything(
    trained: tuple[TrainResult, TrainResult], folder: Path
) -> None:
    record = TrainRecord.load(folder / "planned" / "record.json")
    planned = trained[0].runs[0]
    assert [run.name for run in record.runs] == ["planned", "stated"]
    run = record.runs[0]
    assert [point.step for point in run.curve] == [3, 4, 6, 8]
    rates = [point.table_lr for point in run.curve]
    assert rates == sorted(rates, reverse=True)  # type: ignore[type-var]
    assert all(point.samples_per_s and point.memory_bytes for point in run.curve)
    losses = [point.loss for point in run.curve]
    assert losses[0] == pytest.approx(sum(planned.losses[:3]) / 3)
    assert [evaluation.step for evaluation in run.evaluations] == [4, 8]
    assert run.evaluations[-1].metrics == planned.evaluated.metrics
    assert run.evaluations[-1].metrics.keys() == {"loss", "ne", "auc", "calibration"}
    assert run.plan == str(planned.plan2d)
    assert run.explanation == planned.explanation
    assert len(run.memory_bytes) == 2
    assert record.environment["torch"].startswith("2.")
    # A trained run can be retrained.
    again = load_config(TrainConfig, folder / "planned" / "config.toml")
    assert again.model_dump(mode="json") == record.config
    assert Path(again.runs["planned"].access).is_absolute()
    assert tomllib.loads((folder / "planned" / "config.toml").read_text())["loop"]["steps"] == 8


def test_the_progress_of_a_run_is_the_curve_of_its_record(
    trained: tuple[TrainResult, TrainResult], folder: Path
) -> None:
    record = TrainRecord.load(folder / "planned" / "record.json")
    for run in record.runs:
        *lines, last = read_progress(folder / "planned" / run.name)
        assert last.is_over
        assert tuple(line.point for line in lines if line.point) == run.curve
        evaluations = tuple(line.evaluation for line in lines if line.evaluation)
        assert evaluations == run.evaluations


def test_progress_goes_on_where_the_run_does(tmp_path: Path, folder: Path) -> None:
    earlier = folder / "planned" / "planned" / "progress.jsonl"
    # The last line was about to be written when the run was killed.
    (tmp_path / "progress.jsonl").write_text(earlier.read_text() + '{"point": {"st')
    progress = ProgressFile(tmp_path)
    assert read_progress(tmp_path) == ()
    progress.resume(4)
    lines = read_progress(tmp_path)
    assert [line.point.step for line in lines if line.point] == [3, 4]
    assert [line.evaluation.step for line in lines if line.evaluation] == [4]
    assert not any(line.is_over for line in lines)


def test_a_page_shows_what_a_program_has_left(
    trained: tuple[TrainResult, TrainResult], folder: Path
) -> None:
    contents = RunContents.read(folder / "planned")
    for run, result in zip(contents.runs, trained[0].runs, strict=True):
        assert run.plan is not None
        assert run.plan.mesh == result.plan2d.mesh
        tables = [table for _, module in result.plan2d.modules() for table in module.tables()]
        assert len(run.plan.tables) == len(tables)
        by_name = dict(run.plan.tables)
        for name, sharding in tables:
            assert by_name[name].sharding_type == sharding.sharding_type
            assert by_name[name].exchange == sharding.exchange.value
            assert by_name[name].num_hot == len(sharding.hot_set or ())
            assert by_name[name].size[1] == TREE["model"]["dim"]
    html = run_page(contents).html()
    assert contents.runs[0].explanation == trained[0].runs[0].explanation.strip()
    assert "<h3>Rows by use, for planned</h3>" in html
    assert "Why the plan of planned is as it is" in html


def test_each_rank_writes_a_trace_of_the_steps(
    trained: tuple[TrainResult, TrainResult], folder: Path
) -> None:
    for rank in range(2):
        trace = json.loads((folder / f"repeated/repeated/trace_rank{rank}.json").read_text())
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert [step for name in names if (step := marked_step(name))] == [2, 3]
        # Dense gradients are added up once in each step.
        assert names.count("torch::distributed::reducer::mul_out") > 0
        assert names.count("autograd::engine::evaluate_function: NllBackward") == 0
        losses = [name for name in names if name == "aten::binary_cross_entropy_with_logits"]
        assert len(losses) == 2


def test_traces_say_where_a_step_goes(
    trained: tuple[TrainResult, TrainResult], folder: Path
) -> None:
    (run,) = RunContents.read(folder / "repeated").runs
    assert [split.rank for split in run.splits] == [0, 1]
    for split in run.splits:
        assert list(split.steps) == [2, 3]
        # Float rounding: microseconds since the machine has started have twelve digits.
        total_us = split.all_computing_us + split.all_waiting_us
        assert total_us == pytest.approx(split.step_us, rel=1e-5)
        # A short phase may be all waiting.
        assert split.computing_us.keys() | split.waiting_us.keys() == {*StepPhase}
        assert split.all_waiting_us > 0
    html = run_page(RunContents.read(folder / "repeated")).html()
    assert "<h3>Span by span</h3>" in html


ROWS = {"sharding_types": ["row_wise"], "exchange": "row"}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stock": {"stock": True},
    "prefetch": {**ROWS, "prefetch_rows": True},
    "late": {"num_groups": 2, "delay": 1},
    "averaged": {"num_groups": 2, "sync": "WeightSync"},
    "delayed": {"dense": {"kind": "delayed", "warm_up": 2}},
}
"""Runs that leave something in flight between two steps, each another thing."""


def train_traced(
    rank: int, world_size: int, folder: Path
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Train all kinds of runs with and without traced steps; return their losses.

    One run is stopped in the middle and resumed; a step of another has two batches.
    """

    def losses(name: str, runs: dict[str, Any], traced_steps: int, **loop: Any) -> dict[str, Any]:
        loop = {"steps": 12, "report_every": 5, **loop}
        output = {"folder": str(folder / f"{name}_{traced_steps}"), "traced_steps": traced_steps}
        checkpoint = {"folder": str(folder / f"saved_{traced_steps}"), "every": 6}
        config = config_with(loop=loop, output=output, runs=runs, checkpoint=checkpoint)
        with marking_spans():
            result = train_in_folder(rank, world_size, config, resume="auto")
        assert all(run.samples_per_s > 0 for run in result.runs)
        return {f"{name}_{run.name}": run.losses for run in result.runs}

    both = {}
    for traced_steps in (0, 4):
        both[str(traced_steps)] = {
            **losses("kinds", KINDS, traced_steps),
            **losses("accumulated", {"batches": {}}, traced_steps, accumulate=2, eval_every=3),
            **losses("first", {"resumed": {}}, traced_steps, steps=6),
            **losses("second", {"resumed": {}}, traced_steps),
        }
    return both


@pytest.mark.dealt_suite(seconds=25)
def test_traced_steps_change_no_loss_and_are_written_for_every_kind_of_run(
    ranks2: RankPool, tmp_path: Path
) -> None:
    both = ranks2.run(train_traced, tmp_path, timeout_s=280)[0]
    assert len(both["4"]) == len(KINDS) + 3
    assert both["4"] == both["0"]
    # A third of the steps that are left at most, in their middle, but after a checkpoint; an
    # evaluation ends them.
    middle = {
        "kinds": [7, 8, 9, 10],
        "accumulated": [7, 8, 9],
        "first": [3, 4],
        "second": [9, 10],
    }
    for name, steps in middle.items():
        for run in RunContents.read(tmp_path / f"{name}_4").runs:
            assert [list(split.steps) for split in run.splits] == [steps] * 2, run.name
            own = tmp_path / f"{name}_4" / run.name
            assert not [*own.glob("trace*")], "nobody asked to keep traces"
            assert (own / "progress.jsonl").stat().st_size < 10_000
        assert not any(run.splits for run in RunContents.read(tmp_path / f"{name}_0").runs)


def test_traced_steps_are_in_the_middle_of_what_is_left() -> None:
    assert middle_steps(0, 200, 10) == range(96, 106)
    assert middle_steps(40, 100_000, 10) == range(536, 546)
    assert middle_steps(90, 99, 10) == range(94, 97)
    assert not middle_steps(0, 2, 10)
    assert not middle_steps(0, 200, 0)


def slow_while_traced(rank: int, world_size: int) -> tuple[float, float, float]:
    """Return the reported times for four steps; two are traced and take 0.2 s more each."""
    began = time.perf_counter()
    profiler = StepProfiler(range(2, 4), torch.device("cpu"))
    for step in (1, 2, 3, 4):
        with profiler.step(step):
            time.sleep(0.2 if step in (2, 3) else 0.0)
    assert profiler.take() == (), "no step had a backward"
    counted = profiler.untraced_seconds(time.perf_counter() - began, 4, 0.0)
    only_traced = StepProfiler(range(1, 2), torch.device("cpu"))
    with only_traced.step(1):
        pass
    return counted, only_traced.untraced_seconds(5.0, 1, 0.1), profiler.untraced_seconds(0.3, 1, 0)


def test_time_of_traced_steps_is_not_counted(ranks2: RankPool) -> None:
    for counted, only_traced, later in ranks2.run(slow_while_traced):
        # The profiler's own start and end are part of the traced steps.
        assert counted < 0.1
        # If all steps are traced, they count like the steps before.
        assert (only_traced, later) == (0.1, 0.3)


def test_scalars_follow_rates_evaluations_speed_and_memory(
    trained: tuple[TrainResult, TrainResult], folder: Path
) -> None:
    by_tag = scalars_in(folder / "scalars" / "planned")
    planned = trained[0].runs[0]
    assert list(by_tag["train/loss"].values()) == pytest.approx(planned.losses)
    for tag in ("lr/tables", "lr/dense", "speed/samples_per_s_now", "memory/largest_gb"):
        assert list(by_tag[tag]) == [3, 4, 6, 8], tag
        assert all(value > 0 for value in by_tag[tag].values())
    for name, value in planned.evaluated.metrics.items():
        assert by_tag[f"eval/{name}"] == {
            4: pytest.approx(planned.evaluations[0].metrics[name]),
            8: pytest.approx(value),
        }


def refused(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    plan = str(folder / "planned" / "planned" / "plan.json")
    groups = 3 - load(Path(plan)).mesh.num_groups
    cases = {
        "no stats": {"access": str(folder / "nowhere"), "num_groups": 2, "hot_rows": 4},
        "no calibration": {"calibration": str(folder / "nowhere.toml")},
        "no plan": {"plan": str(folder / "nowhere.json")},
        "other sync": {"plan": plan, "sync": "WeightSync"},
        "other groups": {"plan": plan, "num_groups": groups},
    }
    messages = {
        name: refusal(rank, world_size, config_with(runs={"odd": run}))
        for name, run in cases.items()
    }
    no_folder = refusal(rank, world_size, config_with(), profiled=range(1, 3))
    output, late = {"folder": str(folder / "unprofiled")}, range(300, 311)
    no_step = refusal(rank, world_size, config_with(output=output), profiled=late)
    return messages | {"no folder": no_folder, "no step": no_step}


def sync_of_a_plan(rank: int, world_size: int, folder: Path) -> tuple[str, bool]:
    plan = load(folder / "planned" / "planned" / "plan.json")
    path = folder / f"averaged_{rank}.json"
    early = Pipeline.ROW_PREFETCH
    save(Plan2D(plan.plan, mesh=plan.mesh, sync=WeightSync(), pipeline=early), path)
    with patch.object(program, "PipelinedSteps", wraps=PipelinedSteps) as steps:
        (run,) = train(config_with(runs={"averaged": {"plan": str(path)}})).runs
    model, *_ = steps.call_args.args
    return run.sync, model.plan.pipeline is early


def test_a_plan_file_says_the_sync_and_the_pipeline(
    ranks2: RankPool, trained: Any, folder: Path
) -> None:
    assert set(ranks2.run(sync_of_a_plan, folder)) == {(str(WeightSync()), True)}


def test_files_that_do_not_fit_are_refused_on_all_ranks(
    ranks2: RankPool, trained: Any, folder: Path
) -> None:
    first, second = ranks2.run(refused, folder)
    assert first == second
    assert "nowhere" in first["no stats"]
    assert "nowhere.toml" in first["no calibration"]
    assert "nowhere.json" in first["no plan"]
    assert "runs.odd has WeightSync" in first["other sync"]
    assert "let the run say the same" in first["other sync"]
    assert re.search(r"runs.odd has num_groups=[12], and the plan .* has", first["other groups"])
    assert first["no folder"] == "--profile writes to the output folder; set output.folder"
    late = (
        "--profile 300:310 begins after the last step of runs.one_group, which is 8; give earlier"
    )
    assert first["no step"].startswith(late)


def profiled_too_late(rank: int, world_size: int, folder: Path) -> list[tuple[Any, ...]]:
    """Resume from step 4 and profile earlier steps; return the warnings."""
    checkpoint, output = {"folder": str(folder / "saved")}, {"folder": str(folder / "output")}
    for steps in (4, 6):
        loop = {"steps": steps, "global_batch_size": 32, "eval_steps": 1}
        config = config_with(loop=loop, checkpoint=checkpoint, output=output)
        with patch.object(program, "logger") as log:
            train(config, resume="auto", profiled=range(1, 3))
    return [call.args for call in log.warning.call_args_list]


def test_steps_before_a_resume_are_not_profiled(ranks2: RankPool, tmp_path: Path) -> None:
    (text, *values), *others = ranks2.run(profiled_too_late, tmp_path)[0]
    assert text % tuple(values) == "--profile 1:2 traces nothing: one_group begins after step 4"
    assert not others


def test_runs_leave_their_mesh_to_the_planner() -> None:
    config = config_with(runs={"open": {"access": "stats"}, "stated": {}})
    assert config.mesh("open", 4) is None
    assert config.runs["open"].is_planned_by_cost
    assert not config.runs["stated"].is_planned_by_cost


def test_paths_of_runs_are_beside_their_config(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[data]\nfeatures = [{ name = 'user', num_rows = 10 }]\n"
        "[runs.one]\naccess = 'stats'\ncalibration = 'emulated_1gbit'\n"
    )
    config = load_config(TrainConfig, path)
    assert config.runs["one"].access == str(tmp_path / "stats")
    assert Path(config.runs["one"].calibration).name == "emulated_1gbit.toml"


@pytest.mark.parametrize("text", ["20", "3:2", "0:4", "a:b"])
def test_steps_to_profile_are_two_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="names no steps; give the first and the last, such as"):
        profiled_steps(text)
