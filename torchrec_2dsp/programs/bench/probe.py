"""`ComputeProbe`: a fixed piece of work, which tells how fast the machine is just now."""

import time

import numpy as np

_NUM_ROWS = 100_000
_DIM = 64
_NUM_LOOKUPS = 20_000
_NUM_PASSES = 20


class ComputeProbe:
    """Looks rows up, adds them and sorts their ids, as training does, in one thread.

    The speed of a virtual machine changes with its neighbours, and that of a laptop with its
    temperature, without any load that the operating system could see. So what counts is the time
    that the thread had a core, not the time that it waited for one, which is somebody's load.

    Example:
        >>> from torchrec_2dsp.programs.bench.probe import ComputeProbe
        >>> ComputeProbe().run() > 0
        True
    """

    def __init__(self) -> None:
        draws = np.random.default_rng(0)
        self._rows = draws.random((_NUM_ROWS, _DIM), dtype=np.float32)
        self._ids = draws.integers(_NUM_ROWS, size=_NUM_LOOKUPS)
        self._found = np.empty((_NUM_LOOKUPS, _DIM), dtype=np.float32)

    def run(self) -> float:
        """The processor time of a pass: the mean of several, after one that warms the caches."""
        self._pass()
        start = time.thread_time()
        for _ in range(_NUM_PASSES):
            self._pass()
        return (time.thread_time() - start) / _NUM_PASSES

    def _pass(self) -> None:
        np.sort(self._ids)
        np.take(self._rows, self._ids, axis=0, out=self._found, mode="clip")
        self._found *= self._found
        self._found.sum(axis=1)
