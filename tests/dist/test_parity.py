"""What the matrix of pinned cases lacks: names with an at sign, and parts of a sharded model."""

from functools import partial

import pytest

import torchrec_2dsp as tdsp
from tests.support.models import ModelSpec, TableSpec, make_batch
from tests.support.oracle import local_loss
from tests.support.parity import ONE, STEPS, TWO, Cell, check_cells, shard
from tests.support.ranks import RankPool, error_text
from torchrec_2dsp.shard.parted import sharded_tables


def test_a_features_name_may_have_an_at_sign(ranks4: RankPool) -> None:
    """TorchRec writes outputs of a feature that looks up several tables as ``feature@table``."""
    tables = (TableSpec("t0", 40, 8, ("user@7d",)), TableSpec("t1", 24, 8, ("user", "item@1")))
    hot = (("t0", (0, 1, 5)), ("t1", (0, 2)))
    cells = [
        Cell(ONE, spec=spec, hot_rows=hot_rows, variable=is_variable)
        for spec in (ModelSpec(tables), ModelSpec(tables, sequence=True))
        for hot_rows, is_variable in ((hot, False), ((), True))
    ]
    check_cells(cells, ranks4, STEPS, must_sync=True)


def modes_of(rank: int, world_size: int, cell: Cell) -> list[bool]:
    parallel = shard(cell).eval()
    return [part.module.training for part in sharded_tables(parallel)]


@pytest.mark.dealt_file
def test_all_parts_are_told_of_evaluation(ranks4: RankPool) -> None:
    assert ranks4.run(modes_of, Cell(TWO, in_world=("t1",))) == [[False, False]] * 4


def bad_ids(rank: int, world_size: int, cell: Cell) -> list[str]:
    """Return the errors for a bad id in either kind of table, and train a good batch after each."""
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
    first, *others = ranks4.run(bad_ids, Cell(TWO, in_world=("t1",)), timeout_s=60)
    assert all(other == first for other in others)
    assert ["'t0'" in first[0], "'t1'" in first[1]] == [True, True]
