"""The groups of ranks that are measured: of a host, of one on each host, and of all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from torchrec_2dsp.comms.full_duplex import full_duplex_backend

Groups = list[list[int]]
"""World ranks, group by group."""


def ranks_by_host(world_size: int, local_world_size: int) -> Groups:
    """The ranks of each host."""
    return [
        list(range(first, first + local_world_size))
        for first in range(0, world_size, local_world_size)
    ]


def ranks_by_place(world_size: int, local_world_size: int) -> Groups:
    """The ranks that have the same place on their hosts."""
    hosts = ranks_by_host(world_size, local_world_size)
    return [list(ranks) for ranks in zip(*hosts, strict=True)]


@contextmanager
def subgroup(
    groups: Sequence[Sequence[int]], *, is_full_duplex: bool
) -> Iterator[dist.ProcessGroup]:
    """This rank's group among some that are all made, and are destroyed at the end.

    Collectives:
        Makes the process groups.
    """
    mine, made = dist.new_subgroups_by_enumeration(
        [list(ranks) for ranks in groups],
        backend=full_duplex_backend() if is_full_duplex else None,
        group_desc="measured",
    )
    assert isinstance(mine, dist.ProcessGroup)
    try:
        yield mine
    finally:
        for group in reversed(made):
            dist.destroy_process_group(group)
