"""`study_report`: runs with several seeds as a page, and its plot."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from torchrec_2dsp.programs.study.study import CONFIDENCE, Gap, gaps_to
from torchrec_2dsp.programs.train.record import TrainRecord
from torchrec_2dsp.report.plots import MARKERS, PALETTE, plotting, save_plot


def study_report(
    records: Sequence[TrainRecord],
    *,
    reference: str,
    baseline: str = "",
    title: str = "Quality",
    plot: str = "",
    data: Sequence[str] = (),
) -> str:
    """A page on runs with several seeds.

    Args:
        records: one for each pair of seeds.
        reference: the run that the others are held against.
        baseline: the run whose gap to the reference the others may close.
        title: of the page.
        plot: where the page finds its plot, if there is one.
        data: where it finds the JSON of each record.
    """
    gaps = gaps_to(records, reference)
    first = records[0]
    seeds = ", ".join(str(record.seeds) for record in records)
    facts = [
        f"{first.num_samples:,} samples in {first.config['loop']['steps']:,} steps, "
        f"{first.world_size} ranks",
        f"{len(records)} seeds of data and initial weights: {seeds}",
        f"The model behind the labels has a normalized entropy of {_planted(records):.5f}",
    ]
    if data:
        facts.append("Numbers: " + ", ".join(f"[{name}]({name})" for name in data))
    parts = [f"# {title}", "\n".join(f"- {fact}" for fact in facts)]
    if plot:
        parts.append(f"![Gap to {reference} while training]({plot})")
    parts += [_HOW_TO_READ.format(reference=reference, confidence=100 * CONFIDENCE)]
    if baseline:
        parts.append(f"*Closed* is the share of the gap of *{baseline}* that is gone.")
    parts.append(_table(records, gaps, baseline))
    return "\n\n".join(parts) + "\n"


_HOW_TO_READ = (
    "NE is the normalized entropy of held-out batches: lower is better, 1 knows nothing. *Gap* is "
    "the difference to *{reference}* with the same seeds, in units of 1e-5: its mean over the "
    "seeds with a {confidence:.0f}% interval (Student's), the smallest and the largest one."
)


def _table(records: Sequence[TrainRecord], gaps: Sequence[Gap], baseline: str) -> str:
    to_close = next((gap.mean for gap in gaps if gap.name == baseline), None)
    heading = ["run", "sync", "NE", "gap", "interval", "min", "max", "sync MB per step"]
    rows = [heading + ["closed"] * bool(baseline)]
    rows.append(["---", "---"] + ["---:"] * (len(rows[0]) - 2))
    for gap in gaps:
        run = records[0].find(gap.name)
        assert run is not None
        low, high = gap.interval
        row = [gap.name, run.sync if run.num_groups > 1 else "one group"]
        row += [f"{statistics.fmean(gap.ne):.5f}", f"{1e5 * gap.mean:.1f}"]
        row += [f"[{1e5 * low:.1f}, {1e5 * high:.1f}]"]
        row += [f"{1e5 * value:.1f}" for value in (min(gap.gaps), max(gap.gaps))]
        row += [f"{run.sync_bytes_per_step / 1e6:.3f}"]
        if baseline:
            row.append(f"{100 * (1 - gap.mean / to_close):.0f}%" if to_close else "-")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def study_plot(records: Sequence[TrainRecord], path: str | Path, *, reference: str) -> None:
    """Write an SVG of the gap to the reference by samples, mean and range over the seeds.

    Raises:
        ConfigError: matplotlib is missing.
    """
    gaps = gaps_to(records, reference)
    with plotting():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.0, 3.6), layout="constrained")
        axis = figure.subplots()
        for number, gap in enumerate(gaps[1:]):
            samples, curves = _curves(records, gap.name, reference)
            colour = PALETTE[number % len(PALETTE)]
            axis.plot(
                samples,
                [statistics.fmean(values) for values in curves],
                color=colour,
                marker=MARKERS[number % len(MARKERS)],
                markersize=3,
                linewidth=1.2,
                label=gap.name,
            )
            low, high = [min(values) for values in curves], [max(values) for values in curves]
            axis.fill_between(samples, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.axhline(0.0, color="#333333", linewidth=0.8)
        axis.set(xlabel="million samples", ylabel=f"NE minus that of {reference}")
        axis.grid(True)
        figure.legend(loc="outside right upper")
        save_plot(figure, path)


def _curves(
    records: Sequence[TrainRecord], name: str, reference: str
) -> tuple[list[float], list[list[float]]]:
    """Million samples, and at each of these points the gaps by seed."""
    batch_size = records[0].config["loop"]["global_batch_size"]
    by_seed = []
    for record in records:
        run, base = record.find(name), record.find(reference)
        assert run is not None
        assert base is not None
        pairs = zip(run.curve, base.curve, strict=True)
        by_seed.append([mine.ne - theirs.ne for mine, theirs in pairs])
    run = records[0].find(name)
    assert run is not None
    samples = [point.step * batch_size / 1e6 for point in run.curve]
    return samples, [list(values) for values in zip(*by_seed, strict=True)]


def _planted(records: Sequence[TrainRecord]) -> float:
    return statistics.fmean(record.planted_ne for record in records)
