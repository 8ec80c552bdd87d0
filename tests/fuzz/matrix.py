"""The matrix: tables sharded every way, by mesh, kind of lookup, optimizer and sync, as cases."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torchrec_2dsp as tdsp
from tests.fuzz.case import Case, ModuleCase, SyncCase, TableCase
from tests.support.oracle import WITH_AVERAGE

ONE_HOST = (
    tdsp.Mesh2D(1, 4),
    tdsp.Mesh2D(2, 2),
    tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS),
    tdsp.Mesh2D(4, 1),
)
FOUR_HOSTS = (
    tdsp.Mesh2D(2, 4),
    tdsp.Mesh2D(2, 4, tdsp.RankLayout.CONTIGUOUS),
    tdsp.Mesh2D(4, 2),
)
"""Where groups span hosts, as types that split a table inside a host only then are themselves."""
TYPES = ("table_wise", "column_wise", "row_wise", "data_parallel")
BAG_TYPES = (*TYPES, "table_row_wise", "table_column_wise", "grid_shard")
"""Those of bags alone come last."""
METHODS = (
    ("sgd", SyncCase()),
    ("rowwise_adagrad", SyncCase()),
    ("sgd", SyncCase(kind="weight", dense_above=1.0)),
)
SIZES = ((40, 8, 1), (24, 16, 2), (33, 8, 1))
"""Rows, dim and features: several of each, and a row count that no group size divides."""


def ways(types: Sequence[str]) -> list[TableCase]:
    """Return tables of some types, with and without hot rows where not all ranks have all rows."""
    return [
        TableCase(sharding=kind, hot=hot)
        for kind, hot in product(types, ("none", "some", "all"))
        if kind != "data_parallel" or hot == "none"
    ]


BY_ROW = [TableCase(exchange="row", hot=hot) for hot in ("none", "some")]


def module(kind: str, tables: Sequence[TableCase]) -> ModuleCase:
    """Return a module whose tables have features of their own."""
    sized, first = [], 0
    for place, table in enumerate(tables):
        rows, dim, count = SIZES[place % len(SIZES)]
        changes = {"rows": rows, "features": tuple(range(first, first + count)), "place": place % 4}
        if kind == "mean":
            changes["pooling"] = "mean"
        sized.append(replace(table, dim=8 if kind == "sequences" else dim, **changes))
        first += count
    return ModuleCase(kind="bags" if kind == "mean" else kind, tables=tuple(sized))


def case(mesh: tdsp.Mesh2D, optimizer: str, *modules: ModuleCase, **options: object) -> Case:
    """Return a case of four steps, on two ranks of each host if it has more than four."""
    known = {"groups": mesh.num_groups, "size": mesh.group_size, "layout": mesh.layout.value}
    known |= {"local": 2 if mesh.world_size > 4 else 0, "sizes": (6,) * mesh.world_size}
    known |= {"steps": 4, "max_length": 4, "bound": 1e-6}
    return Case(optimizer=optimizer, modules=modules, **known | options)  # pyright: ignore


def matrix() -> Iterator[tuple[str, Case]]:
    """Yield names and cases: all kinds by all methods, and all optimizers by one kind."""
    for mesh, (optimizer, sync) in product((*ONE_HOST, *FOUR_HOSTS), METHODS):
        name = f"{mesh} {optimizer} {sync.kind}"
        for kind in ("bags", "mean", "weighted", "sequences"):
            tables = module(kind, ways(TYPES if kind == "sequences" else BAG_TYPES))
            yield f"{kind} {name}", case(mesh, optimizer, tables, sync=sync)
    for mesh in ONE_HOST:
        yield f"adagrad {mesh}", case(mesh, "adagrad", module("bags", ways(TYPES)))
    for mesh, optimizer in product(ONE_HOST, WITH_AVERAGE):
        # By weights, gradients don't cancel to nothing: the oracle would miss that lookup.
        bags = module("weighted", [*ways(BAG_TYPES), *BY_ROW])
        sequences = module("sequences", [TableCase(sharding="table_wise"), *BY_ROW])
        yield f"{optimizer} {mesh}", case(mesh, optimizer, bags, sequences, bound=1e-5)
