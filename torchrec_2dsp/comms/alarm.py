"""All ranks go on, or all raise the same error: by agreement, by an alarm, batch by batch.

`agree` gathers errors and facts, and waits: for setup. An `Alarm` costs an all-reduce of 8 bytes
that overlaps with training. `BatchesInStep` uses one for a loader's batches.
"""

import enum
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.breaking import GRACE_S, described
from torchrec_2dsp.comms.collectives import beside_kernels
from torchrec_2dsp.comms.failure_detection import NoticeBoard, name_of
from torchrec_2dsp.errors import ConfigError, RankError, TwoDError


def agree(
    group: dist.ProcessGroup,
    *,
    error: TwoDError | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Raise on every rank of ``group`` if any rank has an error or the facts differ.

    Collectives:
        One all-gather of objects.
    """
    own = (error, dict(facts or {}))
    gathered: list[tuple[TwoDError | None, dict[str, str]]] = [own] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    ranks = dist.get_process_group_ranks(group)
    failed = [
        (rank, raised)
        for rank, (raised, _) in zip(ranks, gathered, strict=True)
        if raised is not None
    ]
    if failed:
        rank, first = failed[0]
        is_alike = all(str(raised) == str(first) for _, raised in failed)
        # A `RankError` already names the rank.
        if not isinstance(first, RankError) and not (is_alike and len(failed) == len(gathered)):
            first = type(first)(f"{first} (found on rank {rank})")
        raise on_all_ranks(first)
    for name, expected in gathered[0][1].items():
        for rank, (_, facts_there) in zip(ranks, gathered, strict=True):
            if facts_there.get(name) != expected:
                line, line_there = _first_difference(expected, str(facts_there.get(name)))
                raise on_all_ranks(
                    ConfigError(
                        f"{name} differs between ranks: rank {ranks[0]} has {line}, rank {rank} "
                        f"has {line_there}; give all ranks the same"
                    )
                )


@contextmanager
def agreeing(group: dist.ProcessGroup) -> Iterator[dict[str, str]]:
    """Run a block of local work, then agree on its error and its facts.

    The block puts its facts into a dict. An error that isn't a `TwoDError` becomes a `ConfigError`
    with the same text, because the other ranks must raise it, too.
    """
    facts: dict[str, str] = {}
    try:
        yield facts
    except Exception as error:
        agree(group, error=as_ours(error, ConfigError))
    else:
        agree(group, facts=facts)


def as_ours(error: Exception, kind: type[TwoDError]) -> TwoDError:
    """Return ``error`` if it is a `TwoDError`, else a ``kind`` with its text, for other ranks."""
    if isinstance(error, TwoDError):
        return error
    converted = kind(f"{type(error).__name__}: {error}")
    converted.__cause__ = error
    return converted


def on_all_ranks(error: TwoDError) -> TwoDError:
    """Mark an error as raised on all ranks, so that no rank is blamed for it."""
    error.is_on_all_ranks = True
    return error


def _first_difference(first: str, second: str, limit: int = 300) -> tuple[str, str]:
    """Return the first differing lines of two texts, cut to ``limit`` characters."""
    lines = zip_longest(first.splitlines(), second.splitlines(), fillvalue="nothing")
    pair = next(((a.strip(" ,"), b.strip(" ,")) for a, b in lines if a != b), (first, second))
    return pair[0][:limit], pair[1][:limit]


_BITS = 15
"""The bits that count the ranks with a signal, which limit the world to fewer than 32,768 ranks."""


class Signal(enum.IntEnum):
    """A rank's message to the others. The sum over all ranks counts the ranks with each signal."""

    WELL = 0

    FAILED = 1
    """The rank has an error, which all ranks will raise."""

    OUTSIDE = 1 << _BITS
    """The rank evaluates, reads the state, leaves the loop, or goes on without a backward."""

    ENDED = 1 << 2 * _BITS

    READY = 1 << 3 * _BITS
    """The rank has a batch, or looks up the last batch of a step with several."""


class Alarm:
    """Lets each rank signal its state, go on, and learn about the others later.

    Without it, only some peers would notice a failed rank, and the others would wait forever. All
    signals have the same size, so that they match even if ranks are at different places in the
    program. Nothing else may use the alarm's group.

    A check waits as long as any collective: for the timeout of ``init_process_group``, which all of
    this package's groups inherit. The board then waits for answers for
    `failure_detection.ANSWER_S`.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, board: NoticeBoard) -> None:
        self.group = group
        """All ranks that must stop together."""
        self.board = board
        """The board where ranks post failure details."""
        self.device = device

    def check(self, error: TwoDError | None = None, signal: Signal = Signal.WELL) -> "Check":
        """Signal this rank's state or error, without waiting.

        Collectives:
            One all-reduce of 8 bytes, not waited for.
        """
        own_signal = Signal.FAILED if error is not None else signal
        with beside_kernels(self.device):
            total = torch.full((1,), int(own_signal), device=self.device)
            work = dist.all_reduce(total, dist.ReduceOp.SUM, group=self.group, async_op=True)
        assert work is not None
        return Check(self, work, total, error)

    def step_outside(self, alone: TwoDError | None = None) -> None:
        """Wait until no rank trains; if some do, raise ``alone`` or an explanation.

        Training ranks may wait for this one in a collective forever, so they are asked.

        Collectives:
            One all-reduce of 8 bytes, waited for.
        """
        check = self.check(signal=Signal.OUTSIDE)
        patience_s = _PATIENCE_S
        while not _ends_within(check.work, patience_s):
            # A rank that has gone on may have answered this check meanwhile.
            if self._is_left_behind() and not _ends_within(check.work, GRACE_S):
                raise alone or self.board.explain()
            patience_s *= 2
        check.wait(alone)

    def _is_left_behind(self) -> bool:
        """Return whether a rank has begun a forward or backward that this one hasn't."""
        own = self.board.activity
        return any(
            notice.num_forwards > own.num_forwards or notice.backward_of in own.awaited
            for notice in self.board.ask()
            if notice.num_models == own.num_models
        )


def _ends_within(work: dist.Work, seconds: float) -> bool:
    """Wait for a collective for some seconds; return whether it has ended."""
    deadline = time.monotonic() + seconds
    while not (has_ended := work.is_completed()) and time.monotonic() < deadline:
        time.sleep(1e-4)
    return has_ended


_PATIENCE_S = 2.0
"""The time after which a rank that waits outside asks the others where they are; it doubles."""


@dataclass(frozen=True)
class Check:
    """All ranks' signals in flight."""

    alarm: Alarm
    work: dist.Work
    total: torch.Tensor
    error: TwoDError | None

    def wait(self, alone: TwoDError | None = None) -> dict[Signal, int]:
        """Wait for all signals, and count the ranks behind each; all ranks raise the first error.

        Args:
            alone: raised if only some ranks, including this one, are `Signal.OUTSIDE`.

        Raises:
            RankError: a rank has failed, or is at another place in the program.

        Returns:
            The number of ranks with each signal.

        Collectives:
            An agreement, if a rank has failed.
        """
        group, board = self.alarm.group, self.alarm.board
        with beside_kernels(self.alarm.device):
            try:
                self.work.wait()
            except RuntimeError as error:
                raise board.explain(error) from error
            total = int(self.total.item())
        if board.has_aborted:
            raise board.explain()
        counts = {signal: total // int(signal) % (1 << _BITS) for signal in Signal if signal.value}
        if counts[Signal.FAILED]:
            agree(group, error=self.error)
        in_loader = counts[Signal.READY] + counts[Signal.ENDED]
        if {counts[Signal.OUTSIDE], in_loader} - {0, dist.get_world_size(group)}:
            raise alone or board.explain()
        return counts


T = TypeVar("T")


class BatchesInStep(Iterator[T], Generic[T]):
    """Yields a batch if all ranks have one, and ends if none has.

    If only some ranks have a batch, or a loader fails, all ranks raise an error that names the
    rank, before any of them trains the next batch. Each batch is taken from the loader before the
    previous one is trained, so messages between ranks overlap with training.
    """

    def __init__(self, batches: Iterable[T], alarm: Alarm) -> None:
        self._batches = iter(batches)
        self._alarm = alarm
        self._taken: list[T] = []
        self._check: Check | None = None
        self._error: BaseException | None = None
        self._num_given = 0
        self._has_ended = False

    def __next__(self) -> T:
        """Return the next batch.

        Collectives:
            An all-reduce of 8 bytes for the batch after this one, not waited for.
        """
        if self._error is not None and self._check is None:
            raise self._error
        if self._has_ended:
            raise StopIteration
        if self._check is None:
            self._take()
        self._settle()
        batch = self._taken.pop()
        self._num_given += 1
        self._take()
        return batch

    def stop(self) -> list[T]:
        """Take no more batches; return the one taken ahead, in a list, if all ranks have one."""
        if self._has_ended or self._check is None:
            return []
        try:
            self._settle()
        except StopIteration:
            return []
        self._has_ended = True
        return self._taken

    def _take(self) -> None:
        """Take a batch from the loader, and signal to the other ranks whether there was one."""
        activity, signal, error = self._alarm.board.activity, Signal.READY, None
        before = activity.phase
        activity.begin(f"the loader, for batch {self._num_given + 1}")
        try:
            self._taken.append(next(self._batches))
        except StopIteration:
            signal = Signal.ENDED
        except Exception as raised:
            self._error = raised
            rank = dist.get_rank()
            text = f"{name_of(rank)} failed {activity}: {described(raised)}"
            error = RankError(text, (rank,))
        self._check = self._alarm.check(error, signal)
        activity.phase = before

    def _settle(self) -> None:
        assert self._check is not None
        check, self._check = self._check, None
        try:
            counts = check.wait()
        except TwoDError as shared_error:
            self._error = self._error or shared_error
            raise self._error from (None if shared_error is self._error else shared_error)
        num_ranks = dist.get_world_size(self._alarm.group)
        if counts[Signal.READY] == num_ranks:
            return
        self._has_ended = True
        if counts[Signal.ENDED] == num_ranks:
            raise StopIteration
        self._error = self._out_of_step(num_ranks)
        raise self._error

    def _out_of_step(self, num_ranks: int) -> RankError:
        has_batch: list[bool] = [False] * num_ranks
        dist.all_gather_object(has_batch, bool(self._taken), group=self._alarm.group)
        ended = tuple(rank for rank in range(num_ranks) if not has_batch[rank])
        others = [rank for rank in range(num_ranks) if has_batch[rank]]
        error = RankError(
            f"no batch is left after {self._num_given} for {name_of(*ended)}, but one for "
            f"{name_of(*others)}; give all ranks the same number of batches: drop or pad the rest",
            ended,
        )
        error.is_on_all_ranks = True
        return error
