"""Join and leave the world that torchrun started; name what it runs on."""

import ctypes
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.groups import leave_world
from torchrec_2dsp.errors import ConfigError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""The parameters for glibc's ``mallopt``."""
_LARGEST_KEPT_BYTES = 32 * 2**20
"""The largest value that glibc accepts."""
DEFAULT_TIMEOUT_S = 1800.0
"""The time after which waiting for another rank fails; gloo's default."""
_RECORDED_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec-2dsp", "numpy")
_SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def recorded_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    versions = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        # Only one of the two FBGEMM packages is installed.
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def check_launched(command: str) -> None:
    """Raise `ConfigError` unless torchrun started this process."""
    missing = [name for name in _SET_BY_TORCHRUN if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{missing[0]} is not set, so torchrun didn't start this process, and there are no "
            f"other ranks; start with: torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp "
            f"{command} ..."
        )


@contextmanager
def launched_world(
    device: str, command: str, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Iterator[int]:
    """Join the ranks that torchrun started, and yield this rank.

    After success, ranks leave the world together. After an error a rank doesn't wait: waiting for
    failed peers would hide the error.

    Args:
        device: the compute device: ``"cpu"`` or ``"cuda"``.
        command: the program's name, for errors.
        timeout_s: the number of seconds a rank may keep the others waiting.

    Collectives:
        Creates the world's process group; a barrier at the end.
    """
    check_launched(command)
    keep_freed_memory()
    if device == "cuda":
        take_gpu(dist.get_node_local_rank(fallback_rank=0))
        # A rank whose peer is gone can report it only if NCCL's watchdog doesn't end the process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    yield dist.get_rank()
    leave_world()


def take_gpu(local_rank: int) -> None:
    """Assign a rank of this host its own GPU."""
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"device='cuda' needs a GPU for each of a host's ranks, and torch sees "
            f"{torch.cuda.device_count()}; use device='cpu' or fewer ranks, or install the CUDA "
            "build"
        )
    torch.cuda.set_device(local_rank)


def launched_world_or_one() -> AbstractContextManager[int]:
    """Join the ranks that torchrun started, or run as the only rank; yield this rank.

    Collectives:
        Those in `launched_world`, under torchrun.
    """
    return launched_world("cpu", "") if _is_launched() else _world_of_one()


def only_rank(command: str) -> AbstractContextManager[int]:
    """Run a single-rank command.

    Raises:
        ConfigError: torchrun started this process, perhaps with others.
    """
    if _is_launched():
        raise ConfigError(
            f"{command} is for a single process, and torchrun started this one; start it with: "
            f"torchrec-2dsp {command} ..."
        )
    return _world_of_one()


def _is_launched() -> bool:
    return all(name in os.environ for name in _SET_BY_TORCHRUN)


@contextmanager
def _world_of_one() -> Iterator[int]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield 0
    finally:
        leave_world()


def keep_freed_memory() -> None:
    """Keep the memory that tensors free for the next step, in this process and its forks.

    By default, glibc returns much of it to the system, and faults it in again page by page in every
    step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


_NO_NEWS = ("[Connection]", "Sharding spec not found for ")


def quiet_upstream() -> None:
    """Suppress harmless messages that torch and torchrec print on every rank."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|torchrec)\..*")
    warnings.filterwarnings("ignore", r"`broadcast_buffers` is deprecated", FutureWarning)
    # FBGEMM's lookup for data-parallel tables passes its gradient along differently.
    warnings.filterwarnings("ignore", r"fbgemm::dense_embedding_codegen", UserWarning)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    logging.getLogger("torchrec.distributed.utils").addFilter(_is_news)
    logging.getLogger("torchrec.distributed.comm").addFilter(_is_news)
    # TorchRec's planner tells the root logger about each data-parallel table.
    logging.getLogger().addFilter(_is_news)


@contextmanager
def silenced() -> Iterator[None]:
    """Suppress C++'s error output, such as the profiler's lines on every rank."""
    sys.stderr.flush()
    saved_stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)


def _is_news(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "caching params will be ignored" not in message and not message.startswith(_NO_NEWS)
