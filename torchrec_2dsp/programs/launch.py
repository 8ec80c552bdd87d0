"""The world that torchrun started: joined and left in order."""

import ctypes
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.groups import leave_world
from torchrec_2dsp.errors import ConfigError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""The parameters of glibc's ``mallopt`` that are set."""
_LARGEST_KEPT_BYTES = 32 * 2**20
"""The most that glibc can keep."""
DEFAULT_TIMEOUT_S = 1800.0
"""How long a rank may keep the others waiting, which is gloo's default, too."""
_SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    """Join the ranks that torchrun started; the value is this rank.

    The world is left in order after a success. After an error it is left as it is: a rank that
    waited here for peers that failed would hide the error.

    Args:
        device: where ranks compute: ``"cpu"`` or ``"cuda"``.
        command: the program's name, for its errors.
        timeout_s: how many seconds a rank may keep the others waiting.

    Collectives:
        Makes the world's process group; a barrier at the end.
    """
    check_launched(command)
    keep_freed_memory()
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    yield dist.get_rank()
    leave_world()


@contextmanager
def launched_world_or_one() -> Iterator[int]:
    """Join the ranks that torchrun started, or be the only rank; the value is this rank.

    Collectives:
        Those of `launched_world`, under torchrun.
    """
    if all(name in os.environ for name in _SET_BY_TORCHRUN):
        with launched_world("cpu", "") as rank:
            yield rank
        return
    with _world_of_one():
        yield 0


@contextmanager
def only_rank(command: str) -> Iterator[None]:
    """Be the only rank of a command that isn't for several.

    Raises:
        ConfigError: torchrun started this process, perhaps with others.
    """
    if all(name in os.environ for name in _SET_BY_TORCHRUN):
        raise ConfigError(
            f"{command} is for a single process, and torchrun started this one; start it with: "
            f"torchrec-2dsp {command} ..."
        )
    with _world_of_one():
        yield


@contextmanager
def _world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        leave_world()


def keep_freed_memory() -> None:
    """Let this process and its forks keep what tensors free, for those of the next step.

    Left to itself, glibc gives much of it back to the system, and gets it again page by page in
    every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


_NO_NEWS = ("[Connection]", "Sharding spec not found for ")


def quiet_upstream() -> None:
    """Leave out what torch and torchrec say on every rank though all is as it should be."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|torchrec)\..*")
    warnings.filterwarnings("ignore", r"`broadcast_buffers` is deprecated", FutureWarning)
    # FBGEMM's lookup for data-parallel tables brings its gradient along in another way.
    warnings.filterwarnings("ignore", r"fbgemm::dense_embedding_codegen", UserWarning)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    logging.getLogger("torchrec.distributed.utils").addFilter(_is_news)
    logging.getLogger("torchrec.distributed.comm").addFilter(_is_news)
    # TorchRec's planner tells the root logger of each table that is to be data-parallel.
    logging.getLogger().addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "caching params will be ignored" not in message and not message.startswith(_NO_NEWS)
