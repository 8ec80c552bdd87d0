"""Training loops and TorchRec's pipelines: the same numbers whichever runs the model."""

from dataclasses import replace

import pytest
import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loop_oracles import LoopOracle
from tests.support.loops import (
    PIPELINES,
    counting_syncs,
    largest_gap,
    make_stream,
    pipeline_loop,
    plain_loop,
    shard,
    shard_loss_model,
    train,
)
from tests.support.models import BagModel
from tests.support.parity import FUSED, LR, Cell, compare, make_optimizer
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives

MESH = tdsp.Mesh2D(2, 2)
EXACT = Cell(MESH)
AVERAGED = replace(EXACT, sync=tdsp.WeightSync())
HOT = replace(EXACT, sharding="table_wise", hot_rows=(("t0", (0, 1, 5)), ("t1", (0, 2))))
BOTH = replace(HOT, sync=tdsp.WeightSync())
STEPS = 4

ROUNDING = 1e-6
"""The oracle adds gradients in another order: some float32 roundings of values below 1."""


def oracle_of(cell: Cell) -> LoopOracle:
    return LoopOracle(cell.spec, optimizer=cell.optimizer, lr=LR, eps=cell.eps)


def all_loops(rank: int, world_size: int, cells: list[Cell]) -> list[list[float]]:
    """The gaps to the plain loop of a second one, of each pipeline, and of a stock wrapper's."""
    gaps = []
    for cell in cells:
        stream = make_stream(cell, STEPS)
        plain = train(cell, rank, stream)
        others = [train(cell, rank, stream, kind) for kind in ("plain", *PIPELINES)]
        others.append(train(replace(cell, stock_wrapper=True), rank, stream, "sparse dist"))
        gaps.append([largest_gap(other, plain) for other in others])
    return gaps


def test_every_loop_trains_the_same_bit_for_bit(ranks4: RankPool) -> None:
    """And the same again from the same seed, and to the end of the stream."""
    cells = [EXACT, AVERAGED, HOT, BOTH]
    assert ranks4.run(all_loops, cells) == [[[0.0] * (len(PIPELINES) + 2)] * len(cells)] * 4


def syncs_in_a_pipeline(rank: int, world_size: int, cell: Cell, interval: int) -> int:
    parallel = shard_loss_model(cell)
    batches = [step[rank] for step in make_stream(cell, STEPS)]
    with counting_syncs(parallel) as reports:
        pipeline_loop(
            "sparse dist",
            parallel,
            make_optimizer(parallel),
            batches,
            dmp_collection_sync_interval_batches=interval,
        )
        return len(reports)


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_a_pipelines_interval_skips_no_sync(ranks4: RankPool, interval: int) -> None:
    for cell in (EXACT, AVERAGED):
        assert ranks4.run(syncs_in_a_pipeline, cell, interval) == [STEPS] * 4


def one_hot_batch(cell: Cell) -> KeyedJaggedTensor:
    """Four samples with one id per feature: the first and the last row of each table, twice."""
    features = cell.spec.features
    ids = [row for _, table in features for row in (0, table.num_rows - 1) * 2]
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
        optimizer, batch = make_optimizer(parallel), one_hot_batch(cell)
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
    "hot_rows": "world",
    "default_pg": "world",
}


def step_of(
    splits: int, lengths: int, ids: int, pooled: int, *replicate: tuple[str, int], rows: bool
) -> Step:
    """What all sharding types have in common; sizes are per rank.

    The pooled output is 8 + 16 + 16 + 8 = 48 columns wide. Its gradient comes back for the 4
    samples of the rank: 4 x 48 x 4 = 768 bytes. DDP reduces 48 weights and a bias: 196 bytes.
    """
    a2a = "all_to_all_single"
    forward, backward = ("reduce_scatter_tensor", "all_gather_into_tensor") if rows else (a2a, a2a)
    return [
        (a2a, "shard", splits),
        (a2a, "shard", lengths),
        (a2a, "shard", ids),
        (forward, "shard", pooled),
        ("all_reduce", "world", 196),
        (backward, "shard", 768),
        *((op, "replicate", num_bytes) for op, num_bytes in replicate),
    ]


def merge_of(header: int, rows: int, values: int) -> list[tuple[str, int]]:
    """Row gradients of one backward."""
    return [("all_gather", header), ("all_to_all_single", rows), ("all_to_all_single", values)]


# Splits: ids, lengths and stride for 2 ranks, 8 bytes each: 48.
# Lengths: 4 features x 4 samples x 8 = 128 where a feature goes to one rank.
# Ids: 4 features x 4 samples x 8 = 128.
# Header: row counts by table and one learning rate, 8 bytes each. Rows (8 bytes each) and their
# gradients go to both replica peers, this rank included.
# Row-wise: lengths to both ranks, 256; pooled partial sums of 8 samples, 8 x 48 x 4 = 1536. A rank
# has one touched row of each table: 3 x 8 x 2 = 48 and (8 + 16 + 8) x 4 x 2 = 256.
ROW_WISE = step_of(48, 256, 128, 1536, *merge_of(32, 48, 256), rows=True)
# Column-wise, 4 columns to a shard: 2 + 4 + 4 + 2 = 12 features of shards, so 12 x 4 x 8 = 384. A
# rank holds 4 of 8 shards, half of the columns, 8 x 24 x 4 = 768, and two touched rows of each:
# 4 x 2 x 8 x 2 = 128 and 4 x 2 x 4 x 4 x 2 = 256.
COLUMN_WISE = step_of(48, 384, 384, 768, *merge_of(40, 128, 256), rows=False)
# Grid: the lengths of 12 features to both ranks. All 8 shards, one touched row of each.
GRID = step_of(48, 768, 384, 1536, *merge_of(72, 128, 256), rows=True)
# Table-wise: one rank has t1, 8 x 32 x 4 = 1024, with 2 rows of 16 columns ...
TABLE_WISE_T1 = step_of(48, 128, 128, 1024, *merge_of(16, 32, 256), rows=False)
# ... the other has t0 and t2, 8 x 16 x 4 = 512, with 4 rows of 8.
TABLE_WISE_T0_T2 = step_of(48, 128, 128, 512, *merge_of(24, 64, 256), rows=False)
# Hot are the first rows of t0 and t1: 6 of 16 ids, which leaves 80 bytes. A rank tells 3 others and
# itself 2 rows: 2 x 8 x 4 = 64 and (8 + 16) x 4 x 4 = 384.
HOT_MERGE = [(op, "world", num_bytes) for op, num_bytes in merge_of(24, 64, 384)]
HOT_T1 = step_of(48, 128, 80, 1024, *merge_of(16, 16, 128), rows=False) + HOT_MERGE
HOT_T0_T2 = step_of(48, 128, 80, 512, *merge_of(24, 48, 192), rows=False) + HOT_MERGE
# Averages of what was touched: a flag and row counts, 8 bytes each; then one row of each table with
# its id and its moment, padded to 8 bytes: (8 + 32 + 8) + (8 + 64 + 8) + (8 + 32 + 8) = 176, twice.
AVERAGE = step_of(48, 256, 128, 1536, ("all_gather", 32), ("all_to_all_single", 352), rows=True)
# Averages of everything: a shard of 20 x 8 + 12 x 16 + 17 x 8 weights and 49 moments, (488 + 49) x 4 = 2148; the
# other has 16 rows of t2.
AVERAGES = [
    step_of(48, 256, 128, 1536, ("all_reduce_coalesced", num_bytes), rows=True)
    for num_bytes in (2148, 2112)
]
# Data parallel: (40 x 8 + 24 x 16 + 33 x 8) x 4 = 3872.
DATA_PARALLEL = [("all_reduce", "world", 196), ("all_reduce", "world", 3872)]

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


def accumulated(rank: int, world_size: int, cell: Cell, steps: int) -> float:
    parallel, oracle, stream = shard(cell), oracle_of(cell), make_stream(cell, STEPS)
    batches = [step[rank] for step in stream]
    plain_loop(parallel, make_optimizer(parallel), batches, accumulate=steps)
    for first in range(0, STEPS, steps):
        oracle.accumulate(stream[first : first + steps])
    return compare(parallel, oracle).worst


def test_gradient_accumulation(ranks4: RankPool) -> None:
    """The fused update runs in every backward, the dense one in every first, or second."""
    for cell in (EXACT, HOT, replace(AVERAGED, optimizer="sgd")):
        for steps in (1, 2):
            assert max(ranks4.run(accumulated, cell, steps)) < ROUNDING


def dense_clipped(rank: int, world_size: int, cell: Cell) -> float:
    parallel, oracle, stream = shard(cell), oracle_of(cell), make_stream(cell, STEPS)
    optimizer = GradientClippingOptimizer(
        make_optimizer(parallel), clipping=GradientClipping.NORM, max_gradient=0.1
    )
    plain_loop(parallel, optimizer, [step[rank] for step in stream])
    oracle.max_norm = 0.1
    for batches in stream:
        oracle.accumulate([batches])
    return compare(parallel, oracle).worst


def warmed_up(rank: int, world_size: int, cell: Cell) -> float:
    parallel, oracle, stream = shard(cell), oracle_of(cell), make_stream(cell, STEPS)
    stage = WarmupStage(WarmupPolicy.LINEAR, max_iters=2, value=0.1)
    optimizer = WarmupOptimizer(make_optimizer(parallel), [stage], lr=LR)
    plain_loop(parallel, optimizer, [step[rank] for step in stream])
    for factor, batches in zip((0.1, 0.55, 1.0, 1.0), stream, strict=True):
        oracle.lr = LR * factor
        oracle.accumulate([batches])
    return compare(parallel, oracle).worst


def test_wrapped_optimizers(ranks4: RankPool) -> None:
    """TorchRec's wrappers around the combined optimizer."""
    for cell in (EXACT, HOT, replace(AVERAGED, optimizer="sgd")):
        assert max(ranks4.run(dense_clipped, cell)) < ROUNDING
        assert max(ranks4.run(warmed_up, cell)) < ROUNDING


class ClippedModel(BagModel):
    """Clips the gradient of every bag, as FBGEMM's kernels do that of their output."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)
        parts = [pooled[name] for name in self.features]
        for part in parts:
            part.register_hook(lambda grad: grad.clamp(-MAX_GRADIENT, MAX_GRADIENT))
        return self.over(torch.cat(parts, dim=1)).squeeze(1)


MAX_GRADIENT = 0.02


def fused_clipped(rank: int, world_size: int, cell: Cell) -> tuple[float, float]:
    """The gaps to the oracle that clips, and to the one that doesn't."""
    params = {"gradient_clipping": True, "max_gradient": MAX_GRADIENT}
    params |= {"learning_rate": LR, "eps": cell.eps}
    sharder = tdsp.EmbeddingBagCollectionSharder2D(FUSED[cell.optimizer], fused_params=params)
    sharder.always_capture = cell.always_capture
    parallel, stream = shard(cell, sharder), make_stream(cell, STEPS)
    plain_loop(parallel, make_optimizer(parallel), [step[rank] for step in stream])
    clipping, plain = oracle_of(cell), oracle_of(cell)
    torch.manual_seed(0)
    clipping.train(ClippedModel(cell.spec))
    for oracle in (clipping, plain):
        for batches in stream:
            oracle.accumulate([batches])
    return compare(parallel, clipping).worst, compare(parallel, plain).worst


ONE_GROUP = replace(EXACT, mesh=tdsp.Mesh2D(1, 4))


@pytest.mark.parametrize(
    "cell",
    [
        ONE_GROUP,
        replace(ONE_GROUP, always_capture=True),
        EXACT,
        HOT,
        replace(HOT, mesh=tdsp.Mesh2D(1, 4)),
    ],
    ids=str,
)
def test_fused_clipping(ranks4: RankPool, cell: Cell) -> None:
    """The bound is that of one group, whatever the mesh."""
    for clipped, plain in ranks4.run(fused_clipped, cell):
        assert clipped < ROUNDING < plain
