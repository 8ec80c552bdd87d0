"""The page on a training run: what it shows, for which runs, and what it refuses."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.run_folders import (
    EXPLANATION,
    figure,
    headings_of,
    page_of,
    plan,
    point,
    run_record,
    words_of,
    write_access,
    write_progress,
    write_run,
)
from tests.support.traces import COMPUTING_US, WAITING_US, step_events, write_trace
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.cli.app import app
from torchrec_2dsp.programs.run_report.contents import RunContents
from torchrec_2dsp.programs.run_report.page import run_page
from torchrec_2dsp.programs.run_report.steps import common_steps, rank_shares, slowest_counts
from torchrec_2dsp.programs.traces import RankShares, RankSplit, StepPhase, StepTimes

CHROMIUM = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)


def everything(folder: Path) -> Path:
    """Return two finished runs with all that a page can show."""
    stats = write_access(folder.parent / "access.parquet")
    dense = tuple(point(step, dense=True) for step in (10, 20, 30))
    runs = [
        run_record("plain"),
        run_record(
            "encoded",
            curve=dense,
            sync_bytes_per_step=1e6,
            rows_bytes_per_step=3e6,
            rows_fp32_bytes_per_step=6e6,
        ),
    ]
    sections = {"plain": {"num_groups": 2}, "encoded": {"num_groups": 2, "access": str(stats)}}
    written = write_run(folder, runs, sections=sections, plans={"encoded": plan([7, 2])})
    for rank in range(4):
        write_trace(folder / "plain" / f"trace_rank{rank}.json", step_events(late=rank))
    return written


def test_a_page_has_its_parts_in_order_and_every_plot_has_data(tmp_path: Path) -> None:
    page = page_of(everything(tmp_path / "run"))
    assert headings_of(page) == [
        "Runs",
        "Last training loss and last evaluation",
        "Training loss",
        "Training NE",
        "Held out: Loss",
        "Held out: Normalized entropy (NE)",
        "Held out: AUC",
        "Held out: Calibration (predicted over observed clicks)",
        "Learning rates",
        "Throughput",
        "Where a step goes",
        "How even the work of ranks is",
        "Ranks in a step of plain",
        "Phases of a step of plain",
        "Memory",
        "Bytes per step",
        "Bytes of dense gradients",
        "Plan of plain: 2 groups of 2 ranks, GradientSync",
        "Plan of encoded: 2 groups of 2 ranks, GradientSync",
        "Rows by use, for encoded",
        "Environment",
        "Config",
    ]
    for drawn in page.figures:
        traces: Any = drawn.data
        assert traces
        assert all(len(trace.x) and len(trace.x) == len(trace.y) for trace in traces)


def test_a_page_says_what_was_trained_and_how_it_went(tmp_path: Path) -> None:
    words = words_of(page_of(everything(tmp_path / "run")))
    assert "A DLRM, trained by 4 ranks on synthetic clicks: 30 steps of 64 samples." in words
    assert "has an NE of 0.6000" in words
    # 30 steps of 64 samples at 6,400 samples per second.
    assert "0.3 s" in words
    assert "6,400" in words
    assert "0.90000 (step 20)" in words
    assert "all steps are trained" in words
    assert EXPLANATION in words
    assert "row, hash owners, in fp16, 2 hot" in words
    assert re.search(r"t_user\s+1,000\s+16\s+2d_row_wise\s+0\+1  2\+3", words)
    assert "2.13.0" in words
    assert "global_batch_size = 64" in words
    assert "nan" not in words.lower()


def test_curves_marks_and_bytes_are_those_of_the_record(tmp_path: Path) -> None:
    page = page_of(everything(tmp_path / "run"))
    loss = figure(page, "Training loss")
    assert list(loss) == ["plain", "encoded"]
    assert list(loss["plain"].x) == [10, 20, 30]
    assert list(loss["plain"].y) == [1 / 10, 1 / 20, 1 / 30]
    # The best evaluations are the second ones, of less entropy and of more area.
    for heading, best in (("Normalized entropy (NE)", 0.9), ("AUC", 0.7)):
        marks = [
            trace
            for name, trace in figure(page, f"Held out: {heading}").items()
            if name.startswith("mark")
        ]
        assert [(list(mark.x), list(mark.y)) for mark in marks] == [([20], [best])] * 2
    rates = figure(page, "Learning rates")
    assert list(rates) == ["tables: plain, encoded", "dense part: plain, encoded"]
    memory = figure(page, "Memory")
    assert list(memory["plain"].y) == [3.0, 2.0, 2.5, 1.0]
    sent = figure(page, "Bytes per step")
    assert dict(zip(sent["rows"].y, sent["rows"].x, strict=True)) == {
        "encoded, before encoding": 6.0,
        "encoded, sent": 3.0,
    }
    assert dict(zip(sent["replicas"].y, sent["replicas"].x, strict=True)) == {
        "plain": 2.0,
        "encoded, before encoding": 2.0,
        "encoded, sent": 1.0,
    }
    assert list(sent["dense gradients"].x) == [4.0, 1.0]
    # Of 1,000 rows two are hot, which take 90 of 100 lookups.
    hot = figure(page, "Rows by use, for encoded")["mark 1"]
    assert (list(hot.x), list(hot.y)) == ([pytest.approx(0.2)], [pytest.approx(90.0)])


def test_rankings_have_their_metrics_and_no_entropy(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [run_record("main", clicks=False)], model="two_tower")
    page = page_of(folder)
    headings = headings_of(page)
    assert "Held out: recall@10" in headings
    assert "Held out: ndcg@10" in headings
    assert not any("NE" in heading for heading in headings)
    words = words_of(page)
    assert "best ndcg@10" in words
    assert "A two-tower model" in words
    assert "nan" not in words.lower()


def test_a_run_that_diverged_has_the_points_that_are_numbers(tmp_path: Path) -> None:
    curve = (point(10), point(20).model_copy(update={"loss": float("inf"), "ne": float("nan")}))
    page = page_of(write_run(tmp_path / "run", [run_record("main", curve=curve)]))
    assert list(figure(page, "Training loss")["main"].x) == [10]
    assert "inf" not in words_of(page)


def test_runs_that_are_not_over_show_what_they_have(tmp_path: Path) -> None:
    names = ("done", "running", "waiting")
    sections = {name: {"num_groups": 2} for name in names}
    folder = write_run(tmp_path / "run", [run_record("done")], sections=sections)
    write_progress(folder / "done", is_over=True)
    write_progress(folder / "running")
    (folder / "waiting" / "plan.json").unlink()
    contents = RunContents.read(folder)
    assert [run.state for run in contents.runs] == [
        "all steps are trained",
        "not finished",
        "not begun",
    ]
    page = run_page(contents)
    assert list(figure(page, "Training loss")["running"].x) == [10, 20]
    assert list(figure(page, "Training loss")["done"].x) == [10, 20, 30]
    assert "Not over, so that some figures are missing: running, waiting." in words_of(page)


def test_the_first_run_has_a_page_before_there_is_a_record(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [], sections={"main": {"num_groups": 2}})
    with pytest.raises(ConfigError, match=r"has no record\.json, and no run has reported yet"):
        RunContents.read(folder)
    write_progress(folder / "main")
    page = page_of(folder)
    assert "Environment" not in headings_of(page)
    assert "trained by 4 ranks" in words_of(page)


def test_a_run_that_is_trained_anew_is_not_shown_as_it_was(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [run_record("main")])
    write_progress(folder / "main")
    (run,) = RunContents.read(folder).runs
    assert run.record is None
    assert [part.step for part in run.curve] == [10, 20]


def test_statistics_that_are_gone_leave_the_rest_of_the_page(tmp_path: Path) -> None:
    sections = {"main": {"num_groups": 2, "access": str(tmp_path / "gone.parquet")}}
    page = page_of(write_run(tmp_path / "run", [run_record("main")], sections=sections))
    assert re.search("Rows by use, for main: the statistics can.*gone.parquet", words_of(page))
    assert "Config" in headings_of(page)


def test_the_command_writes_where_it_is_told_and_needs_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [run_record("main")])
    program = (
        "import sys; from torchrec_2dsp.programs.cli.app import app\n"
        "try: app(['report', *sys.argv[1:]])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'torchrec', 'pyarrow'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True, timeout=60)
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    output = tmp_path / "pages" / "mine.html"
    result = CliRunner().invoke(app, ["report", str(folder), "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert f"wrote {output}" in result.output
    # The script for the plots is inside, so that nothing is loaded.
    html = output.read_text()
    assert "plotly.js v" in html
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="', html)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_every_plot_without_an_error(tmp_path: Path) -> None:
    page = page_of(everything(tmp_path / "run"))
    path = tmp_path / "report.html"
    path.write_text(
        page.html().replace(
            "<head>", "<head><script>window.onerror = text => console.log('FAIL ' + text)</script>"
        )
    )
    shown = subprocess.run(
        [
            str(CHROMIUM),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=10000",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    assert "CONSOLE" not in shown.stderr, shown.stderr
    # What plotly has drawn has axes and lines.
    assert shown.stdout.count('class="main-svg"') >= len(page.figures)


def _without_config(folder: Path) -> None:
    (folder / "config.toml").unlink()


def _without_runs(folder: Path) -> None:
    (folder / "config.toml").write_text("[data]\n[model]\n[loop]\n")


def _of_another_format(folder: Path) -> None:
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps({**record, "format": 99}))


def _no_json(folder: Path) -> None:
    (folder / "record.json").write_text("{")


def _no_record(folder: Path) -> None:
    (folder / "record.json").write_text(json.dumps({"format": 3}))


def _no_plan(folder: Path) -> None:
    (folder / "main" / "plan.json").write_text("{}")


def _no_progress(folder: Path) -> None:
    (folder / "main" / "progress.jsonl").write_text('{"point": 3}\n')


def _gone(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_gone, r"there is no folder .*run; give the folder that train wrote to"),
        (_without_config, r"config\.toml can't be read: No such file"),
        (_without_runs, r"config\.toml isn't a train config: it has no section runs"),
        (_of_another_format, r"record\.json has format=99, and this version reads 1 to 4; use"),
        (_no_json, r"record\.json is not JSON"),
        (_no_record, r"record\.json is not what train --output writes"),
        (_no_plan, r"plan\.json is not a plan file"),
        (_no_progress, r"progress\.jsonl is not the progress of a run"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, damage: Any, message: str) -> None:
    folder = write_run(tmp_path / "run", [run_record("main")])
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        RunContents.read(folder)
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 2


def test_without_plotly_the_command_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=r"pip install 'torchrec-2dsp\[report\]'"):
        run_page(RunContents.read(write_run(tmp_path / "run", [run_record("main")])))


def test_profiled_steps_are_split_by_phase_and_the_slowest_rank_is_marked(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [run_record("traced"), run_record("plain")])
    # The next batch of rank 2 takes 30 us more.
    for rank in (0, 2, 10):
        events = step_events(late=30 * (rank == 2))
        write_trace(folder / "traced" / f"trace_rank{rank}.json", events)
    traced, plain = RunContents.read(folder).runs
    assert [path.stem for path in traced.traces] == ["trace_rank0", "trace_rank2", "trace_rank10"]
    assert not plain.traces
    page = page_of(folder)
    places = ["traced, rank 0", "traced, rank 2 (slowest)", "traced, rank 10"]
    bars = figure(page, "Where a step goes")
    assert {*bars} == {
        *(phase.value for phase in COMPUTING_US),
        *(f"{phase.value}: waiting" for phase in WAITING_US),
    }
    assert list(bars["next batch"].y) == places
    assert list(bars["next batch"].x) == [0.01, 0.04, 0.01]
    assert list(bars["rows: waiting"].x) == [0.011] * 3
    assert bars["rows: waiting"].marker.pattern.shape == "/"
    ends = [sum(trace.x[place] for trace in bars.values()) for place in range(3)]
    assert ends == pytest.approx([0.1, 0.13, 0.1])
    words = " ".join(words_of(page).split())
    assert "The mean of 1 step of 3 ranks. Rank 2 computes longest, 0.10 ms." in words
    assert f"Traces, for Perfetto or Chrome: {folder / 'traced'}." in words
    # 10, 40 and 10 us of 100, 130 and 100 us.
    assert "next batch 0.02 18.2% 0.02 0.00 0.01 (rank 0) 0.04 (rank 2)" in words
    assert "rows 0.01 13.6% 0.00 0.01 0.00 (rank 0) 0.00 (rank 10)" in words
    assert "the step 0.11 100.0% 0.08 0.03 0.07 (rank 0) 0.10 (rank 2)" in words
    assert "Phases of a step of plain" not in words
    # Of steps of 110 us ranks compute 83 in the mean, and the slowest 103.
    assert "traced as read 75.5% 18.2% 1.24" in words
    assert "2 0.10 0.03 79.2% 1 of 1" in words


def test_a_page_says_what_the_slowest_rank_costs_with_and_without_dealt_samples(
    tmp_path: Path,
) -> None:
    records = [
        run_record("plain"),
        run_record("dealt", imbalance_before=1.36, imbalance_after=1.02),
        run_record("unprofiled"),
    ]
    sections = {"plain": {}, "dealt": {"balance": {}}, "unprofiled": {}}
    folder = write_run(tmp_path / "run", records, sections=sections)
    # A rank computes 73 us of 100, and in one of two steps of the plain run 50 us more.
    for rank in range(2):
        first, second = (step_events(n, 200 * n, late=50 * (n == rank)) for n in range(2))
        write_trace(folder / "plain" / f"trace_rank{rank}.json", [*first, *second])
        write_trace(folder / "dealt" / f"trace_rank{rank}.json", step_events())
    page = page_of(folder)
    words = " ".join(words_of(page).split())
    assert "plain as read 78.4% 20.0% 1.26 dealt dealt by cost 73.0% 0.0% 1.00 1.36 1.02" in words
    assert "rank computing ms waiting ms busy slowest in steps" in words
    assert "0 0.10 0.03 78.4% 1 of 2 1 0.10 0.03 78.4% 1 of 2" in words
    assert "Ranks in a step of unprofiled" not in headings_of(page)


def split_of(rank: int, *computing_us: float, first: int = 5) -> RankSplit:
    """Return the split of steps of 100 us each."""
    steps = {first + place: StepTimes(time, 100.0) for place, time in enumerate(computing_us)}
    return RankSplit(
        rank=rank,
        num_steps=len(steps),
        step_us=100.0,
        computing_us={StepPhase.OTHER: sum(computing_us) / len(steps)},
        waiting_us={},
        steps=steps,
    )


def test_what_is_lost_to_the_slowest_rank_is_found_step_by_step() -> None:
    splits = [split_of(0, 80, 40), split_of(3, 40, 80)]
    assert rank_shares(splits) == RankShares(busy=0.6, lost=0.2)
    assert slowest_counts(splits) == {0: 1, 3: 1}
    # Steps that a trace lacks are left out.
    later = split_of(9, 20, 10, first=6)
    assert common_steps([*splits, later]) == [6]
    shares = rank_shares([*splits, later])
    assert shares is not None
    assert shares.imbalance == pytest.approx(80 / (140 / 3))
    assert shares.lost == pytest.approx(0.8 - 1.4 / 3)
    assert rank_shares([splits[0], split_of(1, 5, first=9)]) is None
    assert rank_shares([]) is None
    assert rank_shares(splits[:1]) == RankShares(busy=0.6, lost=0.0)


def test_a_page_says_how_to_profile_if_no_step_was_profiled(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", [run_record("main")]))
    assert "train --profile 20:30 records steps 20 to 30" in words_of(page)
    assert "Where a step goes" not in headings_of(page)


def test_a_trace_that_marks_no_steps_leaves_the_rest_of_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [run_record("older"), run_record("newer")])
    write_trace(folder / "older" / "trace_rank0.json", step_events()[1:])
    write_trace(folder / "newer" / "trace_rank0.json", step_events())
    page = page_of(folder)
    assert re.search(
        "Where a step of older goes can.*t be shown.*trace_rank0.json doesn.*t mark", words_of(page)
    )
    assert list(figure(page, "Where a step goes")["ids"].y) == ["newer, rank 0"]
    assert "The mean of 1 step of 1 rank. Traces" in words_of(page)


def test_of_many_ranks_the_fastest_and_the_slowest_have_bars(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [run_record("main")])
    for rank in range(20):
        write_trace(folder / "main" / f"trace_rank{rank}.json", step_events(late=rank * 7 % 20))
    page = page_of(folder)
    # Those with 8 to 11 us more than the fastest have none.
    shown = [rank for rank in range(20) if not 8 <= rank * 7 % 20 < 12]
    slowest = next(rank for rank in range(20) if rank * 7 % 20 == 19)
    assert list(figure(page, "Where a step goes")["ids"].y) == [
        f"main, rank {rank}{' (slowest)' * (rank == slowest)}" for rank in shown
    ]
    assert "half of those shown compute most" in words_of(page)
    assert "of 20 ranks" in words_of(page)
