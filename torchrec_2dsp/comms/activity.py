"""`Activity`: which step a rank is at, and what it does there."""

from collections.abc import Iterator
from contextlib import contextmanager

_AT_START = "before the first step"


class Activity:
    """What this rank does, kept for the day when others have to be told.

    It costs an assignment where something begins or ends; nobody else hears of it meanwhile.

    Example:
        >>> from torchrec_2dsp.comms.activity import Activity
        >>> activity = Activity()
        >>> activity.step = 1
        >>> with activity.during("the forward"):
        ...     print(activity)
        at step 1, in the forward
        >>> print(activity)
        at step 1, after the forward
    """

    def __init__(self) -> None:
        self.step = 0
        """Training forwards of the model so far, the running one included."""
        self.phase = _AT_START
        """What runs, or what ran last."""

    def __str__(self) -> str:
        return f"at step {self.step}, {self.phase}"

    def restart(self) -> None:
        """Another model is trained from now on."""
        self.step, self.phase = 0, _AT_START

    def begin(self, phase: str) -> None:
        """``phase`` runs from now on; nobody will say when it ends."""
        self.phase = f"in {phase}"

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """``phase`` runs in this context. After an error it is still what ran last."""
        self.begin(phase)
        yield
        self.phase = f"after {phase}"
