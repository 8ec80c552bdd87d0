"""`run_page`: the page on a training run."""

import math
from collections.abc import Iterator

from torchrec_2dsp.programs.run_report.access_charts import add_access
from torchrec_2dsp.programs.run_report.amounts import (
    bytes_chart,
    dense_bytes_chart,
    memory_chart,
    seconds_trained,
)
from torchrec_2dsp.programs.run_report.contents import RunContents, RunPart
from torchrec_2dsp.programs.run_report.curves import (
    TITLES,
    best_evaluation,
    curve_chart,
    metric_charts,
    rates_chart,
)
from torchrec_2dsp.report.charts import LineChart
from torchrec_2dsp.report.page import Page
from torchrec_2dsp.report.table import Table

_MODELS = {
    "dlrm": "DLRM",
    "dcn": "DCN",
    "two_tower": "two-tower model",
    "sequence": "sequence model",
}


def run_page(contents: RunContents) -> Page:
    """The page on a training program: what was trained, its curves, its plans, its config.

    Raises:
        ConfigError: plotly is missing.
    """
    page = Page(f"Training run {contents.folder.resolve().name}")
    for text in _headline(contents):
        page.add_text(text)
    page.add_table("Runs", _runs_table(contents))
    for heading, chart in _line_charts(contents):
        if chart is not None:
            page.add_lines(heading, chart)
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
    """What was trained, on what, for how long."""
    model, data, loop = (contents.config[name] for name in ("model", "data", "loop"))
    kind = model.get("kind", "dlrm")
    ranks = "" if contents.num_ranks is None else f" on {contents.num_ranks} ranks"
    yield (
        f"A {_MODELS.get(kind, f'model of the kind {kind}')}, trained{ranks} on data of the kind "
        f"{data.get('kind', 'synthetic')}: {loop['steps']:,} steps of "
        f"{loop['global_batch_size']:,} samples."
    )
    open_runs = [run.name for run in contents.runs if run.record is None]
    if open_runs:
        yield f"Not over, so that some figures are missing: {', '.join(open_runs)}."
    planted = None if contents.record is None else contents.record.planted_ne
    if planted is not None and math.isfinite(planted):
        yield f"The model behind the labels, which nothing beats, has an NE of {planted:.4f}."


def _runs_table(contents: RunContents) -> Table:
    """A line for each run: how it was trained, how long, and its last evaluation."""
    metrics = list(
        dict.fromkeys(
            metric
            for run in contents.runs
            for evaluation in run.evaluations[-1:]
            for metric, value in evaluation.metrics.items()
            if math.isfinite(value)
        )
    )
    headings = ["run", "mesh", "replicas", "steps", "trained for", "samples/s", "train loss"]
    headings += [f"held-out {metric}" for metric in metrics]
    best = metrics[1] if len(metrics) > 1 else None
    rows = []
    for run in contents.runs:
        last = dict(run.evaluations[-1].metrics) if run.evaluations else {}
        rows.append([*_figures(run, contents), *(_text(last.get(metric)) for metric in metrics)])
        if best is not None:
            rows[-1].append(_best_text(run, best))
        rows[-1].append(run.state)
    if best is not None:
        headings.append(f"best {best}")
    return Table([*headings, "state"], rows, words=("run", "mesh", "replicas", "state"))


def _figures(run: RunPart, contents: RunContents) -> list[str]:
    """How a run was trained, for how long, and how it ended."""
    batch_size = contents.config["loop"]["global_batch_size"]
    step = run.curve[-1].step if run.curve else 0
    seconds = seconds_trained(run, batch_size)
    mesh = "" if run.plan is None else f"{run.plan.mesh.num_groups} x {run.plan.mesh.group_size}"
    return [
        run.name,
        mesh,
        "" if run.plan is None else run.plan.sync,
        f"{step:,}",
        "" if seconds is None else _duration(seconds),
        f"{step * batch_size / seconds:,.0f}" if seconds else "",
        _text(run.curve[-1].loss if run.curve else None),
    ]


def _best_text(run: RunPart, metric: str) -> str:
    """The best value of a metric, and after which step."""
    best = best_evaluation(run, metric)
    return "" if best is None else f"{best.metrics[metric]:.5f} (step {best.step:,})"


def _text(value: float | None) -> str:
    """A number, if it is one."""
    return f"{value:.5f}" if value is not None and math.isfinite(value) else ""


def _duration(seconds: float) -> str:
    """A time in words, such as ``2:03:04`` or ``3.1 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _line_charts(contents: RunContents) -> Iterator[tuple[str, LineChart | None]]:
    """The curves over the steps, each under its heading."""
    yield (
        "Training loss",
        curve_chart(contents, "mean loss since the last report", lambda point: point.loss),
    )
    yield (
        "Training NE",
        curve_chart(contents, "NE of batches before they are learned", lambda point: point.ne),
    )
    for metric, chart in metric_charts(contents):
        yield f"Held out: {TITLES.get(metric, metric)}", chart
    yield "Learning rates", rates_chart(contents)
    yield (
        "Throughput",
        curve_chart(contents, "samples of all ranks per second", lambda point: point.samples_per_s),
    )


def _add_amounts(page: Page, contents: RunContents) -> None:
    """Memory and bytes."""
    memory = memory_chart(contents)
    if memory is not None:
        page.add_lines("Memory", memory)
        page.add_text(
            "The most that each rank's process has used since it began: of its GPU, or of the "
            "host. Runs are trained one after the other, so a later run never shows less on a host."
        )
    sent = bytes_chart(contents)
    if sent is not None:
        page.add_bars("Bytes per step", sent)
        page.add_text(
            "Rows are counted where a transport encodes them, dense gradients where they are "
            "thresholded. Replicas: what a rank sends to its replica peers. Means over the run."
        )
    dense = dense_bytes_chart(contents)
    if dense is not None:
        page.add_lines("Bytes of dense gradients", dense)


def _add_plan(page: Page, run: RunPart) -> None:
    """The plan of a run, and why it is as it is."""
    if run.plan is None:
        return
    page.add_table(f"Plan of {run.name}: {run.plan.mesh_text}", run.plan.table())
    if run.explanation:
        page.add_code(f"Why the plan of {run.name} is as it is", run.explanation, is_folded=True)
