"""Training in 2D equals training one unsharded model on the global batch: the matrix.

Ten steps, or four; the loss of every step, every weight and every moment at the end.
"""

from itertools import product

import pytest
from torchrec.modules.embedding_configs import DataType

from tests.support.models import BAGS, HOT_ROWS, SEQUENCES, ModelSpec
from tests.support.parity import MESHES, STEPS, TOLERANCE, Cell, check_cells, run_cells
from tests.support.ranks import RankPool
from tests.support.slices import Deal
from torchrec_2dsp import GradientSync, Mesh2D, RankLayout, WeightSync

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
    """Return all cells of one sharding type that apply."""
    cells = [
        Cell(mesh, sharding, spec, optimizer, sync, hot_rows)
        for mesh, spec, (optimizer, sync), hot_rows in product(
            meshes, BAGS, METHODS, ((), HOT_ROWS)
        )
    ]
    if sharding == "table_column_wise":
        # Runs as column-wise; what differs is the planning.
        return [cell for cell in cells if cell.spec == ModelSpec()]
    if sharding == "data_parallel":
        # Replicated by TorchRec itself: no hot rows, one (dense) optimizer.
        return [cell for cell in cells if not cell.hot_rows and cell.optimizer == "sgd"]
    return cells


def every_triple(cells: list[Cell]) -> list[Cell]:
    """Half of the cells, in which any three of mesh, bags, method and hot rows still meet."""
    if len(cells) < len(MESHES) * len(BAGS) * len(METHODS) * 2:
        # Where some of them don't vary, half would be too few.
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


@pytest.mark.parametrize("sharding", BAG_TYPES)
def test_bags_equal_the_unsharded_model(ranks4: RankPool, sharding: str, dealt: Deal) -> None:
    cells = dealt(every_triple(matrix(sharding, MESHES)))
    # The other types repeat what happens in this one; fewer steps show that they do.
    steps = STEPS if sharding == "row_wise" else 4
    check_cells(cells, ranks4, steps, must_sync=True)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("sharding", BAG_TYPES)
def test_bags_in_all_cells(ranks4: RankPool, sharding: str, mesh: Mesh2D) -> None:
    cells = matrix(sharding, (mesh,))
    check_cells(cells, ranks4, STEPS, must_sync=True)


def test_a_table_may_be_hot_from_end_to_end(ranks4: RankPool) -> None:
    """A table on every rank whose gradients are merged by row instead of all-reduced."""
    (first, *_) = ModelSpec().tables
    everything = ((first.name, tuple(range(first.num_rows))),)
    cells = [
        Cell(mesh, sharding, optimizer="rowwise_adagrad", hot_rows=everything)
        for mesh in MESHES[:2]
        for sharding in ("table_wise", "row_wise")
    ]
    check_cells(cells, ranks4, STEPS, must_sync=True)


@pytest.mark.parametrize("sharding", ["table_wise", "column_wise", "row_wise"])
def test_sequences_equal_the_unsharded_model(ranks4: RankPool, sharding: str, dealt: Deal) -> None:
    cells = dealt(
        [
            Cell(mesh, sharding, SEQUENCES, optimizer, sync)
            for mesh, (optimizer, sync) in product(MESHES, METHODS)
        ]
    )
    check_cells(cells, ranks4, STEPS, must_sync=True)


def test_element_wise_adagrad_is_exact_too(ranks4: RankPool, dealt: Deal) -> None:
    cells = dealt(
        [
            Cell(mesh, sharding, optimizer="adagrad", hot_rows=hot_rows)
            for mesh in MESHES
            for sharding in ("table_wise", "row_wise", "column_wise")
            for hot_rows in ((), HOT_ROWS)
        ]
    )
    check_cells(cells, ranks4, 5, must_sync=True)


def test_half_precision_tables(ranks4: RankPool, dealt: Deal) -> None:
    """Within a rounding of fp16 per step, which is 2.4e-4 for weights below 0.5."""
    spec = ModelSpec(data_type=DataType.FP16)
    cells = [
        Cell(MESHES[1], sharding, spec, optimizer, sync, hot_rows)
        for sharding in ("table_wise", "row_wise")
        for optimizer, sync in METHODS
        for hot_rows in ((), HOT_ROWS)
    ]
    for gaps in ranks4.run(run_cells, dealt(cells), 5):
        assert max(gap.worst for gap in gaps) < 1e-3


def test_two_ranks_per_host_in_groups_over_hosts(ranks8: RankPool, dealt: Deal) -> None:
    """Node-wise types are only themselves where a group spans hosts."""
    cells = [
        Cell(MESHES_8[0], sharding, optimizer="rowwise_adagrad", hot_rows=hot_rows)
        for sharding in ("table_row_wise", "grid_shard")
        for hot_rows in ((), HOT_ROWS)
    ]
    cells += [Cell(MESHES_8[1], sharding) for sharding in ("table_row_wise", "grid_shard")]
    cells = dealt(cells)
    check_cells(cells, ranks8, STEPS, tolerance=TOLERANCE, must_sync=True)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES_8, ids=str)
@pytest.mark.parametrize("sharding", BAG_TYPES)
def test_eight_ranks(ranks8: RankPool, sharding: str, mesh: Mesh2D) -> None:
    cells = matrix(sharding, (mesh,))
    check_cells(cells, ranks8, STEPS, tolerance=TOLERANCE, must_sync=True)


def test_the_matrix_notices_a_method_that_is_not_exact(ranks4: RankPool) -> None:
    """Averaging row-wise AdaGrad is a different algorithm: the check must see it."""
    cell = Cell(Mesh2D(2, 2), optimizer="rowwise_adagrad", sync=WeightSync())
    gaps = [gaps[0] for gaps in ranks4.run(run_cells, [cell])]
    assert max(gap.weight for gap in gaps) > 1e-3
