"""`clip_together_`: gradients of layers that are on several ranks, scaled by one factor."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchrec_2dsp.dense.pipelined.groups import PipelineGroups
from torchrec_2dsp.dense.pipelined.held_layers import HeldLayers


@torch.no_grad()
def clip_together_(
    max_norm: float,
    others: Sequence[nn.Module],
    held: Sequence[HeldLayers],
    groups: PipelineGroups,
) -> float:
    """Scale all dense gradients in place so that their norm is at most ``max_norm``.

    Args:
        max_norm: the largest Euclidean norm of all of them together.
        others: modules that are sharded over all ranks.
        held: the layers of this rank.
        groups: of the pipeline.

    Returns:
        The norm before.

    Collectives:
        An all-reduce of 8 bytes over all ranks, waited for.
    """
    gradients = [
        param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        for part in others
        for param in part.parameters()
        if param.grad is not None
    ]
    square = torch.zeros((), dtype=torch.float64, device=groups.device)
    for gradient in gradients:
        square += gradient.double().square().sum()
    for layers in held:
        square += layers.square_norm()
        gradients += layers.gradients()
    dist.all_reduce(square, group=groups.everyone)
    norm = float(square.sqrt())
    if norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
    return norm
