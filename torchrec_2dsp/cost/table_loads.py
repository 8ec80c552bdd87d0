"""The loads that a table adds to its group, by sharding type and exchange. Pure."""

from collections.abc import Callable
from functools import cache

import numpy as np
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.loads import Loads, Ranks
from torchrec_2dsp.cost.placed import (
    FLOAT_BYTES,
    ID_BYTES,
    LENGTH_BYTES,
    Placed,
    TableBatch,
    distinct_by_owner,
    encode_and_decode,
    look_up,
    move_and_add,
    owner_shares,
)
from torchrec_2dsp.cost.row_loads import add_row_exchange
from torchrec_2dsp.cost.span import Span
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.plan.parameter_sharding import ROW_EXCHANGES, Exchange

_DENSE_PASSES = 6
"""Over a data-parallel table: its gradient is zeroed, copied to a bucket and back, squared, scaled
and applied."""


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
    batch = TableBatch(ids, bags, ids if work.is_sequence else bags, cold)
    loads.given_bytes += batch.vectors * work.dim * FLOAT_BYTES
    if table.exchange in ROW_EXCHANGES:
        add_row_exchange(loads, table, workload, batch, span)
    elif table.kind in _BY_KIND:
        _BY_KIND[table.kind](loads, table, workload, batch, span)
        num_parts = span.num_ranks if table.kind is ShardingType.ROW_WISE else 1
        encode_and_decode(loads, table, num_parts * batch.vectors * work.dim)
    else:
        raise UnsupportedError(f"the cost of {table.kind.value} tables isn't known")
    loads.types |= {message_type(table.kind, table.exchange, table.transport)} - {""}


def message_type(
    kind: ShardingType, exchange: Exchange, transport: Transport = Transport.FP32
) -> str:
    """The name under which a table's messages are shared with other tables; empty without any."""
    if kind is ShardingType.DATA_PARALLEL:
        return ""
    return f"{kind.value}, {exchange.value}, {transport.value}"


@cache
def exchanges_rows(message_type: str) -> bool:
    """Whether the tables of a `message_type` are looked up row by row."""
    _, _, exchange = message_type.rpartition(", ")[0].rpartition(", ")
    return exchange in [exchange.value for exchange in ROW_EXCHANGES]


def _table_or_column_wise(
    loads: Loads, table: Placed, workload: Workload, batch: TableBatch, span: Span
) -> None:
    """The ranks with shards look up what all ranks ask, and send each rank its vectors."""
    num_shards, columns = _on_ranks(loads, table)
    _look_up_shards(loads, table, workload, batch)
    loads.ids_to += num_shards * (batch.bags * LENGTH_BYTES + batch.ids * ID_BYTES)
    sent, received = _output(loads, table)
    vectors = _sent_vectors(table, batch)
    numbers = vectors * columns
    if table.exchange is Exchange.NONEMPTY:
        # Vectors of some bags become those of all bags, and the same of their gradients.
        move_and_add(loads, vectors, vectors * table.work.dim * FLOAT_BYTES)
    sent += numbers * table.forward_bytes(workload)
    received += numbers * table.backward_bytes(workload)


def _row_wise(
    loads: Loads, table: Placed, workload: Workload, batch: TableBatch, span: Span
) -> None:
    """Each rank looks up those ids whose rows it has; sums of sums give the vectors."""
    num = loads.num_ranks
    shares = owner_shares(table, num)
    vectors = batch.ids * shares if table.work.is_sequence else batch.vectors
    look_up(
        loads,
        num * batch.ids * shares,
        table.row_bytes,
        distinct=distinct_by_owner(table, _lookups(table, workload, num), num),
        vector_bytes=num * vectors * table.work.dim * FLOAT_BYTES,
    )
    loads.ids_to += batch.bags * LENGTH_BYTES + batch.ids * ID_BYTES * shares
    if table.work.is_sequence or table.exchange is Exchange.NONEMPTY:
        sent, received = _output(loads, table)
        vectors = batch.ids * shares if table.work.is_sequence else batch.bags_with(shares)
        if table.exchange is Exchange.NONEMPTY:
            num_vectors = float(vectors.sum())
            move_and_add(loads, num_vectors, num_vectors * table.work.dim * FLOAT_BYTES)
        sent += vectors * table.work.dim * table.forward_bytes(workload)
        received += vectors * table.work.dim * table.backward_bytes(workload)
        return
    loads.scattered += num * batch.vectors * table.work.dim * table.forward_bytes(workload)
    loads.gathered += batch.vectors * table.work.dim * table.backward_bytes(workload)


def _host_wise(
    loads: Loads, table: Placed, workload: Workload, batch: TableBatch, span: Span
) -> None:
    """Rows are dealt to the ranks of a host, which add up inside it what they send across."""
    num_shards, columns = _on_ranks(loads, table)
    hosts = np.arange(loads.num_ranks) // span.ranks_per_host
    owners = np.maximum(1, np.bincount(hosts, num_shards > 0)[hosts])
    _look_up_shards(loads, table, workload, batch, owners)
    loads.ids_to += num_shards * batch.bags * LENGTH_BYTES
    loads.ids_to += num_shards * batch.ids / owners * ID_BYTES
    numbers = batch.vectors * columns
    loads.host_scattered += loads.num_ranks * numbers * table.forward_bytes(workload)
    loads.across_from += numbers * table.forward_bytes(workload)
    loads.across_to += numbers * table.backward_bytes(workload)
    # Of its part of the host's vectors.
    loads.host_gathered += span.num_hosts * numbers * table.backward_bytes(workload)


def _data_parallel(
    loads: Loads, table: Placed, workload: Workload, batch: TableBatch, span: Span
) -> None:
    """Every rank has the table; the dense gradient of all of it is all-reduced."""
    table_bytes = table.work.num_rows * table.row_bytes
    look_up(
        loads,
        batch.ids,
        table.row_bytes,
        distinct=table.work.expected_distinct(_lookups(table, workload, 1)),
        vector_bytes=batch.vectors * table.work.dim * FLOAT_BYTES,
    )
    loads.dense_bytes += _DENSE_PASSES * table_bytes
    loads.all_reduced_bytes += table_bytes


_Add = Callable[[Loads, Placed, Workload, TableBatch, Span], None]
_BY_KIND: dict[ShardingType, _Add] = {
    ShardingType.TABLE_WISE: _table_or_column_wise,
    ShardingType.COLUMN_WISE: _table_or_column_wise,
    ShardingType.TABLE_COLUMN_WISE: _table_or_column_wise,
    ShardingType.ROW_WISE: _row_wise,
    ShardingType.TABLE_ROW_WISE: _host_wise,
    ShardingType.GRID_SHARD: _host_wise,
    ShardingType.DATA_PARALLEL: _data_parallel,
}


def _look_up_shards(
    loads: Loads, table: Placed, workload: Workload, batch: TableBatch, owners: float | Ranks = 1.0
) -> None:
    """Add all ranks' lookups in shards of some columns, and one ``owners``-th of the rows."""
    num = loads.num_ranks
    num_shards, columns = _on_ranks(loads, table)
    lookups = _lookups(table, workload, num)
    distinct = table.work.expected_distinct(lookups, num_hot=table.num_hot)
    vectors = batch.vectors / owners if table.work.is_sequence else batch.vectors
    # Bytes are of the columns of all shards of a rank, ids of each shard.
    width = columns / np.maximum(1, num_shards)
    look_up(
        loads,
        num * batch.ids / owners * num_shards,
        width * table.work.element_bytes,
        distinct=distinct / owners * num_shards,
        vector_bytes=num * vectors * columns * FLOAT_BYTES,
    )


def _lookups(table: Placed, workload: Workload, num_ranks: int) -> float:
    """Lookups of so many ranks' batches, of hot rows as well."""
    return num_ranks * workload.batch_size * table.work.ids_per_sample


def _on_ranks(loads: Loads, table: Placed) -> tuple[Ranks, Ranks]:
    """How many shards each rank has, and of how many columns together."""
    ranks, _, columns = table.shards
    num_shards, sums = np.zeros(loads.num_ranks), np.zeros(loads.num_ranks)
    np.add.at(num_shards, ranks, 1.0)
    np.add.at(sums, ranks, columns)
    return num_shards, sums


def _output(loads: Loads, table: Placed) -> tuple[Ranks, Ranks]:
    """The loads in which the vectors count that a rank sends, and gets back."""
    if table.exchange is Exchange.NONEMPTY:
        return loads.rows_from, loads.rows_to
    return loads.pooled_from, loads.pooled_to


def _sent_vectors(table: Placed, batch: TableBatch) -> float:
    if table.work.is_sequence or table.exchange is not Exchange.NONEMPTY:
        return batch.vectors
    return float(batch.bags_with(np.ones(1))[0])
