"""Processes that run cases, each on freshly forked ranks, so that no state outlives it.

A worker must have imported everything and started no threads, so it never trains by itself.
"""

import contextlib
import ctypes
import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

import torchrec_2dsp as tdsp
from tests.fuzz.case import Case
from tests.fuzz.judge import Verdict, judge
from tests.fuzz.run import run_case
from tests.fuzz.seen import RankReport
from tests.support.devices import device_env, join_world
from tests.support.rank_worker import leave_out_watchers
from tests.support.ranks import PRELOADED

GRACE_S = 15.0
"""The time that the other ranks may go on after one has failed."""
_STACKS_S, _LAST_S = 2.0, 1.0
_DIE_WITH_PARENT = 1
"""Linux's ``PR_SET_PDEATHSIG``."""


@dataclass
class _Child:
    rank: int
    process: int
    answers: int
    """The end of the pipe to read."""
    received: bytes = b""


def run_ranks_of(case: Case, folder: Path, deadline_s: float) -> list[RankReport]:
    """Run a case on new ranks, which write to an empty folder; return their reports by rank."""
    children = [_fork(rank, case, folder) for rank in range(case.world_size)]
    try:
        reports = _collect(children, folder, deadline_s)
    finally:
        for child in children:
            os.close(child.answers)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.process, 0)
    return [reports[child.rank] for child in children]


def _fork(rank: int, case: Case, folder: Path) -> _Child:
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        _be_rank(rank, case, folder, writing)
    os.close(writing)
    return _Child(rank, process, reading)


def _collect(children: list[_Child], folder: Path, deadline_s: float) -> dict[int, RankReport]:
    reports: dict[int, RankReport] = {}
    waiting = {child.answers: child for child in children}
    deadline = time.monotonic() + deadline_s
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select(list(waiting), [], [], left)
        for answers in ready:
            child = waiting[answers]
            data = os.read(answers, 1 << 20)
            child.received += data
            if data:
                continue
            del waiting[answers]
            reports[child.rank] = _report(child, folder)
            if reports[child.rank].outcome != "returned":
                deadline = min(deadline, time.monotonic() + GRACE_S)
    for child in waiting.values():
        os.kill(child.process, signal.SIGUSR1)
    if waiting:
        time.sleep(_STACKS_S)
    for child in waiting.values():
        failed = any(report.outcome != "returned" for report in reports.values())
        message = "went on after another rank failed" if failed else f"still ran at {deadline_s} s"
        trace = _written(folder, child.rank)
        reports[child.rank] = RankReport("hung", message=message, trace=trace)
    return reports


def _report(child: _Child, folder: Path) -> RankReport:
    if child.received:
        return pickle.loads(child.received)
    _, status = os.waitpid(child.process, 0)
    message = f"exit code {os.waitstatus_to_exitcode(status)}"
    return RankReport("died", message=message, trace=_written(folder, child.rank))


def _written(folder: Path, rank: int) -> str:
    return (folder / f"rank{rank}.log").read_text(errors="replace")[-6_000:]


def _be_rank(rank: int, case: Case, folder: Path, writing: int) -> NoReturn:
    """Run as a rank's fork; never return."""
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        report = _answer(rank, case, folder)
        with os.fdopen(writing, "wb") as answers:
            answers.write(pickle.dumps(report))
        if report.outcome == "returned":
            # The parent ends all ranks together, so that none takes a connection away.
            while True:
                signal.pause()
        # As the end of a program that fails; the others may have the same error a little later.
        time.sleep(_LAST_S)
    finally:
        os._exit(70)


def _answer(rank: int, case: Case, folder: Path) -> RankReport:
    log = (folder / f"rank{rank}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(case.world_size),
        "LOCAL_RANK": str(rank % case.local_world_size),
        "LOCAL_WORLD_SIZE": str(case.local_world_size),
        "GLOO_SOCKET_IFNAME": "lo",
    } | device_env(rank)
    try:
        store = dist.FileStore(str(folder / "store"), case.world_size)
        join_world(
            rank, store=store, rank=rank, world_size=case.world_size, timeout=timedelta(minutes=10)
        )
        return RankReport("returned", run_case(rank, case.world_size, case, folder))
    except Exception as error:  # Whatever it is, it is reported.
        return RankReport(
            "raised",
            error=type(error).__name__,
            is_ours=isinstance(error, tdsp.TwoDError),
            message=str(error),
            trace=traceback.format_exc(),
        )
    finally:
        sys.stdout.flush()


Plant = Callable[[], AbstractContextManager[object]]
"""Enters a fault into the code that ranks run; at module level, so that a worker can import it."""


class Worker:
    """The caller's handle on a process that runs cases."""

    def __init__(self, plant: Plant = nullcontext) -> None:
        """Start the process, which plants a fault in each case."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.connection, remote = context.Pipe()
        """The connection that verdicts come through."""
        self.plant = plant
        """The fault that its cases have."""
        self._process = context.Process(target=serve, args=(remote, plant))
        self._process.start()
        remote.close()

    def ask(self, case: Case, deadline_s: float) -> None:
        """Send a case to the process; `answer` returns the verdict."""
        self.connection.send((case, deadline_s))

    def answer(self) -> Verdict:
        """Return the verdict on the last case sent."""
        return self.connection.recv()

    def judged(self, case: Case, deadline_s: float) -> Verdict:
        """Run a case; return the verdict."""
        self.ask(case, deadline_s)
        return self.answer()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()
        self._process.join(20)
        self._process.kill()


def serve(connection: Connection, plant: Plant) -> None:
    """Answer each case with its verdict, until the caller leaves."""
    torch.set_num_threads(1)
    # The imports' leftovers needn't be collected again in each rank.
    gc.freeze()
    gc.enable()
    leave_out_watchers()
    with plant():
        while True:
            try:
                case, deadline_s = connection.recv()
            except (EOFError, OSError):
                break
            folder = Path(tempfile.mkdtemp(prefix="fuzz"))
            try:
                verdict = judge(case, run_ranks_of(case, folder, deadline_s))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            connection.send(verdict)
            sys.stdout.flush()
