"""`Feed`: the batches of a contestant on one rank."""

from collections import deque
from collections.abc import Iterator

from torchrec.datasets.utils import Batch

from torchrec_2dsp.programs.bench.config import BenchConfig
from torchrec_2dsp.programs.data.synthetic import make_batch


class Feed(Iterator[Batch]):
    """Batches made ahead of time, so that making them takes none of the steps'."""

    def __init__(self, config: BenchConfig, *, rank: int, world_size: int, cycle: int) -> None:
        """
        Args:
            config: the data and the batch size.
            rank: whose part of each batch it is.
            world_size: how many parts a batch has.
            cycle: after so many batches the first one comes again; 0 for never.
        """
        self.cycle = cycle
        """The number of different batches; 0 if all are."""
        self._config = config
        self._rank, self._world_size = rank, world_size
        self._ready: deque[Batch] = deque()
        self._num_batches = 0

    def prepare(self, num_steps: int) -> None:
        """Have enough for some steps, and for what the pipeline takes ahead."""
        while len(self._ready) < num_steps + 3:
            self._ready.append(self._next_batch())

    def __next__(self) -> Batch:
        return self._ready.popleft() if self._ready else self._next_batch()

    def _next_batch(self) -> Batch:
        size = self._config.schedule.batch_size * self._world_size
        step = self._num_batches % self.cycle if self.cycle else self._num_batches
        self._num_batches += 1
        return make_batch(
            self._config.data,
            step=step,
            global_batch_size=size,
            rank=self._rank,
            world_size=self._world_size,
        )
