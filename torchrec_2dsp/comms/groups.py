"""The process groups that this package creates, and their release: nothing else creates any.

A group runs its collectives in order, a few at a time. Those that nobody waits for yet would delay
the ones that a step needs, and two threads could issue theirs in another order on each rank. A
group of their own prevents both.
"""

import atexit
import gc
from collections.abc import Hashable, Iterable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchrec_2dsp._compat.c10d import exists, forget_meshes, set_timeout, timeout_of
from torchrec_2dsp.comms.notice_board import NoticeBoard
from torchrec_2dsp.errors import MeshError


def world_group() -> dist.ProcessGroup:
    """Return the group of all ranks, or raise an error that says how to create it."""
    if not dist.is_initialized():
        raise MeshError(
            "torch.distributed is not initialised; call "
            "torch.distributed.init_process_group(...) first"
        )
    world = dist.group.WORLD
    assert world is not None
    return world


class WorldGroups:
    """The process groups that this package has created in one world, oldest first.

    The functions below create groups and add them here, so that one call can release them all.
    Neither the world nor a user's group is ever added.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world = world
        """All ranks."""
        self.shared: dict[Hashable, Any] = {}
        """Objects created once per world and shared, such as a mesh's groups."""
        self._groups: list[dist.ProcessGroup] = []

    @classmethod
    def current(cls) -> "WorldGroups":
        """Return the current world's groups."""
        world = world_group()
        _leave_in_order_at_exit()
        # The groups of a destroyed world were destroyed with it.
        if not _CURRENT or _CURRENT[0].world is not world:
            _CURRENT[:] = [cls(world)]
        return _CURRENT[0]

    def add(self, group: dist.ProcessGroup) -> None:
        """Take over a new group, unless it is the world or here already."""
        if group is not self.world and group not in self:
            self._groups.append(group)

    def __contains__(self, group: dist.ProcessGroup) -> bool:
        """Return whether a group was added and isn't destroyed yet, here or by the user."""
        return exists(group) and any(other is group for other in self._groups)

    def destroy(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Destroy the given groups that were added, newest first, without waiting for ranks."""
        destroyed_ids = {id(group) for group in groups if group in self}
        for group in reversed(self._groups):
            if id(group) in destroyed_ids:
                dist.destroy_process_group(group)
        self._groups = [group for group in self._groups if id(group) not in destroyed_ids]

    def forget(self) -> None:
        """Destroy all groups and forget shared objects, without waiting for other ranks."""
        self.shared.clear()
        self.destroy(self._groups)
        self._groups.clear()


_CURRENT: list[WorldGroups] = []
"""The current world's groups, if any."""


def release_groups() -> None:
    """Destroy all process groups that this package has created, on all ranks together.

    A program that trains one model after the other calls it between two of them, when the
    pipelines, the batches and the asynchronous saves of the first one are over. Models of this
    world can't be used afterwards. A group's threads end when nothing refers to it any more, so
    delete the model before.

    Example::

        for plan in plans:
            model = tdsp.ModelParallel2D(make_model(), plan=plan, sharders=sharders)
            train(model)
            del model
            tdsp.release_groups()

    Collectives:
        One barrier on the world. Ranks that leave while peers still use a gloo group abort at
        interpreter exit.
    """
    dist.barrier(world_group())
    WorldGroups.current().forget()
    forget_meshes()
    # Traced modules and saved states refer to each other. Until they are collected, they keep
    # tables, and the threads and files of groups. What a backward has kept goes in a second pass.
    gc.collect()
    gc.collect()


def leave_world() -> None:
    """Destroy the current world's groups, and the threads behind them.

    A gloo thread that still runs while the interpreter is torn down may abort the process. It runs
    as long as anything refers to its group.

    Collectives:
        One barrier on the world.
    """
    dist.barrier(world_group())
    NoticeBoard.close_all()
    dist.destroy_process_group()
    _CURRENT.clear()
    forget_meshes()
    gc.collect()


@cache
def _leave_in_order_at_exit() -> None:
    """Register, once, a clean-up for programs that don't destroy their process group."""
    atexit.register(_forget_groups)


def _forget_groups() -> None:
    """Destroy this package's groups, and none of the user's."""
    NoticeBoard.close_all()
    for groups in _CURRENT:
        groups.forget()
    _CURRENT.clear()


def own_group(
    group: dist.ProcessGroup, device: torch.device, name: str, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a group with the same ranks and timeout, for collectives beside all others.

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
    """Create a group for each set of ranks, and return this rank's.

    Each rank of the world is in exactly one set.

    Collectives:
        The creation of the groups, which all ranks of the world call.
    """
    group, _ = dist.new_subgroups_by_enumeration(
        [list(ranks) for ranks in sets], timeout=timeout, backend=backend, group_desc=name
    )
    return _added(cast(dist.ProcessGroup, group))


def own_mesh(ranks: torch.Tensor, device_type: str, axes: tuple[str, ...]) -> DeviceMesh:
    """Create a mesh of world ranks for torch and TorchRec, whose groups have the world's timeout.

    The group of an axis is that of the world, if it has all of its ranks.

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
