"""Processes that run cases, each case on new ranks, so that nothing outlives it."""

import logging
import multiprocessing
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import torchrec_2dsp as tdsp
from tests.fuzz.case import Case
from tests.fuzz.judge import Verdict, judge
from tests.fuzz.run import run_case
from tests.fuzz.seen import RankReport, Seen
from tests.support.ranks import PRELOADED, RanksFailed, run_ranks

GRACE_S = 5.0
"""The time for which other ranks may go on after one has failed: its connections stay open."""
_RAISED = re.compile(r".*^Traceback \(most.*?^([\w.]+)(?:: (.*))?\Z", re.MULTILINE | re.DOTALL)
"""A rank's error and its text, at the end of the last traceback."""

Plant = Callable[[], AbstractContextManager[object]]
"""Enters a fault into the code that ranks run; at module level, so that a worker can import it."""


def run_ranks_of(case: Case, folder: Path, deadline_s: float, plant: Plant) -> list[RankReport]:
    """Run a case on new ranks; return their reports in rank order.

    Args:
        case: what to run.
        folder: an empty one, for checkpoints and what ranks write.
        deadline_s: how long the ranks may take.
        plant: a fault to plant in them.
    """
    try:
        seen = run_ranks(
            run_planted,
            case.world_size,
            *(plant, case, folder),
            local_world_size=case.local_world_size,
            timeout_s=deadline_s,
            grace_s=GRACE_S,
            start_method="forkserver",
        )
    except RanksFailed as failed:
        return [report_of(failed.reports[rank]) for rank in range(case.world_size)]
    return [RankReport("returned", of_rank) for of_rank in seen]


def run_planted(rank: int, world_size: int, plant: Plant, case: Case, folder: Path) -> Seen:
    """Run a case on a rank of its own."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(rank)
    with plant():
        return run_case(rank, world_size, case, folder)


def report_of(text: str) -> RankReport:
    """Return a rank's report from what its pool says of it."""
    end, _, trace = text.partition("\n")
    if end == "raised":
        raised = _RAISED.match(trace)
        assert raised is not None, text
        module, _, error = raised[1].rpartition(".")
        is_ours = module == tdsp.errors.__name__
        return RankReport(end, None, error, is_ours, (raised[2] or "").strip(), trace)
    if end.startswith("died"):
        return RankReport("died", message=end.removeprefix("died with "), trace=trace)
    if end.startswith(("returned", "exited")):
        return RankReport("returned")
    return RankReport("hung", message=end, trace=trace)


class Worker:
    """The caller's side of such a process."""

    def __init__(self, plant: Plant = nullcontext) -> None:
        """Start the process.

        Args:
            plant: a fault to plant in each case.
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

    def ask(self, case: Case, deadline_s: float) -> None:
        """Let it run a case; `answer` gives the verdict."""
        self.connection.send((case, deadline_s))

    def answer(self) -> Verdict:
        """Return the verdict on the case that was asked for last."""
        return self.connection.recv()

    def judged(self, case: Case, deadline_s: float) -> Verdict:
        """Run a case; return the verdict."""
        self.ask(case, deadline_s)
        return self.answer()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        """End the process."""
        self.connection.close()
        self._process.join(20)
        self._process.kill()


def serve(connection: Connection, plant: Plant) -> None:
    """Answer each case with its verdict, until the caller leaves."""
    torch.set_num_threads(1)
    while True:
        try:
            case, deadline_s = connection.recv()
        except (EOFError, OSError):
            break
        folder = Path(tempfile.mkdtemp(prefix="fuzz"))
        try:
            reports = run_ranks_of(case, folder, deadline_s, plant)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        with plant():
            connection.send(judge(case, reports))
        sys.stdout.flush()
