"""Show a step's phases: a run's by rank, and a benchmark's, TorchRec's beside this package's."""

from collections import Counter
from collections.abc import Mapping, Sequence

from torchrec_2dsp.programs.bench.results import ContestantResult
from torchrec_2dsp.programs.run_report.contents import RunContents, RunPart
from torchrec_2dsp.programs.run_report.gain import Contenders
from torchrec_2dsp.programs.traces import RankShares, RankSplit, StepPhase, mean_step
from torchrec_2dsp.report.charts import BarChart, Bars
from torchrec_2dsp.report.page import Page
from torchrec_2dsp.report.table import Table

_SHARES_TEXT = (
    "Busy: the share of a step in which a rank computes. Lost: the share by which the slowest rank "
    "of each step computes longer than the mean, while the others wait for it; waiting for the "
    "network doesn't count. Imbalance: the slowest rank's computing divided by the mean."
)


def shares_table(runs: Sequence[RunPart]) -> Table:
    """Return a row for each traced run: how busy its ranks are, and the slowest rank's cost."""
    rows = [
        [run.name, f"{shares.busy:.1%}", f"{shares.lost:.1%}", f"{shares.imbalance:.2f}"]
        for run in runs
        if (shares := rank_shares(run.splits))
    ]
    headings = ("run", "busy", "lost to the slowest", "imbalance")
    return Table(headings, rows, words=("run",))


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

    Another rank may be the slowest in each step, which single ranks' means hide.
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


def slowest(splits: Sequence[RankSplit]) -> RankSplit:
    """Return the rank that computes longest, for which the others wait."""
    return max(splits, key=lambda split: split.all_computing_us)


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


MeanStep = Mapping[str, tuple[float, float]]
"""The computing and the waiting time of each phase of a step, in microseconds."""
_NONE = (0.0, 0.0)


def contestant_step(contestant: ContestantResult) -> MeanStep:
    """Return the mean step of a benchmark's contestant."""
    us = {(phase.name, phase.waiting): 1e6 * phase.seconds for phase in contestant.phases}
    return {name: (us.get((name, False), 0.0), us.get((name, True), 0.0)) for name, _ in us}


def _whole_us(step: MeanStep) -> tuple[float, float]:
    """Return a whole step's computing and waiting time."""
    computing_us, waiting_us = zip(*step.values(), strict=True)
    return sum(computing_us), sum(waiting_us)


def add_steps(page: Page, contents: RunContents) -> None:
    """Add the phases of a step: of each traced run, and of a benchmark, TorchRec's beside ours."""
    traced = [run for run in contents.runs if run.splits]
    if traced:
        bars = {
            _place(run.name, split, run.splits): mean_step([split])
            for run in traced
            for split in _shown(run.splits)
        }
        page.add_bars("A step of this training, by rank", step_chart(bars))
        page.add_text(_chart_text(traced))
        means = {run.name: mean_step(run.splits) for run in traced}
        page.add_table("Span by span", spans_table(means))
    for result in contents.benches:
        contenders = Contenders.of(result)
        steps = {
            contestant.name: contestant_step(contestant)
            for contestant in contenders.distinct()
            if contestant.phases
        }
        if steps:
            title = result.setting.title
            page.add_bars(f"A step of the benchmark {title}, beside TorchRec's", step_chart(steps))
            stock, own = contenders.stock, contenders.own
            compared = (stock.name, own.name) if stock and own else None
            page.add_table(f"Span by span, of {title}", spans_table(steps, compared))
    if traced or any(result.measured() for result in contents.benches):
        page.add_text(
            "Milliseconds of a mean step; in brackets and hatched: waiting for a collective. "
            "Tracing takes time itself."
        )
    if not traced:
        page.add_text(_untraced_text(contents))
        return
    page.add_table("How even the work of ranks is", shares_table(traced))
    page.add_text(_SHARES_TEXT)
    for run in traced:
        page.add_table(f"Ranks in a step of {run.name}", ranks_table(run.splits), is_folded=True)


def _untraced_text(contents: RunContents) -> str:
    """Say why no step was traced."""
    if contents.config.get("output", {}).get("traced_steps") == 0:
        return "Where a step of this training goes isn't known: output.traced_steps=0 traces none."
    if all(run.record for run in contents.runs):
        why = ", because none was traced: train traces some in the middle of a run"
    else:
        why = " yet: train traces some in the middle of a run"
    return f"Where a step of this training goes isn't known{why} (output.traced_steps)."


def step_chart(steps: Mapping[str, MeanStep]) -> BarChart:
    """Draw steps' phases in order, each step at its own place."""
    bars = []
    for phase in StepPhase:
        for title, is_waiting in ((phase.value, False), (f"{phase.value}: waiting", True)):
            times_us = {place: step.get(phase, _NONE)[is_waiting] for place, step in steps.items()}
            if not any(times_us.values()):
                continue
            bars.append(
                Bars(
                    name=title,
                    values={place: time_us / 1e3 for place, time_us in times_us.items()},
                    colour=_COLOURS[phase],
                    is_hatched=is_waiting,
                    hover={
                        place: f"{place}<br>{title}: {times_us[place] / 1e3:.2f} ms of "
                        f"{sum(_whole_us(step)) / 1e3:.2f} ms"
                        for place, step in steps.items()
                    },
                )
            )
    return BarChart(bars, places=list(steps), title="ms of a step")


def spans_table(steps: Mapping[str, MeanStep], compared: tuple[str, str] | None = None) -> Table:
    """Return a row for each phase, a column for each step, and the difference of two of them."""
    rows = []
    for phase in StepPhase:
        times_us = {name: step.get(phase, _NONE) for name, step in steps.items()}
        if any(map(any, times_us.values())):
            rows.append(_span_row(phase.value, times_us, compared))
    whole_us = {name: _whole_us(step) for name, step in steps.items()}
    rows.append(_span_row("the step", whole_us, compared))
    headings = ["phase", *steps, *(["saved"] if compared else [])]
    return Table(headings, rows, words=("phase",))


def _span_row(
    name: str, times_us: Mapping[str, tuple[float, float]], compared: tuple[str, str] | None
) -> list[str]:
    cells = [
        f"{(computing_us + waiting_us) / 1e3:.2f}"
        + (f" ({waiting_us / 1e3:.2f})" if waiting_us else "")
        for computing_us, waiting_us in times_us.values()
    ]
    if compared:
        base, own = (sum(times_us[other]) for other in compared)
        cells.append(f"{(base - own) / 1e3:+.2f}")
    return [name, *cells]


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


def _chart_text(runs: Sequence[RunPart]) -> str:
    """Name the steps that were traced, and the ranks that the chart omits."""
    left_out = (
        f"Of runs with more than {_MAX_RANKS} ranks, half of those shown compute most, the others "
        "least. "
        if max(len(run.splits) for run in runs) > _MAX_RANKS
        else ""
    )
    steps = []
    for run in runs:
        numbers, last = common_steps(run.splits) or [0], slowest(run.splits)
        steps.append(
            f"{run.name}: steps {numbers[0]} to {numbers[-1]}, in which rank {last.rank} computes "
            f"longest, {last.all_computing_us / 1e3:.2f} ms"
        )
    return (
        f"{left_out}Each bar is the mean step of a rank, on the host; the others wait for the "
        f"slowest, which computes longest. {'; '.join(steps)}."
    )
