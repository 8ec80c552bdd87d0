"""The device on which ranks compute: the CPU, or GPUs if TESTS_DEVICE is "cuda"."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


def on_gpus() -> bool:
    """Tell whether ranks compute on GPUs and communicate by NCCL."""
    return os.environ.get("TESTS_DEVICE", "cpu") == "cuda"


def ranks_per_host(wanted: int) -> int:
    """Return a pool's number of ranks per host: on GPUs, at most one for each GPU."""
    return min(wanted, torch.cuda.device_count()) if on_gpus() else wanted


KERNEL_ROUNDING = 2e-6 if on_gpus() else 0.0
"""The largest difference of runs that do the same. On CPUs they have the same bits. On GPUs threads
add in any order, and kernels with the same rule fuse products and sums in other ways: a few float32
roundings of weights below 1, and of losses below 10."""


def rounded(expected: Any) -> Any:
    """Wrap numbers to compare exactly on CPUs, and up to `KERNEL_ROUNDING` on GPUs."""
    return pytest.approx(expected, rel=KERNEL_ROUNDING, abs=KERNEL_ROUNDING)


def are_equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether tensors are equal: bitwise on CPUs, up to `KERNEL_ROUNDING` on GPUs."""
    is_alike = actual.shape == expected.shape and actual.dtype == expected.dtype
    return is_alike and torch.allclose(actual, expected, KERNEL_ROUNDING, KERNEL_ROUNDING)


def cpu_only(reason: str) -> pytest.MarkDecorator:
    """Skip a test on GPUs, for this reason."""
    return pytest.mark.skipif(on_gpus(), reason=reason)


def device_env(rank: int, *, is_measured: bool = False) -> dict[str, str]:
    """Return the environment variables that a rank's process needs for its device.

    NCCL refuses two ranks on one host and GPU. Ranks that claim to be on separate hosts may
    share a GPU, and communicate through sockets. NCCL's monitor would report a failure while
    ranks rest between two tests. Unless speed is measured, groups are quick to create.
    """
    if not on_gpus():
        return {}
    return ({} if is_measured else _QUICK_GROUPS) | {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        # Else its watchdog aborts a process whose peer has gone, before it can report why.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    }


_QUICK_GROUPS = {
    # A test creates groups by the dozen: each gets one channel with small buffers,
    "NCCL_MAX_CTAS": "1",
    "NCCL_BUFFSIZE": str(2**20),
    # memory from cudaMalloc, and looks for nothing but sockets.
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET_PLUGIN": "none",
    # This service would query ranks that rest between two tests.
    "NCCL_RAS_ENABLE": "0",
    # Errors only, or the end of a job's output shows nothing but logs.
    "TORCH_LOGS": "-all",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


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
    """Initialize a rank's process group, on its device's backend."""
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
