"""Collectives that break when a rank fails: gloo's by themselves, NCCL's by a `Watch`.

gloo raises an error when a rank ends. NCCL's kernels wait forever: a thread must notice the
failure, and abort them.
"""

import os
import re
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

_BEAT_S = 1.0
"""The interval at which a rank shows that it is running."""
SILENT_S = 30.0
"""The time after which a rank without a sign of life counts as silent."""
GRACE_S = 1.0
"""The time in which a collective may break by itself after a failure."""
STUCK_S = 4.0
"""The time after an abort within which all waits for collectives should have returned."""


class HostPeer:
    """The process of another rank on this host, whose end the kernel reports immediately.

    Each rank watches the next one on its host, and the last rank watches the first.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, num_ranks: int) -> None:
        self._store, self._prefix = store, f"{prefix}process/"
        self._rank, self._num_ranks = rank, num_ranks
        self._place = _place()
        self._peer: int | None = None
        self._handle: int | None = None
        store.set(self._key(rank), f"{self._place} {os.getpid()}")

    def was_killed(self) -> bool:
        """Return whether the process has ended without `leave`; False while that is unknown."""
        if self._handle is None and not self._open():
            return False
        assert self._handle is not None
        assert self._peer is not None
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(0)) and self._written_by(self._peer) != _LEFT

    def leave(self) -> None:
        """Announce that this process ends regularly."""
        self._store.set(self._key(self._rank), _LEFT)

    def _open(self) -> bool:
        """Open a handle to the peer's process once it is known; return whether there is one."""
        if self._place and self._peer is None:
            self._peer = self._find()
        if self._peer is None or self._peer == self._rank:
            return False
        try:
            pid = int(self._written_by(self._peer).split()[-1])
            self._handle = os.pidfd_open(pid)
        except (AttributeError, OSError, ValueError, IndexError):
            # The system has no such handles, or the process is gone: then silence reveals it.
            self._place = ""
            self._peer = None
        return self._handle is not None

    def _find(self) -> int | None:
        """Return the next rank on this host, possibly this one; `None` while a host is unknown."""
        following = (self._rank + 1) % self._num_ranks
        is_here = self._is_here(following)
        if is_here is not False:
            return following if is_here else None
        first = self._rank
        while first > 0 and (is_here := self._is_here(first - 1)):
            first -= 1
        return None if is_here is None else first

    def _is_here(self, rank: int) -> bool | None:
        written = self._written_by(rank) if self._store.check([self._key(rank)]) else _LEFT
        return None if written == _LEFT else written.startswith(f"{self._place} ")

    def _written_by(self, rank: int) -> str:
        return self._store.get(self._key(rank)).decode()

    def _key(self, rank: int) -> str:
        return f"{self._prefix}{rank}"


_LEFT = "left"


def _place() -> str:
    """Identify this host and its process namespace; return nothing if they are unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class Watch:
    """Shows signs of life, watches the next rank, and can end this rank's collectives."""

    def __init__(
        self, store: dist.Store, prefix: str, rank: int, num_ranks: int, abort: Callable[[], None]
    ) -> None:
        self.has_aborted = False
        """True if this rank's collectives were aborted: their results are worthless."""
        self.num_waiting = 0
        """The open contexts in which this rank may wait for others; without one, nobody is late."""
        self.peer = HostPeer(store, prefix, rank, num_ranks)
        self._store, self._abort = store, abort
        self._own, self._next = (f"{prefix}beat/{r}" for r in (rank, (rank + 1) % num_ranks))
        self._num_beats = 0
        self._due = self._seen_at = time.monotonic()
        self._seen = b""
        self._failed_at: float | None = None
        self._aborted_at = 0.0

    def misses_a_rank(self) -> bool:
        """Return whether a rank watched by this one is silent or was killed."""
        was_killed = self.peer.was_killed()  # Asked from the start, while the peer still runs.
        return self._next_is_silent() or (was_killed and self.num_waiting > 0)

    def _next_is_silent(self) -> bool:
        """Show at intervals that this rank runs; return whether the next rank doesn't."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + _BEAT_S
        self._num_beats += 1
        self._store.set(self._own, str(self._num_beats))
        seen = self._store.get(self._next) if self._store.check([self._next]) else b""
        if seen != self._seen or not self.num_waiting:
            self._seen, self._seen_at = seen, now
        return now > self._seen_at + SILENT_S

    def end_collectives(self) -> None:
        """Abort all collectives, if they haven't broken some time after the first call."""
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        if not self.has_aborted and now >= self._failed_at + GRACE_S:
            self.has_aborted = True
            self._abort()
            self._aborted_at = time.monotonic()

    @property
    def is_stuck(self) -> bool:
        """True if this rank still waits after an abort: for a GPU that doesn't return."""
        is_late = self.has_aborted and time.monotonic() > self._aborted_at + STUCK_S
        return is_late and self.num_waiting > 0


_OF_COLLECTIVES = re.compile(
    r"/gloo/\S*:\d+\]|Connection (closed|reset) by peer|pair closure|an all-to-all isn't over"
    r"|all-to-all with rank|NCCL Error \d|NCCL communicator was aborted"
)
"""Error texts, of bare ``RuntimeError``s, from gloo, NCCL and the full-duplex all-to-all."""


def is_broken_connection(error: BaseException) -> bool:
    """Return whether an exception, or one of its causes, comes from a failed collective.

    Example:
        >>> from torchrec_2dsp.comms.breaking import is_broken_connection
        >>> is_broken_connection(RuntimeError("[/t/gloo/pair.cc:5] Connection closed by peer"))
        True
        >>> is_broken_connection(RuntimeError("NCCL Error 6: remote process exited or ..."))
        True
        >>> is_broken_connection(RuntimeError("shape '[2, 3]' is invalid for input of size 5"))
        False
    """
    return any(
        isinstance(cause, dist.DistError)
        or (isinstance(cause, RuntimeError) and _OF_COLLECTIVES.search(str(cause)) is not None)
        for cause in causes_of(error)
    )


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the exception itself, then its cause, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


_SOURCE_OR_ADVICE = re.compile(r"^\[\S*\] |\. This is typically .*")
"""The parts of gloo's error texts that don't tell what failed."""


def described(error: BaseException) -> str:
    """Describe an exception in one line: its type, its text's first line, and its origin."""
    text = _SOURCE_OR_ADVICE.sub("", str(error).split("\n")[0])[:300]
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    if trace is not None:
        code = trace.tb_frame.f_code
        where = f" ({code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} in {code.co_name})"
    return f"{type(error).__name__}: {text}{where}" if text else type(error).__name__ + where
