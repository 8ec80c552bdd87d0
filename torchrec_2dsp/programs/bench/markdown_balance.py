"""The tables of a benchmark report on how busy the ranks were, and how even their work was."""

from torchrec_2dsp.programs.bench.markdown_tables import MISSING, megabytes, ms, table
from torchrec_2dsp.programs.bench.results import ContestantResult
from torchrec_2dsp.programs.bench.statistics import Summary
from torchrec_2dsp.programs.traces import RankShares

SHARES = (
    "How the ranks used the time of the blocks. *Busy*: the share of a step in which the training "
    "thread of a rank computes, in processor time, which doesn't grow while a rank waits. *Lost to "
    "imbalance*: the share by which the slowest rank of each step computes longer than the mean, "
    "while the others wait for it. *Other*: waiting for the network, for another process, or for a "
    "core, where ranks share them. *Imbalance*: the slowest rank's computing by the mean."
)

BALANCE = (
    "How even the work of the ranks was. *As read*, *as dealt*: how many times the mean the "
    "slowest rank's samples cost, by their lengths, in all steps. *Moved*: the share of the "
    "samples that were given to another rank, and *sent MB*, what a rank sent of them per step. "
    "*Computing*: processor ms of the training thread in a step, of a rank in the mean, and of the "
    "rank that took longest in each step; *lost*, the difference, in which the others wait."
)


def balance_table(summary: Summary) -> str:
    """How even the work of the ranks was; empty unless a contestant deals its samples."""
    results = [contestant.result for contestant in summary.contestants]
    if not any(result.dealt for result in results):
        return ""
    rows = []
    for result in results:
        dealt, compute = result.dealt, result.compute
        figures, times = [MISSING] * 4, [MISSING] * 3
        if dealt is not None:
            figures = [
                f"{dealt.imbalance_before:.3f}",
                f"{dealt.imbalance_after:.3f}",
                f"{dealt.moved_share:.0%}",
                megabytes(dealt.sent_bytes),
            ]
        if compute is not None:
            lost_s = compute.slowest_s - compute.mean_s
            times = [ms(seconds) for seconds in (compute.mean_s, compute.slowest_s, lost_s)]
        rows.append([result.name, *figures, *times])
    headings = ["as read", "as dealt", "moved", "sent MB", "computing ms", "slowest", "lost"]
    return table(["contestant", *headings], rows)


def shares_table(summary: Summary) -> str:
    """How busy ranks were, and what the slowest cost; empty if no processor times are known."""
    results = [contestant.result for contestant in summary.contestants]
    all_shares = [shares_of(result) for result in results]
    if not any(all_shares):
        return ""
    rows = [
        [result.name, *[MISSING] * 4]
        if shares is None
        else [
            result.name,
            f"{shares.busy:.1%}",
            f"{shares.lost:.1%}",
            # Processor times include the untimed first step of each block, which takes longer.
            f"{max(0.0, 1.0 - shares.busy - shares.lost):.1%}",
            f"{shares.imbalance:.3f}",
        ]
        for result, shares in zip(results, all_shares, strict=True)
    ]
    return table(["contestant", "busy", "lost to imbalance", "other", "imbalance"], rows)


def shares_of(result: ContestantResult) -> RankShares | None:
    """What the ranks of a contestant did in its blocks; `None` without processor times.

    A ceiling's ranks don't wait for each other, so that nothing is lost to the slowest of them.
    """
    compute, num_steps = result.compute, sum(block.num_steps for block in result.blocks)
    if compute is None or not num_steps:
        return None
    return RankShares.of_times(
        mean=compute.mean_s,
        slowest=compute.mean_s if result.kind == "ceiling" else compute.slowest_s,
        step=sum(block.step_s * block.num_steps for block in result.blocks) / num_steps,
    )
