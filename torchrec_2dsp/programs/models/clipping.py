"""`clip_before_steps`: an optimizer whose steps scale gradients down to a largest norm."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def clip_before_steps(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    """Let every step of an optimizer begin by clipping the gradients of all its parameters.

    Gradients that are sharded over ranks, as FSDP2's are, count with the norm of all shards.

    Args:
        optimizer: an optimizer of torch.
        max_norm: the largest Euclidean norm of all gradients together.

    Collectives:
        In each step of a fully sharded dense part, an all-reduce of one number over its ranks.
    """

    def clip(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        params = [param for group in stepped.param_groups for param in group["params"]]
        clip_(
            [gradient for param in params if (gradient := param.grad) is not None],
            max_norm,
        )

    optimizer.register_step_pre_hook(clip)


@torch.no_grad()
def clip_(gradients: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale gradients down to a largest norm, in place, and give the norm that they had.

    Args:
        gradients: plain tensors, equal on all ranks, and tensors that are sharded over ranks.
        max_norm: the largest Euclidean norm of all of them together.

    Collectives:
        If some are sharded, an all-reduce of one number over the ranks of their mesh.
    """
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    norm = torch.nn.utils.get_total_norm(whole)
    if sharded:
        norm_of_shards: Any = torch.nn.utils.get_total_norm(sharded)
        norm = torch.hypot(norm, norm_of_shards.full_tensor().to(norm.device))
    # As torch does it: the small number keeps a gradient of zero as it is.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in [*whole, *(part.to_local() for part in sharded)]:
        gradient.mul_(factor)
    return norm
