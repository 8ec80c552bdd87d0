"""The table of a benchmark report on how even the work of the ranks was."""

from torchrec_2dsp.programs.bench.markdown_tables import MISSING, megabytes, ms, table
from torchrec_2dsp.programs.bench.statistics import Summary

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
