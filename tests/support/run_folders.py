"""A training program's folder with known figures, written without training."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from tests.support.bench_results import bench_result, with_figures
from tests.support.traces import step_events
from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.programs.bench.results import BenchResult, Phase
from torchrec_2dsp.programs.run_report.contents import RunContents
from torchrec_2dsp.programs.run_report.page import run_page
from torchrec_2dsp.programs.traces import RankSplit, RankTrace
from torchrec_2dsp.programs.train.record import (
    Evaluation,
    ProgressFile,
    ProgressLine,
    RunRecord,
    StepsTrained,
    TrainRecord,
)
from torchrec_2dsp.report.page import Page

STEPS = (10, 20, 30)
CLICKS = {"loss": 0.5, "ne": 0.9, "auc": 0.7, "calibration": 1.02}
RANKINGS = {"loss": 2.5, "recall@10": 0.3, "ndcg@10": 0.2}
EXPLANATION = "A step takes 1.5 ms."


def point(step: int, *, clicks: bool = True, dense: bool = False) -> StepsTrained:
    """Return a run's progress report on ten steps, which took 0.01 s each."""
    return StepsTrained(
        step=step,
        ne=1 - step / 100 if clicks else math.nan,
        loss=1 / step,
        table_lr=0.1,
        dense_lr=0.01,
        samples_per_s=800.0 * 8,
        memory_bytes=(3_000_000_000,),
        dense_bytes_per_step=1e6 if dense else None,
        dense_fp32_bytes_per_step=4e6 if dense else None,
    )


def evaluations(metrics: dict[str, float]) -> tuple[Evaluation, ...]:
    """Return three evaluations; the second is best by all metrics but the calibration."""
    signs = {"loss": 1, "ne": 1, "calibration": 1}
    return tuple(
        Evaluation(
            step=step,
            metrics={
                name: value * (1 + signs.get(name, -1) * away) for name, value in metrics.items()
            },
        )
        for step, away in zip(STEPS, (0.2, 0.0, 0.1), strict=True)
    )


def run_record(name: str, *, clicks: bool = True, **changes: Any) -> RunRecord:
    record = RunRecord(
        name=name,
        mesh="Mesh2D(2x2, strided)",
        sync="GradientSync()",
        num_groups=2,
        curve=tuple(point(step, clicks=clicks) for step in STEPS),
        eval_loss=0.5,
        eval_ne=0.9 if clicks else math.nan,
        samples_per_s=6400.0,
        sync_bytes_per_step=2e6,
        sync_fp32_bytes_per_step=2e6,
        rows_bytes_per_step=0.0,
        rows_fp32_bytes_per_step=0.0,
        evaluations=evaluations(CLICKS if clicks else RANKINGS),
        ending="all steps are trained",
        memory_bytes=(3_000_000_000, 2_000_000_000, 2_500_000_000, 1_000_000_000),
    )
    return record.model_copy(update=changes)


def plan(hot_rows: Sequence[int] | None = None) -> dict[str, Any]:
    """Return a plan with one table, as in a plan file."""
    shards = [
        {"placement": f"rank:{n}/cpu", "shard_offsets": [500 * n, 0], "shard_sizes": [500, 16]}
        for n in range(2)
    ]
    table = {
        "sharding_type": "2d_row_wise",
        "ranks": [0, 1],
        "shards": shards,
        "exchange": "row",
        "owners": "hash",
        "transport": "fp16",
        "hot_rows": hot_rows,
        "num_groups": None,
    }
    return {
        "mesh": {"num_groups": 2, "group_size": 2, "layout": "strided"},
        "sync": {"kind": "GradientSync"},
        "modules": {"sparse": {"t_user": table}},
    }


def write_run(
    folder: Path,
    runs: Sequence[RunRecord],
    *,
    sections: dict[str, dict[str, Any]] | None = None,
    plans: dict[str, dict[str, Any]] | None = None,
    model: str = "dlrm",
) -> Path:
    """Write the folder of a program with these finished runs; ``sections`` configures all runs."""
    names = [run.name for run in runs]
    sections = sections or {name: {"num_groups": 2} for name in names}
    config = {
        "data": {"kind": "synthetic"},
        "model": {"kind": model, "dim": 16},
        "loop": {"steps": 30, "global_batch_size": 64, "metric": ""},
        "runs": sections,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    for name in sections:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "plan.json").write_text(json.dumps((plans or {}).get(name, plan())))
    if runs:
        (folder / runs[0].name / "explanation.txt").write_text(EXPLANATION + "\n")
        record = TrainRecord(
            config=config,
            world_size=4,
            planted_ne=0.6 if model == "dlrm" else None,
            environment={"python": "3.11", "torch": "2.13.0"},
            runs=tuple(runs),
        )
        record.save(folder / "record.json")
    return folder


def write_progress(folder: Path, *, is_over: bool = False) -> None:
    """Write a run's progress: two points and an evaluation."""
    folder.mkdir(parents=True, exist_ok=True)
    progress = ProgressFile(folder)
    for step in STEPS[:2]:
        progress.add(ProgressLine(point=point(step)))
    progress.add(ProgressLine(evaluation=evaluations(CLICKS)[1]))
    if is_over:
        progress.add(ProgressLine(is_over=True))


def write_splits(folder: Path, traced: Mapping[int, list[dict[str, Any]]]) -> None:
    """Write a finished run's progress, in which ranks traced these events."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = tuple(
        RankSplit.of_trace(rank, RankTrace.of_events(events)) for rank, events in traced.items()
    )
    progress = ProgressFile(folder)
    progress.add(ProgressLine(traced=splits))
    progress.add(ProgressLine(is_over=True))


def gain_of(folder: Path, *, is_rounded: bool = True) -> BenchResult:
    """Write a benchmark result in which TorchRec uses up to INT8, and this package up to int4."""
    rows = {"kind": "two_d", "num_groups": 1, "sharding_types": ["row_wise"], "exchange": "row"}
    contestants = {
        "planner": {"kind": "stock"},
        "int8": {"kind": "stock", "qcomms": "int8"},
        "one_call": {"kind": "parallelized"},
        "rows_int4": {**rows, "row_transport": "int4"},
        "floor": {"kind": "ceiling", "of": "one_call"},
    }
    if not is_rounded:
        contestants = {name: contestants[name] for name in ("planner", "one_call")}
    steps_ms = {
        "planner": (400, 420, 410, 400, 400),
        "int8": (200, 210, 205, 200, 200),
        "one_call": (100, 105, 102, 100, 100),
        "rows_int4": (80, 84, 82, 80, 80),
        "floor": (20, 20, 20, 20, 20),
    }
    result = bench_result(contestants=contestants, steps_ms=steps_ms)
    own_phases = (
        Phase(name="lookup", seconds=0.03, waiting=False),
        Phase(name="rows", seconds=0.05, waiting=True),
    )
    stock_phases = (own_phases[0], Phase(name="rows", seconds=0.17, waiting=True))
    figures = {
        each.name: {
            "loss_bound": None if each.name.startswith(("int", "rows_")) else 1e-4,
            "phases": stock_phases if each.kind == "stock" else own_phases,
        }
        for each in result.contestants
    }
    result = with_figures(result, figures)
    result.save(folder / "gain.json")
    return result


def everything(folder: Path) -> Path:
    """Write two finished runs with everything that a page can show; return their folder."""
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
    write_splits(folder / "plain", {rank: step_events(late=rank) for rank in range(4)})
    gain_of(folder)
    return written


def write_access(path: Path) -> Path:
    """Write access statistics for the only table: row 7 takes 70 % of lookups."""
    counts = [0] * 1000
    counts[7], counts[2], counts[5] = 70, 20, 10
    AccessStats({"t_user": TableAccess.of_counts(counts, num_samples=50)}).save(path)
    return path


def page_of(folder: Path) -> Page:
    """Return the page on a folder's runs."""
    return run_page(RunContents.read(folder))


def words_of(page: Page) -> str:
    html = re.sub(r"(?s)<(script|style).*?</\1>", "", page.html())
    return re.sub(r"<[^>]*>", " ", html)


def headings_of(page: Page) -> list[str]:
    """Return the headings of sections, subsections and collapsed parts."""
    return re.findall("<(?:h2|h3|summary)>(.*?)<", page.html())


def outline_of(page: Page) -> list[str]:
    """Return all headings; sections' are marked by #, collapsed parts' by +."""
    marks = {"h2": "# ", "h3": "", "summary": "+ "}
    return [
        marks[tag] + heading for tag, heading in re.findall("<(h2|h3|summary)>(.*?)<", page.html())
    ]


def figure(page: Page, heading: str) -> dict[str, Any]:
    """Return the traces that plotly draws under a heading, by name or number."""
    html = page.html()
    number = re.compile('id="plot-([0-9]+)"').search(html, html.index(f"<h3>{heading}</h3>"))
    assert number is not None
    drawn: Any = page.figures[int(number[1]) - 1].data
    return {trace.name or f"mark {place}": trace for place, trace in enumerate(drawn)}
