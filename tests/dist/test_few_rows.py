"""Tables with fewer rows than ranks: shards without rows change nothing for the other tables."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import torchrec_2dsp as tdsp
from tests.support.loops import Tensors, largest_gap, make_stream, train
from tests.support.models import ModelSpec, TableSpec
from tests.support.parity import ONE, Cell, check_cells
from tests.support.ranks import RankPool

pytestmark = pytest.mark.dealt_file

ONE_ROW_FIRST = ModelSpec((TableSpec("t0", 1, 4, ("f0",)), TableSpec("t1", 8, 8, ("f1",))))
TWO_ROWS_FIRST = ModelSpec((TableSpec("t0", 2, 4, ("f0",)), TableSpec("t1", 8, 8, ("f1", "f2"))))
ONE_ROW_BETWEEN = ModelSpec(
    (
        TableSpec("t0", 13, 12, ("f0",)),
        TableSpec("t1", 1, 4, ("f1", "f2")),
        TableSpec("t2", 2, 4, ("f3",)),
        TableSpec("t3", 30, 8, ("f4",)),
    )
)
ONE_ROW_LAST = ModelSpec((TableSpec("t0", 30, 8, ("f0",)), TableSpec("t1", 1, 16, ("f1",))))
SEQUENCE = ModelSpec(
    (TableSpec("t0", 1, 8, ("f0",)), TableSpec("t1", 30, 8, ("f1",))), sequence=True
)
SPECS = (ONE_ROW_FIRST, TWO_ROWS_FIRST, ONE_ROW_BETWEEN, ONE_ROW_LAST)
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


def test_one_group_equals_the_unsharded_model(ranks4: RankPool) -> None:
    cells = [
        Cell(ONE, spec=spec, optimizer=optimizer) for spec, optimizer in product(SPECS, OPTIMIZERS)
    ]
    cells += [
        Cell(ONE, spec=spec, exchange=exchange)
        for spec, exchange in product(SPECS, ("nonempty", "row"))
    ]
    cells += [Cell(ONE, "table_row_wise", spec=spec) for spec in SPECS]
    cells += [Cell(ONE, spec=SEQUENCE)]
    check_gaps(ranks4, cells)


def test_exact_replicas_equal_the_unsharded_model(ranks4: RankPool) -> None:
    meshes = (tdsp.Mesh2D(2, 2), tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS))
    cells = [Cell(mesh, spec=spec) for mesh, spec in product(meshes, SPECS)]
    cells += [
        Cell(meshes[0], spec=ONE_ROW_FIRST, sync=tdsp.WeightSync(), optimizer="sgd"),
        Cell(meshes[0], spec=ONE_ROW_FIRST, sync=tdsp.GradientSync(drift_every=1)),
        Cell(meshes[0], spec=ONE_ROW_FIRST, exchange="nonempty"),
        Cell(meshes[0], spec=ONE_ROW_FIRST, in_world=("t0",)),
        Cell(meshes[0], spec=ONE_ROW_FIRST, hot_rows=(("t0", (0,)),)),
    ]
    check_gaps(ranks4, cells)


def check_gaps(ranks: RankPool, cells: list[Cell]) -> None:
    # Bags of several ids make these models diverge: all samples look up the same few rows.
    check_cells([replace(cell, max_length=1) for cell in cells], ranks, steps=3)


def averaged_copies(rank: int, world_size: int) -> list[Tensors]:
    """Return this rank's shards after two steps with averaged copies."""
    spec = ModelSpec(
        (
            TableSpec("t0", 1, 8, ("f0",)),
            TableSpec("t1", 960, 16, ("f1", "f2")),
            TableSpec("t2", 1320, 8, ("f3",)),
        )
    )
    trained = []
    for rows in tdsp.SyncedRows:
        cell = Cell(tdsp.Mesh2D(2, 2), spec=spec, sync=tdsp.WeightSync(rows=rows))
        trained.append(train(cell, rank, make_stream(cell, 2)))
    return trained


def test_averaged_copies_are_equal(ranks4: RankPool) -> None:
    by_rank = ranks4.run(averaged_copies)
    for first, second in (by_rank[:2], by_rank[2:]):
        for copy, other_copy in zip(first, second, strict=True):
            assert largest_gap(copy, other_copy) == 0.0
            assert sum(tensor.numel() for tensor in copy.values() if torch.is_tensor(tensor)) > 0
