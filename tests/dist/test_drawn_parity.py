"""Parity on drawn models, batches and meshes."""

from hypothesis import HealthCheck, given, settings, strategies as st

from tests.support.models import ModelSpec, TableSpec
from tests.support.parity import TOLERANCE, Cell, run_cell
from tests.support.ranks import RankPool
from torchrec_2dsp import GradientSync, Mesh2D, RankLayout, WeightSync

MESHES = [Mesh2D(1, 4), Mesh2D(2, 2), Mesh2D(2, 2, RankLayout.CONTIGUOUS), Mesh2D(4, 1)]
BAG_TYPES = ["table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard"]


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Models of one to three tables."""
    sequence = draw(st.booleans())
    dims = st.sampled_from([4, 8, 12]) if not sequence else st.just(draw(st.sampled_from([4, 8])))
    tables, feature = [], 0
    for index in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 2))
        features = tuple(f"f{feature + offset}" for offset in range(count))
        feature += count
        # TorchRec needs a row per rank.
        tables.append(TableSpec(f"t{index}", draw(st.integers(4, 30)), draw(dims), features))
    return ModelSpec(
        tables=tuple(tables),
        sequence=sequence,
        pooling=draw(st.sampled_from(["sum", "mean"])) if not sequence else "sum",
    )


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    """Cells that are exact."""
    spec = draw(specs())
    sequence_types = ["table_wise", "column_wise", "row_wise"]
    hot_rows = ()
    if not spec.sequence and draw(st.booleans()):
        table = spec.tables[0]
        ids = draw(st.sets(st.integers(0, table.num_rows - 1), min_size=1, max_size=4))
        hot_rows = ((table.name, tuple(sorted(ids))),)
    # TorchRec's sequences need a sample, also unsharded.
    sizes = st.integers(1 if spec.sequence else 0, 5)
    optimizer = draw(st.sampled_from(["sgd", "rowwise_adagrad", "adagrad"]))
    return Cell(
        mesh=draw(st.sampled_from(MESHES)),
        sharding=draw(st.sampled_from(sequence_types if spec.sequence else BAG_TYPES)),
        spec=spec,
        optimizer=optimizer,
        sync=draw(st.sampled_from([GradientSync(), WeightSync(), WeightSync(dense_above=1.0)]))
        if optimizer == "sgd"
        else GradientSync(),
        hot_rows=hot_rows,
        batch_sizes=tuple(draw(st.lists(sizes, min_size=4, max_size=4).filter(any))),
        # A drawn gradient may cancel to nothing but rounding; eps keeps that from mattering.
        eps=1e-2,
        seed=draw(st.integers(0, 10_000)),
        max_length=draw(st.integers(1, 6)),
    )


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(cell=cells())
def test_drawn_cells_equal_the_unsharded_model(ranks4: RankPool, cell: Cell) -> None:
    gaps = ranks4.run(run_cell, cell, 4, timeout_s=60)
    assert max(gap.worst for gap in gaps) <= TOLERANCE, gaps
