"""The process groups over which ranks talk about a checkpoint."""

import weakref
from typing import Any

import torch.distributed as dist

from torchrec_2dsp.mesh.groups import world_group

GLOO_GROUPS: "weakref.WeakKeyDictionary[dist.ProcessGroup, Any]" = weakref.WeakKeyDictionary()
"""The groups of worlds that don't talk gloo themselves."""


def coordination_group() -> dist.ProcessGroup:
    """All ranks over gloo, so that plans and names don't pass through the accelerators.

    Collectives:
        The making of a group, once per world, where the world itself doesn't talk gloo.
    """
    world = world_group()
    if "gloo" in dist.get_backend_config(world):
        return world
    if world not in GLOO_GROUPS:
        GLOO_GROUPS[world] = dist.new_group(backend="gloo")
    return GLOO_GROUPS[world]
