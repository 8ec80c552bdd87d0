"""`NoticeBoard`: where ranks post that they failed, or still run, and learn which rank is to blame.

In normal operation nothing is written: a thread polls twice a second for questions. A rank whose
collective fails asks, and the other ranks' threads answer, even while the rank waits in a
collective itself. A rank that doesn't answer is dead, stopped or cut off.
"""

import copy
import enum
import json
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from torchrec_2dsp._compat.c10d import end_process, nccl_abort, own_connection, store_of_world
from torchrec_2dsp.comms.breaking import Watch, causes_of, described, is_broken_connection
from torchrec_2dsp.errors import RankError, TwoDError


class Activity:
    """This rank's current work, for the error message in case a rank fails.

    It costs one assignment where a phase begins or ends, and no communication.
    """

    def __init__(self, num_models: int = 0) -> None:
        self.num_models = num_models
        """The number of models made so far: an earlier model's counts don't apply to the last."""
        self.step = 0
        """The model's training forwards so far, including the running one."""
        self.phase = "before the first step"
        """The phase that is running, or ran last."""
        self.batch, self.is_last_batch = "", False
        """The batch in a step with several, as text after the phase."""
        self.backward_of = ""
        """The lookup whose backward began last."""
        self.awaited: dict[str, int] = {}
        """The lookups whose backward hasn't begun, with their forward's number."""
        self.num_forwards = self.num_modules = 0
        """All models' training forwards, and sharded modules, since the last model was made."""

    def __str__(self) -> str:
        return f"at step {self.step}, {self.phase}"

    def begin(self, phase: str) -> None:
        """Record that ``phase`` runs from now on; its end isn't recorded."""
        self.phase = f"in {phase}{self.batch}"


class Standing(enum.StrEnum):
    """A rank's state, as far as the others know."""

    HERE = "here"
    FAILED = "failed"
    """The rank has raised an error of its own."""
    LEFT = "left"
    """The rank has left the training loop without an error."""
    SILENT = "silent"


@dataclass(frozen=True)
class Notice:
    """A rank's message about itself."""

    rank: int
    standing: Standing
    step: int
    phase: str
    error: str = ""
    """The rank's error, as text."""
    loop: int = 0
    """The number of training loops that the rank has entered."""
    alarm: int = 0
    """The latest question that the rank has heard."""
    backward_of: str = ""
    num_forwards: int = 0
    num_models: int = 0

    @property
    def where(self) -> str:
        """The step and the phase, as part of a sentence."""
        return f"at step {self.step}, {self.phase}"

    @classmethod
    def decoded(cls, text: bytes) -> "Notice":
        """Decode a notice."""
        fields = json.loads(text)
        return cls(**fields | {"standing": Standing(fields["standing"])})


def blame(own: Notice, others: Sequence[Notice], cause: str) -> RankError:
    """Return the error that names the ranks to blame; ``cause`` is the error noticed here.

    Example:
        >>> from torchrec_2dsp.comms.failure_detection import Notice, Standing, blame
        >>> own = Notice(0, Standing.HERE, 3, "in the backward")
        >>> failed = Notice(1, Standing.FAILED, 3, "in the loader", "OSError: gone")
        >>> print(blame(own, [failed], ""))
        rank 1 failed at step 3, in the loader: OSError: gone; rank 0 noticed it at step 3,
        in the backward
    """
    by_standing: dict[Standing, list[Notice]] = defaultdict(list)
    for notice in others:
        by_standing[notice.standing].append(notice)
    seen = f" ({cause})" if cause else ""
    noticed = f"{name_of(own.rank)} noticed it {own.where}"
    if failed := by_standing[Standing.FAILED]:
        text = "; ".join(f"{name_of(n.rank)} failed {n.where}: {n.error}" for n in failed)
        return RankError(f"{text}; {noticed}", ranks_of(failed))
    if silent := by_standing[Standing.SILENT]:
        return RankError(
            f"{name_of(*ranks_of(silent))} did not answer: killed, stopped, or cut off from the "
            f"others; {noticed}{seen}. Resume from a checkpoint",
            ranks_of(silent),
        )
    everyone = sorted([own, *others], key=lambda notice: notice.rank)
    leavers = [notice for notice in everyone if notice.standing is Standing.LEFT]
    if leavers and (rest := [notice for notice in everyone if notice not in leavers]):
        text = "; ".join(f"{name_of(n.rank)} left the loop after step {n.step}" for n in leavers)
        return RankError(
            f"{text}, but not {_by_place(rest)}; give all ranks the same number of batches",
            ranks_of(leavers),
        )
    return _difference(everyone, seen)


def _difference(notices: Sequence[Notice], seen: str) -> RankError:
    """Return the error if all ranks answer; it blames the smallest group, or those behind."""
    places = {notice.where: [n for n in notices if n.where == notice.where] for notice in notices}
    if len(places) == 1:
        return RankError(f"all ranks answer, {notices[0].where}, but can't reach each other{seen}")
    apart = min(places.values(), key=lambda group: (len(group), group[0].step))
    return RankError(
        f"not all ranks do the same: {_by_place(notices)}; lookups, syncs and reads of the state "
        f"are for all ranks alike{seen}",
        ranks_of(apart),
    )


def _by_place(notices: Sequence[Notice]) -> str:
    """Group ranks by step and phase, as text."""
    places: dict[str, list[int]] = defaultdict(list)
    for notice in notices:
        places[notice.where].append(notice.rank)
    return "; ".join(f"{name_of(*ranks)} {where}" for where, ranks in places.items())


def ranks_of(notices: Sequence[Notice]) -> tuple[int, ...]:
    """Return the ranks that posted ``notices``, in ascending order."""
    return tuple(sorted(notice.rank for notice in notices))


def name_of(*ranks: int) -> str:
    """Name ranks in a sentence.

    Example:
        >>> from torchrec_2dsp.comms.failure_detection import name_of
        >>> name_of(1), name_of(0, 2)
        ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


T = TypeVar("T")
ANSWER_S = 2.0
"""The time for which an asking rank waits for answers."""
_LOOK_S = 0.5
"""The interval at which a rank looks for questions."""
_LISTEN_S, _NUM_LISTENS = 0.1, 300
"""The interval once a rank has asked, and the number of looks before it is `_LOOK_S` again."""
_STEPS_APART = 2
"""The most steps by which a rank can be ahead of a failed one."""
_PREFIX = "torchrec_2dsp/"
_ALARMS = f"{_PREFIX}alarms"
_VERDICT = f"{_PREFIX}verdict"
_BOARDS: "weakref.WeakKeyDictionary[dist.ProcessGroup, NoticeBoard]" = weakref.WeakKeyDictionary()


class NoticeBoard:
    """A board where a world's ranks post notices, kept in the world's store."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.activity = Activity()
        """This rank's current work."""
        self.failure: RankError | None = None
        """The error that keeps the ranks from going on together, if any."""
        self.num_loops = 0
        """The number of training loops that this rank has entered."""
        self._rank, self._num_ranks = dist.get_rank(world), dist.get_world_size(world)
        self._world = weakref.ref(world)
        # A second connection, because a waiting call may block the world's own.
        self._store = own_connection(store_of_world())
        self._store.set_timeout(timedelta(seconds=ANSWER_S))
        self._standing, self._error = Standing.HERE, ""
        self._heard: RankError | None = None
        self._watch: Watch | None = None
        if (abort := nccl_abort(world)) is not None:
            self._watch = Watch(self._store, _PREFIX, self._rank, self._num_ranks, abort)
        self._last_alarm = self._store.add(_ALARMS, 0)
        self._post()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="notice board", daemon=True)
        if self._num_ranks > 1:
            self._thread.start()

    @classmethod
    def of(cls, world: dist.ProcessGroup) -> "NoticeBoard":
        """Return a world's board, created on first use."""
        if world not in _BOARDS:
            _BOARDS[world] = cls(world)
        return _BOARDS[world]

    @classmethod
    def start_anew(cls, world: dist.ProcessGroup) -> None:
        """Restart the step count for another model, if the world has a board."""
        if (board := _BOARDS.get(world)) is not None:
            board.activity = Activity(board.activity.num_models + 1)

    @classmethod
    def close_all(cls) -> bool:
        """Stop answering on all boards before the program ends; tell if NCCL's groups are broken.

        A thread that returns from a store during interpreter shutdown would abort the process.
        """
        are_broken = [board._close() for board in list(_BOARDS.values())]
        return any(are_broken)

    def _close(self) -> bool:
        self._is_closing.set()
        if self._thread.is_alive():
            # A store on a stopped host never answers.
            self._thread.join(ANSWER_S)
        if (watch := self._watch) is None:
            return False
        has_failed = self.failure is not None or self._standing is Standing.FAILED
        if not has_failed:
            self._within_time(watch.peer.leave)
        return has_failed or watch.has_aborted

    def enter_loop(self) -> None:
        """Record that this rank begins to train."""
        self.num_loops += 1
        if self._standing is not Standing.HERE:
            self._post_standing(Standing.HERE)

    def leave_loop(self) -> None:
        """Post that this rank has trained all its batches."""
        self._post_standing(Standing.LEFT)

    def fail(self, error: BaseException) -> None:
        """Post that this rank is about to raise its own error."""
        if (text := described(error)) != self._error:
            self._post_standing(Standing.FAILED, text)
            if self._watch is not None:
                self._within_time(self._ring)

    def _ring(self) -> bool:
        """Send this rank's error to ranks that can't notice it."""
        text = f"{name_of(self._rank)} failed {self.activity}: {self._error}"
        if self._verdict() is None:
            self._post_verdict(RankError(text, (self._rank,)), self.activity.step)
        self._last_alarm = self._store.add(_ALARMS, 1)
        return True

    @property
    def has_aborted(self) -> bool:
        """True if this rank's collectives were aborted for another rank's failure, see `Watch`."""
        has_aborted = self._watch is not None and self._watch.has_aborted
        return has_aborted and self._standing is not Standing.FAILED

    def wait_for_others(self, change: int) -> None:
        """Count a context in which this rank may wait for others, or uncount it."""
        if self._watch is not None:
            self._watch.num_waiting += change

    def raise_failure(self) -> None:
        """Raise the error that has stopped the ranks, if any."""
        if self.failure is not None:
            raise copy.copy(self.failure).with_traceback(None)

    def ask(self) -> list[Notice]:
        """Return all other ranks' answers; nothing if the store doesn't answer."""
        return self._within_time(self._ask) or []

    def explain(self, error: BaseException | None = None) -> RankError:
        """Ask all ranks for their state, and blame some for the error that this rank noticed."""
        if self.failure is None:
            cause = "" if error is None else described(error)
            verdict = self._within_time(partial(self._judge, cause)) or self._heard
            self.failure = verdict or RankError(
                "a rank failed, and the store of the process group doesn't answer, which rank 0 "
                f"hosts unless torchrun does; this rank noticed it {self.activity} ({cause})",
                (0,),
            )
        return copy.copy(self.failure)

    def _judge(self, cause: str) -> RankError:
        """Return the verdict that was posted first, possibly this rank's.

        Ranks that notice the failure later can't ask ranks that have ended meanwhile.
        """
        own = self._notice()
        if (verdict := self._verdict()) is not None:
            return verdict
        own_verdict = blame(own, self._ask(), cause)
        if (verdict := self._verdict()) is not None:
            return verdict
        self._post_verdict(own_verdict, own.step)
        return own_verdict

    def _verdict(self) -> RankError | None:
        """Return a posted verdict; `None` if it is from an earlier failure."""
        if not self._store.check([_VERDICT]):
            return None
        verdict = json.loads(self._store.get(_VERDICT))
        if verdict["step"] < self.activity.step - _STEPS_APART:
            return None
        return RankError(verdict["text"], tuple(verdict["ranks"]))

    def _post_verdict(self, error: RankError, step: int) -> None:
        verdict = {"text": str(error), "ranks": error.ranks, "step": step}
        self._store.set(_VERDICT, json.dumps(verdict))

    def _post_standing(self, standing: Standing, error: str = "") -> None:
        self._standing, self._error = standing, error
        self._within_time(self._post)

    def _notice(self) -> Notice:
        activity = self.activity  # Another thread may begin a new one meanwhile.
        return Notice(
            rank=self._rank,
            standing=self._standing,
            step=activity.step,
            phase=activity.phase,
            error=self._error,
            loop=self.num_loops,
            alarm=self._last_alarm,
            backward_of=activity.backward_of,
            num_forwards=activity.num_forwards,
            num_models=activity.num_models,
        )

    def _post(self) -> bool:
        self._store.set(_key(self._rank), json.dumps(asdict(self._notice())))
        return True

    def _post_if_asked(self) -> bool:
        """Post this rank's notice if another rank asks for it; return whether one did."""
        alarm = int(self._store.get(_ALARMS))
        if is_asked := alarm > self._last_alarm:
            self._last_alarm = alarm
            self._post()
        return is_asked

    def _ask(self) -> list[Notice]:
        """Ask all others; return their notices once all answered, one failed, or time is up.

        Others that ask meanwhile get answers, or ranks that notice a failure blame each other.
        """
        alarm = self._store.add(_ALARMS, 1)
        self._last_alarm = alarm
        self._post()
        deadline = time.monotonic() + ANSWER_S
        while True:
            self._post_if_asked()
            notices = self._read()
            is_last = time.monotonic() > deadline
            judged = [self._judged(notice, alarm, is_last=is_last) for notice in notices]
            others = [notice for notice in judged if notice is not None]
            has_failed = any(notice.standing is Standing.FAILED for notice in others)
            if has_failed or len(others) == self._num_ranks - 1:
                return others
            # The more ranks there are, the less often each one reads.
            time.sleep(max(0.05, self._num_ranks / 1_000))

    def _judged(self, notice: Notice, alarm: int, *, is_last: bool) -> Notice | None:
        """Return the notice with its rank's current standing; `None` while that is unknown."""
        is_recent = notice.step >= self.activity.step - _STEPS_APART
        if notice.standing is Standing.FAILED and is_recent:
            return notice
        if notice.standing is Standing.LEFT and notice.loop >= self.num_loops:
            # If this rank has left as well, others may have failed since.
            if self._standing is not Standing.LEFT or notice.alarm >= alarm:
                return notice
        elif notice.alarm >= alarm:
            return replace(notice, standing=Standing.HERE)
        return replace(notice, standing=Standing.SILENT) if is_last else None

    def _read(self) -> list[Notice]:
        keys = [_key(rank) for rank in range(self._num_ranks) if rank != self._rank]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        return [Notice.decoded(text) for text in self._store.multi_get(keys)] if keys else []

    def _within_time(self, action: Callable[[], T]) -> T | None:
        """Return the action's result; `None` if the store is gone or doesn't answer in time."""
        results: list[T] = []

        def act() -> None:
            with suppress(RuntimeError):
                results.append(action())

        # A store on a stopped host makes its clients wait, whatever their timeout.
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        thread.join(2 * ANSWER_S)
        return results[0] if results else None

    def _answer(self) -> None:
        """Post this rank's notice whenever another rank asks, as long as the program runs."""
        num_listens = 0
        while not self._is_closing.wait(_LISTEN_S if num_listens else _LOOK_S):
            num_listens = max(0, num_listens - 1)
            if self._world() is not dist.group.WORLD:
                return
            try:
                if self._post_if_asked():
                    num_listens = _NUM_LISTENS
                if num_listens and self._heard is None:
                    # The store may be gone by the time this rank notices the failure.
                    self._heard = self._verdict()
                if self._watch is not None:
                    self._keep(self._watch)
            except RuntimeError:
                return

    def _keep(self, watch: Watch) -> None:
        """Look for a missing rank, and end this rank's collectives once a rank is to blame."""
        is_missing = watch.misses_a_rank() and self._heard is None
        well = Standing.HERE, self._standing  # All may have left, or raised a common error.
        if is_missing and any(notice.standing not in well for notice in self._ask()):
            self._heard = self._judge("")
        self.failure = self.failure or self._heard
        if self.failure is None:
            return
        watch.end_collectives()
        if watch.is_stuck:
            sys.excepthook(RankError, self.failure, None)
            end_process(1)


def _key(rank: int) -> str:
    return f"{_PREFIX}notice/{rank}"


class naming_faults(AbstractContextManager[None]):
    """A context whose errors tell which rank failed.

    A broken connection becomes a `RankError` that names the rank, after all ranks were asked. This
    rank's own error is raised unchanged, and posted to the other ranks.

    ``phase`` describes the block's work; `None` if the block has several phases.
    """

    def __init__(self, board: NoticeBoard, phase: str | None = None) -> None:
        self._board, self._phase = board, phase

    def __enter__(self) -> None:
        self._board.raise_failure()
        self._board.wait_for_others(1)
        if self._phase is not None:
            self._board.activity.begin(self._phase)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._board.wait_for_others(-1)
        # Whatever follows, aborted collectives are to blame: they leave arbitrary numbers behind.
        has_aborted = self._board.has_aborted and isinstance(error, Exception | None)
        if has_aborted and not _is_explained(error):
            raise self._board.explain(error) from error
        if error is None:
            if self._phase is not None:
                self._board.activity.phase = f"after {self._phase}"
        elif is_broken_connection(error) and not _is_explained(error):
            raise self._board.explain(error) from error
        elif not (isinstance(error, StopIteration) or _is_explained(error)):
            self._board.fail(error)


def _is_explained(error: BaseException | None) -> bool:
    """Return whether the other ranks already know about the error."""
    return any(
        isinstance(cause, RankError) or (isinstance(cause, TwoDError) and cause.is_on_all_ranks)
        for cause in causes_of(error)
    )
