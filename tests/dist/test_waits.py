"""A step waits for a GPU a few times, however many tables there are."""

from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import make_stream, plain_loop, shard
from tests.support.models import ModelSpec, TableSpec
from tests.support.parity import Cell, make_optimizer
from tests.support.ranks import RankPool
from tests.support.waits import count_waits
from torchrec_2dsp.shard.batch import BadIds, IdCheck

ROW_WISE = Cell(tdsp.Mesh2D(1, 2))
HOT = replace(ROW_WISE, exchange="row", hot_rows=(("t0", (0, 1, 5)),))
KINDS = {
    "row_wise": (ROW_WISE, 3),
    "copies": (replace(ROW_WISE, mesh=tdsp.Mesh2D(2, 1)), 7),
    "rows": (replace(HOT, hot_rows=()), 6),
    "rows, hot": (HOT, 12),
    "sequences, hot": (replace(HOT, spec=ModelSpec(sequence=True)), 12),
}
"""Configurations, and how many times a step of each may wait."""


def with_tables(cell: Cell, num_tables: int) -> Cell:
    """Repeat the cell's table, with its hot rows."""
    tables = tuple(TableSpec(f"t{n}", 40, 8, (f"f{n}",)) for n in range(num_tables))
    hot_rows = tuple((table.name, rows) for table in tables for _, rows in cell.hot_rows)
    return replace(cell, spec=replace(cell.spec, tables=tables), hot_rows=hot_rows)


def waits_of_a_step(rank: int, world_size: int) -> list[list[Counter[str]]]:
    """Return each kind's waits by place, with two tables and with five."""
    by_kind = []
    for cell, _ in KINDS.values():
        by_kind.append([])
        for repeated in (with_tables(cell, 2), with_tables(cell, 5)):
            parallel = shard(repeated)
            optimizer = make_optimizer(parallel)
            batches = [of_step[rank] for of_step in make_stream(repeated, 3)]
            plain_loop(parallel, optimizer, batches[:2])
            with count_waits() as places:
                plain_loop(parallel, optimizer, batches[2:])
            by_kind[-1].append(places)
    return by_kind


def test_waits_do_not_depend_on_the_number_of_tables(ranks2: RankPool) -> None:
    for by_kind in ranks2.run(waits_of_a_step):
        for (kind, (_, bound)), (few, many) in zip(KINDS.items(), by_kind, strict=True):
            assert few == many, kind
            assert any("hot_rows.py" in place for place in many) == ("hot" in kind)
            assert 0 < many.total() <= bound, f"{kind}: {many}"


def test_what_is_a_wait() -> None:
    table = SimpleNamespace(name="t", num_embeddings=5, feature_names=["a"])
    batch = KeyedJaggedTensor(["a"], torch.tensor([9, 1]), lengths=torch.tensor([2]))
    check = partial(IdCheck([table], BadIds.DROP), batch)
    check()  # The first time it also copies the number of rows.
    with count_waits() as places:
        check()
        batch.values().tolist()
    # Is any id bad, how many are, and which are left; the test's own wait isn't the package's.
    assert places.total() == 3, places
