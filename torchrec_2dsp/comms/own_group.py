"""New process groups, which `release_groups` destroys: the one place that creates some.

A group runs its collectives in their order, a few at a time. Those that nobody waits for yet would
hold up the ones that a step needs, and those of two threads could be issued in another order on
each rank. In a group of their own they do neither.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchrec_2dsp._compat.c10d import set_timeout, timeout_of
from torchrec_2dsp.comms.world_groups import WorldGroups


def own_group(
    group: dist.ProcessGroup, device: torch.device, name: str, backend: str | None = None
) -> dist.ProcessGroup:
    """The ranks of a group once more, with the same timeout, for collectives beside all others.

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
    return _added(cast(dist.ProcessGroup, created))


def own_subgroup(
    sets: Sequence[Sequence[int]], timeout: timedelta, name: str, backend: str | None = None
) -> dist.ProcessGroup:
    """The group of that set of ranks to which this rank belongs.

    Args:
        sets: ranks of the world, each in exactly one set; a group is created for each set.
        timeout: how long a collective may take.
        name: what the groups are for, in logs.
        backend: such as "gloo"; without it, that of the world.

    Collectives:
        The creation of the groups, which all ranks of the world call.
    """
    group, _ = dist.new_subgroups_by_enumeration(
        [list(ranks) for ranks in sets], timeout=timeout, backend=backend, group_desc=name
    )
    return _added(cast(dist.ProcessGroup, group))


def own_mesh(ranks: torch.Tensor, device_type: str, axes: tuple[str, ...]) -> DeviceMesh:
    """A mesh of ranks for torch and TorchRec, whose groups have the timeout of the world.

    The group of an axis is that of the world, if it has all of its ranks.

    Args:
        ranks: of the world, with one dimension for each axis.
        device_type: such as "cpu".
        axes: their names.

    Collectives:
        The creation of the groups, which all ranks of the world call.
    """
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=axes)
    timeout = timeout_of(WorldGroups.current().world, device_type)
    for group in mesh.get_all_groups():
        set_timeout(group, timeout)
        _added(group)
    return mesh


def _added(group: dist.ProcessGroup) -> dist.ProcessGroup:
    WorldGroups.current().add(group)
    return group
