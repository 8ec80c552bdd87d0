"""The device of this rank, and the world of ranks on such devices."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.support.devices import on_gpus


def rank_device() -> torch.device:
    """Return this rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus() else torch.device("cpu")


def on_rank_device(model: nn.Module) -> nn.Module:
    """Move the model to this rank's device, except for parts on the meta device."""
    for part in model.children():
        if not any(param.is_meta for param in part.parameters()):
            part.to(rank_device())
    return model


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU, which another process can read."""
    return tensor.detach().to("cpu", copy=True)


def join_world(number: int, **settings: Any) -> None:
    """Initialize the process group of a rank, on the backend of its device."""
    if on_gpus():
        torch.cuda.set_device(number % torch.cuda.device_count())
        hook: Any = _move_batch
        register_module_forward_pre_hook(hook)
    dist.init_process_group("nccl" if on_gpus() else "gloo", **settings)


def _move_batch(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Move a sharded model's arguments to the rank's device, as a loop would."""
    # Not above: ranks on the CPU may do without TorchRec, which takes seconds to import.
    from torchrec.distributed.model_parallel import DistributedModelParallel

    if not isinstance(module, DistributedModelParallel):
        return args
    return tuple(arg.to(rank_device()) if hasattr(arg, "to") else arg for arg in args)
