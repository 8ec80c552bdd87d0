"""`Feed`: the batches of a contestant on one rank."""

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain, cycle, islice, repeat

from torchrec.datasets.utils import Batch

from torchrec_2dsp.programs.bench.config import BenchConfig
from torchrec_2dsp.programs.config.sections import BalanceConfig
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.models.balance import deal_batches
from torchrec_2dsp.programs.models.kinds import dataset_for
from torchrec_2dsp.samples.balanced_batches import BalancedBatches
from torchrec_2dsp.samples.dealer import BalanceReport

_AHEAD = 4
"""So many batches are taken ahead of a step: by the pipeline, and by whoever deals samples."""


class Feed(Iterator[Batch]):
    """Batches made ahead of time, so that making them takes none of the steps'.

    Dealing their samples to the ranks does: it is work of the contestant that asks for it.
    """

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
        self._model = config.model
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
        self._given: Iterator[Batch] = self._read()
        self._dealt: BalancedBatches[Batch] | None = None

    def deal(self, balance: BalanceConfig) -> None:
        """Give each rank samples by their cost from now on.

        Where batches come again they are dealt here, so that later steps need no other rank.

        Args:
            balance: how samples are dealt.

        Collectives:
            Those of `deal_batches`.
        """
        self._given = self._dealt = deal_batches(self._given, balance, self._model)
        if self.cycle:
            batches = list(islice(self._dealt, self.cycle))
            self._dealt.close()
            self._given = cycle(batches)

    @property
    def report(self) -> BalanceReport | None:
        """What became of the samples of all batches so far; `None` if they aren't dealt."""
        return None if self._dealt is None else self._dealt.report

    def note_seconds(self, seconds: float) -> None:
        """Tell how much processor time the last step took, for speeds that are measured."""
        if self._dealt is not None:
            self._dealt.note_seconds(seconds)

    def prepare(self, num_steps: int) -> None:
        """Have enough for some steps, and for what is taken ahead."""
        while len(self._ready) < num_steps + _AHEAD:
            self._ready.append(next(self._batches))

    def __next__(self) -> Batch:
        return next(self._given)

    def _read(self) -> Iterator[Batch]:
        """The batches as this rank reads them, without an end."""
        while True:
            yield self._ready.popleft() if self._ready else next(self._batches)
