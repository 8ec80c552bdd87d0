"""How even the work of a contestant's ranks was: by the costs of samples, and by time."""

from collections.abc import Sequence

from torchrec_2dsp.programs.bench.results import DealtSamples, Phase
from torchrec_2dsp.samples.report import BalanceReport


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


def compute_seconds(ranks: Sequence[Sequence[Phase]]) -> tuple[float, ...]:
    """The seconds of a step in which each rank didn't wait.

    Args:
        ranks: the phases of each rank's traced step.
    """
    return tuple(sum(phase.seconds for phase in phases if not phase.waiting) for phases in ranks)
