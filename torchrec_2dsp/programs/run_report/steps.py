"""Show a run's steps: where the time goes, and how even the ranks' work is."""

from collections import Counter
from collections.abc import Mapping, Sequence

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.run_report.contents import RunContents, RunPart
from torchrec_2dsp.programs.traces import RankShares, RankSplit, StepPhase, read_splits, slowest
from torchrec_2dsp.report.charts import BarChart, Bars
from torchrec_2dsp.report.page import Page
from torchrec_2dsp.report.table import Table

SHARES_TEXT = (
    "Busy: the share of a step in which a rank computes. Lost: the share by which the slowest rank "
    "of each step computes longer than the mean, while the others wait for it; waiting for the "
    "network isn't in it. Imbalance: the slowest rank's computing by the mean. By costs: the same "
    "of what samples should take by their lengths, in all steps, where the run deals them."
)


def shares_table(runs: Sequence[RunPart], splits_of: Mapping[str, Sequence[RankSplit]]) -> Table:
    """Return a row for each profiled run: how busy its ranks are, and the slowest rank's cost.

    Args:
        runs: all the program's runs.
        splits_of: the profiled runs' step splits, by run name.
    """
    rows = []
    for run in runs:
        shares = rank_shares(splits_of.get(run.name, ()))
        if shares is None:
            continue
        record = run.record
        by_costs = (
            (None, None) if record is None else (record.imbalance_before, record.imbalance_after)
        )
        rows.append(
            [
                run.name,
                "dealt by cost" if run.config.get("balance") is not None else "as read",
                f"{shares.busy:.1%}",
                f"{shares.lost:.1%}",
                f"{shares.imbalance:.2f}",
                *("" if cost is None else f"{cost:.2f}" for cost in by_costs),
            ]
        )
    headings = (
        "run",
        "samples",
        "busy",
        "lost to the slowest",
        "imbalance",
        "by costs, as read",
        "as dealt",
    )
    return Table(headings, rows, words=("run", "samples"))


def ranks_table(splits: Sequence[RankSplit]) -> Table:
    """Return a row for each rank: computing, waiting, and the steps in which it is slowest."""
    times_slowest = slowest_counts(splits)
    num_steps = len(common_steps(splits))
    rows = [
        [
            str(split.rank),
            f"{split.all_computing_us / 1e3:.2f}",
            f"{split.all_waiting_us / 1e3:.2f}",
            f"{split.all_computing_us / split.step_us:.1%}",
            f"{times_slowest[split.rank]} of {num_steps}",
        ]
        for split in splits
    ]
    return Table(("rank", "computing ms", "waiting ms", "busy", "slowest in steps"), rows)


def rank_shares(splits: Sequence[RankSplit]) -> RankShares | None:
    """Return how busy ranks are in the steps that all of them have; `None` without any.

    In each step another rank may be the slowest one, so that means of single ranks hide it.
    """
    steps = common_steps(splits)
    if not steps:
        return None
    computing_us = [[split.steps[step].computing_us for split in splits] for step in steps]
    whole_us = [split.steps[step].whole_us for step in steps for split in splits]
    return RankShares.of_times(
        mean=sum(map(sum, computing_us)) / len(whole_us),
        slowest=sum(map(max, computing_us)) / len(steps),
        step=sum(whole_us) / len(whole_us),
    )


def slowest_counts(splits: Sequence[RankSplit]) -> Counter[int]:
    """Count the steps in which each rank computes longest, by its number."""
    return Counter(
        max(splits, key=lambda split: split.steps[step].computing_us).rank
        for step in common_steps(splits)
    )


def common_steps(splits: Sequence[RankSplit]) -> list[int]:
    """Return the numbers of the steps that all traces have."""
    numbers = [set(split.steps) for split in splits]
    return sorted(set.intersection(*numbers)) if numbers else []


_MAX_RANKS = 16
"""The most bars for a run."""
_COLOURS = {
    StepPhase.NEXT_BATCH: "#999999",
    StepPhase.IDS: "#56B4E9",
    StepPhase.LOOKUP: "#0072B2",
    StepPhase.ROWS: "#F0E442",
    StepPhase.DENSE_FORWARD: "#7BCDB0",
    StepPhase.DENSE_BACKWARD: "#009E73",
    StepPhase.ROW_GRADIENTS: "#E69F00",
    StepPhase.TABLE_UPDATE: "#1B3A6B",
    StepPhase.REPLICA_SYNC: "#D55E00",
    StepPhase.DENSE_GRADIENTS: "#CC79A7",
    StepPhase.OPTIMIZER: "#7B4B94",
    StepPhase.OTHER: "#DDDDDD",
}


def add_steps(page: Page, contents: RunContents) -> None:
    """Add the phases in each profiled run's step, or explain how to profile one."""
    traced = [run for run in contents.runs if run.traces]
    if not traced:
        page.add_text(
            "Where a step goes isn't known, because no step was profiled: train --profile 20:30 "
            "records steps 20 to 30."
        )
    splits_of: dict[str, list[RankSplit]] = {}
    refusals = []
    for run in traced:
        try:
            splits_of[run.name] = read_splits(run.traces)
        except ConfigError as error:
            # A trace may come from an older version, or be incomplete; the rest of the page still
            # holds.
            refusals.append(f"Where a step of {run.name} goes can't be shown. {error}")
    if splits_of:
        page.add_bars("Where a step goes", step_chart(splits_of))
        page.add_text(_chart_text(splits_of))
        page.add_table("How even the work of ranks is", shares_table(traced, splits_of))
        page.add_text(SHARES_TEXT)
    for name, splits in splits_of.items():
        page.add_table(f"Ranks in a step of {name}", ranks_table(splits))
        page.add_table(f"Phases of a step of {name}", phases_table(splits))
        page.add_text(_table_text(next(run for run in traced if run.name == name), splits))
    for refusal in refusals:
        page.add_text(refusal)


def step_chart(splits_of: dict[str, list[RankSplit]]) -> BarChart:
    """Draw the phases of each rank's mean step in order, by run name."""
    shown = [
        (_place(name, split, splits), split)
        for name, splits in splits_of.items()
        for split in _shown(splits)
    ]
    bars = []
    for phase in StepPhase:
        parts = (
            (phase.value, {place: split.computing_us.get(phase, 0.0) for place, split in shown}),
            (
                f"{phase.value}: waiting",
                {place: split.waiting_us.get(phase, 0.0) for place, split in shown},
            ),
        )
        for title, times_us in parts:
            if not any(times_us.values()):
                continue
            bars.append(
                Bars(
                    name=title,
                    values={place: time_us / 1e3 for place, time_us in times_us.items()},
                    colour=_COLOURS[phase],
                    is_hatched=title != phase.value,
                    hover={
                        place: f"{place}<br>{title}: {times_us[place] / 1e3:.2f} ms of "
                        f"{split.step_us / 1e3:.2f} ms"
                        for place, split in shown
                    },
                )
            )
    return BarChart(bars, places=[place for place, _ in shown], title="ms of a step")


def phases_table(splits: Sequence[RankSplit]) -> Table:
    """Return a row for each phase: its mean time over ranks, and the extremes."""
    mean_step_us = _mean([split.step_us for split in splits])
    rows = []
    for phase in StepPhase:
        waiting_us = [split.waiting_us.get(phase, 0.0) for split in splits]
        computing_us = [split.computing_us.get(phase, 0.0) for split in splits]
        if any(waiting_us) or any(computing_us):
            rows.append(_phase_row(phase.value, splits, computing_us, waiting_us, mean_step_us))
    rows.append(
        _phase_row(
            "the step",
            splits,
            [split.all_computing_us for split in splits],
            [split.all_waiting_us for split in splits],
            mean_step_us,
        )
    )
    headings = ("phase", "ms", "share", "computing ms", "waiting ms", "computes least", "most")
    return Table(headings, rows, words=("phase",))


def _phase_row(
    name: str,
    splits: Sequence[RankSplit],
    computing_us: Sequence[float],
    waiting_us: Sequence[float],
    step_us: float,
) -> list[str]:
    """Return a row: means over ranks, and the ranks that compute least and most."""
    mean_computing_us, mean_waiting_us = _mean(computing_us), _mean(waiting_us)
    both_us = mean_computing_us + mean_waiting_us
    by_computing = sorted(zip(computing_us, (split.rank for split in splits), strict=True))
    ends = [f"{time_us / 1e3:.2f} (rank {rank})" for time_us, rank in by_computing]
    return [
        name,
        f"{both_us / 1e3:.2f}",
        f"{both_us / step_us:.1%}",
        f"{mean_computing_us / 1e3:.2f}",
        f"{mean_waiting_us / 1e3:.2f}",
        ends[0],
        ends[-1],
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _place(name: str, split: RankSplit, splits: Sequence[RankSplit]) -> str:
    """Name a rank's bar; the slowest is marked."""
    mark = " (slowest)" if len(splits) > 1 and split is slowest(splits) else ""
    return f"{name}, rank {split.rank}{mark}"


def _shown(splits: Sequence[RankSplit]) -> list[RankSplit]:
    """Choose the ranks that get a bar: all, or those that compute least and most."""
    if len(splits) <= _MAX_RANKS:
        return list(splits)
    by_computing = sorted(splits, key=lambda split: split.all_computing_us)
    ends = by_computing[: _MAX_RANKS // 2] + by_computing[-_MAX_RANKS // 2 :]
    return sorted(ends, key=lambda split: split.rank)


def _chart_text(splits_of: dict[str, list[RankSplit]]) -> str:
    """Explain the chart, and which ranks it omits."""
    most = max(len(splits) for splits in splits_of.values())
    left_out = (
        f"Of runs with more than {_MAX_RANKS} ranks, half of those shown compute most, the others "
        "least. "
        if most > _MAX_RANKS
        else ""
    )
    return (
        f"{left_out}Each bar is the mean step of a rank, on the host. Hatched: the rank waits for "
        "a collective. The slowest rank computes longest, and the others wait for it."
    )


def _table_text(run: RunPart, splits: Sequence[RankSplit]) -> str:
    """Name the steps and ranks over which a run's figures are averaged."""
    counts = sorted({split.num_steps for split in splits})
    steps = " to ".join(str(count) for count in {counts[0]: 0, counts[-1]: 0})
    last = slowest(splits)
    text = f"The mean of {steps} {'step' if counts[-1] == 1 else 'steps'} of {len(splits)} "
    text += "rank. " if len(splits) == 1 else "ranks. "
    if len(splits) > 1:
        text += f"Rank {last.rank} computes longest, {last.all_computing_us / 1e3:.2f} ms. "
    return f"{text}Traces, for Perfetto or Chrome: {run.traces[0].parent.resolve()}."
