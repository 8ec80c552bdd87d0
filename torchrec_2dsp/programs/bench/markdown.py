"""`markdown_report`: one or several benchmark results as a page."""

from collections.abc import Mapping, Sequence
from textwrap import indent

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.markdown_balance import (
    BALANCE,
    SHARES,
    balance_table,
    shares_table,
)
from torchrec_2dsp.programs.bench.markdown_predicted import predicted_section, predicted_together
from torchrec_2dsp.programs.bench.markdown_tables import (
    counts_link,
    escaped,
    failures,
    names_in,
    noise_table,
    overview_table,
    phase_table,
    plan_table,
    shows_plain_stock,
    step_table,
)
from torchrec_2dsp.programs.bench.markdown_traffic import (
    dense_table,
    encoded_table,
    traffic_table,
    travel_table,
)
from torchrec_2dsp.programs.bench.results import BenchResult, ContestantResult
from torchrec_2dsp.programs.bench.setting_labels import setting_labels
from torchrec_2dsp.programs.bench.statistics import (
    CONFIDENCE,
    FOREIGN_LOAD_LIMIT_CORES,
    NUM_RESAMPLES,
    Summary,
    config_of,
    interval_coverage,
    summarize,
)
from torchrec_2dsp.programs.bench.workload_text import workload_text


def markdown_report(
    results: Sequence[BenchResult],
    *,
    plots: Mapping[str, str] = {},
    data: Sequence[str] = (),
) -> str:
    """A page on one or several results; what they have in common is said once.

    Args:
        results: such as one model on several clusters.
        plots: where the page finds its plots: "scaling", "predicted", and "phases_1" for the first
            result.
        data: where it finds the JSON of each result.
    """
    if not results:
        raise ConfigError("there is no result to report on; give at least one")
    places = {
        "scaling",
        "predicted",
        *(f"phases_{number}" for number in range(1, len(results) + 1)),
    }
    if unknown := sorted(set(plots) - places):
        raise ConfigError(f"there is no place for the plot {unknown[0]!r}; use {sorted(places)}")
    if data and len(data) != len(results):
        raise ConfigError(f"{len(data)} places for the data of {len(results)} results; name each")

    summaries = [summarize(result) for result in results]
    facts = [_facts(result) for result in results]
    common = {
        name: text for name, text in facts[0].items() if all(other[name] == text for other in facts)
    }
    titles = dict.fromkeys(escaped(result.setting.title) for result in results)
    parts = [f"# {' / '.join(titles)}"]
    if len(results) > 1:
        parts += [_OVERVIEW, overview_table(results, summaries)]
    if "scaling" in plots:
        parts.append(f"![Step time by number of ranks]({plots['scaling']})")
    if together := predicted_together(results):
        parts += ["## Predicted steps of all settings", together]
    if "predicted" in plots:
        parts.append(f"![Predicted against measured steps]({plots['predicted']})")
    parts += ["## What and where", _list(common), "## Contestants", _contestants(results)]
    parts += ["## How to read the tables", _columns(summaries)]
    for index, (result, summary) in enumerate(zip(results, summaries, strict=True)):
        own = {name: text for name, text in facts[index].items() if name not in common}
        if data:
            own["Data"] = f"[{data[index]}]({data[index]})"
        parts += [f"## {escaped(setting_labels(results)[index])}", _list(own)]
        parts += _section(result, summary, plots.get(f"phases_{index + 1}"))
    return "\n\n".join(part for part in parts if part) + "\n"


_OVERVIEW = (
    "Median step time in ms, and in brackets how many times as fast as the best stock contestant "
    "of the same setting."
)


_TRAVEL = (
    "Row gradients are sent behind the step. *Window*: from then until a lookup needs their rows, "
    "in which they travel for nothing; *waited*: what the lookup still waits. Means over ranks, of "
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


def _section(result: BenchResult, summary: Summary, plot: str | None) -> list[str]:
    shares = shares_table(summary)
    phases, traffic, plan = phase_table(summary), traffic_table(summary), plan_table(result)
    failed = failures(result)
    return [
        "### Step times",
        _who_is_best(result, summary),
        step_table(result, summary),
        f"Without figures:\n\n{failed}" if failed else "",
        "### Where the time goes" if phases or plot or shares else "",
        f"![Traced step by phase]({plot})" if plot else "",
        phases,
        f"{SHARES}\n\n{shares}" if shares else "",
        f"{_TRAVEL}\n\n{travel}" if (travel := travel_table(summary)) else "",
        f"### Traffic\n\n{traffic}" if traffic else "",
        f"{_ENCODED}\n\n{encoded}" if (encoded := encoded_table(summary)) else "",
        f"{_DENSE}\n\n{dense}" if (dense := dense_table(summary)) else "",
        f"### Balance\n\n{BALANCE}\n\n{balance}" if (balance := balance_table(summary)) else "",
        f"### Plans\n\n{plan}" if plan else "",
        f"### Predicted steps\n\n{predicted}" if (predicted := predicted_section(result)) else "",
        f"### Noise\n\n{noise_table(summary)}" if summary.contestants else "",
    ]


def _who_is_best(result: BenchResult, summary: Summary) -> str:
    """Whom the ratios are against."""
    if summary.best_stock is None:
        return "No stock contestant was measured, so there are no ratios."
    has_own = summary.best_stock == summary.best_plain_stock
    how = "with gloo's own all-to-all" if has_own else "given the full-duplex all-to-all"
    text = f"The best stock contestant is {escaped(summary.best_stock)}, {how}"
    if shows_plain_stock(summary):
        text += f"; of those with gloo's own, it is {escaped(str(summary.best_plain_stock))}"
    if summary.ceiling is not None:
        text += f". The lowest ceiling is {escaped(summary.ceiling)}"
    return f"{text}. Losses are held against those of {escaped(result.reference)}."


def _described(contestant: ContestantResult) -> str:
    if not contestant.dense_plan:
        return contestant.description
    return f"{contestant.description}: {contestant.dense_plan}"


def _contestants(results: Sequence[BenchResult]) -> str:
    lines = []
    for name in names_in(results):
        texts = dict.fromkeys(
            escaped(_described(contestant))
            for result in results
            for contestant in result.contestants
            if contestant.name == name
        )
        lines.append(f"- {escaped(name)}: {' / '.join(texts)}")
    return "\n".join(lines)


def _columns(summaries: Sequence[Summary]) -> str:
    meanings = {
        "min, median, max ms": (
            "step time over the blocks, on the slowest rank (of a ceiling, whose ranks wait for "
            "nobody, on a rank in the mean)"
        ),
        "samples/s": "of all ranks, at the median",
        "x best stock": (
            "how many times as fast as TorchRec's fastest contestant, whatever that was given: the "
            "median over rounds, in each of which the two blocks are compared, with its "
            f"{CONFIDENCE:.0%} bootstrap interval ({NUM_RESAMPLES:,} resamples"
            f"{_coverage(summaries)})"
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
    if not any(shows_plain_stock(summary) for summary in summaries):
        del meanings["x best plain stock"]
    if not any(counts_link(summary) for summary in summaries):
        del meanings["link MB"]
    return (
        "A block is some steps of one contestant; in each round every contestant trains one. "
        + "; ".join(f"**{name}**: {text}" for name, text in meanings.items())
        + "."
    )


def _coverage(summaries: Sequence[Summary]) -> str:
    """How much of its confidence an interval of so few rounds keeps."""
    rounds = {
        len(contestant.result.blocks) for summary in summaries for contestant in summary.contestants
    }
    parts = [f"{interval_coverage(number):.0%} ({number} rounds)" for number in sorted(rounds)]
    if not parts:
        return ""
    return f"; with so few values it holds the true median in {' or '.join(parts)} of all cases"


def _facts(result: BenchResult) -> dict[str, str]:
    """The facts of a run by heading: what was run, and where."""
    setting, config = result.setting, config_of(result)
    schedule = config.schedule
    speeds = {
        name: "none" if speed is None else f"{speed / 1e6:,.1f} MB/s"
        for name, speed in setting.link_speeds.items()
    }
    return {
        "When": f"{escaped(setting.when)} (UTC)",
        "Ranks": f"{setting.hosts} x {setting.ranks_per_host} (hosts x ranks per host)",
        "Network": escaped(setting.network),
        "Cluster": escaped(setting.cluster),
        "Measured links, per rank": _pairs(speeds),
        "Machine": _pairs(setting.machine),
        "Versions": _pairs(setting.versions),
        "Workload": workload_text(config),
        "Schedule": (
            f"{schedule.rounds} rounds in random order; blocks of about {schedule.block_s:g} s, "
            f"at most {schedule.max_block_steps:,} steps, after {schedule.warmup_steps:,} to warm "
            f"up; on {schedule.device}; seed {schedule.seed}"
        ),
        "To repeat": "\n\n" + indent(setting.command.strip(), " " * 6),
    }


def _pairs(texts: Mapping[str, str]) -> str:
    return escaped("; ".join(f"{name} {text}" for name, text in texts.items()))


def _list(facts: Mapping[str, str]) -> str:
    return "\n".join(
        f"- {name}: {text}".replace(": \n", ":\n") for name, text in facts.items() if text
    )
