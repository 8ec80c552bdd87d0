"""The page on a training run: its contents for various runs, and refused folders."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.run_folders import (
    CLICKS,
    EXPLANATION,
    evaluations,
    everything,
    figure,
    gain_of,
    headings_of,
    outline_of,
    page_of,
    plan,
    point,
    run_record,
    words_of,
    write_progress,
    write_run,
)
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.cli.app import app
from torchrec_2dsp.programs.run_report.contents import RunContents
from torchrec_2dsp.programs.run_report.page import run_page

CHROMIUM = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)


def test_a_page_begins_with_the_gain_and_ends_with_what_is_folded_away(tmp_path: Path) -> None:
    page = page_of(everything(tmp_path / "run"))
    assert outline_of(page) == [
        "# Gain",
        "Time of a step",
        "+ All contestants of demo",
        "# Where a step goes",
        "A step of this training, by rank",
        "Span by span",
        "A step of the benchmark demo, beside TorchRec&#x27;s",
        "Span by span, of demo",
        "How even the work of ranks is",
        "+ Ranks in a step of plain",
        "# What was chosen, and why",
        "+ Plan of plain, table by table",
        "+ Why the plan of plain is as it is",
        "+ Plan of encoded, table by table",
        "# Training",
        "Runs",
        "Last training loss and last evaluation",
        "Training loss",
        "Training NE",
        "Held out: Loss",
        "Held out: Normalized entropy (NE)",
        "Held out: AUC",
        "Held out: Calibration (predicted over observed clicks)",
        "Throughput",
        "Learning rates",
        "# Memory and bytes",
        "Memory",
        "Bytes per step",
        "Bytes of dense gradients",
        "# Rows by use",
        "Rows by use, for encoded",
        "# Config and versions",
        "+ Config",
        "+ Versions",
    ]
    # The list at the side leads to each section, in this order.
    html = page.html()
    links = re.findall('<a href="#(.*?)">(.*?)</a>', html)
    assert re.findall('<section id="(.*?)"><h2>(.*?)</h2>', html) == links
    assert html.count("<section") == html.count("</section>") == len(links)
    for drawn in page.figures:
        traces: Any = drawn.data
        assert traces
        assert all(len(trace.x) and len(trace.x) == len(trace.y) for trace in traces)


def test_a_page_says_what_was_trained_and_how_it_went(tmp_path: Path) -> None:
    words = words_of(page_of(everything(tmp_path / "run")))
    assert "A DLRM, trained by 4 ranks on synthetic clicks: 30 steps of 64 samples." in words
    assert "has an NE of 0.6000" in words
    # 30 steps with 64 samples each at 6,400 samples per second.
    assert "0.3 s" in words
    assert "6,400" in words
    assert "0.90000 (step 20)" in words
    assert "all steps are trained" in words
    assert EXPLANATION in words
    assert "row, hash owners, in fp16, 2 hot" in words
    assert re.search(r"t_user\s+1,000\s+16\s+row-wise\s+0\+1  2\+3", words)
    assert "2.13.0" in words
    assert "global_batch_size = 64" in words
    assert "nan" not in words.lower()


def test_a_page_counts_the_steps_that_were_trained(tmp_path: Path) -> None:
    """One run has 30 steps; another's patience ends it after 20."""
    runs = [run_record("long"), run_record("short", curve=(point(10), point(20)))]
    words = words_of(page_of(write_run(tmp_path / "run", runs)))
    assert "on synthetic clicks: 20 to 30 steps of 64 samples." in words
    words = words_of(page_of(write_run(tmp_path / "other", runs[1:])))
    assert "on synthetic clicks: 20 steps of 64 samples." in words


def test_what_was_chosen_is_said_in_words(tmp_path: Path) -> None:
    records = [run_record(name) for name in ("by_cost", "stock", "read", "given")]
    sections = {"by_cost": {}, "stock": {"stock": True}, "read": {"plan": "p.json"}, "given": {}}
    duplex = plan([1, 2]) | {"pipeline": "row_prefetch", "full_duplex": True}
    folder = write_run(tmp_path / "run", records, sections=sections, plans={"by_cost": duplex})
    words = " ".join(words_of(page_of(folder)).split())
    tables = "1 table row-wise (row, hash owners, in fp16)."
    assert (
        f"by_cost: 2 groups of 2 ranks, GradientSync. {tables} Every rank has a copy of 2 hot "
        f"rows. Pipeline: row prefetch, with full-duplex all-to-alls. {EXPLANATION}"
    ) in words
    assert f"{tables} Pipeline: sparse dist. TorchRec&#x27;s own planner chose it" in words
    assert "It was read from p.json." in words
    assert "The config gives the mesh and the exchange" in words


def test_a_single_number_has_no_chart(tmp_path: Path) -> None:
    once = run_record("main", evaluations=evaluations(CLICKS)[1:2], curve=(point(10),))
    page = page_of(write_run(tmp_path / "run", [once.model_copy(update={"memory_bytes": (3,)})]))
    assert [heading for heading in headings_of(page) if heading.startswith("Held out")] == []
    assert not {"Training loss", "Throughput", "Learning rates", "Memory"} & {*headings_of(page)}
    assert len(page.figures) == 1, "bytes are bars"
    words = " ".join(words_of(page).split())
    assert "main 0.10000 0.50000 0.90000 0.70000 1.02000 0.90000 (step 20)" in words
    assert "main 2 x 2 GradientSync 10 0.1 s 6,400 3.00 all steps are trained" in words


def test_curves_marks_and_bytes_are_those_of_the_record(tmp_path: Path) -> None:
    page = page_of(everything(tmp_path / "run"))
    loss = figure(page, "Training loss")
    assert list(loss) == ["plain", "encoded"]
    assert list(loss["plain"].x) == [10, 20, 30]
    assert list(loss["plain"].y) == [1 / 10, 1 / 20, 1 / 30]
    # The best evaluations are the second ones, with less entropy and more area.
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
    # Two of 1,000 rows are hot, and take 90 % of lookups.
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
    curve = (point(20).model_copy(update={"loss": float("inf"), "ne": float("nan")}), point(30))
    page = page_of(write_run(tmp_path / "run", [run_record("main", curve=curve)]))
    assert "Training loss" not in headings_of(page)
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
    assert "Unfinished, so some figures are missing: running, waiting." in words_of(page)


def test_the_first_run_has_a_page_before_there_is_a_record(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [], sections={"main": {"num_groups": 2}})
    with pytest.raises(ConfigError, match=r"has no finished run, and no run has reported yet"):
        RunContents.read(folder)
    write_progress(folder / "main")
    page = page_of(folder)
    assert "Versions" not in headings_of(page)
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
    gain_of(folder)
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
    config = folder / "config.toml"
    refused = CliRunner().invoke(app, ["report", str(folder), "--output", str(config)])
    assert refused.exit_code == 2
    assert "is no HTML page" in refused.stderr
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


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("", None, r"there is no folder .*run; give the folder that train wrote to"),
        ("config.toml", None, r"config\.toml can't be read: No such file"),
        (
            "config.toml",
            "[data]\n[model]\n[loop]\n",
            r"config\.toml isn't a train config: it has no section runs",
        ),
        (
            "record.json",
            '{"format": 99}',
            r"record\.json is not what train .*: format: Input .* less than or equal to 4, and",
        ),
        ("record.json", "{", r"record\.json is not what train --output writes: Invalid JSON"),
        ("record.json", '{"format": 3}', r"record\.json is not what train --output writes"),
        ("main/plan.json", "{}", r"plan\.json is not a plan file"),
        (
            "main/progress.jsonl",
            '{"point": 3}\n',
            r"progress\.jsonl is not the progress of a run",
        ),
    ],
)
def test_a_folder_of_something_else_is_refused(
    tmp_path: Path, file: str, content: str | None, message: str
) -> None:
    folder = write_run(tmp_path / "run", [run_record("main")])
    if content is not None:
        (folder / file).write_text(content)
    elif file:
        (folder / file).unlink()
    else:
        shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=message):
        RunContents.read(folder)
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 2
