"""Plans chosen by predicted cost train like the unsharded model.

A model's tables have different types and exchanges; `Planner2D` plans it, or TorchRec's planner
with this package's proposers, and `ModelParallel2D` runs it, or TorchRec's own wrapper.
"""

import pytest

from tests.support.models import build
from tests.support.parity import MESHES, Cell, check_cells, make_sharder, plan_by_cost
from tests.support.planning import tables_in
from tests.support.ranks import RankPool
from tests.support.slices import Deal
from torchrec_2dsp import GradientSync, ParameterConstraints2D, WeightSync
from torchrec_2dsp.plan.parameter_sharding import base_type
from torchrec_2dsp.plan.plan2d import Plan2D


def demand(
    kind: str,
    exchange: str | None = None,
    hot_rows: int | None = None,
    num_groups: int | None = None,
) -> ParameterConstraints2D:
    return ParameterConstraints2D(
        sharding_types=[kind],
        exchange=exchange,
        hot_rows=hot_rows,
        num_groups=num_groups,
        min_partition=4,
    )


MIXES = {
    "rows": (
        ("t0", demand("row_wise", "row", 3)),
        ("t1", demand("table_wise", "nonempty", 2)),
        ("t2", demand("row_wise", "pooled")),
    ),
    "hosts": (
        ("t0", demand("row_wise", "row_per_host")),
        ("t1", demand("table_row_wise")),
        ("t2", demand("table_wise", "pooled")),
    ),
    "free": tuple((name, ParameterConstraints2D()) for name in ("t0", "t1", "t2")),
}

IN_WORLD = (
    ("t0", demand("table_wise", "nonempty", 3, num_groups=1)),
    ("t1", demand("row_wise", "row", 2)),
    ("t2", demand("table_wise", "pooled", num_groups=1)),
)
"""Tables with one copy, beside one in each group."""


def cells_of(mix: str, **how: bool) -> list[Cell]:
    # Data-parallel tables, which are free to choose, are trained by the dense optimizer: SGD.
    optimizer = "sgd" if mix == "free" else "rowwise_adagrad"
    return [
        Cell(mesh, optimizer=optimizer, sync=sync, demands=MIXES[mix], **how)  # type: ignore[arg-type]
        for mesh in MESHES
        for sync in (GradientSync(), WeightSync(dense_above=1.0))
        if optimizer == "sgd" or isinstance(sync, GradientSync)
    ]


@pytest.mark.parametrize("proposed", [False, True])
@pytest.mark.parametrize("mix", ["rows", "hosts"])
def test_planned_is_what_was_demanded(mix: str, proposed: bool) -> None:
    cell = cells_of(mix, proposed=proposed)[0]
    plan = plan_by_cost(cell, build(cell.spec), make_sharder(cell), local_world_size=2)
    of_tables = tables_in(Plan2D.from_stock(plan, cell.mesh))
    for name, asked in cell.demands:
        table = of_tables[name]
        assert [base_type(table.sharding_type)] == asked.sharding_types
        assert asked.exchange is None or [table.exchange] == asked.exchange
        num_hot = len(table.hot_set.row_ids) if table.hot_set else 0
        assert num_hot == (asked.hot_rows or 0)


@pytest.mark.parametrize(
    ("mix", "proposed", "stock_wrapper"),
    [
        *((mix, False, False) for mix in MIXES),
        ("rows", True, True),
        ("hosts", True, True),
        ("rows", True, False),
        pytest.param("free", True, True, marks=pytest.mark.slow),
    ],
)
def test_what_is_planned_equals_the_unsharded_model(
    ranks4: RankPool, mix: str, proposed: bool, stock_wrapper: bool, dealt: Deal
) -> None:
    check_cells(dealt(cells_of(mix, proposed=proposed, stock_wrapper=stock_wrapper)), ranks4)


@pytest.mark.parametrize("stock_wrapper", [False, True])
def test_tables_in_the_world_equal_the_unsharded_model(
    ranks4: RankPool, stock_wrapper: bool, dealt: Deal
) -> None:
    methods = (("rowwise_adagrad", GradientSync()), ("sgd", WeightSync(dense_above=1.0)))
    cells = [
        Cell(
            mesh,
            optimizer=optimizer,
            sync=sync,
            demands=IN_WORLD,
            in_world=("t0", "t2"),
            stock_wrapper=stock_wrapper,
        )
        for mesh in MESHES[1:]
        for optimizer, sync in methods
    ]
    check_cells(dealt(cells), ranks4)
