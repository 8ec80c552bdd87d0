"""`SequenceData`: a log of interactions as a dataset, one sequence for each user.

Sequences need all interactions of a user, which may be anywhere in the files. So a log is grouped
in memory: about 30 bytes an interaction remain.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.programs.data.dataset import Progress, Split
from torchrec_2dsp.programs.data.logs.batches import BatchStream, EpochPlan, check_batch, row_order
from torchrec_2dsp.programs.data.logs.config import InteractionsLayout
from torchrec_2dsp.programs.data.logs.conversion import ConvertedFile
from torchrec_2dsp.programs.data.logs.encoder import FeatureIds, LogFeature, Samples
from torchrec_2dsp.programs.data.logs.files import list_files
from torchrec_2dsp.programs.data.logs.ids import TIMES, compute, texts_of, times_of
from torchrec_2dsp.programs.data.logs.source import LogReader, LogSource, converted_files
from torchrec_2dsp.programs.data.logs.text import ColumnKind, Columns, LogColumn, MalformedLines


@dataclass(frozen=True)
class InteractionLog:
    """The items of each user, in the order of time."""

    items: NDArray[np.int64]
    """The items of all users, one user after another, in the order in which users first appear. The
    most frequent item is 0."""

    starts: NDArray[np.int64]
    """Where each user's items begin."""

    lengths: NDArray[np.int64]
    """How many items each user has."""

    item_values: pa.BinaryArray
    """The items as the log names them, in the order of their numbers."""

    num_left_out: int
    """How many users had too few items."""

    @cached_property
    def item_names(self) -> tuple[str, ...]:
        """The items' names, with a mark for bytes that are no text."""
        return tuple(value.decode("utf-8", "replace") for value in self.item_values.to_pylist())

    @property
    def num_users(self) -> int:
        """The number of users."""
        return len(self.starts)

    def last_items(
        self, users: NDArray[np.int64], *, max_length: int, without_last: bool
    ) -> FeatureIds:
        """Return the last items of some users, oldest first.

        Args:
            users: numbers of users.
            max_length: how many items at most.
            without_last: leaves out each user's last item, and ends before it.
        """
        ends = self.starts[users] + self.lengths[users] - without_last
        lengths = np.minimum(ends - self.starts[users], max_length)
        before = np.cumsum(lengths) - lengths
        places = np.arange(int(lengths.sum())) + np.repeat(ends - lengths - before, lengths)
        return FeatureIds(self.items[places], lengths.astype(np.int32))


def read_interactions(
    source: LogSource,
    *,
    user: str,
    item: str,
    time: str,
    time_format: str,
    min_items: int,
    incomplete_limit: int,
) -> InteractionLog:
    """Group a log by user, in memory, by sorting arrays.

    Args:
        source: the rows.
        user: the column of the users.
        item: the column of the items.
        time: the column that orders a user's items; those of one time stay in the log's order.
        time_format: how a time is written.
        min_items: users with fewer items are left out.
        incomplete_limit: how many rows may lack a user, an item or a time; they are left out.

    Raises:
        InputError: more rows are incomplete.
        ConfigError: no user is left.
    """
    with LogReader(source) as reader:
        tables = [reader.block(block) for block in source.blocks]
    users = texts_of(pa.chunked_array([part for table in tables for part in table[user].chunks]))
    items = texts_of(pa.chunked_array([part for table in tables for part in table[item].chunks]))
    times = np.concatenate([_times(table[time], time_format) for table in tables])
    is_whole = ~np.isnan(times)
    for texts in (users, items):
        is_whole &= np.asarray(compute.binary_length(texts.values)) > 0
    num_incomplete = len(times) - int(is_whole.sum())
    if num_incomplete > incomplete_limit:
        row = int(np.flatnonzero(~is_whole)[0])
        raise InputError(
            f"{num_incomplete} rows lack a user, an item or a time, the first of them row {row} of "
            f"the log; malformed_limit={incomplete_limit} allows fewer"
        )
    whole = pa.array(is_whole)
    by_appearance = users.values.filter(whole).dictionary_encode()
    user_numbers = np.asarray(by_appearance.indices).astype(np.int64)
    item_numbers, names = _by_frequency(items.values.filter(whole))
    order = np.lexsort((times[is_whole], user_numbers))
    counts = np.bincount(user_numbers)
    has_enough = counts >= min_items
    if not has_enough.any():
        raise ConfigError(
            f"no user has min_items={min_items} items: the longest sequence has "
            f"{counts.max(initial=0)}"
        )
    is_used = has_enough[user_numbers[order]]
    lengths = counts[has_enough]
    return InteractionLog(
        items=item_numbers[order][is_used],
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        item_values=names,
        num_left_out=int((~has_enough).sum()),
    )


def _by_frequency(values: pa.BinaryArray) -> tuple[NDArray[np.int64], pa.BinaryArray]:
    """Rank values, the most frequent 0; of equally frequent ones, the smaller text first."""
    encoded = values.dictionary_encode()
    numbers = np.asarray(encoded.indices).astype(np.int64)
    counts = np.bincount(numbers, minlength=len(encoded.dictionary))
    order = np.asarray(
        compute.sort_indices(
            pa.table({"count": counts, "value": encoded.dictionary}),
            sort_keys=[("count", "descending"), ("value", "ascending")],
        )
    ).astype(np.int64)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    return ranks[numbers], encoded.dictionary.take(pa.array(order))


def _times(column: pa.ChunkedArray, time_format: str) -> NDArray[np.float64]:
    if time_format != "unix":
        column, is_wrong = times_of(column, time_format)
        if is_wrong.any():
            raise InputError(
                f"{int(is_wrong.sum())} times aren't written as time_format={time_format!r} says"
            )
    if pt.is_timestamp(column.type):
        column = column.cast(TIMES, safe=False).cast(pa.int64())
    return column.cast(pa.float64(), safe=False).to_numpy()


_USERS_AT_ONCE = 4096


class SequenceData:
    """The sequences of a log of interactions, as a `Dataset` with one sparse feature.

    A training sample is a user's last items without the very last; a held-out sample has it, too.
    All labels are 1, and there are no dense features.
    """

    def __init__(self, config: InteractionsLayout, progress: Progress | None = None) -> None:
        """Read and group the log.

        Args:
            config: the section of the config.
            progress: called while files are converted.
        """
        self._config = config
        self.malformed = MalformedLines(config.malformed_limit)
        """The lines that couldn't be read."""
        source = LogSource(
            config.layout,
            list_files(config.files),
            _columns(config),
            prepared=config.prepared,
            malformed=self.malformed,
            progress=progress,
        )
        self.log: InteractionLog = read_interactions(
            source,
            user=config.user,
            item=config.item,
            time=config.time,
            time_format=config.time_format,
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
        """The number of dense features: none."""
        return 0

    def num_rows(self, split: Split) -> int:
        """Return how many samples a split has: one for each user."""
        return self.log.num_users

    def num_batches(self, split: Split, global_batch_size: int) -> int:
        """Return how many batches an epoch of a split has."""
        return self._plan(global_batch_size).num_batches

    def num_train_batches(self, global_batch_size: int) -> int | None:
        """Return how many global batches all epochs have; `None` if epochs never end."""
        if not self._config.epochs:
            return None
        return self._config.epochs * self.num_batches(Split.TRAIN, global_batch_size)

    def batches(
        self, split: Split, *, global_batch_size: int, rank: int, world_size: int, start: int = 0
    ) -> BatchStream:
        """Make this rank's part of a split's global batches; see `Dataset.batches`.

        Training batches end after the config's epochs, held-out ones after one.
        """
        check_batch(global_batch_size, rank, world_size, start)
        plan = self._plan(global_batch_size)
        plan.check("users'")
        return self._stream(lambda: self._read(split, plan, rank, world_size, start))

    def samples_once(self, split: Split, *, rank: int, world_size: int) -> BatchStream:
        """Make a sample of every user once, dealt to ranks, in batches of any size."""

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


def interactions_to_convert(config: InteractionsLayout) -> list[ConvertedFile]:
    """Return the log's files that are converted before they are read."""
    files = list_files(config.files)
    return converted_files(config.layout, files, _columns(config), config.prepared)


def _columns(config: InteractionsLayout) -> Columns:
    time = LogColumn(ColumnKind.TIME)
    if config.time_format != "unix":
        time = LogColumn(ColumnKind.WRITTEN_TIME, config.time_format)
    text = LogColumn(ColumnKind.TEXT)
    return {config.user: text, config.item: text, config.time: time}
