"""The process groups over which ranks coordinate a checkpoint."""

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.groups import WorldGroups, own_group, world_group


def coordination_group() -> dist.ProcessGroup:
    """All ranks over gloo, so that plans and names don't pass through the accelerators.

    Collectives:
        The creation of a group, once per world, if the world itself doesn't talk gloo.
    """
    world = world_group()
    return world if _talks_gloo(world) else _shared_group("checkpoints")


def background_group() -> dist.ProcessGroup:
    """All ranks over gloo, used by nothing but saves that go on while the model trains.

    Collectives of two threads on one group could be issued in another order on each rank.

    Collectives:
        The creation of a group, once per world.
    """
    return _shared_group("background_checkpoints")


def _shared_group(name: str) -> dist.ProcessGroup:
    """All ranks over gloo, in a group that is created at its first use."""
    world, shared = world_group(), WorldGroups.current().shared
    if name not in shared:
        accelerator = None if _talks_gloo(world) else torch.accelerator.current_accelerator()
        device = accelerator or torch.device("cpu")
        shared[name] = own_group(world, device, name, backend="gloo")
    group: dist.ProcessGroup = shared[name]
    return group


def _talks_gloo(world: dist.ProcessGroup) -> bool:
    return "gloo" in dist.get_backend_config(world)
