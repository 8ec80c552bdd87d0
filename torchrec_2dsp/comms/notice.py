"""`Notice`: what a rank has to say when something went wrong, and what all of them say together."""

import enum
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torchrec_2dsp.errors import RankError


class Standing(enum.Enum):
    """How a rank is."""

    HERE = "here"
    """It answers."""

    FAILED = "failed"
    """It has raised an error of its own."""

    LEFT = "left"
    """It has left the training loop, as if all were well."""

    SILENT = "silent"
    """It doesn't answer."""


@dataclass(frozen=True)
class Notice:
    """What a rank has posted."""

    rank: int
    standing: str
    """A `Standing`, as text."""
    step: int
    """Its training step."""
    phase: str
    """What it does there."""
    error: str = ""
    """What it has raised."""
    loop: int = 0
    """How many training loops it has entered."""
    alarm: int = 0
    """The last question that it has heard."""

    @property
    def where(self) -> str:
        """Step and phase."""
        return f"at step {self.step}, {self.phase}"

    def encoded(self) -> str:
        """As text, for a store."""
        return json.dumps(asdict(self))

    @classmethod
    def decoded(cls, text: bytes) -> "Notice":
        """The notice of a text."""
        return cls(**json.loads(text))


def blame(own: Notice, others: Sequence[Notice], cause: str) -> RankError:
    """The error that names the ranks to blame.

    Args:
        own: of this rank.
        others: of all other ranks; silent ones have the standing `Standing.SILENT`.
        cause: what this rank has seen of it.

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
        told = "; ".join(f"{name_of(n.rank)} failed {n.where}: {n.error}" for n in failed)
        return RankError(f"{told}; {noticed}", ranks_of(failed))
    if silent := by_standing[Standing.SILENT]:
        return RankError(
            f"{name_of(*ranks_of(silent))} did not answer: killed, stopped, or cut off from the "
            f"others; {noticed}{seen}. Resume from a checkpoint",
            ranks_of(silent),
        )
    everyone = sorted([own, *others], key=lambda notice: notice.rank)
    if left := [notice for notice in everyone if notice.standing == Standing.LEFT.value]:
        told = "; ".join(f"{name_of(n.rank)} left the loop after step {n.step}" for n in left)
        rest = [notice for notice in everyone if notice not in left]
        return RankError(
            f"{told}, but not {_by_place(rest)}; give all ranks the same number of batches",
            ranks_of(left),
        )
    return _difference(everyone, seen)


def _difference(notices: Sequence[Notice], seen: str) -> RankError:
    """All ranks are there: those that are behind are to blame, or those that are few."""
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
    """Which ranks are where."""
    places: dict[str, list[int]] = defaultdict(list)
    for notice in notices:
        places[notice.where].append(notice.rank)
    return "; ".join(f"{name_of(*ranks)} {where}" for where, ranks in places.items())


def encoded_verdict(error: RankError, step: int) -> str:
    """What a rank has found out at a step, for a store."""
    return json.dumps({"text": str(error), "ranks": error.ranks, "step": step})


def decoded_verdict(text: bytes, since_step: int) -> RankError | None:
    """What another rank has found out; `None` if that is older than a step."""
    verdict = json.loads(text)
    if verdict["step"] < since_step:
        return None
    return RankError(verdict["text"], tuple(verdict["ranks"]))


def ranks_of(notices: Sequence[Notice]) -> tuple[int, ...]:
    """Who has posted them."""
    return tuple(sorted(notice.rank for notice in notices))


def name_of(*ranks: int) -> str:
    """Ranks in a sentence.

    Example:
        >>> from torchrec_2dsp.comms.notice import name_of
        >>> name_of(1), name_of(0, 2)
        ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
