"""`PipelineTimes`: how long the stages of a pipeline worked, and how long they waited."""

from dataclasses import dataclass

import torch.distributed as dist

from torchrec_2dsp.dense.pipelined.engine import BusyTime
from torchrec_2dsp.dense.pipelined.groups import PipelineGroups


@dataclass(frozen=True)
class PipelineTimes:
    """What a batch took, as a mean over all batches and pipelines.

    Example:
        >>> from torchrec_2dsp.dense.pipelined.pipeline_times import PipelineTimes
        >>> times = PipelineTimes((3.0, 1.0), total_seconds=4.0, num_ranks=2)
        >>> times.bubble, times.imbalance
        (0.5, 1.5)
    """

    seconds_of_stage: tuple[float, ...]
    """How long each stage was worked on."""

    total_seconds: float
    """How long the schedule took."""

    num_ranks: int
    """How many ranks worked at the same time."""

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they waited."""
        if not self.total_seconds:
            return 0.0
        return 1.0 - sum(self.seconds_of_stage) / (self.total_seconds * self.num_ranks)

    @property
    def imbalance(self) -> float:
        """How many times the mean stage the slowest one took; 1 where cuts are right."""
        mean = sum(self.seconds_of_stage) / len(self.seconds_of_stage)
        return max(self.seconds_of_stage) / mean if mean else 1.0


def gather_times(busy: BusyTime, num_stages: int, groups: PipelineGroups) -> PipelineTimes:
    """The times of all ranks.

    Collectives:
        An all-gather of objects over all ranks.
    """
    gathered: list[BusyTime] = [busy] * dist.get_world_size(groups.everyone)
    dist.all_gather_object(gathered, busy, group=groups.everyone)
    # All ranks of a stage count, those that compute it together as well.
    num_each = groups.mesh.dp * groups.mesh.tp
    seconds = [
        sum(times.seconds_of_stage.get(stage, 0.0) / max(1, times.num_steps) for times in gathered)
        / num_each
        for stage in range(num_stages)
    ]
    totals = [times.total_seconds / max(1, times.num_steps) for times in gathered]
    return PipelineTimes(tuple(seconds), sum(totals) / len(totals), groups.mesh.pp)
