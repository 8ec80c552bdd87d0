"""Run jobs on a GPU, as many as there is time for: ``python -m tests.gpu.queue --minutes 12``.

It resumes where the last run stopped. Jobs that passed with this code don't run again, failed
jobs run again at the end, and each job is stopped at its budget. Without a GPU, jobs run in small.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.gpu.jobs import JOBS, Job
from tests.gpu.lanes import Lane
from tests.gpu.recorder import PASSED as PASSED_FILE, TESTS as TESTS_FILE
from tests.gpu.results import (
    CRASHED,
    FAILED,
    NUMBERS_FILE,
    PASSED,
    ROOT,
    STOPPED,
    TIMED_OUT,
    Result,
    append_result,
    read_results,
    sum_of_code,
)

_MARK = "GPU_QUEUE_JOB"
_NO_TESTS = 5
"""pytest's exit code if no test is left to run."""
_LEAST_S = 20.0
"""No job starts with less time than this."""
_GRACE_S = 10.0
"""The time in which an interrupted job may say where it was."""
_TAIL, _LOGGED = 4_000, 400_000
"""Characters of a job's output in its result, and in the log beside the results."""


@dataclass(frozen=True)
class Machine:
    """A machine that runs jobs."""

    card: str
    """The GPU's name, or "CPU"."""
    versions: dict[str, str]

    @property
    def has_gpu(self) -> bool:
        return self.card != "CPU"

    @classmethod
    def this(cls) -> "Machine":
        """Describe this machine by another process, as this one must never hold the GPU."""
        code = "from tests.gpu.lanes import describe_machine as d; d()"
        shown = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True
        ).stdout
        return cls(**json.loads(shown.splitlines()[-1]))


@dataclass
class Running:
    """A running job."""

    job: Job
    lanes: list[Lane]
    process: "subprocess.Popen[bytes]"
    folder: Path
    started: str
    start: float
    deadline: float
    is_last: bool
    """True if the deadline is the queue's."""
    interrupted_at: float | None = None

    @property
    def mark(self) -> str:
        return f"{_MARK}={self.folder}"


@dataclass
class Queue:
    """Runs jobs in lanes until the time is up."""

    machine: Machine
    lanes: list[Lane]
    out: Path
    """The file for results."""
    before: list[Result]
    """The results of earlier runs."""
    end: float
    """On the monotonic clock."""
    commit: str = ""
    code: str = field(default_factory=sum_of_code)
    results: list[Result] = field(default_factory=list)
    """This run's."""

    def run(self, jobs: Sequence[Job], folder: Path) -> list[Job]:
        """Run jobs; return the ones that haven't passed, in the order to run them next."""
        waiting = self.left(jobs)
        running: list[Running] = []
        try:
            while waiting or running:
                for entry in [entry for entry in running if self._is_over(entry)]:
                    running.remove(entry)
                    self._finish(entry)
                idle = [lane for lane in self.lanes if not any(lane in e.lanes for e in running)]
                if time.monotonic() > self.end - _LEAST_S or self._is_broken():
                    waiting = []
                elif waiting and len(idle) >= (wanted := min(waiting[0].lanes, len(self.lanes))):
                    running.append(self._start(waiting.pop(0), idle[:wanted], folder))
                    continue
                time.sleep(0.05)
        finally:
            for entry in running:
                _kill(entry)
        return self.left(jobs)

    def earlier(self, name: str) -> list[Result]:
        """Return a job's results with this code, on this kind of machine."""
        return [
            result
            for result in [*self.before, *self.results]
            if (result.name, result.code) == (name, self.code)
            and (result.card != "CPU") == self.machine.has_gpu
        ]

    def left(self, jobs: Sequence[Job]) -> list[Job]:
        """Return jobs that haven't passed; any with outcomes other than `STOPPED` come last."""
        outcomes = {job.name: [result.outcome for result in self.earlier(job.name)] for job in jobs}
        left = [job for job in jobs if PASSED not in outcomes[job.name]]
        return sorted(left, key=lambda job: bool({*outcomes[job.name]} - {STOPPED}))

    def _is_broken(self) -> bool:
        return any(not result.is_usable_after for result in self.results)

    def _start(self, job: Job, lanes: list[Lane], folder: Path) -> Running:
        place = Path(tempfile.mkdtemp(dir=folder))
        earlier = [test for result in self.earlier(job.name) for test in result.passed_tests]
        (place / "passed").write_text("\n".join(earlier))
        environ = os.environ | lanes[0].environ(shares=job.shares_gpu)
        environ |= {TESTS_FILE: str(place / "tests"), PASSED_FILE: str(place / "passed")}
        environ |= {NUMBERS_FILE: str(place / "numbers"), _MARK: str(place)}
        arguments = job.in_small if job.in_small and not self.machine.has_gpu else job.arguments
        with (place / "output").open("wb") as output:
            process = subprocess.Popen(
                # Where the queue runs in a shell's background, SIGINT is ignored, and inherited so.
                ["env", "--default-signal=INT", sys.executable, *arguments],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        now = time.monotonic()
        print(f"{self.end - now:4.0f} s left, lane {lanes[0].number}: {job.name}", flush=True)
        deadline = min(now + job.budget_s, self.end)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        return Running(
            job, lanes, process, place, started, now, deadline, now + job.budget_s > self.end
        )

    def _is_over(self, entry: Running) -> bool:
        """Tell whether a job has ended; interrupt it when its time is up, and later kill it."""
        if entry.process.poll() is not None:
            return True
        now = time.monotonic()
        if entry.interrupted_at is None and now > entry.deadline:
            entry.interrupted_at = now
            entry.process.send_signal(signal.SIGINT)
        if entry.interrupted_at is None or now < entry.interrupted_at + _GRACE_S:
            return False
        _kill(entry)
        return True

    def _finish(self, entry: Running) -> None:
        """Record how a job ended, and make the GPU usable again if it ended badly."""
        seconds = time.monotonic() - entry.start
        num_left = _kill(entry)
        tests = _lines(entry.folder / "tests")
        numbers = entry.folder / "numbers"
        text = (entry.folder / "output").read_text(errors="replace").replace(f"{ROOT}/", "")
        outcome = self._outcome(entry)
        is_usable = True
        if self.machine.has_gpu and outcome not in (PASSED, STOPPED):
            text += f"\n{num_left} processes were left" if num_left else ""
            renewed = [lane.renew(is_sure=outcome == FAILED) for lane in entry.lanes]
            is_usable = all(renewed)
        result = Result(
            name=entry.job.name,
            outcome=outcome,
            seconds=round(seconds, 1),
            exit_code=entry.process.returncode,
            code=self.code,
            commit=self.commit,
            card=self.machine.card,
            versions=self.machine.versions,
            started=entry.started,
            tests=dict(tests),
            numbers=json.loads(numbers.read_text()) if numbers.exists() else {},
            tail=text[-_TAIL:],
            is_usable_after=is_usable,
        )
        self.results.append(result)
        append_result(self.out, result)
        with self.out.with_suffix(".log").open("a") as log:
            log.write(f"\n##### {result}\n{text[-_LOGGED:]}")
        print(f"{self.end - time.monotonic():4.0f} s left: {result}", flush=True)

    def _outcome(self, entry: Running) -> str:
        if entry.interrupted_at is not None:
            return STOPPED if entry.is_last else TIMED_OUT
        code = entry.process.returncode
        has_passed = any(result.passed_tests for result in self.earlier(entry.job.name))
        if code == 0 or (code == _NO_TESTS and has_passed):
            return PASSED
        return CRASHED if code < 0 else FAILED


def _kill(entry: Running) -> int:
    """Kill a job's remaining processes, in whatever session; return their number."""
    mark = entry.mark.encode()
    pids = {int(path.name) for path in Path("/proc").glob("[0-9]*") if mark in _environ(path)}
    if entry.process.poll() is None:
        pids.add(entry.process.pid)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    entry.process.wait()
    return len(pids)


def _environ(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:  # It has just ended, or is someone else's.
        return []


def _lines(path: Path) -> list[tuple[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def jobs_named(parts: Sequence[str]) -> list[Job]:
    """Return the jobs whose names contain any of these parts, in this order, each once."""
    return list(dict.fromkeys(job for part in parts for job in JOBS if part in job.name))


def main() -> int:
    """Run the queue; return 1 if a job that ran hasn't passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.queue", description=__doc__)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu/results", help="for results")
    parser.add_argument(
        "--state", type=Path, default=ROOT / "tests/gpu/runs", help="has earlier results"
    )
    parser.add_argument("--only", action="append", help="jobs whose name contains this; repeatable")
    parser.add_argument("--lanes", type=int, default=4, help="jobs side by side on a GPU")
    parser.add_argument("--commit", default="", help="where there is no repository")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    machine = Machine.this()
    print(f"{machine.card}, {machine.versions}", flush=True)
    git = ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]
    commit = options.commit or subprocess.run(git, capture_output=True, text=True).stdout.strip()
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}.jsonl"
    jobs = jobs_named(options.only or [""])
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        num_lanes = options.lanes if machine.has_gpu else 1
        lanes = [Lane(number, folder, has_gpu=machine.has_gpu) for number in range(num_lanes)]
        before = read_results([options.state, options.out])
        queue = Queue(machine, lanes, options.out / name, before, end, commit)
        try:
            left = queue.run(jobs, folder)
        finally:
            for lane in lanes:
                lane.close()
    print(f"\n{len(jobs) - len(left)} of {len(jobs)} jobs have passed with code {queue.code}")
    for job in left:
        outcomes = [result.outcome for result in queue.earlier(job.name)]
        print(f"left: {job.name} ({outcomes[-1] if outcomes else 'not run'})")
    print(f"results are in {queue.out}")
    return int(any(result.outcome not in (PASSED, STOPPED) for result in queue.results))


if __name__ == "__main__":
    sys.exit(main())
