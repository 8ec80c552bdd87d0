"""Ids that travel in one, two and three bytes train as the unsharded model does."""

from dataclasses import replace
from itertools import product

from tests.support.models import ModelSpec, TableSpec
from tests.support.parity import ONE, TWO, Cell, check_cells
from tests.support.ranks import RankPool

TABLES = (
    TableSpec("t0", 255, 4, ("f0",)),
    TableSpec("t1", 256, 4, ("f1",)),
    TableSpec("t2", 70_000, 4, ("f2", "f3")),
)
BAGS = ModelSpec(TABLES)
SMALL, SEQUENCES = replace(BAGS, tables=TABLES[:1]), replace(BAGS, sequence=True)


def test_training_equals_the_unsharded_model(two_hosts: RankPool) -> None:
    kinds = product((ONE, TWO), ("table_wise", "row_wise"), (BAGS, SEQUENCES))
    cells = [Cell(mesh, sharding=kind, spec=spec) for mesh, kind, spec in kinds]
    cells += [
        Cell(ONE, sharding="table_row_wise", spec=replace(BAGS, weighted=True)),
        Cell(ONE, sharding="column_wise", spec=SMALL),
        Cell(ONE, sharding="row_wise", spec=BAGS, exchange="nonempty"),
        Cell(ONE, sharding="row_wise", spec=BAGS, exchange="row"),
        Cell(ONE, sharding="row_wise", spec=SEQUENCES, exchange="row_per_host"),
    ]
    check_cells(cells, two_hosts)
