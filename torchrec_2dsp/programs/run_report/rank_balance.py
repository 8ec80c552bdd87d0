"""How even the work of a run's ranks was: what each does in a step, and what the slowest costs."""

from collections import Counter
from collections.abc import Mapping, Sequence

from torchrec_2dsp.programs.run_report.contents import RunPart
from torchrec_2dsp.programs.traces import RankShares, RankSplit
from torchrec_2dsp.report.table import Table

SHARES_TEXT = (
    "Busy: the share of a step in which a rank computes. Lost: the share by which the slowest rank "
    "of each step computes longer than the mean, while the others wait for it; waiting for the "
    "network isn't in it. Imbalance: the slowest rank's computing by the mean. By costs: the same "
    "of what samples should take by their lengths, in all steps, where the run deals them."
)


def shares_table(runs: Sequence[RunPart], splits_of: Mapping[str, Sequence[RankSplit]]) -> Table:
    """A line for each profiled run: how busy its ranks are, and what is lost to the slowest.

    Args:
        runs: all runs of the program.
        splits_of: the steps of those that are profiled, by their names.
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
    """A line for each rank: how long it computes and waits, and in how many steps it is slowest."""
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
    """What ranks do in the steps that all of them have; `None` if there are none.

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
    """In how many steps each rank computes longest, by its number."""
    return Counter(
        max(splits, key=lambda split: split.steps[step].computing_us).rank
        for step in common_steps(splits)
    )


def common_steps(splits: Sequence[RankSplit]) -> list[int]:
    """The steps that the traces of all ranks have, by their numbers."""
    numbers = [set(split.steps) for split in splits]
    return sorted(set.intersection(*numbers)) if numbers else []
