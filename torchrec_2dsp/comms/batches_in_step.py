"""`BatchesInStep`: a loader's batches, of which all ranks must have the same number."""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch.distributed as dist

from torchrec_2dsp.comms.alarm import Alarm, Check, Signal
from torchrec_2dsp.comms.notice import name_of
from torchrec_2dsp.comms.notice_board import described
from torchrec_2dsp.errors import RankError, TwoDError

T = TypeVar("T")


class BatchesInStep(Iterator[T], Generic[T]):
    """Gives a batch when all ranks have one, and ends when none has.

    If only some ranks have a batch, or a loader fails, all ranks raise an error that names the
    rank, before any of them trains the next batch. Each batch is taken from the loader before the
    previous one is trained, so the messages between ranks overlap with training.
    """

    def __init__(self, batches: Iterable[T], alarm: Alarm) -> None:
        """
        Args:
            batches: the batches of this rank.
            alarm: the alarm of all ranks.
        """
        self._batches = iter(batches)
        self._alarm = alarm
        self._taken: list[T] = []
        self._check: Check | None = None
        self._error: BaseException | None = None
        self._num_given = 0
        self._has_ended = False

    def __next__(self) -> T:
        """The next batch.

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
        """Take no more batches; return the one taken ahead in a list, if all ranks have one."""
        if self._has_ended or self._check is None:
            return []
        try:
            self._settle()
        except StopIteration:
            return []
        self._has_ended = True
        return self._taken

    def _take(self) -> None:
        """Take a batch from the loader, and tell the other ranks whether there was one."""
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
        """Wait for the other ranks; return if all have taken a batch, else raise."""
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
        self._error = self._out_of_step(counts, num_ranks)
        raise self._error

    def _out_of_step(self, counts: dict[Signal, int], num_ranks: int) -> RankError:
        if counts[Signal.READY] + counts[Signal.ENDED] < num_ranks:
            return self._alarm.board.explain()
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
