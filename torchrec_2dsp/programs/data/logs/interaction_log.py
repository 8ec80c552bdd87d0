"""`InteractionLog`: who used what and when, as a sequence of items for each user.

Sequences need all interactions of a user, which may be anywhere in the files. So a log of
interactions is grouped in memory, by sorting arrays: about 30 bytes an interaction remain.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.programs.data.logs.arrow import compute
from torchrec_2dsp.programs.data.logs.blocks import ColumnKind, LogSource
from torchrec_2dsp.programs.data.logs.samples import FeatureIds
from torchrec_2dsp.programs.data.logs.values import texts_of


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
        """The names of the items, with a mark for bytes that are no text."""
        return tuple(value.decode("utf-8", "replace") for value in self.item_values.to_pylist())

    @property
    def num_users(self) -> int:
        """How many users there are."""
        return len(self.starts)

    def last_items(
        self, users: NDArray[np.int64], *, max_length: int, without_last: bool
    ) -> FeatureIds:
        """The last items of some users, oldest first.

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
    source: LogSource, *, user: str, item: str, time: str, min_items: int, incomplete_limit: int
) -> InteractionLog:
    """Group a log by user.

    Args:
        source: the rows.
        user: the column of the users.
        item: the column of the items.
        time: the column that orders a user's items; those of one time stay in the log's order.
        min_items: users with fewer items are left out.
        incomplete_limit: how many rows may lack a user, an item or a time; they are left out.

    Raises:
        InputError: more rows are incomplete.
        ConfigError: no user is left.
    """
    columns = {user: ColumnKind.TEXT, item: ColumnKind.TEXT, time: ColumnKind.TIME}
    tables = [source.read(block, columns) for block in source.blocks]
    users = texts_of(pa.chunked_array([part for table in tables for part in table[user].chunks]))
    items = texts_of(pa.chunked_array([part for table in tables for part in table[item].chunks]))
    times = np.concatenate([_times(table[time]) for table in tables])
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
    """Numbers for values, the most frequent 0; of equally frequent ones, the smaller text first."""
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


def _times(column: pa.ChunkedArray) -> NDArray[np.float64]:
    if pt.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    return column.cast(pa.float64(), safe=False).to_numpy()
