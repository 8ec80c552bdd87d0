"""Build a benchmark's tables, which pages and terminals share."""

import statistics
from collections.abc import Callable, Iterable, Sequence

from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.programs.bench.labels import setting_labels
from torchrec_2dsp.programs.bench.results import BenchResult, ContestantResult
from torchrec_2dsp.programs.bench.statistics import (
    FOREIGN_LOAD_LIMIT_CORES,
    Agreement,
    ContestantSummary,
    Summary,
    median_s,
)
from torchrec_2dsp.programs.traces import RankShares
from torchrec_2dsp.report.table import MISSING, Table

_NAME = "contestant"


def ms(seconds: float) -> str:
    """Format seconds in milliseconds."""
    return f"{seconds * 1e3:,.1f}"


def _megabytes(num_bytes: float | None, num_digits: int = 2) -> str:
    return MISSING if num_bytes is None else f"{num_bytes / 1e6:,.{num_digits}f}"


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{share:.0%}"


def names_in(results: Iterable[BenchResult]) -> list[str]:
    """Return every contestant's name once, in order."""
    return list(
        dict.fromkeys(contestant.name for result in results for contestant in result.contestants)
    )


def counts_link(summary: Summary) -> bool:
    """Return whether bytes on the network interface were counted."""
    return any(contestant.link_bytes is not None for contestant in summary.contestants.values())


def shows_plain_stock(summary: Summary) -> bool:
    """Return whether the best plain stock contestant differs from the best."""
    return summary.best_plain_stock not in (None, summary.best_stock)


def overview_table(results: Sequence[BenchResult], summaries: Sequence[Summary]) -> Table:
    """Show median step times: a row for each contestant, a column for each setting."""

    def cell(name: str, result: BenchResult, summary: Summary) -> str:
        figures = summary.contestants.get(name)
        if figures is None:
            outcomes = {contestant.name: contestant.outcome for contestant in result.contestants}
            return outcomes.get(name, MISSING)
        over = figures.over_best_stock
        return ms(figures.step.median_s) + (f" ({over.factor:.2f})" if over else "")

    rows = [
        [name, *(cell(name, *pair) for pair in zip(results, summaries, strict=True))]
        for name in names_in(results)
    ]
    return Table([_NAME, *setting_labels(results)], rows, words={_NAME})


def step_table(result: BenchResult, summary: Summary) -> Table:
    """Show one result's main figures; contestants that failed have a row without figures."""
    columns = _step_columns(result, summary)

    def row(contestant: ContestantResult) -> list[str]:
        figures = summary.contestants.get(contestant.name)
        if figures is None:
            return [contestant.name, MISSING, contestant.outcome, *[MISSING] * (len(columns) - 2)]
        return [contestant.name, *(column(figures) for column in columns.values())]

    return Table([_NAME, *columns], list(map(row, result.contestants)), words={_NAME})


def closing_table(result: BenchResult, summary: Summary) -> Table:
    """Show the figures that fit into a log file's 80 columns."""
    columns = _step_columns(result, summary)
    headings = {
        "min ms": "min\nms",
        "median ms": "median\nms",
        "max ms": "max\nms",
        "x best stock": "x best stock\n[low, high]",
        **({"of ceiling": "of\nceiling"} if summary.ceiling else {}),
        "link MB" if counts_link(summary) else "sent MB": "MB/\nstep",
        "NE gap": "NE\ngap",
    }
    rows = [
        [name, *(columns[column](figures).replace("reference", MISSING) for column in headings)]
        for name, figures in summary.contestants.items()
    ]
    return Table([_NAME, *headings.values()], rows, words={_NAME})


def _step_columns(
    result: BenchResult, summary: Summary
) -> dict[str, Callable[[ContestantSummary], str]]:
    """Return, by heading, the function that formats a contestant's figure."""

    def gap(figures: ContestantSummary, value: float | None, form: str) -> str:
        if figures.result.name == result.reference:
            return "reference"
        return MISSING if value is None else f"{value:{form}}"

    columns: dict[str, Callable[[ContestantSummary], str]] = {
        "min ms": lambda figures: ms(figures.step.min_s),
        "median ms": lambda figures: ms(figures.step.median_s),
        "max ms": lambda figures: ms(figures.step.max_s),
        "samples/s": lambda figures: f"{figures.samples_per_s:,.0f}",
        "x best stock": lambda figures: str(figures.over_best_stock or MISSING),
        "x best plain stock": lambda figures: str(figures.over_plain_stock or MISSING),
        "of ceiling": lambda figures: _percent(figures.share_of_ceiling),
        "link MB": lambda figures: _megabytes(figures.link_bytes),
        "sent MB": lambda figures: _megabytes(figures.sent_bytes),
        "peak MB": lambda figures: _megabytes(figures.result.peak_memory_bytes, 0),
        "loss gap": lambda figures: gap(figures, figures.result.loss_gap, ".1e"),
        "NE gap": lambda figures: gap(figures, figures.result.ne_gap, "+.3%"),
    }
    del columns["sent MB" if counts_link(summary) else "link MB"]
    if not shows_plain_stock(summary):
        del columns["x best plain stock"]
    return columns


def phase_table(result: BenchResult) -> Table | None:
    """Show the traced step by phase, in ms; `None` if nothing was traced."""
    traced = [contestant for contestant in result.measured() if contestant.phases]
    # Phases that wait come last.
    parts = dict.fromkeys((part.waiting, part.name) for each in traced for part in each.phases)
    columns = sorted(parts, key=lambda phase: phase[0])
    rows = []
    for contestant in traced:
        seconds = {(part.waiting, part.name): part.seconds for part in contestant.phases}
        cells = [ms(seconds[column]) if column in seconds else MISSING for column in columns]
        rows.append([contestant.name, *cells, ms(sum(seconds.values()))])
    headings = (f"{name} (waits)" if is_waiting else name for is_waiting, name in columns)
    return _table([_NAME, *headings, "whole step"], rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table | None:
    return Table(headings, rows, words={_NAME}) if rows else None


def plan_table(result: BenchResult) -> Table | None:
    """Count the tables by sharding type; `None` if no plan is known."""
    planned = [contestant for contestant in result.contestants if contestant.sharding]
    kinds = sorted({kind for contestant in planned for kind in contestant.sharding})
    rows = [
        [contestant.name, *(str(contestant.sharding.get(kind, MISSING)) for kind in kinds)]
        for contestant in planned
    ]
    return _table([_NAME, *kinds], rows)


def noise_table(summary: Summary) -> Table:
    """Show the blocks' variation, and the machine's other load."""
    headings = ("blocks", "steps", "median within ms", "spread", "foreign load", "highest")
    rows = []
    for name, figures in summary.contestants.items():
        step, blocks = figures.step, figures.result.blocks
        loads = {block.round: block.foreign_load for block in blocks}
        loaded = [str(number) for number in loads if loads[number] > FOREIGN_LOAD_LIMIT_CORES]
        probes_s = [block.probe_s for block in blocks]
        rows.append(
            [
                name,
                str(len(blocks)),
                str(sum(block.num_steps for block in blocks)),
                f"[{ms(step.low_s)}, {ms(step.high_s)}]",
                f"{step.spread:.1%}",
                f"{statistics.median(loads.values()):.2f}",
                f"{max(loads.values()):.2f}",
                ", ".join(loaded) or "none",
                " / ".join(f"{of(probes_s) * 1e3:.2f}" for of in (min, statistics.median, max)),
            ]
        )
    return Table([_NAME, *headings, "loaded rounds", "probe ms"], rows, words={_NAME})


def travel_table(result: BenchResult) -> Table | None:
    """Show how row gradients travel; `None` if no contestant sends any."""
    rows = [
        [contestant.name, ms(travel.window_s), ms(travel.waited_s)]
        for contestant in result.measured()
        if (travel := contestant.row_travel)
    ]
    return _table([_NAME, "window ms", "waited ms"], rows)


def traffic_table(result: BenchResult) -> Table | None:
    """Show the traffic by collective; `None` if nothing was traced."""
    rows = [
        [contestant.name, part.name, f"{part.calls:,.1f}", _megabytes(part.sent_bytes)]
        for contestant in result.measured()
        for part in contestant.traffic
    ]
    headings = (_NAME, "collective", "calls", "sent MB")
    return Table(headings, rows, words={*headings[:2]}) if rows else None


def encoded_table(result: BenchResult) -> Table | None:
    """Show the bytes before and after encoding; `None` if no transport encodes any."""
    rows = []
    for contestant in result.measured():
        if (encoded := contestant.encoded) is None:
            continue
        cells = []
        for kind in ("rows", "replicas"):
            before, after = (getattr(encoded, f"{kind}{part}_bytes") for part in ("_fp32", ""))
            cells += [_megabytes(before), _megabytes(after)] if before else [MISSING, MISSING]
        rows.append([contestant.name, *cells])
    headings = ("rows fp32 MB", "rows encoded MB", "replicas fp32 MB", "replicas encoded MB")
    return _table([_NAME, *headings], rows)


def dense_table(result: BenchResult) -> Table | None:
    """Show the bytes for thresholded dense gradients; `None` if no contestant has any."""
    rows = [
        [
            contestant.name,
            _megabytes(dense.fp32_bytes),
            _megabytes(dense.sent_bytes),
            f"{dense.fp32_bytes / dense.sent_bytes:,.1f}x" if dense.sent_bytes else MISSING,
            f"{dense.density:.3%}",
            f"{dense.residual_norm:.3g}",
        ]
        for contestant in result.measured()
        if (dense := contestant.dense)
    ]
    return _table([_NAME, "fp32 MB", "sent MB", "fewer", "density", "residual norm"], rows)


def shares_table(result: BenchResult) -> Table | None:
    """Show how busy ranks were, and the slowest rank's cost; `None` without processor times."""
    rows = []
    for contestant in result.measured():
        shares = shares_of(contestant)
        cells = [MISSING] * 4
        if shares is not None:
            # Processor times include the untimed first step of each block, which takes longer.
            other = max(0.0, 1.0 - shares.busy - shares.lost)
            cells = [f"{share:.1%}" for share in (shares.busy, shares.lost, other)]
            cells.append(f"{shares.imbalance:.3f}")
        rows.append([contestant.name, *cells])
    if all(row[1] == MISSING for row in rows):
        return None
    return _table([_NAME, "busy", "lost to imbalance", "other", "imbalance"], rows)


def shares_of(result: ContestantResult) -> RankShares | None:
    """Return a contestant's shares over its blocks; `None` without processor times.

    A ceiling's ranks don't wait for each other, so nothing is lost to the slowest.
    """
    compute, num_steps = result.compute, sum(block.num_steps for block in result.blocks)
    if compute is None or not num_steps:
        return None
    return RankShares.of_times(
        mean=compute.mean_s,
        slowest=compute.mean_s if result.kind == "ceiling" else compute.slowest_s,
        step=sum(block.step_s * block.num_steps for block in result.blocks) / num_steps,
    )


def predicted_in(result: BenchResult) -> list[ContestantResult]:
    """Return the measured contestants whose steps were predicted."""
    return [contestant for contestant in result.measured() if contestant.predicted is not None]


def predicted_cost(contestant: ContestantResult) -> StepCost:
    """Return a contestant's predicted step."""
    assert contestant.predicted is not None
    return StepCost(**contestant.predicted)


def predicted_table(result: BenchResult) -> Table | None:
    """Show predicted steps beside measured ones; `None` if none was predicted."""
    predicted = predicted_in(result)
    costs = [dict(predicted_cost(contestant).parts()) for contestant in predicted]
    parts = [
        name for name, _ in StepCost().parts() if any(abs(cost[name]) >= 5e-5 for cost in costs)
    ]
    rows = []
    for contestant, cost in zip(predicted, costs, strict=True):
        total_s, step_s = predicted_cost(contestant).total_s, median_s(contestant)
        cells = [ms(step_s), ms(total_s), f"{total_s / step_s - 1:+.0%}"]
        rows.append([contestant.name, *cells, *(ms(cost[name]) for name in parts)])
    headings = ("measured ms", "predicted ms", "error")
    return _table([_NAME, *headings, *(name.replace("_", " ") for name in parts)], rows)


def agreement_table(agreement: Agreement) -> Table:
    """Show each contestant's medians by run; excessive differences are red."""
    num_runs = max(map(len, agreement.medians_s.values()))
    rows, styles = [], {}
    for number, (name, medians_s) in enumerate(agreement.medians_s.items()):
        figures = ["failed" if median is None else ms(median) for median in medians_s]
        difference = f"{agreement.difference(name):.1%}" if any(medians_s) else MISSING
        rows.append([name, *figures, difference])
        if name in agreement.apart:
            styles[number] = "bold red"
    if probes_s := agreement.probes_s:
        difference = f"{max(probes_s) / min(probes_s) - 1:.1%}"
        rows.append(["(machine)", *(f"{seconds * 1e3:.3f}" for seconds in probes_s), difference])
        styles[len(rows) - 1] = "dim"
    headings = [f"run {number}\nms" for number in range(1, num_runs + 1)]
    return Table([_NAME, *headings, "largest\ndifference"], rows, words={_NAME}, styles=styles)
