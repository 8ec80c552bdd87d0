"""Which device ranks compute on: the CPU, or GPUs where the variable TESTS_DEVICE is "cuda"."""

import os


def on_gpus() -> bool:
    """Whether ranks compute on GPUs, and talk NCCL."""
    return os.environ.get("TESTS_DEVICE", "cpu") == "cuda"


def ranks_per_host(wanted: int) -> int:
    """How many ranks of a pool count as those of one host: on GPUs, as many as there are GPUs."""
    if not on_gpus():
        return wanted
    import torch

    return min(wanted, torch.cuda.device_count())


def device_env(rank: int) -> dict[str, str]:
    """What the process of a rank must be told about its device.

    NCCL refuses two ranks of a host on one GPU. Ranks that say they are on hosts of their own may
    share one, and talk to each other through sockets. Its monitor would take it for a failure
    that ranks rest between two tests.
    """
    if not on_gpus():
        return {}
    return {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
