"""Run a function on several gloo ranks, each in its own process, and return all results.

`run_ranks` starts fresh processes for one call. `RankPool` keeps them for many calls, which
takes milliseconds instead of seconds. Functions and arguments travel by pickle, so a function
must be importable: module level, in a test module.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import pytest

from tests.support.devices import device_env, on_gpus, ranks_per_host
from tests.support.rank_worker import serve, sum_over_ranks
from tests.support.slices import patient

START_TIMEOUT_S = 120
EXIT_TIMEOUT_S = 20
GRACE_S = 15
"""The time for which other ranks may go on after one failed, so that their errors are seen."""

PRELOADED = ["tests.support.no_collections", "tests.support.preloaded"]  # In this order.
_BAD_EXIT = "died with exit code"

RankFunction = Callable[..., Any]
StartMethod = Literal["forkserver", "spawn"]


class RanksFailed(Exception):
    """At least one rank raised, died or missed the deadline. The message shows every rank."""

    def __init__(self, reports: dict[int, str]) -> None:
        self.reports = reports
        """Each rank's report."""
        text = [f"---- rank {rank}: {report.rstrip()}" for rank, report in sorted(reports.items())]
        super().__init__("\n" + "\n".join(text))

    def __reduce__(self) -> tuple[type["RanksFailed"], tuple[dict[int, str]]]:
        return type(self), (self.reports,)


def run_ranks(
    fn: RankFunction,
    world_size: int,
    *args: Any,
    local_world_size: int | None = None,
    timeout_s: float = 120,
    grace_s: float = GRACE_S,
    start_method: StartMethod = "spawn",
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on fresh processes; return the results by rank.

    A process that doesn't exit with code 0 afterwards is a failure, too.
    """
    with RankPool(world_size, local_world_size, start_method=start_method) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s, grace_s=grace_s)


class RankPool:
    """``world_size`` ranks that run one function after another.

    The ranks start at the first `run`. They share one process group until a call leaves them
    out of step (a deadline missed, a rank dead, some raised and some returned): then they are
    stopped, and the next `run` starts new ones. Between calls they are paused: every group's gloo
    threads wake up all the time, and idle pools together would keep a core busy.
    """

    def __init__(
        self,
        world_size: int,
        local_world_size: int | None = None,
        *,
        start_method: StartMethod = "forkserver",
    ) -> None:
        """Prepare the ranks; they start with the first call.

        ``start_method="spawn"`` takes seconds, but its ranks start and exit like a script's: a
        process forked after TorchRec's import runs no exit handlers.
        """
        self.world_size = world_size
        self.local_world_size = ranks_per_host(local_world_size or world_size)
        self.num_starts = 0
        """The number of process starts."""
        self.exit_codes: list[int | None] = []
        """The exit codes of the ranks that were closed last; `None` if one had to be killed."""
        self._start_method = start_method
        self._ranks: list[_Rank] = []

    def run(
        self, fn: RankFunction, *args: Any, timeout_s: float = 120, grace_s: float = GRACE_S
    ) -> list[Any]:
        """Run ``fn(rank, world_size, *args)`` on every rank; return the results by rank."""
        if not self._ranks:
            self._start()
        return self._call(fn, args, timeout_s, grace_s)

    def close(self) -> None:
        """Let the ranks exit; raise `RanksFailed` unless all exit with code 0."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.ask_to_leave()
        deadline = time.monotonic() + patient(EXIT_TIMEOUT_S)
        reports = {rank.number: rank.leave(deadline) for rank in ranks}
        self.exit_codes = [rank.exit_code for rank in ranks]
        if any(report != "exited" for report in reports.values()):
            raise RanksFailed(reports)

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._kill()

    def _start(self) -> None:
        import torch.distributed as dist

        # The parent hosts the store on a port that the system picks, as torchrun's agent does.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env = {
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        context: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
        if self._start_method == "forkserver" and not on_gpus():
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
        self.num_starts += 1
        self._ranks = [
            _Rank(number, context, env | self._env_of(number)) for number in range(self.world_size)
        ]
        self._collect(patient(START_TIMEOUT_S), GRACE_S)

    def _env_of(self, rank: int) -> dict[str, str]:
        local = {"RANK": str(rank), "LOCAL_RANK": str(rank % self.local_world_size)}
        return local | device_env(rank)

    def _call(
        self, fn: RankFunction, args: tuple[Any, ...], timeout_s: float, grace_s: float
    ) -> list[Any]:
        payload = pickle.dumps((fn, args))
        for rank in self._ranks:
            rank.wake()
            rank.send(payload)
        results = self._collect(patient(timeout_s), grace_s)
        for rank in self._ranks:
            rank.rest()
        return results

    def _collect(self, timeout_s: float, grace_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        answers: dict[int, tuple[str, Any]] = {}
        pending = {rank.connection: rank for rank in self._ranks}
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(pending), left)
            for connection in [entry for entry in pending if entry in ready]:
                rank = pending.pop(connection)
                answers[rank.number] = rank.answer()
                if answers[rank.number][0] != "returned":
                    deadline = min(deadline, time.monotonic() + grace_s)
        kinds = {kind for kind, _ in answers.values()}
        if not pending and kinds == {"returned"}:
            return [answers[rank.number][1] for rank in self._ranks]
        reports = {number: _report(kind, value) for number, (kind, value) in answers.items()}
        for rank in pending.values():
            rank.ask_for_stacks()
        late = "still running" if kinds - {"returned"} else f"missed the deadline of {timeout_s} s"
        for rank in pending.values():
            reports[rank.number] = f"{late}, in\n{rank.stacks()}"
        if pending or kinds != {"raised"} or not self._in_step():
            self._kill()
        raise RanksFailed(reports)

    def _in_step(self) -> bool:
        """Tell whether ranks that all raised can still communicate."""
        answers = []
        payload = pickle.dumps((sum_over_ranks, ()))
        for rank in self._ranks:
            rank.send(payload)
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for rank in self._ranks:
            if not rank.connection.poll(max(0.0, deadline - time.monotonic())):
                return False
            answers.append(rank.answer())
        return answers == [("returned", self.world_size)] * self.world_size

    def _kill(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.kill()


class _Rank:
    """The parent's handle on one process."""

    def __init__(
        self,
        number: int,
        context: SpawnContext | ForkServerContext,
        env: dict[str, str],
    ) -> None:
        self.number = number
        self.connection, remote = context.Pipe()
        self._stacks = Path(tempfile.mkdtemp()) / "stacks.txt"
        self._process = context.Process(
            target=serve, args=(number, env, remote, self._stacks), daemon=True
        )
        self._process.start()
        self.exit_code: int | None = None
        """Known after `leave`."""
        remote.close()

    def send(self, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # It died: `answer` says so.
            self.connection.send_bytes(payload)

    def answer(self) -> tuple[str, Any]:
        try:
            kind, value = pickle.loads(self.connection.recv_bytes())
            return str(kind), value
        except (EOFError, OSError):
            self._process.join(EXIT_TIMEOUT_S)
            return _BAD_EXIT, self._process.exitcode

    def ask_for_stacks(self) -> None:
        self._signal(signal.SIGUSR1)

    def stacks(self) -> str:
        """Return faulthandler's output after `ask_for_stacks`, complete or nearly so."""
        text = ""
        for _ in range(20):
            time.sleep(0.05)
            before = text
            text = self._stacks.read_text() if self._stacks.exists() else ""
            if text and text == before:
                break
        return text or "(no stacks: the process doesn't take signals)"

    def rest(self) -> None:
        """Pause the process with all its threads, until `wake`."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def ask_to_leave(self) -> None:
        self.wake()
        self.send(b"")

    def leave(self, deadline: float) -> str:
        """Wait for the requested exit; return a report on it."""
        self._process.join(max(0.0, deadline - time.monotonic()))
        self.exit_code = self._process.exitcode
        if self._process.is_alive():
            self.ask_for_stacks()
            report = f"didn't exit within {EXIT_TIMEOUT_S} s, in\n{self.stacks()}"
        elif self._process.exitcode:
            report = f"{_BAD_EXIT} {self._process.exitcode}"
        else:
            report = "exited"
        self.kill()
        return report

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.connection.close()
        self._stacks.unlink(missing_ok=True)
        self._stacks.parent.rmdir()


def error_text(action: Callable[[], object], kind: type[Exception]) -> str:
    """Return the text of the error, with this type, that an action must raise."""
    with pytest.raises(kind) as raised:
        action()
    return str(raised.value)


def error_of(action: Callable[[], object]) -> str:
    """Return the type and text of an action's error; empty if it raises none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _report(kind: str, value: Any) -> str:
    if kind == "raised":
        return f"raised\n{value}"
    return f"{kind} {value}"
