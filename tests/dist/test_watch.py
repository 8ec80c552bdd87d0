"""Ranks whose collectives wait forever, as with NCCL, end with an error that names the rank."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RanksFailed, run_ranks
from tests.support.slices import patient
from torchrec_2dsp._compat import c10d
from torchrec_2dsp.comms import breaking, failure_detection
from torchrec_2dsp.comms.alarm import Alarm
from torchrec_2dsp.comms.breaking import HostPeer
from torchrec_2dsp.comms.failure_detection import NoticeBoard, Standing, naming_faults
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import RankError

Answer = tuple[str, tuple[int, ...], bool]
"""A rank's error, the ranks that it names, and whether its collectives were aborted."""


def in_context(rank: int, world_size: int, work: Callable[..., None], silent_s: float) -> Answer:
    """Run work that waits as with NCCL, until collectives are aborted."""
    aborted = threading.Event()
    error: BaseException | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failure_detection, "nccl_abort", lambda world: aborted.set)
        patch.setattr(breaking, "SILENT_S", silent_s)
        patch.setattr(breaking, "_BEAT_S", 0.2)
        board = NoticeBoard(world_group())
        dist.barrier()
        try:
            with naming_faults(board, "a step"):
                work(rank, board, aborted)
        except (RankError, ValueError) as raised:
            error = raised
        # The others' threads still ask this one.
        time.sleep(min(silent_s, 2.0))
        board._is_closing.set()
        board._thread.join()
    return f"{type(error).__name__}: {error}", getattr(error, "ranks", ()), board.has_aborted


def answers_of(work: Callable[..., None], silent_s: float = 2.0) -> list[Answer]:
    return run_ranks(in_context, 3, work, silent_s, start_method="forkserver")


def wait_as_nccl(aborted: threading.Event) -> None:
    """Wait until a kernel is aborted; the next call raises."""
    assert aborted.wait(patient(60))
    raise RuntimeError("NCCL communicator was aborted on rank 0.")


def one_raises(rank: int, board: NoticeBoard, aborted: threading.Event) -> None:
    if rank == 1:
        raise ValueError("no such row")
    wait_as_nccl(aborted)


def one_raises_and_nobody_looks(rank: int, board: NoticeBoard, aborted: threading.Event) -> None:
    """Make no further call that could fail: an aborted kernel only leaves arbitrary numbers."""
    with suppress(RuntimeError):
        one_raises(rank, board, aborted)


def one_raises_before_an_alarm(rank: int, board: NoticeBoard, aborted: threading.Event) -> None:
    with suppress(RuntimeError):
        one_raises(rank, board, aborted)
    # It would be trusted, were it not known that collectives were aborted.
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(alone, dist.ProcessGroup)
    Alarm(alone, torch.device("cpu"), board).check().wait()
    pytest.fail("the numbers of aborted collectives were trusted")


@pytest.mark.parametrize(
    "work",
    [one_raises, one_raises_and_nobody_looks, one_raises_before_an_alarm],
    ids=lambda work: work.__name__,
)
def test_an_error_of_one_rank_ends_the_others(work: Callable[..., None]) -> None:
    first, second, third = answers_of(work)
    assert second[0].startswith("ValueError: no such row")
    for message, ranks, has_aborted in (first, third):
        assert message.startswith("RankError: rank 1 failed at step 0, in a step: ValueError: no s")
        assert ranks == (1,)
        assert has_aborted


def one_is_silent(rank: int, board: NoticeBoard, aborted: threading.Event) -> None:
    if rank != 1:
        wait_as_nccl(aborted)
    board._is_closing.set()


def one_is_silent_after_the_loop(rank: int, board: NoticeBoard, aborted: threading.Event) -> None:
    board.leave_loop()
    one_is_silent(rank, board, aborted)


@pytest.mark.dealt
@pytest.mark.parametrize("work", [one_is_silent, one_is_silent_after_the_loop])
def test_a_silent_rank_is_noticed_and_named(work: Callable[..., None]) -> None:
    first, _, third = answers_of(work)
    for message, ranks, has_aborted in (first, third):
        assert message.startswith("RankError: rank 1 did not answer: killed, stopped, or cut off")
        assert ranks == (1,)
        assert has_aborted


def one_is_killed(rank: int, board: NoticeBoard, aborted: threading.Event) -> None:
    if rank != 1:
        wait_as_nccl(aborted)
    time.sleep(1.0)  # Until it is watched.
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_of_this_host_is_noticed_before_it_counts_as_silent() -> None:
    with pytest.raises(RanksFailed) as failed:
        answers_of(one_is_killed, silent_s=20.0)
    named = re.findall(
        r"rank (\d): returned \('RankError: rank 1 did not answer", str(failed.value)
    )
    assert named == ["0", "2"]


def test_the_end_of_a_process_is_seen_unless_it_has_left() -> None:
    store = dist.HashStore()
    first, second = HostPeer(store, "", 0, 3), HostPeer(store, "", 1, 3)
    store.set("process/2", "another-host 1")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    store.set("process/1", f"{breaking._place()} {child.pid}")
    assert not first.was_killed()
    assert not second.was_killed()  # It watches the first rank, which is this process.
    child.communicate(b"\n")
    assert first.was_killed()
    assert not second.was_killed()
    second.leave()
    assert not first.was_killed()


def ask_at_once(rank: int, world_size: int) -> list[Standing]:
    """Ask the others, without a thread that answers; rank 1 doesn't even ask."""
    board = NoticeBoard(world_group())
    dist.barrier()
    board._is_closing.set()
    board._thread.join()
    if rank == 1:
        return []
    time.sleep(0.3 * (rank == 0))
    return [notice.standing for notice in sorted(board._ask(), key=lambda notice: notice.rank)]


def test_ranks_that_ask_answer_meanwhile() -> None:
    answers = run_ranks(ask_at_once, 3, start_method="forkserver")
    here, silent = Standing.HERE, Standing.SILENT
    assert answers == [[silent, here], [], [here, silent]]


def all_compute(rank: int, board: NoticeBoard, aborted: threading.Event) -> None:
    assert not aborted.wait(4.0)


def one_leaves(rank: int, board: NoticeBoard, aborted: threading.Event) -> None:
    """Leave on rank 1: outside the contexts nobody waits for others or misses them."""
    board.wait_for_others(-1)
    if rank == 1:
        board._is_closing.set()
    assert not aborted.wait(4.0)
    board.wait_for_others(1)


def all_have_left(rank: int, board: NoticeBoard, aborted: threading.Event) -> None:
    """Leave on all ranks, pretend that one is missing, and check that nothing is aborted."""
    board.leave_loop()
    dist.barrier()
    cast(Any, board._watch).misses_a_rank = lambda: True
    assert not aborted.wait(4.0)


@pytest.mark.dealt
@pytest.mark.parametrize(
    "work", [all_compute, one_leaves, all_have_left], ids=lambda work: work.__name__
)
def test_nothing_is_aborted_without_a_reason(work: Callable[..., None]) -> None:
    assert answers_of(work, silent_s=1.5) == [("NoneType: None", (), False)] * 3


def test_gloo_breaks_by_itself_and_has_no_watch() -> None:
    assert run_ranks(has_watch, 2, start_method="forkserver") == [False, False]


def has_watch(rank: int, world_size: int) -> bool:
    return NoticeBoard(world_group())._watch is not None


class FakeBackend:
    """Finishes its abort once all groups' aborts have begun, like NCCL; then records it."""

    def __init__(self, all_begun: threading.Barrier, aborted: list[str], name: str) -> None:
        self._all_begun, self._aborted, self._name = all_begun, aborted, name

    def abort(self) -> None:
        self._all_begun.wait(patient(60))
        self._aborted.append(self._name)


class FakeGroup:
    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def _get_backend(self, device: object) -> Any:
        return self._backend


def test_all_nccl_groups_are_aborted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []
    begun, names = threading.Barrier(2), ("nccl", "gloo", "more nccl")
    groups = {FakeGroup(FakeBackend(begun, aborted, name)): name for name in names}
    monkeypatch.setattr(dist, "get_backend", lambda group: groups[group].split()[-1])
    monkeypatch.setattr(c10d._c10d, "_world", SimpleNamespace(pg_names=groups))
    nccl, gloo, _ = groups
    assert c10d.nccl_abort(cast(Any, gloo)) is None
    abort = c10d.nccl_abort(cast(Any, nccl))
    assert abort is not None
    abort()
    assert sorted(aborted) == ["more nccl", "nccl"]


WITH_NCCL = """
import time
import torch.distributed as dist
from torchrec_2dsp.comms import breaking, failure_detection, groups
from torchrec_2dsp.errors import RankError

failure_detection.nccl_abort = lambda world: lambda: None
breaking.GRACE_S = breaking.STUCK_S = 0.0
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mine = groups.WorldGroups.current()
board = failure_detection.NoticeBoard.of(groups.world_group())
groups.WorldGroups.forget = lambda self: time.sleep(60)
print("a line that waits in a buffer", end="")
"""
ENDS = {
    "after an abort": """
board._watch.end_collectives()
raise RuntimeError("rank 1 failed")
""",
    "after an error of its own": """
with failure_detection.naming_faults(board):
    raise RuntimeError("rank 1 failed")
""",
    "while it waits for a GPU that doesn't come back": """
board.failure = RankError("RuntimeError: rank 1 failed", (1,))
board._thread.start()
board.wait_for_others(1)
time.sleep(60)
""",
}


@pytest.mark.dealt
@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_with_broken_collectives_whatever_hangs(end: str) -> None:
    script = [sys.executable, "-c", WITH_NCCL + ENDS[end]]
    ended = subprocess.run(script, timeout=patient(45), capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == "a line that waits in a buffer"
    assert "RuntimeError: rank 1 failed" in ended.stderr
