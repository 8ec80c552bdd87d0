"""`SequenceData`: a log of interactions as a dataset, one sequence for each user.

A user's interactions may be anywhere in the files, so the log is grouped in memory, with about 30
bytes per interaction.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.programs.data.dataset import DatasetFeature, Progress, Split
from torchrec_2dsp.programs.data.logs.batches import EpochPlan, LogDataset, row_order
from torchrec_2dsp.programs.data.logs.config import InteractionsLayout
from torchrec_2dsp.programs.data.logs.ids import (
    TIMES,
    compute,
    digest_of,
    hash_texts,
    texts_of,
    times_of,
)
from torchrec_2dsp.programs.data.logs.source import LogReader, LogSource


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

    @property
    def num_users(self) -> int:
        """The number of users."""
        return len(self.starts)

    @property
    def digest(self) -> str:
        """A short text that identifies the items, the users and their order."""
        return digest_of(self.items, self.lengths, hash_texts(self.item_values))

    def last_items(
        self, users: NDArray[np.int64], *, max_length: int, without_last: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each user's last items, oldest first, and how many each has.

        Args:
            users: user indices.
            max_length: the most items per user.
            without_last: drop each user's very last item first.
        """
        ends = self.starts[users] + self.lengths[users] - without_last
        lengths = np.minimum(ends - self.starts[users], max_length)
        in_order = np.arange(int(lengths.sum()))
        before = np.cumsum(lengths) - lengths
        return self.items[in_order + np.repeat(ends - lengths - before, lengths)], lengths


def read_interactions(source: LogSource, config: InteractionsLayout) -> InteractionLog:
    """Group a log by user, in memory, by sorting arrays.

    Raises:
        InputError: more rows than the section allows lack a user, an item or a time.
        ConfigError: no user has enough items.
    """
    for column in (config.user, config.item):
        source.check_single(column, "an interaction")
    reader = LogReader(source)
    tables = [reader.block(block) for block in source.blocks]
    users, items = (
        texts_of(pa.chunked_array([chunk for table in tables for chunk in table[name].chunks]))[0]
        for name in (config.user, config.item)
    )
    times = np.concatenate([_times(table[config.time], config.time_format) for table in tables])
    is_whole = ~np.isnan(times)
    for texts in (users, items):
        is_whole &= np.asarray(compute.binary_length(texts)) > 0
    num_incomplete = len(times) - int(is_whole.sum())
    if num_incomplete > config.malformed_limit:
        row = int(np.flatnonzero(~is_whole)[0])
        raise InputError(
            f"{num_incomplete} rows lack a user, an item or a time, the first of them row {row} of "
            f"the log; malformed_limit={config.malformed_limit} allows fewer"
        )
    whole = pa.array(is_whole)
    by_appearance = users.filter(whole).dictionary_encode()
    user_numbers = np.asarray(by_appearance.indices).astype(np.int64)
    item_numbers, names = _by_frequency(items.filter(whole))
    order = np.lexsort((times[is_whole], user_numbers))
    counts = np.bincount(user_numbers)
    has_enough = counts >= config.min_items
    if not has_enough.any():
        raise ConfigError(
            f"no user has min_items={config.min_items} items: the longest sequence has "
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


class SequenceData(LogDataset):
    """A `Dataset` of user sequences, with one sparse feature.

    A training sample is a user's last items without the very last; a held-out sample includes it.
    All labels are 1, and there are no dense features.
    """

    num_dense = 0

    def __init__(self, config: InteractionsLayout, progress: Progress | None = None) -> None:
        """Read and group the log.

        Args:
            config: the config's section.
            progress: called during conversion.
        """
        super().__init__(config, dict.fromkeys(Split, "users'"))
        self._config = config
        source = LogSource(config, self.malformed, progress)
        self.log = read_interactions(source, config)
        """The sequences of all users."""
        self.fingerprint = {**source.fingerprint, "sequences of users": self.log.digest}
        lengths = np.minimum(self.log.lengths - 1, config.max_length)
        num_items = len(self.log.item_values)
        self.features = (DatasetFeature(config.feature, num_items, float(lengths.mean())),)
        """The single feature: a sequence's items."""

    def num_rows(self, split: Split) -> int:
        """Return how many samples a split has: one per user."""
        return self.log.num_users

    def _read(self, split: Split, plan: EpochPlan, start: int) -> Iterator[Batch]:
        is_shuffled, seed = self._config.is_shuffled and split is Split.TRAIN, self._config.seed
        users = np.arange(self.log.num_users)
        for epoch, first_batch in plan.epochs(start):
            if is_shuffled:
                users = row_order(len(users), epoch=epoch, window=0, seed=seed)
            for number in range(first_batch, plan.num_batches):
                first = number * plan.global_batch_size + plan.rank * plan.batch_size
                places = np.arange(first, first + plan.batch_size)
                yield self._batch(split, users.take(places, mode="wrap"))

    def _read_once(self, split: Split, rank: int, world_size: int) -> Iterator[Batch]:
        users = np.arange(rank, self.log.num_users, world_size)
        for first in range(0, len(users), _USERS_AT_ONCE):
            yield self._batch(split, users[first : first + _USERS_AT_ONCE])

    def _batch(self, split: Split, users: NDArray[np.int64]) -> Batch:
        items, lengths = self.log.last_items(
            users, max_length=self._config.max_length, without_last=split is Split.TRAIN
        )
        sparse = KeyedJaggedTensor(
            keys=[self._config.feature],
            values=torch.from_numpy(items),
            lengths=torch.from_numpy(lengths.astype(np.int32)),
        )
        return Batch(torch.empty(len(users), 0), sparse, torch.ones(len(users)))
