"""`Activity`: which step a rank is at, and what it is doing there."""

from collections.abc import Iterator
from contextlib import contextmanager

_AT_START = "before the first step"


class Activity:
    """What this rank is doing, for the error message in case a rank fails.

    It costs one assignment where a phase begins or ends, and no communication.

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
        """What runs now, or ran last."""

    def __str__(self) -> str:
        return f"at step {self.step}, {self.phase}"

    def restart(self) -> None:
        """Go back to the time before the first step, for another model."""
        self.step, self.phase = 0, _AT_START

    def begin(self, phase: str) -> None:
        """Record that ``phase`` runs from now on; its end is not recorded."""
        self.phase = f"in {phase}"

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A context in which ``phase`` runs; after an error, it is still what runs."""
        self.begin(phase)
        yield
        self.phase = f"after {phase}"
