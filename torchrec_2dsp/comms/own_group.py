"""`own_group`: the ranks of a group once more, for collectives that run beside all others."""

from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from torchrec_2dsp._compat.c10d import timeout_of


def own_group(
    group: dist.ProcessGroup, device: torch.device, name: str, backend: str | None = None
) -> dist.ProcessGroup:
    """A new group of the same ranks, with the same timeout.

    A group runs its collectives in their order, a few at a time. Those that nobody waits for yet
    would hold up the ones that a step needs, and those of two threads could be issued in another
    order on each rank. In a group of their own they do neither.

    Args:
        group: whose ranks all call this.
        device: what ``group`` works on.
        name: what the group is for, in logs.
        backend: such as "gloo"; without it, that of the world.

    Collectives:
        The creation of a group.
    """
    timeout: timedelta = timeout_of(group, device.type)
    ranks = dist.get_process_group_ranks(group)
    created = dist.new_group(
        ranks,
        timeout=timeout,
        backend=backend,
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        group_desc=name,
    )
    return cast(dist.ProcessGroup, created)
