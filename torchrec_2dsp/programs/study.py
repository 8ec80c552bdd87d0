"""Compare training runs with several seeds, as a page and a plot.

Gaps are between runs with the same seed.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from urllib.parse import quote

from scipy.stats import t as student

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.sync import WeightSync
from torchrec_2dsp.programs.train.config import RunConfig
from torchrec_2dsp.programs.train.record import RunRecord, TrainRecord
from torchrec_2dsp.report.charts import MARKERS, Axis, Line, LineChart, draw_lines
from torchrec_2dsp.report.table import Table, escape_markdown

CONFIDENCE = 0.95
"""The confidence of the intervals."""


@dataclass(frozen=True)
class Gap:
    """A run's distance from the reference, over the seeds."""

    name: str
    ne: tuple[float, ...]
    """The run's normalized entropy on held-out batches, by seed."""
    gaps: tuple[float, ...]
    """The run's entropy minus the reference's with the same seed: above 0 is worse."""

    @property
    def mean(self) -> float:
        """The mean gap."""
        return statistics.fmean(self.gaps)

    @property
    def interval(self) -> tuple[float, float]:
        """Student's interval of the mean gap; the whole line with a single seed, which has none."""
        count = len(self.gaps)
        if count < 2:
            return float("-inf"), float("inf")
        half = student.ppf((1 + CONFIDENCE) / 2, count - 1) * statistics.stdev(self.gaps)
        half /= count**0.5
        return self.mean - half, self.mean + half


def gaps_to(records: Sequence[TrainRecord], reference: str) -> list[Gap]:
    """Return each run's gap, the reference's own first.

    Args:
        records: one for each pair of seeds, otherwise alike.
        reference: the run to compare the others with.
    """
    check_alike(records)
    names = list(dict.fromkeys(run.name for record in records for run in record.runs))
    _check_run(reference, names)
    if len(names) == 1:
        raise ConfigError(
            f"the records have the reference {reference!r} alone; give a run to compare with it"
        )
    base = _evaluated(records, reference)
    ordered = [reference, *(name for name in names if name != reference)]
    return [
        Gap(
            name,
            tuple(evaluated := _evaluated(records, name)),
            tuple(ne - other for ne, other in zip(evaluated, base, strict=True)),
        )
        for name in ordered
    ]


def _check_run(name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise ConfigError(f"there is no run {name!r}; the records have {', '.join(names)}")


def check_alike(records: Sequence[TrainRecord]) -> None:
    """Raise `ConfigError` unless nothing but seeds and folders differs."""
    for record in records:
        if difference := records[0].difference(record, "data.seed", "model.seed"):
            raise ConfigError(
                f"the records with seeds {records[0].seeds} and {record.seeds} differ in more than "
                f"their seeds: {difference}; compare runs of one config"
            )
    seeds = [record.seeds for record in records]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"two records have the same seeds {seeds}; give each its own")


def _evaluated(records: Sequence[TrainRecord], name: str) -> list[float]:
    """Return a run's normalized entropies, by record."""
    entropies = []
    for record in records:
        run = record.find(name)
        if run is None:
            raise ConfigError(
                f"the record with the seeds {record.seeds} has no run {name!r}; train it, or "
                "leave it out by --only"
            )
        if not math.isfinite(run.eval_ne):
            raise ConfigError(
                f"the run {name!r} with the seeds {record.seeds} has the normalized entropy "
                f"{run.eval_ne}, and studies compare it: give finite runs of models that predict "
                "clicks"
            )
        entropies.append(run.eval_ne)
    return entropies


def study_report(
    records: Sequence[TrainRecord],
    *,
    reference: str,
    baseline: str = "",
    title: str = "Quality",
    plot: str = "",
    data: Sequence[str] = (),
) -> str:
    """Write a page on runs with several seeds.

    Args:
        records: one for each pair of seeds.
        reference: the run to compare the others with.
        baseline: a run with a gap; the page reports how much of it the others close.
        title: the page's title.
        plot: the plot's path as seen from the page, if there is one.
        data: each record's JSON path as seen from the page.
    """
    gaps = gaps_to(records, reference)
    _check_run(baseline or reference, [gap.name for gap in gaps])
    first = records[0]
    seeds = ", ".join(str(record.seeds) for record in records)
    batch_size = first.config["loop"]["global_batch_size"]
    steps = sorted({run.curve[-1].step for record in records for run in record.runs})
    samples, lengths = (
        " to ".join(f"{factor * end:,}" for end in dict.fromkeys((steps[0], steps[-1])))
        for factor in (batch_size, 1)
    )
    facts = [
        f"{samples} samples in {lengths} steps, {first.world_size} ranks",
        f"Seeds of data and initial weights: {seeds}",
    ]
    if (planted := _planted(records)) is not None:
        facts.append(f"The model behind the labels has a normalized entropy of {planted:.5f}")
    if data:
        links = (f"[{escape_markdown(name)}]({quote(name)})" for name in data)
        facts.append(f"Numbers: {', '.join(links)}")
    parts = [f"# {title}", "\n".join(f"- {fact}" for fact in facts)]
    if plot:
        parts.append(f"![Gap to {reference} while training]({quote(plot)})")
    reference_ne = statistics.fmean(gaps[0].ne)
    parts.append(
        f"*{reference}* has a normalized entropy of {reference_ne:.5f} on held-out batches: lower "
        f"is better, 1 knows nothing. {_HOW_TO_READ.format(confidence=100 * CONFIDENCE)}"
    )
    parts.append(_table(records, gaps))
    if baseline:
        parts.append(_closed(gaps, baseline))
    return "\n\n".join(parts) + "\n"


_HOW_TO_READ = (
    "*Gap* is how much higher a run's is with the same seeds, in units of 1e-5: the mean over the "
    "seeds with its {confidence:.0f}% interval (Student's; two seeds or more), then the smallest "
    "and the largest. *Sync MB* is sent per rank and step."
)


def _table(records: Sequence[TrainRecord], gaps: Sequence[Gap]) -> str:
    runs = {run.name: run for run in records[0].runs}
    rows = []
    for gap in gaps:
        run = runs[gap.name]
        low, high = (1e5 * end for end in gap.interval)
        interval = f" [{low:z.1f}, {high:z.1f}]" if len(gap.gaps) > 1 else ""
        rows.append(
            [
                gap.name,
                run.sync if run.num_groups > 1 else "one group",
                _optimizer(records[0], run),
                f"{1e5 * gap.mean:z.1f}{interval}",
                f"{1e5 * min(gap.gaps):z.1f} to {1e5 * max(gap.gaps):z.1f}",
                f"{run.sync_bytes_per_step / 1e6:.3f}",
            ]
        )
    headings = ("run", "sync", "optimizer", "gap", "smallest to largest", "sync MB")
    return Table(headings, rows, words={"run", "sync", "optimizer"}).markdown()


def _optimizer(record: TrainRecord, run: RunRecord) -> str:
    """Describe the rule that updated a run's tables."""
    tree = record.config["runs"][run.name]
    # A record is read as it is, also where a newer version would refuse its config.
    if tree.get("delayed_moment"):
        return "row-wise AdaGrad, delayed moment"
    scale = tree.get("moment_scale", RunConfig.model_fields["moment_scale"].get_default())
    if scale == "expected":
        return "row-wise AdaGrad, moment / expected inflation"
    if scale == "from_mesh":
        # With a saved plan, the section doesn't say the sync.
        scale = run.num_groups if run.sync.startswith(WeightSync.__name__) else 1
    return "row-wise AdaGrad" + (f", moment / {scale:g}" if scale != 1 else "")


def _closed(gaps: Sequence[Gap], baseline: str) -> str:
    """Describe how much of a run's gap the others have closed."""
    to_close = next(gap.mean for gap in gaps if gap.name == baseline)
    if not to_close:
        return f"*{baseline}* has no gap that others could close."
    shares = [f"{gap.name} {1 - gap.mean / to_close:.0%}" for gap in gaps if gap.name != baseline]
    return f"The gap of *{baseline}* is closed by: {', '.join(shares)}."


def study_plot(records: Sequence[TrainRecord], path: str | Path, *, reference: str) -> None:
    """Write an SVG of the gap to the reference by samples, mean and range over the seeds."""
    lines = []
    for gap, marker in zip(gaps_to(records, reference)[1:], cycle(MARKERS), strict=False):
        samples, curves = _curves(records, gap.name, reference)
        lines.append(
            Line(
                name=gap.name,
                x=samples,
                y=[statistics.fmean(values) for values in curves],
                low=[min(values) for values in curves],
                high=[max(values) for values in curves],
                is_band=True,
                marker=marker,
            )
        )
    ends = [end for line in lines for end in (line.x[0], line.x[-1])]
    zero = Line(x=[min(ends), max(ends)], y=[0.0, 0.0], colour="#333333")
    chart = LineChart(
        [*lines, zero],
        x=Axis(title="million samples"),
        y=Axis(title=f"NE minus that of {reference}"),
    )
    draw_lines([chart], path)


def _curves(
    records: Sequence[TrainRecord], name: str, reference: str
) -> tuple[list[float], list[list[float]]]:
    """Return the samples in millions and, at each point that all reached, the gaps by seed."""
    batch_size = records[0].config["loop"]["global_batch_size"]
    by_seed = []
    for record in records:
        own, base = (
            {point.step: point.ne for run in record.runs if run.name == of for point in run.curve}
            for of in (name, reference)
        )
        by_seed.append({step: own[step] - base[step] for step in own if step in base})
    steps = [step for step in by_seed[0] if all(step in gaps for gaps in by_seed)]
    if not steps:
        raise ConfigError(
            f"the curves of {name!r} and {reference!r} share no step over all seeds; train for "
            "loop.report_every steps at least, or leave the run out by --only"
        )
    samples = [step * batch_size / 1e6 for step in steps]
    return samples, [[gaps[step] for gaps in by_seed] for step in steps]


def _planted(records: Sequence[TrainRecord]) -> float | None:
    """Return the planted model's mean entropy; `None` without such a model."""
    entropies = [record.planted_ne for record in records if record.planted_ne is not None]
    return statistics.fmean(entropies) if entropies else None
