"""`run_page`: the page on a training run."""

import math
from collections.abc import Iterator

from torchrec_2dsp.programs.run_report.charts import (
    add_access,
    bytes_chart,
    dense_bytes_chart,
    line_charts,
    memory_chart,
    seconds_trained,
)
from torchrec_2dsp.programs.run_report.contents import RunContents, RunPart
from torchrec_2dsp.programs.run_report.gain import add_gain
from torchrec_2dsp.programs.run_report.steps import add_steps
from torchrec_2dsp.programs.train.record import best_of, heading_of
from torchrec_2dsp.report.page import Page
from torchrec_2dsp.report.table import Table

_MODELS = {
    "dlrm": "DLRM",
    "dcn": "DCN",
    "two_tower": "two-tower model",
    "sequence": "sequence model",
    "module:factory": "model of the user's own",
}
_DATA = {
    "synthetic": "synthetic clicks",
    "synthetic_sequences": "synthetic sequences",
    "table": "a table of clicks",
    "criteo": "a Criteo log",
    "avazu": "an Avazu log",
    "interactions": "a log of interactions",
}


def run_page(contents: RunContents) -> Page:
    """Build the page on a training program: gain, steps, plans, then curves, amounts and config."""
    page = Page(f"Training run {contents.folder.resolve().name}")
    for text in _headline(contents):
        page.add_text(text)
    page.begin_section("Gain")
    add_gain(page, contents)
    page.begin_section("Where a step goes")
    add_steps(page, contents)
    page.begin_section("What was chosen, and why")
    for run in contents.runs:
        _add_plan(page, run)
    page.begin_section("Training")
    page.add_table("Runs", _runs_table(contents))
    page.add_table("Last training loss and last evaluation", _results_table(contents))
    page.add_small_charts(list(line_charts(contents)))
    page.begin_section("Memory and bytes")
    _add_amounts(page, contents)
    if any(run.config.get("access") for run in contents.runs):
        page.begin_section("Rows by use")
        add_access(page, contents)
    page.begin_section("Config and versions")
    page.add_code("Config", contents.config_text, is_folded=True)
    if contents.record is not None:
        versions = list(contents.record.environment.items())
        table = Table(("what", "version"), versions, words=("what", "version"))
        page.add_table("Versions", table, is_folded=True)
    return page


def _headline(contents: RunContents) -> Iterator[str]:
    """Name the model, its data and the number of steps."""
    model, data, loop = (contents.config[name] for name in ("model", "data", "loop"))
    model_kind, data_kind = model.get("kind", "dlrm"), data.get("kind", "synthetic")
    ranks = "" if contents.num_ranks is None else f" by {contents.num_ranks} ranks"
    # A run may have ended with its data, or by its patience.
    lengths = [
        run.curve[-1].step if run.record and run.curve else loop["steps"] for run in contents.runs
    ]
    steps = " to ".join(f"{length:,}" for length in sorted({min(lengths), max(lengths)}))
    yield (
        f"A {_MODELS.get(model_kind, model_kind)}, trained{ranks} on "
        f"{_DATA.get(data_kind, data_kind)}: {steps} steps of "
        f"{loop['global_batch_size']:,} samples."
    )
    open_runs = [run.name for run in contents.runs if run.record is None]
    if open_runs:
        yield f"Unfinished, so some figures are missing: {', '.join(open_runs)}."
    planted = None if contents.record is None else contents.record.planted_ne
    if planted is not None and math.isfinite(planted):
        yield f"The model behind the labels, which nothing beats, has an NE of {planted:.4f}."


def _runs_table(contents: RunContents) -> Table:
    """Return a row for each run: mesh, sync, steps, time, speed and state."""
    batch_size = contents.config["loop"]["global_batch_size"]
    rows = []
    for run in contents.runs:
        step = run.curve[-1].step if run.curve else 0
        seconds = seconds_trained(run, batch_size)
        plan = run.plan
        memory_bytes = max(run.curve[-1].memory_bytes, default=0) if run.curve else 0
        rows.append(
            [
                run.name,
                "" if plan is None else f"{plan.mesh.num_groups} x {plan.mesh.group_size}",
                "" if plan is None else plan.sync_kind or "none",
                f"{step:,}",
                "" if seconds is None else _duration(seconds),
                f"{step * batch_size / seconds:,.0f}" if seconds else "",
                f"{memory_bytes / 1e9:.2f}" if memory_bytes else "",
                run.state,
            ]
        )
    headings = ("run", "groups x ranks", "sync", "steps", "trained for", "samples/s", "peak GB")
    return Table([*headings, "state"], rows, words=("run", "groups x ranks", "sync", "state"))


def _results_table(contents: RunContents) -> Table:
    """Return a row for each run: last training loss, last evaluation, best evaluation."""
    metrics = contents.finite_metrics
    compared = [metric for metric in metrics if metric == contents.metric]
    rows = []
    for run in contents.runs:
        last = run.evaluations[-1].metrics if run.evaluations else {}
        rows.append(
            [
                run.name,
                _text(run.curve[-1].loss if run.curve else None),
                *(_text(last.get(metric)) for metric in metrics),
                *(_best_text(run, metric) for metric in compared),
            ]
        )
    headings = ["run", "training loss", *(heading_of(metric) for metric in metrics)]
    headings += [f"best {heading_of(metric)}" for metric in compared]
    return Table(headings, rows, {"run"})


def _best_text(run: RunPart, metric: str) -> str:
    best = best_of(run.evaluations, metric)
    return "" if best is None else f"{best.metrics[metric]:.5f} (step {best.step:,})"


def _text(value: float | None) -> str:
    return f"{value:.5f}" if value is not None and math.isfinite(value) else ""


def _duration(seconds: float) -> str:
    """Format a time such as ``2:03:04`` or ``3.1 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _add_amounts(page: Page, contents: RunContents) -> None:
    charts = (
        ("Memory", memory_chart(contents)),
        ("Bytes per step", bytes_chart(contents)),
        ("Bytes of dense gradients", dense_bytes_chart(contents)),
    )
    page.add_small_charts([(heading, chart) for heading, chart in charts if chart is not None])
    page.add_text(
        "Memory: the peak of each rank's process so far, on its GPU or else on the host. Runs are "
        "trained one after the other, so a later run never shows less. Bytes: means over the run. "
        "Rows are counted where a transport encodes them, dense gradients where they are "
        "thresholded; replicas: bytes that copies of a row, hot rows too, send to each other."
    )


def _add_plan(page: Page, run: RunPart) -> None:
    if run.plan is None:
        return
    page.add_text(f"{run.name}: {run.plan.words} {run.reason}")
    page.add_table(f"Plan of {run.name}, table by table", run.plan.table(), is_folded=True)
    if run.explanation:
        page.add_code(f"Why the plan of {run.name} is as it is", run.explanation, is_folded=True)
