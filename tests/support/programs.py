"""Programs on several ranks, started as torchrun starts them but without the imports.

The ranks are forked from the process that also has the imports for rank pools. They end without
the interpreter's destructors: a complete interpreter exit is tested under torchrun.
"""

import gc
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.support.rank_worker import REPOSITORY, die_with_parent
from tests.support.ranks import PRELOADED
from tests.support.slices import patient

_GRACE_S = 10.0
"""The time that the other ranks may go on after one failed: torchrun stops them as well."""


def python(
    *arguments: str | Path,
    cwd: Path = REPOSITORY,
    timeout_s: float = 200,
    env: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run this interpreter with one thread and the repository on its path."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=patient(timeout_s),
        check=False,
    )


def torchrun(
    module: str, *arguments: str, ranks: int = 2, timeout_s: float = 200, columns: int = 80
) -> "subprocess.CompletedProcess[str]":
    """Run ``torchrun -m module`` as a user does."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return python(
        *launcher, "-m", module, *arguments, timeout_s=timeout_s, env={"COLUMNS": str(columns)}
    )


def forked(
    module: str,
    *arguments: str,
    ranks: int = 2,
    timeout_s: float = 200,
    columns: int = 80,
    grace_s: float = _GRACE_S,
    num_stopped: int = 0,
) -> "subprocess.CompletedProcess[str]":
    """Run a program on forked ranks, without torchrun.

    The exit code is the first nonzero one from any rank. Other ranks may then go on for
    ``grace_s`` seconds. The last ``num_stopped`` aren't waited for, but killed.
    """
    import torch.distributed as dist

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = dict(os.environ) | {
        "COLUMNS": str(columns),
        "GLOO_SOCKET_IFNAME": "lo",
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
    }
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder, "stdout"), Path(folder, "stderr")
        processes = []
        for rank in range(ranks):
            rank_env = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # Not daemons: a benchmark has child processes.
            processes.append(
                context.Process(target=_run, args=(module, arguments, rank_env, outputs))
            )
        try:
            for process in processes:
                process.start()
            exit_code = _first_failure(processes, patient(timeout_s), grace_s, num_stopped)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        reports = [path.read_text() if path.exists() else "" for path in outputs]
    return subprocess.CompletedProcess([module, *arguments], exit_code, *reports)


def _first_failure(
    processes: list[ForkServerProcess], timeout_s: float, grace_s: float, num_stopped: int
) -> int:
    """Return the first nonzero exit code, or 0 if no process fails."""
    deadline = time.monotonic() + timeout_s
    failure = 0
    while True:
        running = [process for process in processes if process.exitcode is None]
        if len(running) <= num_stopped:
            break
        left = deadline - time.monotonic()
        if left <= 0:
            return failure or -signal.SIGKILL
        multiprocessing.connection.wait([process.sentinel for process in running], left)
        codes = [process.exitcode for process in processes if process.exitcode]
        if codes and not failure:
            failure = codes[0]
            deadline = min(deadline, time.monotonic() + grace_s)
    return failure or next((code for process in processes if (code := process.exitcode)), 0)


def _run(
    module: str, arguments: tuple[str, ...], env: dict[str, str], outputs: tuple[Path, Path]
) -> None:
    """Run the program as one rank's process."""
    import torch

    # A collection would touch all imported objects, and so copy their pages.
    gc.freeze()
    gc.enable()
    die_with_parent()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(REPOSITORY)
    torch.set_num_threads(1)
    for number, path in enumerate(outputs, 1):
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
