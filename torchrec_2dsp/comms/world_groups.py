"""`WorldGroups`: the process groups that this package has created, and how they are released."""

import atexit
import gc
from collections.abc import Hashable, Iterable
from functools import cache
from typing import Any

import torch.distributed as dist

from torchrec_2dsp._compat.c10d import exists
from torchrec_2dsp._compat.dtensor import forget_meshes
from torchrec_2dsp.comms.notice_board import NoticeBoard
from torchrec_2dsp.errors import MeshError


def world_group() -> dist.ProcessGroup:
    """The group of all ranks; without one, an error says how to create it."""
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

    `own_group.py` creates them and adds them here, so that one call can release them all. A group
    of the world itself, or of the user, is never added.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        """
        Args:
            world: all ranks.
        """
        self.world = world
        """All ranks."""
        self.shared: dict[Hashable, Any] = {}
        """What is created once in a world and used by several, such as the groups of a mesh."""
        self._groups: list[dist.ProcessGroup] = []

    @classmethod
    def current(cls) -> "WorldGroups":
        """The groups of the current world."""
        world = world_group()
        _leave_in_order_at_exit()
        # The groups of a destroyed world were destroyed with it.
        if not _CURRENT or _CURRENT[0].world is not world:
            _CURRENT[:] = [cls(world)]
        return _CURRENT[0]

    def add(self, group: dist.ProcessGroup) -> None:
        """Take over a new group; one that is here already, or is the world, changes nothing."""
        if group is not self.world and group not in self:
            self._groups.append(group)

    def __contains__(self, group: dist.ProcessGroup) -> bool:
        """Whether a group was added and isn't destroyed yet, here or by the user."""
        return exists(group) and any(other is group for other in self._groups)

    def destroy(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Destroy those of some groups that were added, newest first, without waiting for ranks."""
        destroyed_ids = {id(group) for group in groups if group in self}
        for group in reversed(self._groups):
            if id(group) in destroyed_ids:
                dist.destroy_process_group(group)
        self._groups = [group for group in self._groups if id(group) not in destroyed_ids]

    def forget(self) -> None:
        """Destroy all groups, and forget what is shared, without waiting for other ranks."""
        self.shared.clear()
        self.destroy(self._groups)
        self._groups.clear()


_CURRENT: list[WorldGroups] = []
"""The groups of the current world, once there are some."""


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
    """Destroy all groups of the current world, and the threads behind them.

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
    """Prepare, once, for programs that end without `destroy_process_group`."""
    atexit.register(_forget_groups)


def _forget_groups() -> None:
    """Destroy the groups that this package created, and none of the user's."""
    NoticeBoard.close_all()
    for groups in _CURRENT:
        groups.forget()
    _CURRENT.clear()
