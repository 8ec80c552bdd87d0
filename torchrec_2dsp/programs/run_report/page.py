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
from torchrec_2dsp.programs.run_report.steps import add_steps
from torchrec_2dsp.programs.train.record import best_of
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
    """Build the page on a training program: its runs, curves, steps, plans and config.

    Raises:
        ConfigError: plotly is missing.
    """
    page = Page(f"Training run {contents.folder.resolve().name}")
    for text in _headline(contents):
        page.add_text(text)
    page.add_table("Runs", _runs_table(contents))
    page.add_table("Last training loss and last evaluation", _results_table(contents))
    for heading, chart in line_charts(contents):
        if chart is not None:
            page.add_lines(heading, chart)
    add_steps(page, contents)
    _add_amounts(page, contents)
    for run in contents.runs:
        _add_plan(page, run)
    add_access(page, contents)
    if contents.record is not None:
        versions = list(contents.record.environment.items())
        page.add_table(
            "Environment", Table(("what", "version"), versions, words=("what", "version"))
        )
    page.add_code("Config", contents.config_text)
    return page


def _headline(contents: RunContents) -> Iterator[str]:
    """Name the model, its data and the number of steps."""
    model, data, loop = (contents.config[name] for name in ("model", "data", "loop"))
    model_kind, data_kind = model.get("kind", "dlrm"), data.get("kind", "synthetic")
    ranks = "" if contents.num_ranks is None else f" by {contents.num_ranks} ranks"
    yield (
        f"A {_MODELS.get(model_kind, model_kind)}, trained{ranks} on "
        f"{_DATA.get(data_kind, data_kind)}: {loop['steps']:,} steps of "
        f"{loop['global_batch_size']:,} samples."
    )
    open_runs = [run.name for run in contents.runs if run.record is None]
    if open_runs:
        yield f"Not over, so that some figures are missing: {', '.join(open_runs)}."
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
        mesh = "" if run.plan is None else run.plan.mesh
        rows.append(
            [
                run.name,
                "" if mesh == "" else f"{mesh.num_groups} x {mesh.group_size}",
                "" if run.plan is None else run.plan.sync or "none",
                f"{step:,}",
                "" if seconds is None else _duration(seconds),
                f"{step * batch_size / seconds:,.0f}" if seconds else "",
                run.state,
            ]
        )
    headings = ("run", "groups x ranks", "sync", "steps", "trained for", "samples/s", "state")
    return Table(headings, rows, words=("run", "groups x ranks", "sync", "state"))


def _results_table(contents: RunContents) -> Table:
    """Return a row for each run: last training loss, last evaluation, best evaluation."""
    metrics = list(
        dict.fromkeys(
            metric
            for run in contents.runs
            for evaluation in run.evaluations
            for metric, value in evaluation.metrics.items()
            if math.isfinite(value)
        )
    )
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
    headings = ["run", "training loss", *(_short(metric) for metric in metrics)]
    return Table([*headings, *(f"best {_short(metric)}" for metric in compared)], rows, {"run"})


def _short(metric: str) -> str:
    return metric.upper() if metric in ("ne", "auc") else metric


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
    memory = memory_chart(contents)
    if memory is not None:
        page.add_lines("Memory", memory)
        page.add_text(
            "The most that each rank's process has used since it began: of its GPU, or of the "
            "host. Runs are trained one after the other, so a later run never shows less."
        )
    sent = bytes_chart(contents)
    if sent is not None:
        page.add_bars("Bytes per step", sent)
        page.add_text(
            "Rows are counted where a transport encodes them, dense gradients where they are "
            "thresholded. Replicas: what copies of a row, hot rows too, send to each other. All "
            "are means over the run."
        )
    dense = dense_bytes_chart(contents)
    if dense is not None:
        page.add_lines("Bytes of dense gradients", dense)


def _add_plan(page: Page, run: RunPart) -> None:
    if run.plan is None:
        return
    page.add_table(f"Plan of {run.name}: {run.plan.mesh_text}", run.plan.table())
    if run.explanation:
        page.add_code(f"Why the plan of {run.name} is as it is", run.explanation, is_folded=True)
