"""A process that runs cases one after another, each on ranks forked from it."""

import gc
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.fuzz.case import Case
from tests.fuzz.judge import Verdict, judge
from tests.fuzz.processes import run_ranks_of
from tests.support.ranks import PRELOADED
from tests.support.unwatched import leave_out_watchers

Plant = Callable[[], AbstractContextManager[object]]
"""Enters a fault into the code that ranks run; at module level, so that a worker can import it."""


class Worker:
    """The caller's side of such a process."""

    def __init__(self, plant: Plant = nullcontext) -> None:
        """
        Args:
            plant: a fault that the worker's cases have.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.connection, remote = context.Pipe()
        """Where verdicts come."""
        self.plant = plant
        """The fault that its cases have."""
        self._process = context.Process(target=serve, args=(remote, plant))
        self._process.start()
        remote.close()

    def ask(self, case: str, deadline_s: float) -> None:
        """Let it run a case; `answer` gives the verdict."""
        self.connection.send((case, deadline_s))

    def answer(self) -> Verdict:
        """The verdict on the case that was asked for last."""
        return self.connection.recv()

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self._process.join(20)
        self._process.kill()


def serve(connection: Connection, plant: Plant) -> None:
    """Answer each case with its verdict, until the caller leaves."""
    torch.set_num_threads(1)
    # What the imports have left needs no collection in each of the ranks.
    gc.freeze()
    gc.enable()
    leave_out_watchers()
    with plant():
        while True:
            try:
                line, deadline_s = connection.recv()
            except (EOFError, OSError):
                break
            case = Case.from_json(line)
            folder = Path(tempfile.mkdtemp(prefix="fuzz"))
            try:
                verdict = judge(case, run_ranks_of(case, folder, deadline_s))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            connection.send(verdict)
            sys.stdout.flush()
