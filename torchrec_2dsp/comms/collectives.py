"""Collectives that torch doesn't offer on every backend."""

import torch
import torch.distributed as dist


def all_gather_ragged(
    local: torch.Tensor, sizes: list[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """The tensors of all ranks of ``group``, which may differ in their first dimension.

    Args:
        local: this rank's tensor.
        sizes: the first dimension of every rank's tensor, known to all.
        group: the ranks that take part.

    Collectives:
        One all-to-all on ``group`` (gloo has no all-gather of different sizes); each rank sends
        its tensor to every rank.
    """
    world_size = len(sizes)
    if world_size == 1:
        return [local]
    gathered = local.new_empty((sum(sizes), *local.shape[1:]))
    dist.all_to_all_single(
        gathered,
        local.repeat(world_size, *([1] * (local.dim() - 1))),
        output_split_sizes=sizes,
        input_split_sizes=[local.shape[0]] * world_size,
        group=group,
    )
    return list(gathered.split(sizes))
