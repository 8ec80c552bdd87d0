"""Run contestants in their own processes, and let the launched ranks agree.

A contestant's process can be killed without harm to the benchmark, wherever it hangs.
"""

import ctypes
import enum
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from torchrec_2dsp.programs.bench.config import ScheduleConfig
from torchrec_2dsp.programs.launch import take_gpu

Value = TypeVar("Value")


@dataclass(frozen=True)
class Place:
    """This rank's place in the world."""

    rank: int
    world_size: int
    local_world_size: int


class Control:
    """Agreement over torchrun's store, which outlives every contestant and its process groups."""

    def __init__(self, timeout_s: float) -> None:
        """Join all ranks, which may be ``timeout_s`` apart: more than a contestant's deadline."""
        store, self.rank, self.world_size = next(rendezvous("env://"))
        self._store: dist.Store = dist.PrefixStore("torchrec_2dsp_bench", store)
        self._timeout = timedelta(seconds=timeout_s)
        self._exchanges = 0

    def exchange(self, value: Value) -> list[Value]:
        """Return every rank's value; also a barrier. All ranks call it equally often."""
        self._exchanges += 1
        name = f"exchange/{self._exchanges}"
        self._store.set(f"{name}/{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        self._store.wait(keys, self._timeout)
        return [pickle.loads(value) for value in self._store.multi_get(keys)]

    def raise_flag(self, name: str) -> None:
        """Signal every rank, now."""
        self._store.set(f"flag/{name}", "raised")

    def flag(self, name: str) -> bool:
        """Return whether a rank has raised this flag."""
        return self._store.check([f"flag/{name}"])


def join_contestant(
    schedule: ScheduleConfig, number: int, place: Place, *, backend: str = "", patience: float = 1.0
) -> None:
    """Create a contestant's world in its own process, over its own store connection.

    Args:
        schedule: names the device and the deadline.
        number: the contestant's.
        place: this rank's.
        backend: the world's, on the CPU; empty for gloo.
        patience: the number of deadlines that collectives may take.

    Collectives:
        Creates the world's process group.
    """
    torch.set_num_threads(1)
    if schedule.device == "cuda":
        take_gpu(place.rank % place.local_world_size)
        backend = "nccl"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=schedule.deadline_s),
    )
    dist.init_process_group(
        backend or "gloo",
        store=dist.PrefixStore(f"contestant_{number}", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=patience * schedule.deadline_s),
    )


_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent dies."""


class How(enum.Enum):
    """The outcome of a question."""

    ANSWERED = "answered"
    RAISED = "raised"
    DIED = "died"
    LATE = "late"
    STOPPED = "stopped, because another rank failed"


@dataclass(frozen=True)
class Answer:
    """The answer to a question, or its failure."""

    how: How
    value: Any = None
    """The value that the method returned."""
    report: str = ""
    """The error, with a traceback if there is one."""


class ContestantProcess:
    """A forked process with one object, whose methods are called one at a time.

    Importing torch and TorchRec again for every contestant would take longer than the benchmark.
    The parent must not have threads that hold locks, so it computes nothing.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, remote = context.Pipe()
        self._folder = tempfile.TemporaryDirectory(prefix="torchrec_2dsp_")
        self._stacks = Path(self._folder.name) / "stacks.txt"
        self._process = context.Process(
            target=_serve, args=(make, remote, self._stacks, os.getpid()), daemon=True
        )
        gc.collect()
        # A garbage collection writes to all objects that it visits, and so copies memory which
        # parent and child share; it skips frozen objects. Frozen objects aren't visited again for
        # the next process, which saves half a second each.
        gc.freeze()
        self._process.start()
        remote.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        """The process id."""

    def ask(
        self,
        method: str,
        *arguments: Any,
        deadline_s: float,
        give_up: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Resume the process if it is paused, call a method in it, and wait for the result.

        Args:
            method: the object's method.
            arguments: the method's arguments.
            deadline_s: seconds to wait.
            give_up: polled; true stops the waiting.
        """
        end = time.monotonic() + deadline_s
        try:
            os.kill(self.pid, signal.SIGCONT)
            self._connection.send((method, arguments))
            while not self._connection.poll(_POLL_S):
                if time.monotonic() > end:
                    report = f"{method} took over {deadline_s:g} s\n{self._where()}"
                    return Answer(How.LATE, report=report)
                if give_up():
                    return Answer(How.STOPPED, report=How.STOPPED.value)
            raised, value = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(_POLL_S)
            code = self._process.exitcode
            return Answer(How.DIED, report=f"the process died in {method} with exit code {code}")
        return Answer(How.RAISED, report=value) if raised else Answer(How.ANSWERED, value)

    def pause(self) -> None:
        """Stop the process until it is asked again.

        Each gloo process group has a thread that wakes about 85 times a second, even when idle.
        """
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """Kill the process; a second call does nothing."""
        if self._connection.closed:
            return
        self._process.kill()
        self._process.join()
        self._process.close()
        self._connection.close()
        self._folder.cleanup()

    def _where(self) -> str:
        """Return the stacks of its threads."""
        if not self._process.is_alive():
            return "(it has died)"
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(_POLL_S)
        return self._stacks.read_text() if self._stacks.exists() else "(no stacks)"


def failure_line(method: str, answers: Sequence[Answer]) -> str:
    """Return the error lines from all ranks that failed."""
    return f"in {method}: " + "; ".join(
        f"rank {rank}: {report.splitlines()[0 if how is How.LATE else -1]}"
        for rank, how, report in _failed(answers)
    )


def failure_report(method: str, answers: Sequence[Answer]) -> str:
    """Return the reports from all ranks that failed; equal ones are given once."""
    ranks: dict[str, list[str]] = {}
    for rank, _, report in _failed(answers):
        ranks.setdefault(report, []).append(str(rank))
    return "\n".join(
        f"in {method}, rank {', '.join(failed_ranks)}: {report}"
        for report, failed_ranks in ranks.items()
    )


def _failed(answers: Sequence[Answer]) -> list[tuple[int, How, str]]:
    return [
        (rank, answer.how, answer.report.strip())
        for rank, answer in enumerate(answers)
        if answer.how not in (How.ANSWERED, How.STOPPED)
    ]


def _serve(make: Callable[[], Any], connection: Connection, stacks: Path, parent: int) -> None:
    _die_with(parent)
    # torchrun's interrupt reaches the whole process group: the parent decides what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        subject = make()
        while True:
            method, arguments = connection.recv()
            try:
                reply = (False, getattr(subject, method)(*arguments))
            except Exception as error:
                reply = (True, "".join(traceback.format_exception(error)))
            connection.send(reply)


def _die_with(parent: int) -> None:
    """Make the kernel kill this process if the parent dies, even while paused."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
