"""The cost per step of keeping replica peers equal, in plan terms. Pure arithmetic.

A deliberately simple model: bytes over bandwidth, no latency, no overlap with other work, rows
hit evenly. It ranks sharding types against each other; it doesn't predict a step's time.
"""

ID_BYTES = 4
"""Row ids travel as int32."""


def row_sync_ms(
    *, num_groups: int, touched_rows: float, row_bytes: int, bandwidth_bytes_per_ms: float
) -> float:
    """Each peer gets the touched rows' gradients, or their weights and state, and their ids.

    ``touched_rows * (row_bytes + 4) * (num_groups - 1) / bandwidth``

    Example:
        >>> from torchrec_2dsp.planner.torchrec.sync_cost import row_sync_ms
        >>> row_sync_ms(num_groups=3, touched_rows=10, row_bytes=12, bandwidth_bytes_per_ms=320.0)
        1.0
    """
    sent_bytes = touched_rows * (row_bytes + ID_BYTES) * (num_groups - 1)
    return sent_bytes / bandwidth_bytes_per_ms


def weight_sync_ms(*, num_groups: int, shard_bytes: float, bandwidth_bytes_per_ms: float) -> float:
    """`WeightSync` of all rows: an all-reduce of the shard's weights and optimizer state.

    ``2 * (num_groups - 1) / num_groups * shard_bytes / bandwidth``

    Example:
        >>> from torchrec_2dsp.planner.torchrec.sync_cost import weight_sync_ms
        >>> weight_sync_ms(num_groups=2, shard_bytes=640, bandwidth_bytes_per_ms=320.0)
        2.0
    """
    return 2 * (num_groups - 1) / num_groups * shard_bytes / bandwidth_bytes_per_ms


def data_parallel_ms(
    *, num_groups: int, group_size: int, table_bytes: float, bandwidth_bytes_per_ms: float
) -> float:
    """Milliseconds of a data-parallel table's gradient beyond the all-reduce inside one group.

    An all-reduce over the world is one inside each group and one between replica peers, in
    which a rank takes part with its ``1 / group_size`` of the table:
    ``2 * (num_groups - 1) / num_groups * table_bytes / group_size / bandwidth``

    Example:
        >>> from torchrec_2dsp.planner.torchrec.sync_cost import data_parallel_ms
        >>> data_parallel_ms(
        ...     num_groups=2, group_size=4, table_bytes=640, bandwidth_bytes_per_ms=320.0
        ... )
        0.5
    """
    return weight_sync_ms(
        num_groups=num_groups,
        shard_bytes=table_bytes / group_size,
        bandwidth_bytes_per_ms=bandwidth_bytes_per_ms,
    )


def expected_touched_rows(
    *, shard_rows: int, table_rows: int, lookups_per_rank: float, group_size: int
) -> float:
    """Distinct rows of a shard that one group's batch touches: at most all of them.

    ``min(shard_rows, lookups_per_rank * group_size * shard_rows / table_rows)``: a shard gets
    the lookups of its rows, all of them unless the table is sharded by rows.

    Example:
        >>> from torchrec_2dsp.planner.torchrec.sync_cost import expected_touched_rows
        >>> expected_touched_rows(
        ...     shard_rows=500, table_rows=1_000, lookups_per_rank=64.0, group_size=2
        ... )
        64.0
        >>> expected_touched_rows(
        ...     shard_rows=50, table_rows=50, lookups_per_rank=64.0, group_size=2
        ... )
        50
    """
    if not table_rows:
        return 0
    return min(shard_rows, lookups_per_rank * group_size * shard_rows / table_rows)
