"""Batches whose features have batch sizes of their own (TorchRec's VBE) train as what they stand
for: a cell of the matrix equals the oracle, which trains on the same batches written out."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

import torchrec_2dsp as tdsp
from tests.support import prefetching
from tests.support.loops import (
    by_pipelines,
    largest_gap,
    make_stream,
    plain_loop,
    shard,
    snapshot,
)
from tests.support.models import MIXED, SEQUENCE_TABLES, ModelSpec, TableSpec
from tests.support.parity import TOLERANCE, Cell, make_optimizer, run_cells
from tests.support.ranks import RankPool
from tests.support.variable_batches import changed, make_variable_batch, written_out
from torchrec_2dsp.comms.counting import count_collectives

pytestmark = pytest.mark.dealt_file

SUM, MEAN, WEIGHTED = ModelSpec(), ModelSpec(pooling="mean"), ModelSpec(weighted=True)
SEQUENCES = ModelSpec(SEQUENCE_TABLES, sequence=True)
MESHES = (tdsp.Mesh2D(2, 2), tdsp.Mesh2D(1, 4), tdsp.Mesh2D(4, 1))
TWO = MESHES[0]
HOT_ROWS = (("t0", (0, 1, 5, 39)), ("t1", (0, 2)))
GRADIENTS: dict[str, Any] = {"optimizer": "rowwise_adagrad", "sync": tdsp.GradientSync()}
WEIGHTS: dict[str, Any] = {"optimizer": "sgd", "sync": tdsp.WeightSync()}
BAGS = ((SUM, (0, 6, 3, 1)), (MEAN, (0, 6, 3, 1)), (WEIGHTED, (5, 1, 0, 0)))
"""Models, and how many samples each rank has."""
STEPS = 3


def check(cells: Sequence[Cell], ranks: RankPool, tolerance: float = TOLERANCE) -> None:
    cells = [replace(cell, variable=True) for cell in cells]
    for gaps in ranks.run(run_cells, cells, STEPS, timeout_s=300):
        for cell, gap in zip(cells, gaps, strict=True):
            assert gap.worst <= tolerance, f"{cell}: {gap}"


def test_torchrecs_own_exchange(two_hosts: RankPool) -> None:
    """Every sharding type with both syncs, as sums, averages and weighted sums."""
    bags, meshes = cycle(BAGS), cycle(MESHES[:2])
    kinds = ("table_wise", "column_wise", "row_wise", "data_parallel", "grid_shard")
    kinds += ("table_row_wise",)
    cells = [
        Cell(next(meshes), kind, spec, batch_sizes=sizes, **method)
        for method in (GRADIENTS, WEIGHTS)
        for kind in (kinds if method is GRADIENTS else kinds[2:])
        for spec, sizes in [next(bags)]
    ]
    # TorchRec adds 1e-6 to the divisor of row-wise means.
    check(cells, two_hosts)


def test_other_exchanges(two_hosts: RankPool) -> None:
    """With hot rows and without."""
    bags, meshes = cycle(BAGS), cycle(MESHES)
    ways = (
        ("row_wise", "row"),
        ("row_wise", "nonempty"),
        ("table_wise", "nonempty"),
        ("column_wise", "nonempty"),
        ("row_wise", "row_per_host"),
    )
    cells = [
        Cell(mesh, kind, spec, exchange=exchange, batch_sizes=sizes, hot_rows=hot, **method)
        for kind, exchange in ways
        for hot, method in ((HOT_ROWS, GRADIENTS), ((), WEIGHTS))
        for mesh, (spec, sizes) in [(next(meshes), next(bags))]
    ]
    cells.append(Cell(TWO, spec=MIXED, exchange="row", owners="hash", **GRADIENTS))
    cells.append(Cell(TWO, "row_wise", MIXED, in_world=("t1",), **WEIGHTS))
    check(cells, two_hosts)


def test_hot_rows_beside_torchrecs_exchange(ranks4: RankPool) -> None:
    bags, meshes = cycle(BAGS), cycle(MESHES)
    cells = [
        Cell(next(meshes), kind, spec, hot_rows=HOT_ROWS, batch_sizes=sizes, **method)
        for method in (GRADIENTS, WEIGHTS)
        for kind in ("table_wise", "row_wise", "column_wise")
        for spec, sizes in [next(bags)]
    ]
    # TorchRec adds 1e-6 to the divisor of row-wise means.
    check(cells, ranks4)


def test_sequences(two_hosts: RankPool) -> None:
    """TorchRec's own sequences can't be trained with such batches."""
    sizes, meshes = cycle(((6, 6, 6, 6), (1, 6, 3, 2))), cycle(MESHES)
    ways = (
        ("table_wise", "pooled"),
        ("column_wise", "pooled"),
        ("row_wise", "pooled"),
        ("row_wise", "row"),
        ("row_wise", "row_per_host"),
    )
    check(
        [
            Cell(
                next(meshes),
                kind,
                SEQUENCES,
                exchange=exchange,
                batch_sizes=next(sizes),
                hot_rows=hot,
                **method,
            )
            for kind, exchange in ways
            for hot, method in ((HOT_ROWS, GRADIENTS), ((), WEIGHTS))
        ],
        two_hosts,
    )


def with_pipelines(rank: int, world_size: int, cell: Cell) -> tuple[list[float], float]:
    """The gaps between TorchRec's pipelines and the plain loop, and to ours."""
    return by_pipelines(rank, world_size, cell), prefetching.compare(rank, cell)[0]


@pytest.mark.parametrize(
    "cell",
    [
        Cell(MESHES[1], exchange="row", hot_rows=HOT_ROWS, variable=True),
        Cell(TWO, "table_wise", MEAN, variable=True),
    ],
    ids=str,
)
def test_pipelines(ranks4: RankPool, cell: Cell) -> None:
    """A pipeline distributes the next batch before it looks one up."""
    for torchrecs, ours in ranks4.run(with_pipelines, cell, timeout_s=200):
        assert torchrecs == [0.0] * len(torchrecs)
        assert ours == 0.0


def train_sparsely(rank: int, world_size: int, sync: Any) -> tuple[Any, Any]:
    """The state before and after some steps, of a model few of whose rows are in a batch."""
    spec = ModelSpec((TableSpec("t0", 400, 8, ("f0",)), TableSpec("t1", 240, 16, ("f1", "f2"))))
    cell = Cell(TWO, "table_wise", spec, sync=sync, variable=True)
    parallel = shard(cell)
    start = snapshot(parallel)
    batches = [step[rank] for step in make_stream(cell, STEPS)]
    plain_loop(parallel, make_optimizer(parallel), batches)
    return start, snapshot(parallel)


def test_touched_rows_are_averaged_as_whole_shards_are(ranks4: RankPool) -> None:
    touched = ranks4.run(train_sparsely, tdsp.WeightSync())
    whole = ranks4.run(train_sparsely, tdsp.WeightSync(rows=tdsp.SyncedRows.ALL))
    moved = 0.0
    for (start, end), (_, expected) in zip(touched, whole, strict=True):
        assert largest_gap(end, expected) == 0.0
        moved = max(moved, largest_gap(start, end))
    assert moved > 1e-2


def bytes_of_a_step(rank: int, world_size: int, cell: Cell) -> tuple[int, int]:
    """What a step with such a batch sends, and one with the same batch written out."""
    batch = make_variable_batch(cell.spec, 1 + rank, 40, plain_every=0)
    sent = []
    for features in (batch, written_out(batch)):
        parallel = shard(cell)
        parallel(features).sum().backward()  # The first step compares replicas.
        with count_collectives() as counts:
            parallel(features).sum().backward()
        sent.append(counts.total_bytes())
    return sent[0], sent[1]


@pytest.mark.parametrize(
    "cell",
    [
        Cell(MESHES[1], "table_wise"),
        Cell(MESHES[1], "table_wise", exchange="nonempty"),
    ],
    ids=str,
)
def test_bags_that_samples_share_travel_once(ranks4: RankPool, cell: Cell) -> None:
    for shared, apart in ranks4.run(bytes_of_a_step, cell):
        assert 0 < shared < apart


def trained_twice(rank: int, world_size: int) -> float:
    """How far the same batches end from each other if their indices name features otherwise."""
    ends = []
    for turned in (False, True):
        parallel = shard(Cell(TWO, "table_wise"))
        batches = []
        for step in range(STEPS):
            batch = make_variable_batch(SUM, 10 * step + rank, plain_every=0)
            names, indices = batch.inverse_indices()
            if turned and step:
                batch = changed(batch, inverse_indices=(names[::-1], indices.flip(0)))
            batches.append(batch)
        plain_loop(parallel, make_optimizer(parallel), batches)
        ends.append(snapshot(parallel))
    return largest_gap(*ends)


def test_the_order_of_inverse_indices_may_change(ranks4: RankPool) -> None:
    """TorchRec remembers that of the first batch."""
    assert max(ranks4.run(trained_twice)) == 0.0
