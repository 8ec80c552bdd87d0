"""What torch.distributed knows and doesn't say in public."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d as _c10d

__all__ = ["set_timeout", "store_of_world", "timeout_of"]


def timeout_of(group: dist.ProcessGroup, device_type: str) -> timedelta:
    """How long a collective of ``group`` may take; new groups don't inherit it by themselves."""
    return _timeout(group._get_backend(torch.device(device_type)).options)


def _timeout(options: Backend.Options) -> timedelta:
    return options._timeout


def set_timeout(group: dist.ProcessGroup, device_type: str, timeout: timedelta) -> None:
    """Let collectives of a group that others have made take so long, and no longer."""
    group._get_backend(torch.device(device_type))._set_default_timeout(timeout)


def store_of_world() -> dist.Store:
    """The store through which the ranks of the world have found each other."""
    return _c10d._get_default_store()
