"""A rank's process; it answers the parent's messages until it is asked to leave."""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent dies."""

REPOSITORY = Path(__file__).parents[2]
# The parent's deadline shows all ranks' stacks: it should come before gloo's.
GLOO_TIMEOUT = timedelta(minutes=15)


def serve(rank: int, env: dict[str, str], connection: Connection, stacks: Path) -> None:
    """Answer the set-up and then every pickled ``(fn, args)`` with ``(kind, value)``."""
    os.environ.update(env)
    # A collection would touch all the server's imported objects, and so copy their pages.
    gc.freeze()
    gc.enable()
    die_with_parent()
    with stacks.open("w") as stacks_file:
        faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
        import torch
        import torch.distributed as dist

        _answer(connection, _set_up)
        while payload := _receive(connection):
            torch.manual_seed(0)
            _answer(connection, lambda: _call(payload, rank, int(env["WORLD_SIZE"])))
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)


def die_with_parent() -> None:
    """Let this rank end if the tests are killed, whether it is busy or resting."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    """End with the tests, which the server that forked this rank may outlive for a while."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def sum_over_ranks(rank: int, world_size: int) -> int:
    """Count the ranks by an all-reduce, which shows that they can communicate."""
    import torch
    import torch.distributed as dist

    from tests.support.devices import rank_device

    ones = torch.ones(1, device=rank_device())
    dist.all_reduce(ones)
    return int(ones)


def _set_up() -> None:
    import torch
    from _pytest.config import apply_warning_filters

    from tests.support.devices import join_world, on_gpus

    torch.set_num_threads(1)
    leave_out_watchers()
    if on_gpus():  # There many warnings are unavoidable, and bury a job's errors.
        warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu)(\.|$)")
    else:
        apply_warning_filters(_warning_filters(), [])
    join_world(int(os.environ["RANK"]), timeout=GLOO_TIMEOUT)


def _call(payload: bytes, rank: int, world_size: int) -> Any:
    fn, args = pickle.loads(payload)
    return fn(rank, world_size, *args)


def _receive(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        return b""  # The parent is gone.


def _answer(connection: Connection, action: Callable[[], Any]) -> None:
    # Plain pickle, because multiprocessing's own would move tensors to shared memory.
    try:
        reply = pickle.dumps(("returned", action()))
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        lines = traceback.format_exception(type(error), error, trace)
        reply = pickle.dumps(("raised", "".join(lines)))
    connection.send_bytes(reply)


def _warning_filters() -> list[str]:
    """Return pytest's warning filters, so that ranks treat warnings the same way."""
    pyproject = REPOSITORY / "pyproject.toml"
    if not pyproject.exists():
        return []
    options = tomllib.loads(pyproject.read_text()).get("tool", {}).get("pytest", {})
    return list(options.get("ini_options", options).get("filterwarnings", []))


def leave_out_watchers() -> None:
    """Stop TorchRec from logging calls, and torch from marking spans for a profiler.

    Together they take a fifth of a training step.
    """
    from torch.autograd.profiler import record_function

    if torchrec_logger := sys.modules.get("torchrec.distributed.logger"):
        # It prints every module on construction.
        vars(torchrec_logger)["_get_input_from_func"] = lambda *args, **kwargs: ""
    unmarked: Any = record_function
    unmarked.marks = (unmarked.__enter__, unmarked.__exit__)
    unmarked.__enter__ = lambda self: self
    unmarked.__exit__ = lambda self, *error: None


@contextmanager
def marking_spans() -> Iterator[None]:
    """Yield a context in which torch marks spans again, after `leave_out_watchers`."""
    from torch.autograd.profiler import record_function

    marked: Any = record_function
    unmarked = (marked.__enter__, marked.__exit__)
    marked.__enter__, marked.__exit__ = marked.marks
    try:
        yield
    finally:
        marked.__enter__, marked.__exit__ = unmarked
