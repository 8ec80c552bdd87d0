"""The table of a benchmark report on how even the work of the ranks was."""

from torchrec_2dsp.programs.bench.markdown_tables import MISSING, megabytes, ms, table
from torchrec_2dsp.programs.bench.statistics import Summary

BALANCE = (
    "How even the work of the ranks was. *As read*, *as dealt*: how many times the mean the "
    "slowest rank's samples cost, by their lengths, in all steps. *Moved*: the share of the "
    "samples that were given to another rank, and *sent MB*, what a rank sent of them per step. "
    "*Computing*: ms of the traced step in which a rank didn't wait, mean over ranks and on the "
    "slowest; *lost*, the difference, in which the others wait."
)


def balance_table(summary: Summary) -> str:
    """How even the work of the ranks was; empty unless a contestant deals its samples."""
    results = [contestant.result for contestant in summary.contestants]
    if not any(result.dealt for result in results):
        return ""
    rows = []
    for result in results:
        if not result.compute_s:
            continue
        dealt = result.dealt
        mean_s, slowest_s = sum(result.compute_s) / len(result.compute_s), max(result.compute_s)
        figures = [MISSING] * 4
        if dealt is not None:
            figures = [
                f"{dealt.imbalance_before:.3f}",
                f"{dealt.imbalance_after:.3f}",
                f"{dealt.moved_share:.0%}",
                megabytes(dealt.sent_bytes),
            ]
        rows.append([result.name, *figures, ms(mean_s), ms(slowest_s), ms(slowest_s - mean_s)])
    headings = ["as read", "as dealt", "moved", "sent MB", "computing ms", "slowest", "lost"]
    return table(["contestant", *headings], rows)
