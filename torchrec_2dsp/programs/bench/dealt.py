"""How even the work of a contestant's ranks was: by the costs of samples, and by time."""

from collections.abc import Sequence

from torchrec_2dsp.programs.bench.results import ComputeTimes, DealtSamples
from torchrec_2dsp.samples.dealer import BalanceReport


def dealt_samples(reports: Sequence[BalanceReport | None]) -> DealtSamples | None:
    """What became of the samples of all batches; `None` if they weren't dealt.

    Args:
        reports: of all ranks, equal but for the bytes.
    """
    by_rank = [report for report in reports if report is not None]
    if not by_rank or not by_rank[0].num_batches:
        return None
    first = by_rank[0]
    return DealtSamples(
        imbalance_before=first.imbalance_before,
        imbalance_after=first.imbalance_after,
        moved_share=first.num_moved / first.num_samples,
        sent_bytes=sum(report.num_bytes for report in by_rank) / len(by_rank) / first.num_batches,
    )


def compute_times(ranks: Sequence[Sequence[float]]) -> ComputeTimes | None:
    """How evenly the ranks computed, step by step; `None` if their times aren't known.

    In each step another rank may be the slowest one, so that means of single ranks hide it.

    Args:
        ranks: the processor seconds of each rank's steps.
    """
    steps = list(zip(*ranks, strict=True))
    if not steps:
        return None
    return ComputeTimes(
        mean_s=sum(map(sum, steps)) / len(ranks) / len(steps),
        slowest_s=sum(map(max, steps)) / len(steps),
    )
