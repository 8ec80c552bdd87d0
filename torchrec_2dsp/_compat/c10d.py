"""What torch.distributed knows and doesn't say in public."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

__all__ = ["timeout_of"]


def timeout_of(group: dist.ProcessGroup, device_type: str) -> timedelta:
    """How long a collective of ``group`` may take; new groups don't inherit it by themselves."""
    return _timeout(group._get_backend(torch.device(device_type)).options)


def _timeout(options: Backend.Options) -> timedelta:
    return options._timeout
