"""`SequenceData`: the sequences of a log of interactions as a `Dataset`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import count

import numpy as np
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.logs.blocks import ColumnKind
from torchrec_2dsp.programs.data.logs.encoder import LogFeature
from torchrec_2dsp.programs.data.logs.epochs import EpochPlan, check_batch, row_order
from torchrec_2dsp.programs.data.logs.files import list_files
from torchrec_2dsp.programs.data.logs.interaction_log import InteractionLog, read_interactions
from torchrec_2dsp.programs.data.logs.interactions_config import InteractionsLayout
from torchrec_2dsp.programs.data.logs.malformed import MalformedLines
from torchrec_2dsp.programs.data.logs.row_index import RowIndex
from torchrec_2dsp.programs.data.logs.samples import Samples
from torchrec_2dsp.programs.data.logs.sources import FileFormat, open_source
from torchrec_2dsp.programs.data.logs.stream import BatchStream

_USERS_AT_ONCE = 4096


class SequenceData:
    """The sequences of a log of interactions, as a `Dataset` with one sparse feature.

    A training sample is a user's last items without the very last; a held-out sample has it, too.
    All labels are 1, and there are no dense features.
    """

    def __init__(self, config: InteractionsLayout) -> None:
        """
        Args:
            config: the section of the config.
        """
        self._config = config
        self.malformed = MalformedLines(config.malformed_limit)
        """The lines that couldn't be read."""
        layout = FileFormat(
            names=config.columns,
            delimiter=config.delimiter,
            quote=config.quote,
            block_bytes=2**24,
            block_rows=2**18,
        )
        columns = {
            config.user: ColumnKind.TEXT,
            config.item: ColumnKind.TEXT,
            config.time: ColumnKind.TIME,
        }
        files = list_files(config.files)
        with closing(open_source(layout, files, columns, self.malformed, RowIndex(""))) as source:
            self.log: InteractionLog = read_interactions(
                source,
                user=config.user,
                item=config.item,
                time=config.time,
                min_items=config.min_items,
                incomplete_limit=config.malformed_limit,
            )
        """The sequences of all users."""
        lengths = np.minimum(self.log.lengths - 1, config.max_length)
        self.features: Sequence[LogFeature] = (
            LogFeature(config.feature, len(self.log.item_values), float(lengths.mean())),
        )
        """The one feature, which holds the items in their order."""

    @property
    def num_dense(self) -> int:
        """How many dense features there are: none."""
        return 0

    def num_rows(self, split: Split) -> int:
        """How many samples a split has: one for each user."""
        return self.log.num_users

    def num_batches(self, split: Split, global_batch_size: int) -> int:
        """How many batches an epoch of a split has."""
        return self._plan(global_batch_size).num_batches

    def num_train_batches(self, global_batch_size: int) -> int | None:
        """How many global batches all epochs have; `None` if epochs never end."""
        if not self._config.epochs:
            return None
        return self._config.epochs * self.num_batches(Split.TRAIN, global_batch_size)

    def batches(
        self, split: Split, *, global_batch_size: int, rank: int, world_size: int, start: int = 0
    ) -> BatchStream:
        """This rank's part of the global batches of a split; see `Dataset.batches`.

        Training batches end after the config's epochs, held-out ones after one.
        """
        check_batch(global_batch_size, rank, world_size, start)
        plan = self._plan(global_batch_size)
        plan.check("users'")
        return self._stream(lambda: self._read(split, plan, rank, world_size, start))

    def samples_once(self, split: Split, *, rank: int, world_size: int) -> BatchStream:
        """Every user of a split once, dealt to ranks, in batches of any size."""

        def batches() -> Iterator[Batch]:
            users = np.arange(rank, self.log.num_users, world_size)
            for first in range(0, len(users), _USERS_AT_ONCE):
                yield self._batch(split, users[first : first + _USERS_AT_ONCE])

        return self._stream(batches)

    def _read(
        self, split: Split, plan: EpochPlan, rank: int, world_size: int, start: int
    ) -> Iterator[Batch]:
        is_trained = split is Split.TRAIN
        epochs = self._config.epochs if is_trained else 1
        size = plan.global_batch_size // world_size
        order, ordered_epoch = np.arange(self.log.num_users), -1
        for batch in count(start):
            epoch, number = plan.place(batch)
            if epochs and epoch >= epochs:
                return
            if is_trained and self._config.is_shuffled and epoch != ordered_epoch:
                seed = self._config.seed
                order = row_order(self.log.num_users, epoch=epoch, window=0, seed=seed)
                ordered_epoch = epoch
            first = number * plan.global_batch_size + rank * size
            yield self._batch(split, order[np.arange(first, first + size) % len(order)])

    def _batch(self, split: Split, users: NDArray[np.int64]) -> Batch:
        bags = self.log.last_items(
            users, max_length=self._config.max_length, without_last=split is Split.TRAIN
        )
        dense = np.empty((len(users), 0), dtype=np.float32)
        labels = np.ones(len(users), dtype=np.float32)
        return Samples(dense, labels, (bags,)).batch([self._config.feature])

    def _stream(self, batches: Callable[[], Iterator[Batch]]) -> BatchStream:
        return BatchStream(batches, num_ahead=self._config.num_ahead)

    def _plan(self, global_batch_size: int) -> EpochPlan:
        return EpochPlan(self.log.num_users, global_batch_size, self._config.rest)
