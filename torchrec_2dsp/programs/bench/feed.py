"""`Feed`: the batches of a contestant on one rank."""

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice, repeat

from torchrec.datasets.utils import Batch

from torchrec_2dsp.programs.bench.config import BenchConfig
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.models.kinds import dataset_for


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
        dataset = dataset_for(config.model, config.data.dataset())
        batches = partial(
            dataset.batches,
            Split.TRAIN,
            global_batch_size=config.schedule.batch_size * world_size,
            rank=rank,
            world_size=world_size,
        )
        self._batches = (
            batches()
            if not cycle
            else chain.from_iterable(islice(batches(), cycle) for _ in repeat(None))
        )
        self._ready: deque[Batch] = deque()

    def prepare(self, num_steps: int) -> None:
        """Have enough for some steps, and for what the pipeline takes ahead."""
        while len(self._ready) < num_steps + 3:
            self._ready.append(next(self._batches))

    def __next__(self) -> Batch:
        return self._ready.popleft() if self._ready else next(self._batches)
