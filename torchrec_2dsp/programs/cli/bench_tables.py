"""The tables that the benchmark commands print."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from torchrec_2dsp.programs.bench.compare import Agreement
    from torchrec_2dsp.programs.bench.results import BenchResult
    from torchrec_2dsp.programs.bench.statistics import Summary


def show_bench(result: "BenchResult", console: Console) -> None:
    """Print the closing table, what its columns mean, and who failed."""
    from torchrec_2dsp.programs.bench.markdown_tables import (
        counts_link,
        factor,
        megabytes,
        ms,
        ne_gap,
    )
    from torchrec_2dsp.programs.bench.results import Outcome
    from torchrec_2dsp.programs.bench.statistics import summarize

    summary = summarize(result)
    is_counted = counts_link(summary)
    headings = [
        "min\nms",
        "median\nms",
        "max\nms",
        "x best stock\n[low, high]",
        "of\nceiling",
        "MB per\nstep",
        "NE\ngap",
    ]
    table = _narrow_table("contestant", headings)
    for contestant in summary.contestants:
        share = contestant.share_of_ceiling
        table.add_row(
            Text(contestant.name),
            ms(contestant.step.min_s),
            ms(contestant.step.median_s),
            ms(contestant.step.max_s),
            Text(factor(contestant.over_best_stock)),
            "-" if share is None else f"{share:.0%}",
            megabytes(contestant.link_bytes if is_counted else contestant.sent_bytes),
            ne_gap(contestant.result, result.reference),
        )
    console.print()
    console.print(table)
    console.print()
    console.print(Text(_meaning(summary, is_counted)))
    for contestant in result.contestants:
        if contestant.outcome is not Outcome.MEASURED:
            console.print(
                Text(
                    f"\n{contestant.name} {contestant.outcome}: {contestant.reason}",
                    style="bold red",
                )
            )


def show_agreement(agreement: "Agreement", console: Console) -> None:
    """Print each contestant's medians by run, and where the runs contradict each other."""
    from torchrec_2dsp.programs.bench.markdown_tables import ms

    num_runs = len(agreement.contestants[0].medians_s)
    headings = [f"run {number}\nms" for number in range(1, num_runs + 1)]
    table = _narrow_table("contestant", [*headings, "largest\ndifference"])
    for contestant in agreement.contestants:
        figures = ["failed" if median is None else ms(median) for median in contestant.medians_s]
        style = "bold red" if contestant in agreement.apart else ""
        is_known = any(median is not None for median in contestant.medians_s)
        difference = f"{contestant.difference:.1%}" if is_known else "-"
        table.add_row(Text(contestant.name), *figures, difference, style=style)
    probes_s = [probe_s for probe_s in agreement.probes_s if probe_s]
    if len(probes_s) == num_runs:
        table.add_section()
        difference = f"{max(probes_s) / min(probes_s) - 1:.1%}"
        table.add_row("(machine)", *(f"{s * 1e3:.3f}" for s in probes_s), difference, style="dim")
    console.print(table)
    if len(probes_s) == num_runs:
        console.print(
            "\n(machine): processor time of a fixed piece of work, in ms; where it differs, the "
            "machine was not equally fast."
        )
    console.print()
    for pair in agreement.swapped:
        text = (
            f"{pair.first} is faster than {pair.second} in run {pair.run + 1} and slower in run "
            f"{pair.other_run + 1}; in neither do their intervals overlap."
        )
        console.print(Text(text, style="bold red"))
    limit = f"{agreement.tolerance:.0%}"
    if agreement.passed:
        text = f"The runs agree: medians within {limit}, and no clear order that another run turns."
        console.print(Text(text, style="green"))
    else:
        text = f"The runs don't agree: medians more than {limit} apart, failures, or turned orders."
        console.print(Text(text, style="bold red"))


def _narrow_table(first: str, headings: list[str]) -> Table:
    """Narrow enough for 80 columns, which is what a log file gets."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    return table


def _meaning(summary: "Summary", is_counted: bool) -> str:
    """The meaning of the columns, in words."""
    from torchrec_2dsp.programs.bench.statistics import CONFIDENCE

    parts = ["Ms: step time over the blocks, on the slowest rank."]
    if summary.best_stock is not None:
        plain = "" if summary.best_stock == summary.best_plain_stock else ", in full duplex"
        parts.append(
            f"Best stock: {summary.best_stock}{plain}; how many times as fast, compared round by "
            f"round, with its {CONFIDENCE:.0%} interval."
        )
    if summary.ceiling is not None:
        parts.append(f"Of ceiling: {summary.ceiling} without communication is 100%.")
    how = "sent on the counted interface" if is_counted else "that the traced collectives send"
    parts.append(f"MB: {how}, per rank.")
    parts.append(
        "NE gap: how much higher its normalized entropy over all trained steps is than the "
        "reference's."
    )
    return " ".join(parts)
