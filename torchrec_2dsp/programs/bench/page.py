"""Write a Markdown page on one or several benchmark results."""

import statistics
from collections.abc import Mapping, Sequence
from textwrap import indent

from scipy.stats import spearmanr

from torchrec_2dsp.programs.bench.labels import setting_labels, workload_text
from torchrec_2dsp.programs.bench.results import (
    BenchResult,
    ContestantResult,
    Outcome,
)
from torchrec_2dsp.programs.bench.statistics import (
    CONFIDENCE,
    FOREIGN_LOAD_LIMIT_CORES,
    NUM_RESAMPLES,
    Summary,
    config_of,
    interval_coverage,
    median_s,
    summarize,
)
from torchrec_2dsp.programs.bench.tables import (
    counts_link,
    dense_table,
    encoded_table,
    names_in,
    noise_table,
    overview_table,
    phase_table,
    plan_table,
    predicted_cost,
    predicted_in,
    predicted_table,
    shares_table,
    shows_plain_stock,
    step_table,
    traffic_table,
    travel_table,
)
from torchrec_2dsp.report.table import Table, escape_markdown as escaped

_OVERVIEW = (
    "Median step time in ms, and in brackets how many times as fast as the best stock contestant "
    "of the same setting."
)
_SHARES = (
    "How the ranks used the time of the blocks. *Busy*: the share of a step in which the training "
    "thread of a rank computes, in processor time, which doesn't grow while a rank waits. *Lost to "
    "imbalance*: the share by which the slowest rank of each step computes longer than the mean, "
    "while the others wait for it. *Other*: waiting for the network, for another process, or for a "
    "core, where ranks share them. *Imbalance*: the slowest rank's computing divided by the mean."
)
_TRAVEL = (
    "Row gradients are sent behind the step. *Window*: from then until a lookup needs their rows, "
    "in which they travel at no cost; *waited*: how long it still waits. Means over ranks, of "
    "steps without a profiler."
)
_ENCODED = (
    "What transports save, in million bytes per rank and step. *Rows*: rows, bags and their "
    "gradients, each counted once, whoever gets it. *Replicas*: all that is sent to replica peers, "
    "ids included."
)
_DENSE = (
    "What thresholds save of dense gradients, in million bytes per rank and step, the places of "
    "entries counted; an all-reduce is taken to be a ring. *Density*: the share of elements that "
    "were chosen."
)
_MEANINGS = {
    "min, median, max ms": (
        "step time over the blocks, on the slowest rank (of a ceiling, whose ranks wait for "
        "nobody, on a rank in the mean)"
    ),
    "samples/s": "of all ranks, at the median",
    "x best stock": (
        "how many times as fast as TorchRec's fastest contestant, whatever that was given: the "
        "median over rounds, in each of which the two blocks are compared, with its "
        f"{CONFIDENCE:.0%} bootstrap interval ({NUM_RESAMPLES:,} resamples{{coverage}})"
    ),
    "x best plain stock": "the same against the fastest with gloo's own all-to-all",
    "of ceiling": (
        "step time of the lowest ceiling, whose communication is free, relative to this one"
    ),
    "link MB": "million bytes that a rank sent per step on the counted interface",
    "sent MB": (
        "million bytes that an ideal algorithm sends to other ranks, per rank and step, as are "
        "the calls"
    ),
    "peak MB": "the most memory of a rank beyond what it started with",
    "loss gap": "the largest difference of a first step's loss to the reference",
    "NE gap": (
        "the difference of the normalized entropy of all trained steps to the reference's, "
        "relative to that; above 0 is worse"
    ),
    "phases": (
        "ms per step of the traced block alone, mean over ranks (tracing takes time itself); "
        "one that waits is time in which a rank waited for a collective"
    ),
    "median within": f"the median's {CONFIDENCE:.0%} bootstrap interval",
    "spread": "(max - min) / median",
    "foreign load": (
        "cores that other processes or other virtual machines kept busy, median and highest of "
        "the blocks"
    ),
    "loaded rounds": (
        f"rounds, counted from 0, with a foreign load above {FOREIGN_LOAD_LIMIT_CORES:g}"
    ),
    "probe": (
        "processor time of a fixed piece of work before each block, lowest, median and "
        "highest; where it differs, the machine was not equally fast"
    ),
}
_ENOUGH_TO_RANK = 3


def markdown_report(
    results: Sequence[BenchResult],
    *,
    plots: Mapping[str, str] = {},
    data: Sequence[str] = (),
) -> str:
    """Write a page on one or several results; shared facts are listed once.

    Args:
        results: such as one model on several clusters.
        plots: the plots' paths as seen from the page: "scaling" and "predicted".
        data: each result's JSON path as seen from the page.
    """
    summaries = [summarize(result) for result in results]
    facts = [_facts(result) for result in results]
    common = {
        name: text for name, text in facts[0].items() if all(other[name] == text for other in facts)
    }
    titles = dict.fromkeys(escaped(result.setting.title) for result in results)
    parts = [f"# {' / '.join(titles)}"]
    if len(results) > 1:
        parts += [_OVERVIEW, overview_table(results, summaries).markdown()]
    if "scaling" in plots:
        parts.append(f"![Step time by number of ranks]({plots['scaling']})")
    if together := _predicted_together(results):
        parts += ["## Predicted steps of all settings", together]
    if "predicted" in plots:
        parts.append(f"![Predicted against measured steps]({plots['predicted']})")
    parts += ["## What and where", _listed(common), "## Contestants", _contestants(results)]
    parts += ["## How to read the tables", _columns(summaries)]
    labels = setting_labels(results)
    for index, (result, summary) in enumerate(zip(results, summaries, strict=True)):
        own = {name: text for name, text in facts[index].items() if name not in common}
        if data:
            own["Data"] = f"[{data[index]}]({data[index]})"
        parts += [f"## {escaped(labels[index])}", _listed(own)]
        parts += _section(result, summary)
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(result: BenchResult, summary: Summary) -> list[str]:
    shares, phases = _part(_SHARES, shares_table(result)), _part("", phase_table(result))
    failed = _failures(result)
    return [
        "### Step times",
        _who_is_best(result, summary),
        step_table(result, summary).markdown(),
        f"Without figures:\n\n{failed}" if failed else "",
        "### Where the time goes" if phases or shares else "",
        phases,
        shares,
        _part(_TRAVEL, travel_table(result)),
        _part("### Traffic", traffic_table(result)),
        _part(_ENCODED, encoded_table(result)),
        _part(_DENSE, dense_table(result)),
        _part("### Plans", plan_table(result)),
        _part(f"### Predicted steps\n\n{_quality(result)}", predicted_table(result)),
        _part("### Noise", noise_table(summary)) if summary.contestants else "",
    ]


def _part(text: str, table: Table | None) -> str:
    """Join a text and its table; empty without a table."""
    return "" if table is None else f"{text}\n\n{table.markdown()}".lstrip()


def _who_is_best(result: BenchResult, summary: Summary) -> str:
    """Name the contestants that ratios refer to."""
    if summary.best_stock is None:
        return "No stock contestant was measured, so there are no ratios."
    has_own = summary.best_stock == summary.best_plain_stock
    how = "with gloo's own all-to-all" if has_own else "given the full-duplex all-to-all"
    text = f"The best stock contestant is {escaped(summary.best_stock)}, {how}"
    if shows_plain_stock(summary):
        text += f"; of those with gloo's own, it is {escaped(str(summary.best_plain_stock))}"
    if summary.ceiling is not None:
        text += f". The lowest ceiling is {escaped(summary.ceiling)}"
    return f"{text}. Losses are compared with those of {escaped(result.reference)}."


def _contestants(results: Sequence[BenchResult]) -> str:
    texts: dict[str, dict[str, None]] = {name: {} for name in names_in(results)}
    for result in results:
        for contestant in result.contestants:
            plan = f": {contestant.dense_plan}" if contestant.dense_plan else ""
            texts[contestant.name][escaped(contestant.description + plan)] = None
    return "\n".join(f"- {escaped(name)}: {' / '.join(own)}" for name, own in texts.items())


def _failures(result: BenchResult) -> str:
    """List the contestants without figures, and why; empty if all have figures."""
    lines = []
    for contestant in result.contestants:
        if contestant.outcome is Outcome.MEASURED:
            continue
        reason = contestant.reason.strip().splitlines() or ["no reason was recorded"]
        # A traceback ends with what matters; other texts begin with it.
        gist = reason[-1] if reason[0].startswith("Traceback") else reason[0]
        lines.append(f"- {escaped(contestant.name)} {contestant.outcome}: {escaped(gist)}")
        if len(reason) > 1:
            # As indented code, which shows a traceback whatever it contains.
            lines += ["", *(f"      {line}".rstrip() for line in reason), ""]
    return "\n".join(lines).rstrip()


def _columns(summaries: Sequence[Summary]) -> str:
    """Explain the columns of all tables."""
    meanings = dict(_MEANINGS)
    if not any(shows_plain_stock(summary) for summary in summaries):
        del meanings["x best plain stock"]
    if not any(counts_link(summary) for summary in summaries):
        del meanings["link MB"]
    text = "; ".join(f"**{name}**: {meaning}" for name, meaning in meanings.items())
    return (
        "A block is some steps of one contestant; in each round every contestant trains one. "
        f"{text.format(coverage=_coverage(summaries))}."
    )


def _coverage(summaries: Sequence[Summary]) -> str:
    """State how much confidence an interval keeps with this few rounds."""
    rounds = {
        len(contestant.result.blocks)
        for summary in summaries
        for contestant in summary.contestants.values()
    }
    if not rounds:
        return ""
    parts = [f"{interval_coverage(number):.0%} ({number} rounds)" for number in sorted(rounds)]
    return f"; with so few values it holds the true median in {' or '.join(parts)} of all cases"


def _facts(result: BenchResult) -> dict[str, str]:
    """Return a run's facts by heading: workload and place."""
    config, setting = config_of(result), result.setting
    schedule = config.schedule
    speeds = {
        name: "none" if speed is None else f"{speed / 1e6:,.1f} MB/s"
        for name, speed in setting.link_speeds.items()
    }
    return {
        "Workload": workload_text(config),
        "Schedule": (
            f"{schedule.rounds} rounds in random order; blocks of about {schedule.block_s:g} s, "
            f"at most {schedule.max_block_steps:,} steps, after {schedule.warmup_steps:,} to warm "
            f"up; on {schedule.device}; seed {schedule.seed}"
        ),
        "When": f"{escaped(setting.when)} (UTC)",
        "Ranks": f"{setting.hosts} x {setting.ranks_per_host} (hosts x ranks per host)",
        "Network": escaped(setting.network),
        "Cluster": escaped(setting.cluster),
        "Measured links, per rank": _pairs(speeds),
        "Machine": _pairs(setting.machine),
        "Versions": _pairs(setting.versions),
        "To repeat": "\n\n" + indent(setting.command.strip(), " " * 6),
    }


def _pairs(texts: Mapping[str, str]) -> str:
    return escaped("; ".join(f"{name} {text}" for name, text in texts.items()))


def _listed(facts: Mapping[str, str]) -> str:
    """List facts by heading; empty ones are left out."""
    return "\n".join(
        f"- {name}: {text}".replace(": \n", ":\n") for name, text in facts.items() if text
    )


def _predicted_together(results: Sequence[BenchResult]) -> str:
    """Report prediction quality over several settings; empty unless several have predictions."""
    settings = [predicted for result in results if (predicted := predicted_in(result))]
    if len(settings) < 2:
        return ""
    everyone = [contestant for setting in settings for contestant in setting]
    text = f"{len(everyone)} plans of {len(settings)} settings. {_how_good(everyone)}"
    common = set.intersection(
        *({contestant.name for contestant in setting} for setting in settings)
    )
    in_all_settings = [contestant for contestant in everyone if contestant.name in common]
    if 0 < len(in_all_settings) < len(everyone):
        names = ", ".join(
            escaped(contestant.name) for contestant in settings[0] if contestant.name in common
        )
        text += f"\n\n{len(in_all_settings)} of them are of contestants that all settings have: "
        text += f"{names}. {_how_good(in_all_settings)}"
    return text


def _quality(result: BenchResult) -> str:
    """Report a setting's prediction quality, and the source of its dense part."""
    predicted = predicted_in(result)
    if not predicted:
        return ""
    text = _how_good(predicted)
    if not result.dense_from:
        return text
    names = " and ".join(result.dense_from)
    text += f" Dense: what {names} took in the same rounds, less lookups and updates as predicted."
    errors = []
    for contestant in predicted:
        cost = predicted_cost(contestant)
        rest_s = median_s(contestant) - cost.dense_s
        if rest_s > 0:
            errors.append(cost.tables_s / rest_s - 1)
    if errors:
        text += f" Without it, median error of the rest: {statistics.median(errors):+.0%}."
    return text


def _how_good(contestants: Sequence[ContestantResult]) -> str:
    measured_s = [median_s(contestant) for contestant in contestants]
    predicted_s = [predicted_cost(contestant).total_s for contestant in contestants]
    errors = [abs(a / b - 1) for a, b in zip(predicted_s, measured_s, strict=True)]
    text = f"Median error: {statistics.median(errors):.0%}; largest: {max(errors):.0%}."
    if len(contestants) >= _ENOUGH_TO_RANK:
        correlation, _ = spearmanr(measured_s, predicted_s)
        text += f" Rank correlation: {correlation:.2f}."
    return text
