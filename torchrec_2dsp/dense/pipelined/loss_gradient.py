"""`common_factors`: the one number by which the gradients of a pipeline's losses are multiplied."""

import torch
import torch.distributed as dist

from torchrec_2dsp.dense.pipelined.groups import PipelineGroups
from torchrec_2dsp.errors import UnsupportedError

_TOLERANCE = 1e-6
"""How far two factors may be apart, as a share: the gradient of a mean is rounded to float32."""


def common_factors(
    factors: torch.Tensor, groups: PipelineGroups, reduction: str
) -> tuple[float, float]:
    """The factor of this rank's samples, and that of its pipeline's first one.

    Args:
        factors: for each sample of this rank, the gradient of its loss, as a multiple of what the
            schedule has taken it for.
        groups: of the pipeline.
        reduction: what the schedule has taken it for, for errors.

    Raises:
        UnsupportedError: on all ranks, if the factors of a pipeline aren't one number.

    Collectives:
        An all-gather of 24 bytes over all ranks, waited for.
    """
    own = torch.zeros(3, dtype=torch.float64, device=groups.device)
    if factors.numel():
        own[:] = torch.stack((torch.ones_like(factors[0]), *factors.aminmax()))
    num_ranks = dist.get_world_size(groups.everyone)
    gathered = own.new_empty(num_ranks * 3)
    dist.all_gather_into_tensor(gathered, own, group=groups.everyone)
    of_rank = gathered.view(num_ranks, 3).tolist()
    pipeline_factors = {}
    for ranks in groups.mesh.pipelines():
        with_samples = [rank for rank in ranks if of_rank[rank][0]]
        for rank in with_samples:
            _check(of_rank[rank], rank, of_rank[with_samples[0]], with_samples[0], reduction)
        factor = of_rank[with_samples[0]][1] if with_samples else 0.0
        pipeline_factors.update(dict.fromkeys(ranks, factor))
    rank = dist.get_rank(groups.everyone)
    return of_rank[rank][1], pipeline_factors[rank]


def _check(
    own: list[float], rank: int, first: list[float], first_rank: int, reduction: str
) -> None:
    """Raise if the factors of a rank aren't those of the pipeline's first one."""
    reference = first[1]
    for factor in own[1:]:
        if not abs(factor - reference) <= _TOLERANCE * abs(reference):
            error = UnsupportedError(
                "the losses of a pipeline's samples don't count alike: relative to the "
                f"{reduction} of a rank's losses, one of rank {first_rank} counts {reference:g}, "
                f"one of rank {rank} {factor:g}. Train by that {reduction} times one number on all "
                "ranks, give PipelinedDense another reduction, or give weights of samples to the "
                "LayerStack's loss as a target"
            )
            error.is_on_all_ranks = True
            raise error
