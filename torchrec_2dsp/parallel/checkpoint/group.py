"""The process groups over which ranks coordinate a checkpoint."""

import weakref
from typing import cast

import torch
import torch.distributed as dist

from torchrec_2dsp._compat.c10d import timeout_of
from torchrec_2dsp.comms.mesh_groups import world_group

GLOO_GROUPS: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]"
"""The gloo group of each world that doesn't talk gloo itself."""
BACKGROUND_GROUPS: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]"
"""The group of each world's asynchronous saves."""
GLOO_GROUPS, BACKGROUND_GROUPS = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()


def coordination_group() -> dist.ProcessGroup:
    """All ranks over gloo, so that plans and names don't pass through the accelerators.

    Collectives:
        The creation of a group, once per world, if the world itself doesn't talk gloo.
    """
    world = world_group()
    if _talks_gloo(world):
        return world
    if world not in GLOO_GROUPS:
        GLOO_GROUPS[world] = _new_group(world)
    return GLOO_GROUPS[world]


def background_group() -> dist.ProcessGroup:
    """All ranks over gloo, used by nothing but saves that go on while the model trains.

    Collectives of two threads on one group could be issued in another order on each rank.

    Collectives:
        The creation of a group, once per world.
    """
    world = world_group()
    if world not in BACKGROUND_GROUPS:
        BACKGROUND_GROUPS[world] = _new_group(world)
    return BACKGROUND_GROUPS[world]


def _new_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    accelerator = None if _talks_gloo(world) else torch.accelerator.current_accelerator()
    timeout = timeout_of(world, accelerator.type if accelerator is not None else "cpu")
    group = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints")
    return cast(dist.ProcessGroup, group)


def _talks_gloo(world: dist.ProcessGroup) -> bool:
    return "gloo" in dist.get_backend_config(world)
