"""A rank's notice when something went wrong, and the error that blames a rank, from all notices."""

import enum
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torchrec_2dsp.errors import RankError

_AT_START = "before the first step"


class Activity:
    """This rank's current work, for the error message in case a rank fails.

    It costs one assignment where a phase begins or ends, and no communication.

    Example:
        >>> from torchrec_2dsp.comms.notice import Activity
        >>> activity = Activity()
        >>> activity.step = 1
        >>> activity.begin("the forward")
        >>> print(activity)
        at step 1, in the forward
    """

    def __init__(self) -> None:
        self.step = 0
        """The model's training forwards so far, the running one included."""
        self.phase = _AT_START
        """The phase that runs now, or ran last."""

    def __str__(self) -> str:
        return f"at step {self.step}, {self.phase}"

    def restart(self) -> None:
        """Return to the time before the first step, for another model."""
        self.step, self.phase = 0, _AT_START

    def begin(self, phase: str) -> None:
        """Record that ``phase`` runs from now on; its end isn't recorded."""
        self.phase = f"in {phase}"


class Standing(enum.Enum):
    """A rank's state, as far as the others can tell."""

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
    standing: str
    """A `Standing`, as text."""
    step: int
    phase: str
    error: str = ""
    """The rank's error, as text."""
    loop: int = 0
    """The number of training loops that the rank has entered."""
    alarm: int = 0
    """The latest question that the rank has heard."""

    @property
    def where(self) -> str:
        """The step and the phase, as part of a sentence."""
        return f"at step {self.step}, {self.phase}"

    def encoded(self) -> str:
        """Return the notice as text, for a store."""
        return json.dumps(asdict(self))

    @classmethod
    def decoded(cls, text: bytes) -> "Notice":
        """Return the notice that ``text`` encodes."""
        return cls(**json.loads(text))


def blame(own: Notice, others: Sequence[Notice], cause: str) -> RankError:
    """Return the error that names the ranks to blame; ``cause`` is the error noticed here.

    Example:
        >>> from torchrec_2dsp.comms.notice import Notice, blame
        >>> own = Notice(0, "here", 3, "in the backward")
        >>> print(blame(own, [Notice(1, "failed", 3, "in the loader", "OSError: gone")], ""))
        rank 1 failed at step 3, in the loader: OSError: gone; rank 0 noticed it at step 3,
        in the backward
    """
    by_standing: dict[Standing, list[Notice]] = defaultdict(list)
    for notice in others:
        by_standing[Standing(notice.standing)].append(notice)
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
    if leavers := [notice for notice in everyone if notice.standing == Standing.LEFT.value]:
        text = "; ".join(f"{name_of(n.rank)} left the loop after step {n.step}" for n in leavers)
        rest = [notice for notice in everyone if notice not in leavers]
        return RankError(
            f"{text}, but not {_by_place(rest)}; give all ranks the same number of batches",
            ranks_of(leavers),
        )
    return _difference(everyone, seen)


def _difference(notices: Sequence[Notice], seen: str) -> RankError:
    """Return the error if all ranks answer; it blames the fewest at one place, or those behind."""
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


def encoded_verdict(error: RankError, step: int) -> str:
    """Return a rank's verdict at ``step`` as text, for a store."""
    return json.dumps({"text": str(error), "ranks": error.ranks, "step": step})


def decoded_verdict(text: bytes, since_step: int) -> RankError | None:
    """Return another rank's verdict; `None` if it is older than ``since_step``."""
    verdict = json.loads(text)
    if verdict["step"] < since_step:
        return None
    return RankError(verdict["text"], tuple(verdict["ranks"]))


def ranks_of(notices: Sequence[Notice]) -> tuple[int, ...]:
    """Return the ranks that posted ``notices``, in ascending order."""
    return tuple(sorted(notice.rank for notice in notices))


def name_of(*ranks: int) -> str:
    """Name ranks in a sentence.

    Example:
        >>> from torchrec_2dsp.comms.notice import name_of
        >>> name_of(1), name_of(0, 2)
        ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
