"""The loads that a table adds to its group: by sharding type, exchange, hot rows and sync. Pure."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.codecs.ids import num_id_bytes
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.collectives import Span
from torchrec_2dsp.cost.loads import (
    FLOAT_BYTES,
    KEY_BYTES,
    Loads,
    Placed,
    Ranks,
    sum_by_rank,
)
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.plan.parameter_sharding import ROW_EXCHANGES, Exchange
from torchrec_2dsp.plan.sync import GradientSync, SyncConfig, SyncedRows, WeightSync

_DENSE_PASSES = 6
"""Passes over a data-parallel table: its gradient is zeroed, filled, searched for rows, squared,
scaled and applied."""


def message_type(
    kind: ShardingType, exchange: Exchange, transport: Transport = Transport.FP32
) -> str:
    """Return the name under which tables share messages; empty for tables without any."""
    if kind is ShardingType.DATA_PARALLEL:
        return ""
    return f"{kind.value}, {exchange.value}, {transport.value}"


@cache
def exchanges_rows(message_type: str) -> bool:
    """Tell whether tables of a `message_type` are looked up row by row."""
    return message_type.split(", ")[1:2] in [[exchange.value] for exchange in ROW_EXCHANGES]


@dataclass(frozen=True)
class _Batch:
    """Ids, bags and vectors of a rank's batch for one table, without its hot rows."""

    ids: float
    bags: float
    vectors: float
    """Vectors that the model receives: one per bag, or per id of a sequence."""
    cold_share: float
    """The share of cold ids among all ids of the batch."""

    def bags_with(self, shares: Ranks) -> Ranks:
        """Return the number of bags with an id for each rank, if all bags are equally long."""
        if not self.bags or not self.cold_share:
            return np.zeros_like(shares)
        per_bag = self.ids / self.cold_share / self.bags
        absent = (1 - self.cold_share * shares) ** np.maximum(1.0, per_bag)
        return self.bags * np.minimum(1.0, per_bag) * (1 - absent)


def add_table(loads: Loads, table: Placed, workload: Workload, span: Span) -> None:
    """Add a table's lookups and messages to its group's ``loads``, in place."""
    work = table.work
    cold = 1 - work.hot_share(table.num_hot)
    ids = workload.batch_size * work.ids_per_sample * cold
    bags = float(workload.batch_size * work.num_features)
    batch = _Batch(ids, bags, ids if work.is_sequence else bags, cold)
    loads.given_bytes += batch.vectors * work.dim * FLOAT_BYTES
    reads, updates = _rows_bytes(loads)
    if table.exchange in ROW_EXCHANGES:
        _row_exchange(loads, table, workload, batch, span)
    elif table.kind in _BY_KIND:
        _BY_KIND[table.kind](loads, table, workload, batch, span)
        num_parts = span.num_ranks if table.kind is ShardingType.ROW_WISE else 1
        _encode_and_decode(loads, table, num_parts * batch.vectors * work.dim)
    else:
        raise UnsupportedError(f"the cost of {table.kind.value} tables isn't known")
    loads.types |= {message_type(table.kind, table.exchange, table.transport)} - {""}
    if table.in_host_memory:
        read, updated = _rows_bytes(loads)
        # An update also reads optimizer state; rows are written while others are read.
        num_passes = 0.0 if work.is_frozen else 1 + work.state_bytes_per_row / table.row_bytes
        num_bytes = read - reads + num_passes * (updated - updates)
        loads.bus_bytes += num_bytes
        loads.bus_rows += num_bytes / table.row_bytes


def _rows_bytes(loads: Loads) -> tuple[float | Ranks, float | Ranks]:
    """Return the bytes of all looked-up rows, and of all updated rows."""
    owned = loads.owned_bytes
    return loads.lookup_bytes + owned, loads.lookup_row_bytes + owned


def _table_or_column_wise(
    loads: Loads, table: Placed, workload: Workload, batch: _Batch, span: Span
) -> None:
    """Add loads for ranks with shards, which look up all ranks' ids and return their vectors."""
    num_shards, columns = _on_ranks(loads, table)
    _look_up_shards(loads, table, workload, batch)
    loads.send_ids(num_shards * batch.ids, table.id_bytes, lengths=num_shards * batch.bags)
    vectors: float | Ranks = batch.vectors
    if table.exchange is Exchange.NONEMPTY:
        if not table.work.is_sequence:
            vectors = batch.bags_with(np.ones(1))
        # Some bags' vectors become all bags' vectors, and the same for their gradients.
        loads.move_and_add(vectors, vectors * table.work.dim * FLOAT_BYTES)
    _exchange_vectors(loads, table, workload, vectors * columns)


def _row_wise(loads: Loads, table: Placed, workload: Workload, batch: _Batch, span: Span) -> None:
    """Add loads for ranks that look up the ids of rows they have; sums of sums give the vectors."""
    num, dim = loads.num_ranks, table.work.dim
    shares = table.owner_shares(num)
    vectors = batch.ids * shares if table.work.is_sequence else batch.vectors
    loads.look_up(
        num * batch.ids * shares,
        table.row_bytes,
        distinct=table.distinct_by_owner(_lookups(table, workload, num), num),
        vector_bytes=num * vectors * dim * FLOAT_BYTES,
    )
    loads.send_ids(batch.ids * shares, table.id_bytes, lengths=batch.bags)
    if table.work.is_sequence or table.exchange is Exchange.NONEMPTY:
        sent = batch.ids * shares if table.work.is_sequence else batch.bags_with(shares)
        if table.exchange is Exchange.NONEMPTY:
            num_vectors = _of_all(sent)
            loads.move_and_add(num_vectors, num_vectors * dim * FLOAT_BYTES)
        _exchange_vectors(loads, table, workload, sent * dim)
        return
    loads.scattered += num * batch.vectors * dim * table.forward_bytes(workload)
    loads.gathered += batch.vectors * dim * table.backward_bytes(workload)


def _host_wise(loads: Loads, table: Placed, workload: Workload, batch: _Batch, span: Span) -> None:
    """Add loads for rows dealt to a host's ranks, which sum inside it before they send across."""
    num_shards, columns = _on_ranks(loads, table)
    hosts = np.arange(loads.num_ranks) // span.ranks_per_host
    owners = np.maximum(1, np.bincount(hosts, num_shards > 0)[hosts])
    _look_up_shards(loads, table, workload, batch, owners)
    ids = num_shards * batch.ids / owners
    loads.send_ids(ids, table.id_bytes, lengths=num_shards * batch.bags)
    numbers = batch.vectors * columns
    loads.host_scattered += loads.num_ranks * numbers * table.forward_bytes(workload)
    loads.across_from += numbers * table.forward_bytes(workload)
    loads.across_to += numbers * table.backward_bytes(workload)
    # Each rank gathers its part of the host's vectors.
    loads.host_gathered += span.num_hosts * numbers * table.backward_bytes(workload)


def _data_parallel(
    loads: Loads, table: Placed, workload: Workload, batch: _Batch, span: Span
) -> None:
    """Add loads for a table on every rank, whose whole dense gradient is all-reduced."""
    table_bytes = table.work.num_rows * table.row_bytes
    loads.look_up(
        batch.ids,
        table.row_bytes,
        distinct=table.work.expected_distinct(_lookups(table, workload, 1)),
        vector_bytes=batch.vectors * table.work.dim * FLOAT_BYTES,
    )
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


def _look_up_shards(
    loads: Loads, table: Placed, workload: Workload, batch: _Batch, owners: float | Ranks = 1.0
) -> None:
    """Add all ranks' lookups in shards with some columns, and one ``owners``-th of the rows."""
    num = loads.num_ranks
    num_shards, columns = _on_ranks(loads, table)
    lookups = _lookups(table, workload, num)
    distinct = table.work.expected_distinct(lookups, num_hot=table.num_hot)
    vectors = batch.vectors / owners if table.work.is_sequence else batch.vectors
    # Bytes are for all shards' columns on a rank, ids for each shard.
    width = columns / np.maximum(1, num_shards)
    loads.look_up(
        num * batch.ids / owners * num_shards,
        width * table.work.element_bytes,
        distinct=distinct / owners * num_shards,
        vector_bytes=num * vectors * columns * FLOAT_BYTES,
    )


def _exchange_vectors(
    loads: Loads, table: Placed, workload: Workload, numbers: float | Ranks
) -> None:
    """Add the numbers that a rank sends to each other rank, and the gradients that come back."""
    sent = numbers * table.forward_bytes(workload)
    received = numbers * table.backward_bytes(workload)
    if table.exchange is Exchange.NONEMPTY:
        loads.rows_from += sent
        loads.rows_to += received
    else:
        loads.pooled_from += sent
        loads.pooled_to += received


def _encode_and_decode(loads: Loads, table: Placed, numbers: float | Ranks) -> None:
    """Add encoding and decoding the numbers that a rank receives, and their gradients."""
    cost = loads.codecs.get(table.transport)
    if cost is not None:
        of_ranks = np.asarray(numbers, dtype=np.float64)
        loads.encoding_s += 2 * cost.seconds(of_ranks / table.work.dim, of_ranks * FLOAT_BYTES)


def _lookups(table: Placed, workload: Workload, num_ranks: int) -> float:
    """Return the lookups in ``num_ranks`` ranks' batches, hot rows included."""
    return num_ranks * workload.batch_size * table.work.ids_per_sample


def _on_ranks(loads: Loads, table: Placed) -> tuple[Ranks, Ranks]:
    """Count the shards on each rank, and sum their columns."""
    ranks, _, columns = table.shards
    num_shards = sum_by_rank(ranks, np.ones(len(ranks)), loads.num_ranks)
    return num_shards, sum_by_rank(ranks, columns, loads.num_ranks)


def _row_exchange(
    loads: Loads, table: Placed, workload: Workload, batch: _Batch, span: Span
) -> None:
    """Add loads for distinct rows that come from their owners, and gradients that go back.

    With requests per host, a host's ranks share one batch, and each of them collects for
    one owner on every host.
    """
    lookups = workload.batch_size * table.work.ids_per_sample
    dim = table.work.dim
    of_rank = table.distinct_by_owner(lookups, loads.num_ranks)
    loads.found_ids += batch.ids
    loads.move_and_add(batch.ids, batch.ids * dim * FLOAT_BYTES)
    owned_rows = of_rank * loads.num_ranks
    id_bytes = num_id_bytes(table.work.num_rows / loads.num_ranks)
    if table.exchange is Exchange.ROW_PER_HOST and span.crosses_hosts and span.ranks_per_host > 1:
        of_host = table.distinct_by_owner(span.ranks_per_host * lookups, loads.num_ranks)
        owned_rows = of_host * span.num_hosts
        of_batch = _of_all(of_rank)
        handed_on = of_batch / span.ranks_per_host
        loads.found_ids += of_batch
        loads.move_and_add(of_batch, of_batch * dim * FLOAT_BYTES)
        loads.host_rows_from += handed_on * dim * FLOAT_BYTES
        # Ids inside a host are keys.
        loads.host_rows_to += handed_on * (dim * FLOAT_BYTES + KEY_BYTES)
        loads.send_ids(of_host / span.ranks_per_host, id_bytes)
        loads.across_from += of_host * dim * table.forward_bytes(workload)
        loads.across_to += of_host * dim * table.backward_bytes(workload)
        _travel_beside(loads, table, workload, span.ranks_per_host * lookups)
    else:
        loads.send_ids(of_rank, id_bytes)
        loads.rows_from += of_rank * dim * table.forward_bytes(workload)
        loads.rows_to += of_rank * dim * table.backward_bytes(workload)
        _travel_beside(loads, table, workload, lookups)
    _encode_and_decode(loads, table, owned_rows * dim)
    loads.owned_ids += owned_rows
    loads.owned_bytes += owned_rows * table.row_bytes


def _travel_beside(loads: Loads, table: Placed, workload: Workload, lookups: float) -> None:
    """Add the rows and gradients that may travel during computation.

    These are rows that neither the previous batch nor the lagging gradients of the one before it
    change, and gradients of rows that the next batch doesn't need.
    """
    if not loads.prefetches_rows:
        return
    of_all = loads.num_ranks * workload.batch_size * table.work.ids_per_sample

    def not_in(num_batches: int) -> Ranks:
        """Count the distinct rows that aren't in ``num_batches`` other batches of all ranks."""
        others = num_batches * of_all
        with_others = table.distinct_by_owner(lookups + others, loads.num_ranks)
        return with_others - table.distinct_by_owner(others, loads.num_ranks)

    early, lagging, dim = not_in(2), not_in(1), table.work.dim
    loads.early_from += early * dim * table.forward_bytes(workload)
    loads.lagging_to += lagging * dim * table.backward_bytes(workload)
    loads.beside_ids += 2 * loads.num_ranks * early
    loads.early_bytes += _of_all(early) * dim * FLOAT_BYTES
    loads.lagging_bytes += _of_all(lagging) * dim * FLOAT_BYTES


def _of_all(by_rank: Ranks) -> Ranks:
    """Sum over ranks."""
    return np.asarray(by_rank.sum(axis=-1, keepdims=True))


def add_hot_rows(loads: Loads, table: Placed, workload: Workload, world: Span) -> None:
    """Add lookups of a table's hot rows, and the gradients that the world merges, in place."""
    if not table.num_hot:
        return
    work = table.work
    row_bytes = work.dim * FLOAT_BYTES
    lookups = workload.batch_size * work.ids_per_sample

    def touched(num_ranks: int) -> float:
        every = work.expected_distinct(num_ranks * lookups)
        return every - work.expected_distinct(num_ranks * lookups, num_hot=table.num_hot)

    ids = lookups * work.hot_share(table.num_hot)
    bags = 0.0 if work.is_sequence else float(workload.batch_size * work.num_features)
    # All ids are searched in the hot set; hot and cold rows' vectors are added; hot ids' gradients
    # are taken out.
    loads.found_ids += lookups
    loads.added_rows += bags
    loads.added_bytes += bags * row_bytes
    loads.moved_rows += ids
    loads.moved_bytes += ids * row_bytes
    loads.hot_ids += ids
    loads.hot_id_bytes += ids * row_bytes
    loads.hot_rows += touched(world.num_ranks)
    loads.hot_bytes_of_rank += touched(1) * (row_bytes + KEY_BYTES)
    loads.hot_bytes_of_host += touched(world.ranks_per_host) * (row_bytes + KEY_BYTES)
    loads.hot_bytes_of_all += touched(world.num_ranks) * (row_bytes + KEY_BYTES)


def add_synced_rows(
    loads: Loads, table: Placed, workload: Workload, peers: Span, sync: SyncConfig
) -> None:
    """Add the cold rows that replica peers exchange, in place."""
    if peers.num_ranks == 1 or not len(table.shards.ranks):
        return
    shards = _Shards(loads, table, workload)
    if isinstance(sync, GradientSync):
        wire = _bytes_per_number(sync.transport, table.work.dim)
        loads.peer_rows += shards.touched(peers.num_ranks)
        loads.peer_row_bytes += shards.touched_bytes(peers.num_ranks, FLOAT_BYTES)
        loads.peer_bytes_of_rank += shards.touched_bytes(1, wire)
        loads.peer_bytes_of_host += shards.touched_bytes(peers.ranks_per_host, wire)
        loads.peer_bytes_of_all += shards.touched_bytes(peers.num_ranks, wire)
        _read_synced(shards, shards.touched_bytes(peers.num_ranks, FLOAT_BYTES))
        return
    _add_average(shards, sync, weights=True, moments=sync.moments_policy is None)
    if sync.moments_policy is not None:
        of_moments = replace(sync, policy=sync.moments_policy)
        _add_average(shards, of_moments, weights=False, moments=True)


def _add_average(shards: "_Shards", sync: WeightSync, *, weights: bool, moments: bool) -> None:
    num_steps = sync.policy.steps_per_sync
    if math.isinf(num_steps):
        return
    work = shards.table.work
    wire = _bytes_per_number(sync.transport, work.dim)
    state_columns = work.state_bytes_per_row / FLOAT_BYTES / work.dim
    # Rows have moments: a shard with some of the columns has its share of them.
    of_state = _bytes_per_number(sync.transport, 1) if state_columns < 1 else wire
    of_column = wire * weights + of_state * moments * state_columns
    loads = shards.loads
    rows = num_bytes = 0.0
    if sync.rows is SyncedRows.TOUCHED:
        rows, num_bytes = shards.touched(num_steps), shards.touched_bytes(num_steps, of_column)
    is_whole = sync.rows is SyncedRows.ALL
    _read_synced(shards, (shards.whole_bytes(of_column) if is_whole else num_bytes) / num_steps)
    if weights:
        loads.averaged_rows += rows
        loads.averaged_bytes += num_bytes
        loads.averaged_whole_bytes += shards.whole_bytes(of_column)
    else:
        loads.moment_rows += rows
        loads.moment_bytes += num_bytes
        loads.moment_whole_bytes += shards.whole_bytes(of_column)


def _read_synced(shards: "_Shards", num_bytes: float | Ranks) -> None:
    """Add the rows that a sync reads in host memory, to update or average them."""
    work = shards.table.work
    if shards.table.in_host_memory and not work.is_frozen:
        shards.loads.bus_bytes += num_bytes
        shards.loads.bus_rows += num_bytes / shards.table.row_bytes


def _bytes_per_number(transport: Transport, dim: int) -> float:
    """Return a number's bytes in a row, including its share of the scale."""
    return transport.codec_for(dim).num_bytes(dim) / dim


class _Shards:
    """A table's shards, and the part of its rows that their ranks touch."""

    def __init__(self, loads: Loads, table: Placed, workload: Workload) -> None:
        self.loads = loads
        self.table = table
        self._lookups = _lookups(table, workload, loads.num_ranks)
        ranks, rows, columns = table.shards
        parts = rows / np.maximum(1, table.work.num_rows)
        # Each rank's part of the table's rows, once for each shard, and its part of the columns.
        self._parts = sum_by_rank(ranks, parts, loads.num_ranks)
        self._columns = sum_by_rank(ranks, parts * columns, loads.num_ranks)

    def whole_bytes(self, of_column: float) -> Ranks:
        """Return the shards' bytes, for all rows."""
        return self.table.work.num_rows * of_column * self._columns

    def touched(self, num_batches: float) -> Ranks:
        """Return the rows that ``num_batches`` batches touch."""
        return self._rows(num_batches) * self._parts

    def touched_bytes(self, num_batches: float, of_column: float) -> Ranks:
        """Return the touched rows' bytes, with row numbers."""
        return self._rows(num_batches) * (of_column * self._columns + KEY_BYTES * self._parts)

    def _rows(self, num_batches: float) -> float:
        return self.table.work.expected_distinct(
            num_batches * self._lookups, num_hot=self.table.num_hot
        )
