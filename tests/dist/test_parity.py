"""Training in 2D equals training one unsharded model on the global batch: the matrix.

Cells train ten or four steps; each step's loss, and all final weights and moments must match.
"""

from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import torchrec_2dsp as tdsp
from tests.support.loops import largest_gap, snapshot
from tests.support.models import BAGS, HOT_ROWS, SEQUENCES, ModelSpec, TableSpec, build, make_batch
from tests.support.oracle import WITH_AVERAGE, local_loss
from tests.support.parity import (
    MESHES,
    STEPS,
    TOLERANCE,
    Cell,
    check_cells,
    run_cell,
    shard,
)
from tests.support.ranks import RankPool, error_text
from tests.support.slices import Deal
from torchrec_2dsp import GradientSync, Mesh2D, RankLayout, WeightSync
from torchrec_2dsp.shard.parted import sharded_tables

MESHES_8 = (Mesh2D(2, 4), Mesh2D(2, 4, RankLayout.CONTIGUOUS), Mesh2D(4, 2))
BAG_TYPES = (
    "table_wise",
    "column_wise",
    "row_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
    "data_parallel",
)
METHODS = (
    ("sgd", GradientSync()),
    ("rowwise_adagrad", GradientSync()),
    ("sgd", WeightSync(dense_above=1.0)),
)


def matrix(sharding: str, meshes: tuple[Mesh2D, ...]) -> list[Cell]:
    """Return all cells that apply to a sharding type."""
    cells = [
        Cell(mesh, sharding, spec, optimizer, sync, hot_rows)
        for mesh, spec, (optimizer, sync), hot_rows in product(
            meshes, BAGS, METHODS, ((), HOT_ROWS)
        )
    ]
    if sharding == "table_column_wise":
        # Runs as column-wise; only the planning differs.
        return [cell for cell in cells if cell.spec == ModelSpec()]
    if sharding == "data_parallel":
        # All rows are on every rank already, so that none can be hot.
        return [cell for cell in cells if not cell.hot_rows]
    return cells


def every_triple(cells: list[Cell]) -> list[Cell]:
    """Keep half the cells, with all triples from mesh, bags, method and hot rows."""
    if len(cells) < len(MESHES) * len(BAGS) * len(METHODS) * 2:
        # If some don't vary, half would be too few.
        return cells
    return [
        cell
        for cell in cells
        if not (
            MESHES.index(cell.mesh)
            + BAGS.index(cell.spec)
            + METHODS.index((cell.optimizer, cell.sync))
            + bool(cell.hot_rows)
        )
        % 2
    ]


@pytest.mark.dealt
@pytest.mark.parametrize("sharding", BAG_TYPES)
def test_bags_equal_the_unsharded_model(ranks4: RankPool, sharding: str, dealt: Deal) -> None:
    cells = dealt(every_triple(matrix(sharding, MESHES)))
    # The other types behave like this one; fewer steps show that they do.
    steps = STEPS if sharding == "row_wise" else 4
    check_cells(cells, ranks4, steps, must_sync=True)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("sharding", BAG_TYPES)
def test_bags_in_all_cells(ranks4: RankPool, sharding: str, mesh: Mesh2D) -> None:
    cells = matrix(sharding, (mesh,))
    check_cells(cells, ranks4, STEPS, must_sync=True)


def test_a_features_name_may_have_an_at_sign(ranks4: RankPool) -> None:
    """If a feature looks up several tables, TorchRec names its outputs ``feature@table``."""
    tables = (TableSpec("t0", 40, 8, ("user@7d",)), TableSpec("t1", 24, 8, ("user", "item@1")))
    hot = (("t0", (0, 1, 5)), ("t1", (0, 2)))
    cells = [
        Cell(MESHES[0], spec=spec, hot_rows=hot_rows, variable=is_variable)
        for spec in (ModelSpec(tables), ModelSpec(tables, sequence=True))
        for hot_rows, is_variable in ((hot, False), ((), True))
    ]
    check_cells(cells, ranks4, STEPS, must_sync=True)


@pytest.mark.dealt
@pytest.mark.parametrize("sharding", ["table_wise", "column_wise", "row_wise", "data_parallel"])
def test_sequences_equal_the_unsharded_model(ranks4: RankPool, sharding: str, dealt: Deal) -> None:
    cells = dealt(
        [
            Cell(mesh, sharding, SEQUENCES, optimizer, sync)
            for mesh, (optimizer, sync) in product(MESHES, METHODS)
        ]
    )
    check_cells(cells, ranks4, STEPS, must_sync=True)


@pytest.mark.parametrize("optimizer", WITH_AVERAGE)
@pytest.mark.dealt
def test_adam_and_lamb_are_exact_too(ranks4: RankPool, optimizer: str, dealt: Deal) -> None:
    """This includes every way to look up tables, and hot rows that some ranks don't use."""
    ways = [
        *((sharding, "pooled", ()) for sharding in BAG_TYPES),
        *((sharding, "pooled", HOT_ROWS) for sharding in ("table_wise", "column_wise", "row_wise")),
        ("row_wise", "row", ()),
        ("row_wise", "row", HOT_ROWS),
    ]
    spec = ModelSpec(weighted=True) if optimizer == "adam" else ModelSpec()
    cells = [
        Cell(mesh, sharding, spec, optimizer, hot_rows=hot_rows, exchange=exchange)
        for mesh in MESHES
        for sharding, exchange, hot_rows in ways
    ]
    cells += [
        Cell(mesh, sharding, SEQUENCES, optimizer, exchange=exchange)
        for mesh in MESHES
        for sharding, exchange in (("table_wise", "pooled"), ("row_wise", "row"))
    ]
    check_cells(dealt(cells), ranks4, STEPS, tolerance=10 * TOLERANCE, must_sync=True)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES_8, ids=str)
@pytest.mark.parametrize("sharding", BAG_TYPES)
def test_eight_ranks(ranks8: RankPool, sharding: str, mesh: Mesh2D) -> None:
    cells = matrix(sharding, (mesh,))
    check_cells(cells, ranks8, STEPS, tolerance=TOLERANCE, must_sync=True)


def test_the_matrix_notices_a_method_that_is_not_exact(ranks4: RankPool) -> None:
    """Averaging row-wise AdaGrad is a different algorithm, which the check must notice."""
    cell = Cell(Mesh2D(2, 2), optimizer="rowwise_adagrad", sync=WeightSync())
    assert max(gap.weight for gap in ranks4.run(run_cell, cell)) > 1e-3


def modes_of(rank: int, world_size: int, cell: Cell) -> list[bool]:
    parallel = shard(cell).eval()
    return [part.module.training for part in sharded_tables(parallel)]


@pytest.mark.dealt_file
def test_all_parts_are_told_of_evaluation(ranks4: RankPool) -> None:
    assert ranks4.run(modes_of, Cell(Mesh2D(2, 2), in_world=("t1",))) == [[False, False]] * 4


IN_PARTS = (
    Cell(Mesh2D(2, 2), in_world=("t1",), hot_rows=HOT_ROWS),
    Cell(Mesh2D(2, 2), spec=SEQUENCES, in_world=("t0",)),
    Cell(Mesh2D(2, 2), spec=ModelSpec(positions="collection", weighted=True), in_world=("t2",)),
)


def load_by_torch(rank: int, world_size: int, cell: Cell) -> None:
    """Compare the wrapper's view of a model's tables with torch's view of its module."""
    parallel, other = shard(cell), shard(cell)
    names = [name for name, _ in parallel.named_parameters()]
    assert [name for name, _ in parallel.module.named_parameters()] == names
    assert all(parallel.module.get_parameter(name) is not None for name in names)
    assert get_model_state_dict(parallel.module).keys() == parallel.state_dict().keys()
    weights: dict[str, Any] = build(cell.spec, seed=1).state_dict()
    parallel.load_state_dict(cast(Any, {**weights}))
    other.module.load_state_dict({**weights})
    assert largest_gap(snapshot(parallel), snapshot(other)) == 0
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.module.load_state_dict({**weights, f"{names[0]}s": torch.zeros(1)})


@pytest.mark.parametrize("cell", IN_PARTS, ids=str)
def test_torch_sees_the_tables_of_all_parts(ranks4: RankPool, cell: Cell) -> None:
    ranks4.run(load_by_torch, cell)


def bad_ids(rank: int, world_size: int, cell: Cell) -> list[str]:
    """Return the errors for a bad id in each kind of table; train a good batch after each."""
    parallel = shard(cell)
    messages = []
    for feature in ("f0", "f1"):
        batch = make_batch(cell.spec, rank)
        if rank == 1:
            batch[feature].values()[0] = 10_000
        messages.append(error_text(partial(parallel, batch), tdsp.errors.InputError))
        local_loss(parallel(make_batch(cell.spec, rank))).backward()
    return messages


@pytest.mark.dealt_file
def test_bad_ids_of_all_parts_are_told_on_every_rank(ranks4: RankPool) -> None:
    first, *others = ranks4.run(bad_ids, Cell(Mesh2D(2, 2), in_world=("t1",)), timeout_s=60)
    assert all(other == first for other in others)
    assert ["'t0'" in first[0], "'t1'" in first[1]] == [True, True]
