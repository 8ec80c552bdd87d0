"""Which collectives a training step issues, on which axis, and how many bytes each carries."""

from dataclasses import replace

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import plain_loop, shard
from tests.support.parity import Cell, make_optimizer
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives

MESH = tdsp.Mesh2D(2, 2)
EXACT = Cell(MESH)
AVERAGED = replace(EXACT, sync=tdsp.WeightSync())
HOT = replace(EXACT, sharding="table_wise", hot_rows=(("t0", (0, 1, 5)), ("t1", (0, 2, 3))))


def one_hot_batch(cell: Cell, rank: int) -> KeyedJaggedTensor:
    """Four samples with one id per feature: the first and the last row of each table, twice.

    Instead of the first a hot row, not the same on all ranks, if the table has any.
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


def collectives_of_a_step(rank: int, world_size: int, cells: list[Cell]) -> list[Step]:
    steps = []
    for cell in cells:
        parallel = shard(cell)
        optimizer, batch = make_optimizer(parallel), one_hot_batch(cell, rank)
        # The first step also compares the replicas.
        plain_loop(parallel, optimizer, [batch])
        with count_collectives() as seen:
            plain_loop(parallel, optimizer, [batch])
        steps.append([(one.op, AXES[one.group], one.num_bytes) for one in seen.records])
    return steps


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
    """What all sharding types have in common; sizes are per rank.

    The first tells of an id that no table has. The pooled output is 8 + 16 + 16 + 8 = 48 columns
    wide. Its gradient comes back for the 4 samples of the rank: 4 x 48 x 4 = 768 bytes. DDP reduces
    48 weights and a bias: 196 bytes.
    """
    a2a = "all_to_all_single"
    forward, backward = ("reduce_scatter_tensor", "all_gather_into_tensor") if rows else (a2a, a2a)
    return [
        ALARM,
        (a2a, "shard", splits),
        (a2a, "shard", lengths),
        (a2a, "shard", ids),
        *([("all_gather", "replicate", header)] if header else []),
        (forward, "shard", pooled),
        *([("all_gather", "world", hot_header)] if hot_header else []),
        ("all_reduce", "world", 196),
        (backward, "shard", 768),
        *synced,
    ]


def merge_of(axis: str, *blocks: tuple[int, int]) -> Step:
    """Row gradients of one backward: keys and gradients of each block, and that all is well."""
    sent = [("all_to_all_single", axis, num_bytes) for block in blocks for num_bytes in block]
    return [*sent, ALARM]


ALARM = ("all_reduce", "world", 8)

# Splits: ids, lengths and stride for 2 ranks, 8 bytes each: 48.
# Lengths: 4 features x 4 samples x 8 = 128 where a feature goes to one rank.
# Ids: 4 features x 4 samples x 8 = 128.
# Header: a row count for each dimension of the kernel's tables and a learning rate, 8 bytes each.
# Keys (4 bytes each) and gradients go to the one other peer.
# Row-wise: lengths to both ranks, 256; pooled partial sums of 8 samples, 8 x 48 x 4 = 1536. A rank
# has one touched row of each table: two of 8 columns, 2 x 4 and 2 x 8 x 4, and one of 16.
ROW_WISE = step_of(
    48, 256, 128, 1536, *merge_of("replicate", (8, 64), (4, 64)), rows=True, header=24
)
# Column-wise, 4 columns to a shard: 2 + 4 + 4 + 2 = 12 features of shards, so 12 x 4 x 8 = 384. A
# rank holds 4 of 8 shards, half of the columns, 8 x 24 x 4 = 768, and two touched rows of each:
# 4 x 2 x 4 = 32 and 4 x 2 x 4 x 4 = 128.
COLUMN_WISE = step_of(48, 384, 384, 768, *merge_of("replicate", (32, 128)), rows=False, header=16)
# Grid: the lengths of 12 features to both ranks. All 8 shards, one touched row of each.
GRID = step_of(48, 768, 384, 1536, *merge_of("replicate", (32, 128)), rows=True, header=16)
# Table-wise: one rank has t1, 8 x 32 x 4 = 1024, with 2 rows of 16 columns ...
TABLE_WISE_T1 = step_of(48, 128, 128, 1024, *merge_of("replicate", (8, 128)), rows=False, header=16)
# ... the other has t0 and t2, 8 x 16 x 4 = 512, with 4 rows of 8.
TABLE_WISE_T0_T2 = step_of(
    48, 128, 128, 512, *merge_of("replicate", (16, 128)), rows=False, header=16
)
# Hot are one row of t0 and one of t1: 6 of 16 ids, which leaves 80 bytes. A rank tells 3 others of
# a row of 8 and of one of 16 columns: 3 x 4 and 3 x 8 x 4, 3 x 4 and 3 x 16 x 4. In the header
# stand the rows of 4 possible owners, for each dimension.
HOT_MERGE = merge_of("world", (12, 96), (12, 192))
HOT_T1 = step_of(
    *(48, 128, 80, 1024),
    *merge_of("replicate", (4, 64)),
    *HOT_MERGE,
    rows=False,
    header=16,
    hot_header=72,
)
HOT_T0_T2 = step_of(
    *(48, 128, 80, 512),
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
    *(48, 256, 128, 1536),
    ALARM,
    ("all_gather", "replicate", 24),
    ("all_to_all_single", "replicate", 176),
    rows=True,
)
# Averages of everything: a shard of 20 x 8 + 12 x 16 + 17 x 8 weights and 49 moments,
# (488 + 49) x 4 = 2148; the other has 16 rows of t2.
AVERAGES = [
    step_of(48, 256, 128, 1536, ("all_reduce_coalesced", "replicate", num_bytes), rows=True)
    for num_bytes in (2148, 2112)
]
# Data parallel: (40 x 8 + 24 x 16 + 33 x 8) x 4 = 3872.
DATA_PARALLEL = [ALARM, ("all_reduce", "world", 196), ("all_reduce", "world", 3872)]

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
"""What the first and the second rank of a group do."""


def test_the_collectives_of_a_step(ranks4: RankPool) -> None:
    answers = ranks4.run(collectives_of_a_step, [cell for cell, _ in STEPS_BY_CELL])
    for rank, steps in enumerate(answers):
        for (cell, expected), step in zip(STEPS_BY_CELL, steps, strict=True):
            assert step == expected[MESH.shard_index(rank)], cell
