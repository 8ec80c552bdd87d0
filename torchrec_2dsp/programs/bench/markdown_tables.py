"""The tables of a benchmark report, in Markdown that is readable as plain text too."""

import re
from collections.abc import Iterable, Sequence
from statistics import median

from torchrec_2dsp.programs.bench.results import BenchResult, ContestantResult, Outcome
from torchrec_2dsp.programs.bench.setting_labels import setting_labels
from torchrec_2dsp.programs.bench.statistics import ContestantSummary, Speedup, Summary

MISSING = "-"


def escaped(text: str) -> str:
    """Text on one line that Markdown shows as it is.

    Example:
        >>> from torchrec_2dsp.programs.bench.markdown_tables import escaped
        >>> print(escaped("a|b of row_wise"))
        a\\|b of row_wise
    """
    text = re.sub(r"([\\`*<>|]|\](?=[(\[:]))", r"\\\1", " ".join(text.split()))
    # An underscore between letters is just that, as is a bracket that no link follows.
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> str:
    """A table with aligned pipes; all but the first ``num_left`` columns are aligned right.

    Example:
        >>> from torchrec_2dsp.programs.bench.markdown_tables import table
        >>> print(table(["name", "ms"], [["fast", "9.5"], ["slow", "120.0"]]))
        | name |    ms |
        | :--- | ----: |
        | fast |   9.5 |
        | slow | 120.0 |
    """
    cells = [[escaped(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(4, *map(len, column)) for column in zip(*cells, strict=True)]
    is_left = [index < num_left for index in range(len(widths))]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if is_words else cell.rjust(width)
            for cell, width, is_words in zip(row, widths, is_left, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = [
        ":" + "-" * (width - 1) if is_words else "-" * (width - 1) + ":"
        for width, is_words in zip(widths, is_left, strict=True)
    ]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def names_in(results: Iterable[BenchResult]) -> list[str]:
    """Every contestant's name once, in order of appearance."""
    return list(
        dict.fromkeys(contestant.name for result in results for contestant in result.contestants)
    )


def phases_in(contestants: Iterable[ContestantResult]) -> list[tuple[str, bool]]:
    """Every phase once, as its name and whether it waits: first those that don't."""
    phases = dict.fromkeys(
        (part.name, part.waiting) for contestant in contestants for part in contestant.phases
    )
    return sorted(phases, key=lambda phase: phase[1])


def overview_table(results: Sequence[BenchResult], summaries: Sequence[Summary]) -> str:
    """Median step times: a row for each contestant, a column for each setting."""

    def cell(name: str, result: BenchResult, summary: Summary) -> str:
        figures = summary.find(name)
        if figures is None:
            return next(
                (
                    contestant.outcome
                    for contestant in result.contestants
                    if contestant.name == name
                ),
                MISSING,
            )
        over = figures.over_best_stock
        factor = f" ({over.factor:.2f})" if over else ""
        return f"{ms(figures.step.median_s)}{factor}"

    rows = [
        [name, *(cell(name, *pair) for pair in zip(results, summaries, strict=True))]
        for name in names_in(results)
    ]
    return table(["contestant", *setting_labels(results)], rows)


def step_table(result: BenchResult, summary: Summary) -> str:
    """The main table of one result; those that failed have a row without figures."""
    is_counted = counts_link(summary)
    has_two = shows_plain_stock(summary)
    headings = [
        "contestant",
        "min ms",
        "median ms",
        "max ms",
        "samples/s",
        "x best stock",
        *(["x best plain stock"] if has_two else []),
        "of ceiling",
        "link MB" if is_counted else "sent MB",
        "peak MB",
        "loss gap",
        "NE gap",
    ]

    def row(contestant: ContestantResult) -> list[str]:
        figures = summary.find(contestant.name)
        if figures is None:
            return [contestant.name, MISSING, contestant.outcome, *[MISSING] * (len(headings) - 3)]
        step, share = figures.step, figures.share_of_ceiling
        sent = figures.link_bytes if is_counted else figures.sent_bytes
        return [
            contestant.name,
            ms(step.min_s),
            ms(step.median_s),
            ms(step.max_s),
            f"{figures.samples_per_s:,.0f}",
            factor(figures.over_best_stock),
            *([factor(figures.over_plain_stock)] if has_two else []),
            MISSING if share is None else f"{share:.0%}",
            megabytes(sent),
            megabytes(contestant.peak_memory_bytes, 0),
            loss_gap(contestant, result.reference),
            ne_gap(contestant, result.reference),
        ]

    return table(headings, [row(contestant) for contestant in result.contestants])


def phase_table(summary: Summary) -> str:
    """The traced step by phase, in ms; empty if nothing was traced."""
    traced = [contestant.result for contestant in summary.contestants if contestant.result.phases]
    columns = phases_in(traced)
    if not columns:
        return ""
    rows = []
    for contestant in traced:
        seconds = {(part.name, part.waiting): part.seconds for part in contestant.phases}
        parts = [ms(seconds[column]) if column in seconds else MISSING for column in columns]
        rows.append([contestant.name, *parts, ms(sum(seconds.values()))])
    headings = [phase_label(*column) for column in columns]
    return table(["contestant", *headings, "whole step"], rows)


def plan_table(result: BenchResult) -> str:
    """How many tables have which sharding type; empty if no plan is known."""
    planned = [contestant for contestant in result.contestants if contestant.sharding]
    kinds = sorted({kind for contestant in planned for kind in contestant.sharding})
    if not kinds:
        return ""
    rows = [
        [contestant.name, *(str(contestant.sharding.get(kind, MISSING)) for kind in kinds)]
        for contestant in planned
    ]
    return table(["contestant", *kinds], rows)


def noise_table(summary: Summary) -> str:
    """How much the blocks vary and what else the machine did."""

    def row(contestant: ContestantSummary) -> list[str]:
        step = contestant.step
        blocks = contestant.result.blocks
        return [
            contestant.name,
            str(len(blocks)),
            str(sum(block.num_steps for block in blocks)),
            f"[{ms(step.low_s)}, {ms(step.high_s)}]",
            f"{step.spread:.1%}",
            f"{contestant.foreign_load_cores:.2f}",
            f"{max(block.foreign_load for block in blocks):.2f}",
            ", ".join(str(number) for number in contestant.loaded_rounds) or "none",
            _range_ms([block.probe_s for block in blocks if block.probe_s]),
        ]

    return table(
        [
            "contestant",
            "blocks",
            "steps",
            "median within ms",
            "spread",
            "foreign load",
            "highest",
            "loaded rounds",
            "probe ms",
        ],
        [row(contestant) for contestant in summary.contestants],
    )


def _range_ms(values_s: Sequence[float]) -> str:
    """The lowest, the median and the highest."""
    if not values_s:
        return MISSING
    return " / ".join(f"{s * 1e3:.2f}" for s in (min(values_s), median(values_s), max(values_s)))


def failures(result: BenchResult) -> str:
    """Who has no figures, and why; empty if all have."""
    lines = []
    for contestant in result.contestants:
        if contestant.outcome is Outcome.MEASURED:
            continue
        reason = contestant.reason.strip().splitlines() or ["no reason was recorded"]
        # A traceback ends with what matters, anything else begins with it.
        gist = reason[-1] if reason[0].startswith("Traceback") else reason[0]
        lines.append(f"- {escaped(contestant.name)} {contestant.outcome}: {escaped(gist)}")
        if len(reason) > 1:
            # As indented code, which shows a traceback whatever is in it.
            lines += ["", *(f"      {line}".rstrip() for line in reason), ""]
    return "\n".join(lines).rstrip()


def counts_link(summary: Summary) -> bool:
    """Whether bytes on the network interface were counted."""
    return any(contestant.link_bytes is not None for contestant in summary.contestants)


def shows_plain_stock(summary: Summary) -> bool:
    """Whether the best plain stock contestant is another one than the best."""
    return summary.best_plain_stock not in (None, summary.best_stock)


def phase_label(name: str, waiting: bool) -> str:
    """The name of a phase where it stands beside others."""
    return f"{name} (waits)" if waiting else name


def ms(seconds: float) -> str:
    """Seconds as text, in milliseconds."""
    return f"{seconds * 1e3:,.1f}"


def megabytes(num_bytes: float | None, num_digits: int = 2) -> str:
    """Bytes as text, in millions."""
    return MISSING if num_bytes is None else f"{num_bytes / 1e6:,.{num_digits}f}"


def factor(over: Speedup | None) -> str:
    """A speedup with its interval."""
    return MISSING if over is None else f"{over.factor:.2f} [{over.low:.2f}, {over.high:.2f}]"


def loss_gap(contestant: ContestantResult, reference: str) -> str:
    """How far its first losses are from the reference's."""
    if contestant.name == reference:
        return "reference"
    return MISSING if contestant.loss_gap is None else f"{contestant.loss_gap:.1e}"


def ne_gap(contestant: ContestantResult, reference: str) -> str:
    """How far its normalized entropy is from the reference's, relative to that."""
    if contestant.name == reference:
        return "reference"
    return MISSING if contestant.ne_gap is None else f"{contestant.ne_gap:+.3%}"
