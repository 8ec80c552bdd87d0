"""What torch.distributed knows and doesn't say in public."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d as _c10d

__all__ = ["own_connection", "set_timeout", "store_of_world", "timeout_of"]


def timeout_of(group: dist.ProcessGroup, device_type: str) -> timedelta:
    """How long a collective of ``group`` may take; new groups don't inherit it by themselves."""
    return _timeout(group._get_backend(torch.device(device_type)).options)


def _timeout(options: Backend.Options) -> timedelta:
    return options._timeout


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let collectives of a group that others have made take so long, and no longer."""
    # Public since torch 2.14, where the private name warns.
    setter = getattr(dist, "set_timeout", None) or _c10d._set_pg_timeout
    setter(timeout, group)


def store_of_world() -> dist.Store:
    """The store through which the ranks of the world have found each other."""
    return _c10d._get_default_store()


def own_connection(store: dist.Store) -> dist.Store:
    """The same store, over another connection, which doesn't wait for what the first one does."""
    clone: dist.Store = store.clone()  # type: ignore[attr-defined]
    return clone
