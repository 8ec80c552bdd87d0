"""`SequenceData`: a log of interactions as a dataset, one sequence for each user.

A user's interactions may be anywhere in the files, so the log is grouped in memory, with about 30
bytes per interaction.
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
from torchrec_2dsp.programs.data.dataset import Progress, Split, check_batch
from torchrec_2dsp.programs.data.logs.batches import BatchStream, EpochPlan, row_order
from torchrec_2dsp.programs.data.logs.config import InteractionsLayout
from torchrec_2dsp.programs.data.logs.conversion import ConvertedFile
from torchrec_2dsp.programs.data.logs.encoder import FeatureIds, LogFeature, Samples
from torchrec_2dsp.programs.data.logs.files import list_files
from torchrec_2dsp.programs.data.logs.ids import TIMES, compute, texts_of, times_of
from torchrec_2dsp.programs.data.logs.source import LogReader, LogSource, converted_files
from torchrec_2dsp.programs.data.logs.text import ColumnKind, Columns, LogColumn, MalformedLines


@dataclass(frozen=True)
class InteractionLog:
    """Each user's items, in time order."""

    items: NDArray[np.int64]
    """The items of all users, user by user, in the order in which users first appear. The most
    frequent item is 0."""

    starts: NDArray[np.int64]
    """The offset of each user's first item."""

    lengths: NDArray[np.int64]
    """The number of items per user."""

    item_values: pa.BinaryArray
    """The items' names in the log, indexed by item id."""

    num_left_out: int
    """The number of users with too few items."""

    @cached_property
    def item_names(self) -> tuple[str, ...]:
        """The items' names, with a mark for invalid UTF-8."""
        return tuple(value.decode("utf-8", "replace") for value in self.item_values.to_pylist())

    @property
    def num_users(self) -> int:
        """The number of users."""
        return len(self.starts)

    def last_items(
        self, users: NDArray[np.int64], *, max_length: int, without_last: bool
    ) -> FeatureIds:
        """Return each user's last items, oldest first.

        Args:
            users: user indices.
            max_length: the most items per user.
            without_last: drop each user's very last item first.
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
        user: the user column.
        item: the item column.
        time: the column that orders a user's items; items with equal times stay in the log's order.
        time_format: the time format.
        min_items: the fewest items per user; users with fewer are dropped.
        incomplete_limit: the most rows without a user, an item or a time, which are dropped.

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
    """Rank values from the most frequent, 0; ties are in lexical order."""
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
    """A `Dataset` of user sequences, with one sparse feature.

    A training sample is a user's last items without the very last; a held-out sample includes it.
    All labels are 1, and there are no dense features.
    """

    def __init__(self, config: InteractionsLayout, progress: Progress | None = None) -> None:
        """Read and group the log.

        Args:
            config: the config's section.
            progress: called during conversion.
        """
        self._config = config
        self.malformed = MalformedLines(config.malformed_limit)
        """The malformed lines."""
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
        """The single feature: a sequence's items."""

    @property
    def num_dense(self) -> int:
        """The number of dense features: none."""
        return 0

    def num_rows(self, split: Split) -> int:
        """Return how many samples a split has: one per user."""
        return self.log.num_users

    def num_batches(self, split: Split, global_batch_size: int) -> int:
        """Return how many batches a split's epoch has."""
        return self._plan(global_batch_size).num_batches

    def num_train_batches(self, global_batch_size: int) -> int | None:
        """Return how many global batches all epochs have; `None` if they never end."""
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
        """Make one sample per user once, dealt to ranks, in batches of any size."""

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
    """List the log's files that need conversion."""
    files = list_files(config.files)
    return converted_files(config.layout, files, _columns(config), config.prepared)


def _columns(config: InteractionsLayout) -> Columns:
    time = LogColumn(ColumnKind.TIME)
    if config.time_format != "unix":
        time = LogColumn(ColumnKind.WRITTEN_TIME, config.time_format)
    text = LogColumn(ColumnKind.TEXT)
    return {config.user: text, config.item: text, config.time: time}
