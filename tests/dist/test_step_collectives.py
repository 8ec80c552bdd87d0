"""A training step's collectives: operation, axis and bytes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import plain_loop, shard
from tests.support.models import ModelSpec, TableSpec
from tests.support.oracle import local_loss
from tests.support.parity import TWO, Cell, make_optimizer
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives, count_encoded

EXACT = Cell(TWO)
AVERAGED = replace(EXACT, sync=tdsp.WeightSync())
HOT = replace(EXACT, sharding="table_wise", hot_rows=(("t0", (0, 1, 5)), ("t1", (0, 2, 3))))


def one_hot_batch(cell: Cell, rank: int) -> KeyedJaggedTensor:
    """Return four samples with one id per feature: each table's first and last row, twice.

    Tables with hot rows use a hot row instead of the first; it differs between ranks.
    """
    features, hot_rows = cell.spec.features, dict(cell.hot_rows)
    ids = []
    for _, table in features:
        hot = hot_rows.get(table.name, (0,))
        ids += [hot[rank % len(hot)], table.num_rows - 1] * 2
    return KeyedJaggedTensor.from_lengths_sync(
        keys=[name for name, _ in features],
        values=torch.tensor(ids),
        lengths=torch.ones(len(ids), dtype=torch.int64),
    )


Step = list[tuple[str, str, int]]
"""Operation, axis and input bytes of each collective of a step."""


def collectives_of_a_step(rank: int, world_size: int, cell: Cell) -> Step:
    parallel = shard(cell)
    optimizer, batch = make_optimizer(parallel), one_hot_batch(cell, rank)
    # The first step also compares the replicas.
    plain_loop(parallel, optimizer, [batch])
    with count_collectives() as seen:
        plain_loop(parallel, optimizer, [batch])
    return [(entry.op, AXES[entry.group], entry.num_bytes) for entry in seen.records]


AXES = {
    "mesh_shard": "shard",
    "sharding_intra_pg": "shard",
    "mesh_replicate": "replicate",
    "replica_rows": "replicate",
    "hot_rows": "world",
    "alarm": "world",
    "default_pg": "world",
}


def step_of(
    splits: int,
    lengths: int,
    ids: int,
    pooled: int,
    *synced: tuple[str, str, int],
    rows: bool,
    header: int = 0,
    hot_header: int = 0,
) -> Step:
    """Return the collectives that all sharding types share; sizes are per rank.

    The first reports ids outside a table. The pooled output is 8 + 16 + 16 + 8 = 48 columns wide.
    Its gradient comes back for the rank's 4 samples: 4 x 48 x 4 = 768 bytes. DDP reduces 48 weights
    and a bias: 196 bytes.
    """
    a2a = "all_to_all_single"
    forward, backward = ("reduce_scatter_tensor", "all_gather_into_tensor") if rows else (a2a, a2a)
    return [
        ALARM,
        (a2a, "shard", splits),
        (a2a, "shard", lengths),
        (a2a, "shard", ids),
        *([("all_gather_into_tensor", "replicate", header)] if header else []),
        (forward, "shard", pooled),
        *([("all_gather_into_tensor", "world", hot_header)] if hot_header else []),
        ("all_reduce", "world", 196),
        (backward, "shard", 768),
        *synced,
    ]


def merge_of(axis: str, *blocks: tuple[int, int]) -> Step:
    """Return one backward's row exchange: each block's keys and gradients, then the error check."""
    sent = [("all_to_all_single", axis, num_bytes) for block in blocks for num_bytes in block]
    return [*sent, ALARM]


ALARM = ("all_reduce", "world", 8)

# Splits: ids, lengths and stride for 2 ranks, 8 bytes each: 48.
# Lengths: 4 features x 4 samples x 8 = 128 where a feature goes to one rank.
# Ids: 4 features x 4 samples = 16, a byte each.
# Header: a row count for each dimension of the kernel's tables and a learning rate, 8 bytes each.
# Keys (4 bytes each) and gradients go to the one other peer.
# Row-wise: lengths to both ranks, 256; pooled partial sums of 8 samples, 8 x 48 x 4 = 1536. A rank
# has one touched row of each table: two of 8 columns, 2 x 4 and 2 x 8 x 4, and one of 16.
ROW_WISE = step_of(
    48, 256, 16, 1536, *merge_of("replicate", (8, 64), (4, 64)), rows=True, header=24
)
# Column-wise, 4 columns to a shard: 2 + 4 + 4 + 2 = 12 features of shards, so 12 x 4 x 8 = 384
# and 48 ids. A
# rank holds 4 of 8 shards, half of the columns, 8 x 24 x 4 = 768, and two touched rows of each:
# 4 x 2 x 4 = 32 and 4 x 2 x 4 x 4 = 128.
COLUMN_WISE = step_of(48, 384, 48, 768, *merge_of("replicate", (32, 128)), rows=False, header=16)
# Grid: the lengths of 12 features to both ranks. All 8 shards, one touched row of each.
GRID = step_of(48, 768, 48, 1536, *merge_of("replicate", (32, 128)), rows=True, header=16)
# Table-wise: one rank has t1, 8 x 32 x 4 = 1024, with 2 rows of 16 columns ...
TABLE_WISE_T1 = step_of(48, 128, 16, 1024, *merge_of("replicate", (8, 128)), rows=False, header=16)
# ... the other has t0 and t2, 8 x 16 x 4 = 512, with 4 rows of 8.
TABLE_WISE_T0_T2 = step_of(
    48, 128, 16, 512, *merge_of("replicate", (16, 128)), rows=False, header=16
)
# Hot are one row of t0 and one of t1: 6 of 16 ids, which leaves 10 bytes. A rank tells 3 others of
# a row of 8 and of one of 16 columns: 3 x 4 and 3 x 8 x 4, 3 x 4 and 3 x 16 x 4. In the header
# stand the rows of 4 possible owners, for each dimension.
HOT_MERGE = merge_of("world", (12, 96), (12, 192))
HOT_T1 = step_of(
    *(48, 128, 10, 1024),
    *merge_of("replicate", (4, 64)),
    *HOT_MERGE,
    rows=False,
    header=16,
    hot_header=72,
)
HOT_T0_T2 = step_of(
    *(48, 128, 10, 512),
    *merge_of("replicate", (12, 96)),
    *HOT_MERGE,
    rows=False,
    header=16,
    hot_header=72,
)
# Averages of what was touched: row counts, 8 bytes each; then one row of each table with its id and
# its moment, padded to 8 bytes: (8 + 32 + 8) + (8 + 64 + 8) + (8 + 32 + 8) = 176, to the one other
# peer.
AVERAGE = step_of(
    *(48, 256, 16, 1536),
    ALARM,
    ("all_gather", "replicate", 24),
    ("all_to_all_single", "replicate", 176),
    rows=True,
)
# Averages of everything: a shard of 20 x 8 + 12 x 16 + 17 x 8 weights and 49 moments,
# (488 + 49) x 4 = 2148; the other has 16 rows of t2.
AVERAGES = [
    step_of(48, 256, 16, 1536, ("all_reduce_coalesced", "replicate", num_bytes), rows=True)
    for num_bytes in (2148, 2112)
]
# Data parallel: the header of hot rows; (40 x 8 + 33 x 8) x 4 = 2336 and 24 x 16 x 4 = 1536, in
# whole tables because these are small.
DATA_PARALLEL = [
    ALARM,
    ("all_gather_into_tensor", "world", 72),
    ("all_reduce", "world", 196),
    ("all_reduce", "world", 2336),
    ("all_reduce", "world", 1536),
    ALARM,
]

STEPS_BY_CELL: list[tuple[Cell, list[Step]]] = [
    (replace(EXACT, sharding="table_wise"), [TABLE_WISE_T1, TABLE_WISE_T0_T2]),
    (EXACT, [ROW_WISE] * 2),
    (replace(EXACT, sharding="table_row_wise"), [ROW_WISE] * 2),
    (replace(EXACT, sharding="column_wise"), [COLUMN_WISE] * 2),
    (replace(EXACT, sharding="table_column_wise"), [COLUMN_WISE] * 2),
    (replace(EXACT, sharding="grid_shard"), [GRID] * 2),
    (replace(EXACT, sharding="data_parallel"), [DATA_PARALLEL] * 2),
    (AVERAGED, [AVERAGE] * 2),
    (replace(AVERAGED, sync=tdsp.WeightSync(rows=tdsp.SyncedRows.ALL)), AVERAGES),
    (HOT, [HOT_T1, HOT_T0_T2]),
]
"""The collectives of a group's first and second rank."""


def test_the_collectives_of_a_step(ranks4: RankPool) -> None:
    for cell, expected in STEPS_BY_CELL:
        for rank, step in enumerate(ranks4.run(collectives_of_a_step, cell)):
            assert step == expected[TWO.shard_index(rank)], cell


ONE_TABLE = ModelSpec((TableSpec("t0", 40, 8, ("f0",)),))
IDS = ([1, 4, 4], [7, 4, 1, 2])
"""Each rank's ids."""
LENGTHS = ([2, 1, 0], [1, 1, 2])
"""The lengths of three bags."""
NUM_DISTINCT = (2, 4)
"""Each rank's number of distinct rows."""
FP32_BYTES = 8 * 4
"""A table row's bytes."""
ROW_BYTES = {"bf16": 8 * 2, "int8": 8 + 2, "int4": 4 + 2}
"""An encoded row's bytes: its numbers, and a two-byte scale beside integers."""
SHARDED, REPLICATED = tdsp.Mesh2D(1, 2), tdsp.Mesh2D(2, 1)


@dataclass(frozen=True)
class Counted:
    """One rank's counts from a step."""

    before: int
    """Row bytes in fp32."""
    after: int
    """Encoded row bytes."""
    sent: int
    """Bytes that replicas sent."""
    saved: int
    """Bytes that the transport saved."""


def trained(rank: int, world_size: int, cell: Cell) -> Counted:
    """Count one step, after an uncounted first one."""
    parallel = shard(replace(cell, spec=ONE_TABLE))
    assert isinstance(parallel, tdsp.ModelParallel2D)
    batch = KeyedJaggedTensor.from_lengths_sync(
        ["f0"], torch.tensor(IDS[rank % 2]), torch.tensor(LENGTHS[rank % 2])
    )
    local_loss(parallel(batch)).backward()
    first = parallel.sync_now()
    with count_encoded() as encoded:
        local_loss(parallel(batch)).backward()
        report = parallel.sync_now()
    assert parallel.sync_total.saved_bytes == first.saved_bytes + report.saved_bytes
    return Counted(encoded.before, encoded.after, report.num_bytes, report.saved_bytes)


@pytest.mark.parametrize(
    ("cell", "num_rows"),
    [
        # The owner sends six bags, and each rank gradients of its own three.
        (Cell(SHARDED, "table_wise", transport="int8"), 6 + 3 + 3),
        # One of rank 0's bags is empty.
        (
            Cell(SHARDED, "table_wise", exchange="nonempty", transport="bf16"),
            5 + 5,
        ),
        # Both ranks have parts in all six bags.
        (Cell(SHARDED, "row_wise", transport="int8"), 6 + 6 + 3 + 3),
        (
            Cell(SHARDED, "row_wise", exchange="row", transport="int4"),
            2 * sum(NUM_DISTINCT),
        ),
        (Cell(SHARDED, "row_wise", exchange="row"), 0),
    ],
    ids=str,
)
def test_rows_count_once(ranks2: RankPool, cell: Cell, num_rows: int) -> None:
    by_rank = ranks2.run(trained, cell)

    assert sum(counted.before for counted in by_rank) == num_rows * FP32_BYTES
    encoded = num_rows * ROW_BYTES.get(cell.transport, 0)
    assert sum(counted.after for counted in by_rank) == encoded
    assert [counted.saved for counted in by_rank] == [0, 0]


SyncConfig = tdsp.GradientSync | tdsp.WeightSync


def merging(transport: tdsp.Transport) -> SyncConfig:
    """Return a sync that sends gradients."""
    return tdsp.GradientSync(transport=transport)


def averaging(transport: tdsp.Transport) -> SyncConfig:
    """Return a sync that sends changed rows, however many there are."""
    return tdsp.WeightSync(transport=transport, dense_above=1.0)


@pytest.mark.parametrize(
    ("kind", "transport", "encoded_bytes"),
    [
        (merging, "bf16", (2 * 16, 4 * 16)),
        (merging, "int8", (2 * 10, 4 * 10)),
        (averaging, "bf16", (2 * 16, 4 * 16)),
        # Row ids share the message, so tensors begin at multiples of eight bytes.
        (averaging, "int8", (2 * 10 + 4, 4 * 10)),
    ],
)
def test_replicas_say_what_they_save(
    ranks2: RankPool,
    kind: Callable[[tdsp.Transport], SyncConfig],
    transport: str,
    encoded_bytes: tuple[int, int],
) -> None:
    """Rows are sent with and without a transport; the saved bytes are the difference."""
    rounded, exact = (
        ranks2.run(
            trained,
            Cell(REPLICATED, "table_wise", optimizer="sgd", sync=sync),
        )
        for sync in (kind(tdsp.Transport(transport)), kind(tdsp.Transport.FP32))
    )

    saved = [
        num_rows * FP32_BYTES - num_bytes
        for num_rows, num_bytes in zip(NUM_DISTINCT, encoded_bytes, strict=True)
    ]
    assert [counted.saved for counted in rounded] == saved
    assert [counted.sent + counted.saved for counted in rounded] == [
        counted.sent for counted in exact
    ]
    assert [counted.saved for counted in exact] == [0, 0]
    assert all(counted.before == counted.after == 0 for counted in rounded)


@pytest.mark.parametrize("kind", [merging, averaging])
def test_savings_count_for_each_peer(
    ranks4: RankPool, kind: Callable[[tdsp.Transport], SyncConfig]
) -> None:
    rounded, exact = (
        ranks4.run(
            trained, Cell(tdsp.Mesh2D(4, 1), "table_wise", optimizer="sgd", sync=kind(transport))
        )
        for transport in (tdsp.Transport.INT8, tdsp.Transport.FP32)
    )

    for with_transport, without in zip(rounded, exact, strict=True):
        assert with_transport.saved > 0
        assert with_transport.sent + with_transport.saved == without.sent
