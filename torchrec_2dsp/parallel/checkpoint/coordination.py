"""Coordinate the ranks of a checkpoint over gloo, and turn DCP's errors into typed ones."""

import errno
import re
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_2dsp.comms.groups import WorldGroups, own_group, world_group
from torchrec_2dsp.errors import CheckpointError


def coordination_group() -> dist.ProcessGroup:
    """Return a gloo group with all ranks, which keeps plans and names off the accelerators.

    Collectives:
        Group creation, once per world, unless the world itself uses gloo.
    """
    world = world_group()
    return world if _talks_gloo(world) else _shared_group("checkpoints")


def background_group() -> dist.ProcessGroup:
    """Return a gloo group with all ranks, used only by background saves.

    Collectives of two threads on one group could be issued in a different order on each rank.

    Collectives:
        Group creation, once per world.
    """
    return _shared_group("background_checkpoints")


def _shared_group(name: str) -> dist.ProcessGroup:
    """Return a gloo group with all ranks, created at first use."""
    world, shared = world_group(), WorldGroups.current().shared
    if name not in shared:
        accelerator = None if _talks_gloo(world) else torch.accelerator.current_accelerator()
        device = accelerator or torch.device("cpu")
        shared[name] = own_group(world, device, name, backend="gloo")
    group: dist.ProcessGroup = shared[name]
    return group


def _talks_gloo(world: dist.ProcessGroup) -> bool:
    return "gloo" in dist.get_backend_config(world)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors for a full disk, an exhausted quota, and a file above the size limit."""
_SOURCE = re.compile(r"\[\S*\.cc:\d+\] ")
"""A location in gloo's source, as its error messages give it."""


def run_dcp(action: Callable[[], object], failure: str) -> None:
    """Run DCP; raise its errors on all ranks, as a `CheckpointError` that begins by ``failure``."""
    try:
        action()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        if isinstance(cause, CheckpointError):
            raise CheckpointError(f"{cause} (found on rank {rank})") from error
        remedy = ""
        if isinstance(cause, OSError) and cause.errno in _NO_ROOM:
            remedy = "; make room there, and resume from an earlier checkpoint"
        raise CheckpointError(f"{failure} (rank {rank}: {cause!r}){remedy}") from error
    except (RuntimeError, ValueError) as error:
        # A collective between DCP's steps failed: a rank died, or its process group was destroyed.
        text = _SOURCE.sub("", str(error))
        raise CheckpointError(f"{failure} (the ranks have lost each other: {text})") from error
