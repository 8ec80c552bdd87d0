"""What a table adds to its group's loads, by sharding type and exchange. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.cost.loads import Loads, Ranks
from torchrec_2dsp.cost.span import Span
from torchrec_2dsp.cost.workload import TableWork, Workload
from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.plan.parameter_sharding import (
    ROW_EXCHANGES,
    Exchange,
    ParameterSharding2D,
    RowOwners,
    base_type,
)

ID_BYTES = 8
LENGTH_BYTES = 4
KEY_BYTES = 4
"""Of a row's number, where rows are what travels: unless a model has more than 2**31 of them."""
FLOAT_BYTES = 4
_DENSE_PASSES = 6
"""Over a data-parallel table: its gradient is zeroed, copied to a bucket and back, squared, scaled
and applied."""


class Shards(NamedTuple):
    """Parts of a table, a number for each."""

    ranks: NDArray[np.int64]
    """Where it is: a position in the group."""

    rows: Ranks
    columns: Ranks

    @classmethod
    def of(cls, shards: Sequence[tuple[int, int, int]]) -> "Shards":
        """From rank, rows and columns of each."""
        ranks, rows, columns = np.array(shards, dtype=np.float64).reshape(-1, 3).T
        return cls(ranks.astype(np.int64), rows, columns)


@dataclass(frozen=True)
class Placed:
    """A table on the ranks of a group."""

    work: TableWork

    kind: ShardingType
    """TorchRec's type inside the group."""

    shards: Shards
    """Its parts; none of a data-parallel table."""

    exchange: Exchange = Exchange.POOLED

    owners: RowOwners = RowOwners.BLOCK

    num_hot: int = 0
    """Rows that are on every rank besides; the hottest ones."""

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
                [(one.placement.rank(), one.shard_sizes[0], one.shard_sizes[1]) for one in spec]
            ),
            num_hot=0 if sharding.hot_set is None else len(sharding.hot_set),
        )

    @property
    def row_bytes(self) -> float:
        """Of a whole row."""
        return float(self.work.dim * self.work.element_bytes)


@dataclass(frozen=True)
class _Batch:
    """What a rank's batch has for a table, without its hot rows."""

    ids: float
    bags: float
    vectors: float
    """That the model gets: one for each bag, or each id of a sequence."""
    cold_share: float
    """Of the ids that it had with them."""

    def bags_with(self, shares: Ranks) -> Ranks:
        """Bags that have an id for each of some ranks, if all bags are equally long."""
        if not self.bags or not self.cold_share:
            return np.zeros_like(shares)
        per_bag = self.ids / self.cold_share / self.bags
        absent = (1 - self.cold_share * shares) ** max(1.0, per_bag)
        return self.bags * min(1.0, per_bag) * (1 - absent)


def add_table(loads: Loads, table: Placed, workload: Workload, span: Span) -> None:
    """Add a table, in place.

    Args:
        loads: of the ranks of a group.
        table: what is added.
        workload: batch size and bytes on the wire.
        span: of the sharding groups.
    """
    work = table.work
    cold = 1 - work.hot_share(table.num_hot)
    ids = workload.batch_size * work.ids_per_sample * cold
    bags = float(workload.batch_size * work.num_features)
    batch = _Batch(ids, bags, ids if work.is_sequence else bags, cold)
    if table.exchange in ROW_EXCHANGES:
        _row_exchange(loads, table, workload, batch, span)
    elif table.kind in _BY_KIND:
        _BY_KIND[table.kind](loads, table, workload, batch, span)
    else:
        raise UnsupportedError(f"the cost of {table.kind.value} tables isn't known")
    loads.types |= {message_type(table.kind, table.exchange)} - {""}


def message_type(kind: ShardingType, exchange: Exchange) -> str:
    """The name under which a table's messages are shared with other tables; empty without any."""
    return "" if kind is ShardingType.DATA_PARALLEL else f"{kind.value}, {exchange.value}"


def owner_shares(table: Placed, num_ranks: int) -> Ranks:
    """Which share of a table's lookups goes to each rank that has some of its rows."""
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


def _row_exchange(
    loads: Loads, table: Placed, workload: Workload, batch: _Batch, span: Span
) -> None:
    """Each distinct row of a batch comes from its owner, and its gradient goes back.

    With requests per host, a batch is that of a host's ranks together, each of which collects for
    one owner on every host.
    """
    lookups = workload.batch_size * table.work.ids_per_sample
    dim = table.work.dim
    of_rank = distinct_by_owner(table, lookups, loads.num_ranks)
    loads.sorted_ids += batch.ids
    loads.ids_to += of_rank * KEY_BYTES
    loads.gathered_bytes += batch.ids * dim * FLOAT_BYTES
    loads.added_bytes += batch.ids * dim * FLOAT_BYTES
    asked = of_rank * loads.num_ranks
    if table.exchange is Exchange.ROW_PER_HOST and span.crosses_hosts and span.ranks_per_host > 1:
        of_host = distinct_by_owner(table, span.ranks_per_host * lookups, loads.num_ranks)
        asked = of_host * span.num_hosts
        handed_on = of_rank.sum() / span.ranks_per_host
        loads.sorted_ids += of_rank.sum()
        loads.gathered_bytes += of_rank.sum() * dim * FLOAT_BYTES
        loads.added_bytes += of_rank.sum() * dim * FLOAT_BYTES
        loads.host_rows_from += handed_on * dim * workload.forward_wire_bytes
        loads.host_rows_to += handed_on * dim * workload.backward_wire_bytes
        loads.across_from += of_host * dim * workload.forward_wire_bytes
        loads.across_to += of_host * dim * workload.backward_wire_bytes
    else:
        loads.rows_from += of_rank * dim * workload.forward_wire_bytes
        loads.rows_to += of_rank * dim * workload.backward_wire_bytes
    _look_up(loads, asked, asked * table.row_bytes)


def _table_or_column_wise(
    loads: Loads, table: Placed, workload: Workload, batch: _Batch, span: Span
) -> None:
    """The ranks with shards look up what all ranks ask, and send each rank its vectors."""
    num_shards, columns = _on_ranks(loads, table)
    ids = loads.num_ranks * batch.ids
    _look_up(loads, ids * num_shards, ids * columns * table.work.element_bytes)
    loads.ids_to += num_shards * (batch.bags * LENGTH_BYTES + batch.ids * ID_BYTES)
    sent, received = _output(loads, table)
    vectors = _sent_vectors(table, batch)
    numbers = vectors * columns
    if table.exchange is Exchange.NONEMPTY:
        _put_in_place(loads, vectors * table.work.dim)
    sent += numbers * workload.forward_wire_bytes
    received += numbers * workload.backward_wire_bytes


def _row_wise(loads: Loads, table: Placed, workload: Workload, batch: _Batch, span: Span) -> None:
    """Each rank looks up those ids whose rows it has; sums of sums give the vectors."""
    num = loads.num_ranks
    shares = owner_shares(table, num)
    _look_up(loads, num * batch.ids * shares, num * batch.ids * table.row_bytes * shares)
    loads.ids_to += batch.bags * LENGTH_BYTES + batch.ids * ID_BYTES * shares
    if table.work.is_sequence or table.exchange is Exchange.NONEMPTY:
        sent, received = _output(loads, table)
        vectors = batch.ids * shares if table.work.is_sequence else batch.bags_with(shares)
        if table.exchange is Exchange.NONEMPTY:
            _put_in_place(loads, float(vectors.sum()) * table.work.dim)
        sent += vectors * table.work.dim * workload.forward_wire_bytes
        received += vectors * table.work.dim * workload.backward_wire_bytes
        return
    loads.scattered += num * batch.vectors * table.work.dim * workload.forward_wire_bytes
    loads.gathered += batch.vectors * table.work.dim * workload.backward_wire_bytes


def _host_wise(loads: Loads, table: Placed, workload: Workload, batch: _Batch, span: Span) -> None:
    """Rows are dealt to the ranks of a host, which add up inside it what they send across."""
    num_shards, columns = _on_ranks(loads, table)
    hosts = np.arange(loads.num_ranks) // span.ranks_per_host
    owners = np.bincount(hosts, num_shards > 0)[hosts]
    ids = loads.num_ranks * batch.ids / np.maximum(1, owners)
    _look_up(loads, ids * num_shards, ids * columns * table.work.element_bytes)
    loads.ids_to += num_shards * batch.bags * LENGTH_BYTES
    loads.ids_to += num_shards * batch.ids / np.maximum(1, owners) * ID_BYTES
    numbers = batch.vectors * columns
    loads.host_scattered += loads.num_ranks * numbers * workload.forward_wire_bytes
    loads.across_from += numbers * workload.forward_wire_bytes
    loads.across_to += numbers * workload.backward_wire_bytes
    # Of its part of the host's vectors.
    loads.host_gathered += span.num_hosts * numbers * workload.backward_wire_bytes


def _data_parallel(
    loads: Loads, table: Placed, workload: Workload, batch: _Batch, span: Span
) -> None:
    """Every rank has the table; the dense gradient of all of it is all-reduced."""
    table_bytes = table.work.num_rows * table.row_bytes
    _look_up(loads, batch.ids, batch.ids * table.row_bytes)
    loads.dense_bytes += _DENSE_PASSES * table_bytes
    loads.all_reduced_bytes += table_bytes


_Add = Callable[[Loads, Placed, Workload, _Batch, Span], None]
_BY_KIND: dict[ShardingType, _Add] = {
    ShardingType.TABLE_WISE: _table_or_column_wise,
    ShardingType.COLUMN_WISE: _table_or_column_wise,
    ShardingType.TABLE_COLUMN_WISE: _table_or_column_wise,
    ShardingType.ROW_WISE: _row_wise,
    ShardingType.TABLE_ROW_WISE: _host_wise,
    ShardingType.GRID_SHARD: _host_wise,
    ShardingType.DATA_PARALLEL: _data_parallel,
}


def _look_up(loads: Loads, ids: float | Ranks, num_bytes: float | Ranks) -> None:
    loads.lookup_ids += ids
    loads.lookup_bytes += num_bytes
    loads.update_ids += ids
    loads.update_bytes += num_bytes


def _put_in_place(loads: Loads, numbers: float) -> None:
    """Vectors of some bags become those of all bags, and the same of their gradients."""
    loads.added_bytes += numbers * FLOAT_BYTES
    loads.gathered_bytes += numbers * FLOAT_BYTES


def _on_ranks(loads: Loads, table: Placed) -> tuple[Ranks, Ranks]:
    """How many shards each rank has, and of how many columns together."""
    ranks, _, columns = table.shards
    num_shards, sums = np.zeros(loads.num_ranks), np.zeros(loads.num_ranks)
    np.add.at(num_shards, ranks, 1.0)
    np.add.at(sums, ranks, columns)
    return num_shards, sums


def _output(loads: Loads, table: Placed) -> tuple[Ranks, Ranks]:
    """Where the vectors count that a rank sends, and gets back."""
    if table.exchange is Exchange.NONEMPTY:
        return loads.rows_from, loads.rows_to
    return loads.pooled_from, loads.pooled_to


def _sent_vectors(table: Placed, batch: _Batch) -> float:
    if table.work.is_sequence or table.exchange is not Exchange.NONEMPTY:
        return batch.vectors
    return float(batch.bags_with(np.ones(1))[0])
