"""Studies over several seeds: gaps by seed, intervals, the page and the plot."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.cli.app import app
from torchrec_2dsp.programs.study import _curves, gaps_to, study_plot, study_report
from torchrec_2dsp.programs.train.record import RunRecord, StepsTrained, TrainRecord, joined

NE = {"one_group": [0.80, 0.82, 0.81], "averaged": [0.84, 0.86, 0.82], "scaled": [0.81, 0.83, 0.82]}

RUNS = {
    "one_group": {},
    "averaged": {"num_groups": 4, "sync": "WeightSync", "moment_scale": 1.0},
    "scaled": {"num_groups": 4, "sync": "WeightSync"},
}


def record(seed: int, **changes: object) -> TrainRecord:
    config: dict[str, Any] = {
        "data": {"seed": seed, "num_dense": 3},
        "model": {"seed": seed, "dim": 8},
        "loop": {"steps": 20, "global_batch_size": 512},
        "runs": RUNS,
        **changes,
    }
    runs = [
        RunRecord(
            name=name,
            mesh="Mesh2D(4x1, strided)",
            sync=f"{config['runs'].get(name, {}).get('sync', 'GradientSync')}()",
            num_groups=1 if name == "one_group" else 4,
            curve=tuple(StepsTrained(step=step, ne=values[seed] + 0.1 / step) for step in (10, 20)),
            eval_loss=0.5,
            eval_ne=values[seed],
            samples_per_s=1e3,
            sync_bytes_per_step=2e6,
        )
        for name, values in NE.items()
    ]
    return TrainRecord(config=config, world_size=4, planted_ne=0.7, runs=tuple(runs))


RECORDS = [record(seed) for seed in range(3)]


def with_runs(whole: TrainRecord, change: Callable[[RunRecord], dict[str, object]]) -> TrainRecord:
    """Return a record with fields replaced in each of its runs."""
    runs = tuple(run.model_copy(update=change(run)) for run in whole.runs)
    return whole.model_copy(update={"runs": runs})


def test_earlier_records_say_how_evenly_samples_were_dealt(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    RECORDS[0].save(path)
    tree = json.loads(path.read_text())
    for run in tree["runs"]:
        run |= {"imbalance_before": 1.4, "imbalance_after": None}
    path.write_text(json.dumps(tree))
    assert TrainRecord.load(path) == RECORDS[0]


def test_gaps_are_between_runs_of_one_seed() -> None:
    reference, averaged, scaled = gaps_to(RECORDS, "one_group")
    assert reference.gaps == (0.0, 0.0, 0.0)
    assert averaged.gaps == pytest.approx((0.04, 0.04, 0.01))
    assert averaged.mean == pytest.approx(0.03)
    # Student's 97.5% quantile for three values is 4.303; their standard deviation 0.01732.
    assert averaged.interval == pytest.approx((0.03 - 0.04303, 0.03 + 0.04303), abs=1e-5)
    assert scaled.gaps == pytest.approx((0.01,) * 3)
    assert gaps_to(RECORDS[:1], "one_group")[1].interval == (float("-inf"), float("inf"))


@pytest.mark.parametrize(
    ("records", "reference", "message"),
    [
        (RECORDS, "two_groups", "there is no run 'two_groups'; the records have one_group, "),
        ([RECORDS[0], RECORDS[0]], "one_group", "two records have the same seeds"),
        (
            [RECORDS[0], record(1, loop={"steps": 9})],
            "one_group",
            "differ in more than their seeds: loop.global_batch_size is 512 and nothing; compare",
        ),
        (
            [RECORDS[0], RECORDS[1].model_copy(update={"world_size": 2})],
            "one_group",
            "differ in more than their seeds: the number of ranks is 4 and 2; compare",
        ),
    ],
)
def test_what_does_not_belong_together(
    records: list[TrainRecord], reference: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        gaps_to(records, reference)


def folders(seed: int) -> dict[str, object]:
    """Return config sections with separate folders for a seed."""
    return {
        "loop": {"steps": 20, "global_batch_size": 512, "tensorboard_dir": f"boards_{seed}"},
        "checkpoint": {"folder": f"checkpoints_{seed}", "every": 10},
        "output": {"folder": f"out_{seed}"},
    }


def test_each_record_may_have_folders_of_its_own() -> None:
    records = [record(seed, **folders(seed)) for seed in range(3)]
    gaps = [gap.gaps for gap in gaps_to(records, "one_group")]
    assert gaps == [gap.gaps for gap in gaps_to(RECORDS, "one_group")]
    whole = record(0, **folders(7))
    one_group, others = whole.only(["one_group"]), record(0, **folders(8)).only(["scaled"])
    assert [run.name for run in one_group.joined(others).runs] == ["one_group", "scaled"]


def test_the_page_says_how_runs_were_updated_and_how_much_of_a_gap_is_closed() -> None:
    page = study_report(RECORDS, reference="one_group", baseline="averaged")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    table = {row[0]: row[1:] for row in rows if len(row) == 6}
    assert table["run"] == ["sync", "optimizer", "gap", "smallest to largest", "sync MB"]
    assert table["one_group"][:2] == ["one group", "row-wise AdaGrad"]
    assert table["averaged"][:2] == ["WeightSync()", "row-wise AdaGrad"]
    assert table["scaled"][:2] == ["WeightSync()", "row-wise AdaGrad, moment / 4"]
    assert table["scaled"][2:] == ["1000.0 [1000.0, 1000.0]", "1000.0 to 1000.0", "2.000"]
    assert table["averaged"][3] == "1000.0 to 4000.0"
    assert "*one_group* has a normalized entropy of 0.81000 on held-out batches" in page
    assert "The gap of *averaged* is closed by: one_group 100%, scaled 67%." in page
    assert "10,240 samples in 20 steps, 4 ranks" in page
    assert "closed by" not in study_report(RECORDS, reference="one_group")
    assert "| 4000.0 |" in study_report(RECORDS[:1], reference="one_group")  # Without interval.


def test_runs_may_end_at_different_steps(tmp_path: Path) -> None:
    last = {"averaged": 1}
    shorter = with_runs(RECORDS[1], lambda run: {"curve": run.curve[: last.get(run.name)]})
    records = [RECORDS[0], shorter]
    page = study_report(records, reference="one_group")
    assert "5,120 to 10,240 samples in 10 to 20 steps, 4 ranks" in page
    study_plot(records, tmp_path / "gaps.svg", reference="one_group")
    samples, gaps = _curves(records, "averaged", "one_group")
    assert samples == [0.00512]
    assert gaps == [pytest.approx([0.04, 0.04])]
    assert len(_curves(records, "scaled", "one_group")[0]) == 2


def test_runs_without_a_normalized_entropy_are_refused() -> None:
    diverged = with_runs(RECORDS[0], lambda run: {"eval_ne": math.nan})
    with pytest.raises(ConfigError, match=r"^the run 'one_group' with the seeds \(0, 0\) has the"):
        study_report([diverged], reference="one_group")
    fewer = RECORDS[1].model_copy(update={"runs": RECORDS[1].runs[:2]})
    for records in ([RECORDS[0], fewer], [fewer, RECORDS[0]]):
        with pytest.raises(ConfigError, match=r"the seeds \(1, 1\) has no run 'scaled'; train it"):
            gaps_to(records, "one_group")


@pytest.mark.parametrize(
    ("run", "sync", "optimizer"),
    [
        ({"moment_scale": "expected"}, "", "row-wise AdaGrad, moment / expected inflation"),
        ({"num_groups": 4}, "", "row-wise AdaGrad"),
        ({"sync": "WeightSync", "moment_scale": 2.5}, "", "row-wise AdaGrad, moment / 2.5"),
        ({"sync": "WeightSync", "delayed_moment": True}, "", "row-wise AdaGrad, delayed moment"),
        # A saved plan's section is silent, but the record has the settings that the run used.
        ({"plan": "plan.json"}, "WeightSync(every(4))", "row-wise AdaGrad, moment / 4"),
    ],
)
def test_the_page_names_every_optimizer(run: dict[str, object], sync: str, optimizer: str) -> None:
    records = [record(seed, runs={**RUNS, "scaled": run}) for seed in range(2)]
    records = [with_runs(entry, lambda run: {"sync": sync or run.sync}) for entry in records]
    page = study_report(records, reference="one_group")
    (row,) = [line for line in page.splitlines() if line.startswith("| scaled ")]
    assert row.split(" | ")[2] == optimizer


def test_a_gap_of_zero_has_no_sign() -> None:
    nearly_equal = with_runs(RECORDS[0], lambda run: {"eval_ne": 0.8 + 1e-9 * len(run.name)})
    page = study_report([nearly_equal], reference="one_group")
    assert page.count(" 0.0 to 0.0 |") == 3
    assert "-0.0" not in page


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        (RECORDS, {"baseline": "avraged"}, "there is no run 'avraged'; the records have one_group"),
        (
            [entry.only(["scaled"]) for entry in RECORDS],
            {"reference": "scaled"},
            "the records have the reference 'scaled' alone; give a run to compare with it",
        ),
    ],
)
def test_a_study_that_compares_nothing_is_refused(
    records: list[TrainRecord], options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        study_report(records, **{"reference": "one_group", **options})


def test_curves_without_a_common_step_are_refused(tmp_path: Path) -> None:
    other_steps = with_runs(RECORDS[1], lambda run: {"curve": (StepsTrained(step=7, ne=0.8),) * 2})
    message = "the curves of 'averaged' and 'one_group' share no step over all seeds; train"
    with pytest.raises(ConfigError, match=message):
        study_plot([RECORDS[0], other_steps], tmp_path / "gaps.svg", reference="one_group")


def study(folder: Path, records: list[TrainRecord], *options: str) -> Any:
    """Save records in a folder as ``seed_<n>.json``, and run a study on them."""
    sources = [folder / f"seed_{number}.json" for number in range(1, len(records) + 1)]
    for source, entry in zip(sources, records, strict=True):
        entry.save(source.expanduser())
    arguments = ["train-study", *map(str, sources), "--reference", "one_group", *options]
    return CliRunner().invoke(app, arguments)


def test_the_command_writes_page_plot_and_data(tmp_path: Path) -> None:
    done = study(tmp_path, RECORDS, "--output", str(tmp_path / "my (first) page.md"))
    assert done.exit_code == 0, done.output
    page = (tmp_path / "my (first) page.md").read_text()
    assert "(my%20%28first%29%20page.svg)" in page
    assert "[my (first) page_3.json](my%20%28first%29%20page_3.json)" in page
    assert "<svg" in (tmp_path / "my (first) page.svg").read_text()
    assert TrainRecord.load(tmp_path / "my (first) page_3.json") == RECORDS[2]


def test_only_some_runs_are_compared_with_the_reference(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = study(tmp_path, RECORDS, "--output", str(page), "--only", "averaged")
    assert done.exit_code == 0, done.output
    runs = TrainRecord.load(tmp_path / "page_1.json").runs
    assert {run.name for run in runs} == {"one_group", "averaged"} < set(RECORDS[0].config["runs"])


def test_a_tilde_is_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells don't expand it in ``--output=~/page.md``."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    done = study(Path("~"), RECORDS, "--output=~/page.md")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "page.md").exists()
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "seed.md"], "--output seed.md would write over the record seed_1.json; use"),
    ],
)
def test_the_command_refuses_before_it_writes(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    records = [RECORDS[2], RECORDS[0], RECORDS[1]]
    done = study(tmp_path, records, *options)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(list(tmp_path.iterdir())) == 3
    assert [TrainRecord.load(f"seed_{n}.json") for n in (1, 2, 3)] == records


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is not what train --output writes"):
        TrainRecord.load(path)


def part(seed: int, *names: str, **changes: object) -> TrainRecord:
    whole = record(seed, runs={name: RUNS[name] for name in names}, **changes)
    return whole.model_copy(update={"runs": tuple(run for run in whole.runs if run.name in names)})


def test_runs_of_the_same_seeds_join() -> None:
    parts = [part(0, "one_group", "scaled"), part(1, *NE), part(0, "averaged")]
    first, second = joined(parts)
    assert [run.name for run in first.runs] == ["one_group", "scaled", "averaged"]
    assert list(first.config["runs"]) == ["one_group", "scaled", "averaged"]
    assert second is parts[1]
    assert joined(RECORDS) == RECORDS
    watched = part(0, "averaged", output={"watchers": ["mine:Watcher"]}, checkpoint={"every": 9})
    assert len(joined([parts[0], watched])) == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (part(0, "scaled", "averaged"), r"the seeds \(0, 0\) have the run 'scaled'; give one"),
        (
            part(0, "averaged", model={"seed": 0, "dim": 9}),
            "differ in more than their runs: model.dim is 8 and 9; compare",
        ),
    ],
)
def test_runs_that_do_not_join(other: TrainRecord, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        joined([part(0, "one_group", "scaled"), other])


def test_a_study_may_leave_runs_out(tmp_path: Path) -> None:
    page = tmp_path / "quality.md"
    records = [part(0, *NE), part(1, "one_group", "scaled")]

    whole, chosen = (
        study(tmp_path, records, "--output", str(page), *options)
        for options in ((), ("--only", "one_group", "--only", "scaled"))
    )

    assert whole.exit_code == 2
    assert "differ in more than their seeds" in whole.stderr
    assert chosen.exit_code == 0, chosen.output
    assert "| scaled" in page.read_text()
    assert "averaged" not in page.read_text()
    with pytest.raises(ConfigError, match="no run 'most'; the records have one_group, averaged"):
        record(0).only(["most"])
