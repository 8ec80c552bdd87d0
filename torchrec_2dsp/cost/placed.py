"""A table on the ranks of a group, and what a rank's batch has for it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.loads import Loads, Ranks
from torchrec_2dsp.cost.workload import TableWork, Workload
from torchrec_2dsp.plan.parameter_sharding import (
    Exchange,
    ParameterSharding2D,
    RowOwners,
    base_type,
)

ID_BYTES = 8
LENGTH_BYTES = 4
KEY_BYTES = 4
"""Bytes of a row's number, where rows travel, unless a model has more than 2**31 of them."""
FLOAT_BYTES = 4


class Shards(NamedTuple):
    """Parts of a table, a number for each."""

    ranks: NDArray[np.int64]
    """The rank of each shard: a position in the group."""

    rows: Ranks
    columns: Ranks

    @classmethod
    def of(cls, shards: Sequence[tuple[int, int, int]]) -> "Shards":
        """Shards from the rank, rows and columns of each."""
        ranks, rows, columns = np.array(shards, dtype=np.float64).reshape(-1, 3).T
        return cls(ranks.astype(np.int64), rows, columns)


@dataclass(frozen=True)
class Placed:
    """A table on the ranks of a group."""

    work: TableWork

    kind: ShardingType
    """TorchRec's type inside the group."""

    shards: Shards
    """The table's parts; none of a data-parallel table."""

    exchange: Exchange = Exchange.POOLED

    owners: RowOwners = RowOwners.BLOCK

    num_hot: int = 0
    """Rows that are on every rank besides; the hottest ones."""

    transport: Transport = Transport.FP32
    """How rows and vectors look on the wire; as the workload says, unless it is another one."""

    @classmethod
    def of(cls, work: TableWork, sharding: ParameterSharding2D) -> "Placed":
        """A table as a plan has it."""
        spec = getattr(sharding.sharding_spec, "shards", None) or ()
        return cls(
            work=work,
            kind=ShardingType(base_type(sharding.sharding_type)),
            exchange=sharding.exchange,
            owners=sharding.owners,
            shards=Shards.of(
                [
                    (shard.placement.rank(), shard.shard_sizes[0], shard.shard_sizes[1])
                    for shard in spec
                ]
            ),
            num_hot=0 if sharding.hot_set is None else len(sharding.hot_set),
            transport=sharding.transport,
        )

    def forward_bytes(self, workload: Workload) -> float:
        """Bytes of a number that travels in the forward, its share of a scale included."""
        is_in_plan = self.transport is not Transport.FP32
        return self._bytes_per_number if is_in_plan else workload.forward_wire_bytes

    def backward_bytes(self, workload: Workload) -> float:
        """Bytes of a number that travels in the backward."""
        is_in_plan = self.transport is not Transport.FP32
        return self._bytes_per_number if is_in_plan else workload.backward_wire_bytes

    @property
    def _bytes_per_number(self) -> float:
        return self.transport.codec.num_bytes(self.work.dim) / self.work.dim

    @property
    def row_bytes(self) -> float:
        """Bytes of a whole row."""
        return float(self.work.dim * self.work.element_bytes)


@dataclass(frozen=True)
class TableBatch:
    """The ids, bags and vectors of a rank's batch for one table, without its hot rows."""

    ids: float
    bags: float
    vectors: float
    """Vectors that the model gets: one for each bag, or each id of a sequence."""
    cold_share: float
    """The share of cold ids among all ids of the batch."""

    def bags_with(self, shares: Ranks) -> Ranks:
        """Bags that have an id for each of some ranks, if all bags are equally long."""
        if not self.bags or not self.cold_share:
            return np.zeros_like(shares)
        per_bag = self.ids / self.cold_share / self.bags
        absent = (1 - self.cold_share * shares) ** max(1.0, per_bag)
        return self.bags * min(1.0, per_bag) * (1 - absent)


def owner_shares(table: Placed, num_ranks: int) -> Ranks:
    """The share of a table's lookups that goes to each rank that has some of its rows."""
    even = np.full(num_ranks, 1 / num_ranks)
    access = table.work.access
    if access is None or table.owners is RowOwners.HASH:
        return even
    cold = access.without(table.num_hot)
    return cold.share_by_block(num_ranks) if cold.num_lookups else even


def distinct_by_owner(table: Placed, num_lookups: float, num_ranks: int) -> Ranks:
    """How many different rows of each owner so many lookups touch, without hot ones."""
    if table.owners is RowOwners.HASH:
        distinct = table.work.expected_distinct(num_lookups, num_hot=table.num_hot)
        return np.full(num_ranks, distinct / num_ranks)
    return table.work.distinct_by_block(num_lookups, num_ranks, num_hot=table.num_hot)


def look_up(
    loads: Loads,
    ids: float | Ranks,
    row_bytes: float | Ranks,
    *,
    distinct: float | Ranks,
    vector_bytes: float | Ranks,
) -> None:
    """Add rows that are read for bags, and updated.

    Args:
        loads: to add to.
        ids: how many.
        row_bytes: of each one's row.
        distinct: how many rows that are.
        vector_bytes: of what is made of them.
    """
    loads.lookup_ids += ids
    loads.lookup_bytes += ids * row_bytes
    loads.lookup_row_bytes += distinct * row_bytes
    loads.lookup_vector_bytes += vector_bytes


def encode_and_decode(loads: Loads, table: Placed, numbers: float | Ranks) -> None:
    """Add numbers that are encoded and decoded, and their gradients on the way back.

    Args:
        loads: to add to.
        table: whose numbers.
        numbers: how many a rank gets.
    """
    cost = loads.codecs.get(table.transport)
    if cost is not None:
        of_ranks = np.asarray(numbers, dtype=np.float64)
        loads.encoding_s += 2 * cost.seconds(of_ranks / table.work.dim, of_ranks * FLOAT_BYTES)


def move_and_add(loads: Loads, rows: float | Ranks, num_bytes: float | Ranks) -> None:
    """Add rows that are copied to where they are wanted, and whose gradients are added up."""
    loads.moved_rows += rows
    loads.moved_bytes += num_bytes
    loads.added_rows += rows
    loads.added_bytes += num_bytes
