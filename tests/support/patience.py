"""How long to wait for what takes longer when several lanes of tests share the cores."""

import os

NUM_LANES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
"""Workers of xdist that run tests side by side."""
_SHORT_S = 20.0


def patient(seconds: float) -> float:
    """A deadline that no test should reach, longer by each lane.

    Short ones are left as they are: they belong to tests that wait for them.
    """
    return seconds if seconds < _SHORT_S else seconds * NUM_LANES
