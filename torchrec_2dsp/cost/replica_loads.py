"""The loads that a table adds to its group because rows have several homes. Pure."""

import math
from dataclasses import replace

import numpy as np

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.loads import Loads, Ranks
from torchrec_2dsp.cost.placed import FLOAT_BYTES, KEY_BYTES, Placed
from torchrec_2dsp.cost.span import Span
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.plan.sync import GradientSync, SyncConfig, SyncedRows, WeightSync


def add_hot_rows(loads: Loads, table: Placed, workload: Workload, world: Span) -> None:
    """Add lookups of a table's hot rows, and what the world merges of them, in place."""
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
    # All ids are looked for in the hot set; vectors of hot and cold rows are added up; gradients of
    # hot ids are taken out.
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
    """Add what replica peers exchange of a table's cold rows, in place.

    Args:
        loads: of the ranks of a group.
        table: what is added.
        workload: batch size.
        peers: of the replica peers.
        sync: how they are kept equal.
    """
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
        return
    both = sync.moments_policy is None
    _add_average(shards, sync, weights=True, moments=both)
    if sync.moments_policy is not None:
        its_policy = replace(sync, policy=sync.moments_policy)
        _add_average(shards, its_policy, weights=False, moments=True)


def _add_average(shards: "_Shards", sync: WeightSync, *, weights: bool, moments: bool) -> None:
    num_steps = sync.policy.steps_per_sync
    if math.isinf(num_steps):
        return
    work = shards.table.work
    wire = _bytes_per_number(sync.transport, work.dim)
    state_columns = work.state_bytes_per_row / FLOAT_BYTES / work.dim
    # Moments are of rows: a shard with a part of the columns has its part of them.
    of_state = _bytes_per_number(sync.transport, 1) if state_columns < 1 else wire
    of_column = wire * weights + of_state * moments * state_columns
    loads = shards.loads
    rows, num_bytes, whole = (
        (loads.averaged_rows, loads.averaged_bytes, loads.averaged_whole_bytes)
        if weights
        else (loads.moment_rows, loads.moment_bytes, loads.moment_whole_bytes)
    )
    if sync.rows is SyncedRows.TOUCHED:
        rows += shards.touched(num_steps)
        num_bytes += shards.touched_bytes(num_steps, of_column)
    whole += shards.whole_bytes(of_column)


def _bytes_per_number(transport: Transport, dim: int) -> float:
    """The bytes that a number takes in a row of ``dim``, its share of the scale included."""
    return transport.codec_for(dim).num_bytes(dim) / dim


class _Shards:
    """A table's shards, and which part of its rows the ranks that have them touch."""

    def __init__(self, loads: Loads, table: Placed, workload: Workload) -> None:
        self.loads = loads
        self.table = table
        self._lookups = loads.num_ranks * workload.batch_size * table.work.ids_per_sample
        ranks, rows, columns = table.shards
        parts = rows / max(1, table.work.num_rows)
        # Which part of the table's rows each rank has, once for each shard, and of its columns.
        self._parts, self._columns = np.zeros(loads.num_ranks), np.zeros(loads.num_ranks)
        np.add.at(self._parts, ranks, parts)
        np.add.at(self._columns, ranks, parts * columns)

    def whole_bytes(self, of_column: float) -> Ranks:
        """Bytes of all rows of the shards."""
        return self.table.work.num_rows * of_column * self._columns

    def touched(self, num_batches: float) -> Ranks:
        """Rows that so many batches of a group touch."""
        return self._rows(num_batches) * self._parts

    def touched_bytes(self, num_batches: float, of_column: float) -> Ranks:
        """Bytes of the touched rows, with their numbers."""
        return self._rows(num_batches) * (of_column * self._columns + KEY_BYTES * self._parts)

    def _rows(self, num_batches: float) -> float:
        return self.table.work.expected_distinct(
            num_batches * self._lookups, num_hot=self.table.num_hot
        )
