"""A contestant's process, and what the operating system knows of it."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrec_2dsp.programs.bench.machine import (
    MachineLoad,
    foreign_load,
    keep_libraries_in_memory,
    load,
    peak_bytes,
    resident_bytes,
    sent_bytes,
)
from torchrec_2dsp.programs.bench.process import (
    Answer,
    ContestantProcess,
    How,
    failure_line,
    failure_report,
)


class Subject:
    """A contestant's process in these tests."""

    def double(self, value: int) -> int:
        return 2 * value

    def fail(self) -> None:
        raise ValueError("it is broken")

    def die(self) -> None:
        os._exit(7)

    def sleep(self) -> None:
        time.sleep(600)

    def pin(self) -> tuple[bool, int]:
        could = keep_libraries_in_memory()
        status = Path("/proc/self/status").read_text()
        return could, int(status.partition("VmLck:")[2].split()[0])


def state_of(pid: int) -> str:
    """Return the operating system's word for it; empty without such a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for_state(pid: int, states: str) -> str:
    end = time.monotonic() + 20
    while state_of(pid) not in states and time.monotonic() < end:
        time.sleep(0.01)
    return state_of(pid)


@pytest.fixture
def process() -> Iterator[ContestantProcess]:
    process = ContestantProcess(Subject)
    yield process
    process.kill()


def test_a_process_answers_and_survives_an_error(process: ContestantProcess) -> None:
    assert process.ask("double", 4, deadline_s=30) == Answer(How.ANSWERED, 8)
    failed = process.ask("fail", deadline_s=30)
    assert failed.how is How.RAISED
    assert failed.report.endswith("ValueError: it is broken\n")
    assert process.ask("double", 5, deadline_s=30).value == 10


def test_a_paused_process_rests_until_it_is_asked(process: ContestantProcess) -> None:
    process.pause()
    assert wait_for_state(process.pid, "T") == "T"
    assert process.ask("double", 4, deadline_s=30).value == 8
    process.pause()
    process.kill()
    assert state_of(process.pid) == ""


def test_a_paused_process_dies_with_its_parent() -> None:
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        process = ContestantProcess(Subject)
        process.ask("double", 4, deadline_s=30)
        process.pause()
        os.write(write, str(process.pid).encode())
        os._exit(0)
    pid = int(os.read(read, 20))
    os.waitpid(parent, 0)

    # Whoever inherits it may not have noticed yet.
    assert wait_for_state(pid, "Z") in ("", "Z")


def test_libraries_are_pinned_if_that_is_allowed(process: ContestantProcess) -> None:
    could, locked_kib = process.ask("pin", deadline_s=60).value
    # Torch alone has more code than this.
    assert not could or locked_kib > 50_000


def test_a_process_that_dies_is_noticed(process: ContestantProcess) -> None:
    answer = process.ask("die", deadline_s=30)
    assert answer.how is How.DIED
    assert "died in die with exit code 7" in answer.report


def test_a_process_that_hangs_says_where(process: ContestantProcess) -> None:
    late = process.ask("sleep", deadline_s=0.5)
    process.kill()
    assert late.how is How.LATE
    assert late.report.startswith("sleep took over 0.5 s")
    assert "in sleep" in late.report
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_waiting_ends_when_another_rank_failed(process: ContestantProcess) -> None:
    answer = process.ask("sleep", deadline_s=60, give_up=lambda: True)
    assert answer.how is How.STOPPED


def test_failures_of_all_ranks_are_told() -> None:
    answers = [
        Answer(How.RAISED, report="Traceback\n  line\nValueError: bad"),
        Answer(How.ANSWERED, 3),
        Answer(How.LATE, report="block took over 5 s\nstack"),
        Answer(How.STOPPED, report="stopped"),
    ]

    line = failure_line("block", answers)

    assert line == ("in block: rank 0: ValueError: bad; rank 2: block took over 5 s")
    assert "in block, rank 2: block took" in failure_report("block", answers)


def test_foreign_load_is_what_nobody_here_used() -> None:
    before = [
        MachineLoad("a", 100.0, 5.0),
        MachineLoad("a", 100.1, 7.0),
        MachineLoad("b", 50.0, 1.0),
    ]
    after = [
        MachineLoad("a", 116.0, 9.0),
        MachineLoad("a", 116.1, 13.0),
        MachineLoad("b", 51.0, 2.0),
    ]

    assert foreign_load(before, after, seconds=10.0) == pytest.approx(0.6)


def test_a_busy_process_counts_as_its_own() -> None:
    before = load([os.getpid()])
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass

    used = load([os.getpid()])

    assert used.own_s - before.own_s == pytest.approx(0.3, abs=0.15)
    assert used.busy_s - before.busy_s > 0.15
    assert used.machine == before.machine


def test_memory_and_bytes_are_counted() -> None:
    resident, peak = resident_bytes(), peak_bytes()
    assert peak >= 0.9 * resident > 1e7
    before = sent_bytes()["lo"]
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        client.sendall(bytes(10_000))
    assert sent_bytes()["lo"] >= before + 10_000
