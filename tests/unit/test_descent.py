"""From a good start to a better one, where no single table makes it better."""

from dataclasses import replace

import pytest
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingType

import torchrec_2dsp as tdsp
from tests.support.planning import ENOUGH, SHARDERS, calibration, tables
from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.cost.workload import DenseWork, Workload
from torchrec_2dsp.planner.search.choices import candidates_of
from torchrec_2dsp.planner.search.cost_search import search
from torchrec_2dsp.planner.search.placement import Descent, Placement
from torchrec_2dsp.planner.search.space import Space


def space_of(rows: tuple[int, ...], sync: tdsp.WeightSync, dense_s: float = 0.0) -> Space:
    """Table- or row-wise tables, in two groups of four ranks on hosts of two."""
    pooled = tdsp.ParameterConstraints2D(
        sharding_types=["table_wise", "row_wise"], exchange=["pooled"]
    )
    workload = Workload.of_model(tables(rows), batch_size=16)
    workload = replace(workload, dense=DenseWork(forward_s=dense_s, backward_s=0.0))
    constraints: dict[str, ParameterConstraints] = {
        f"t{number}": pooled for number in range(len(rows))
    }
    candidates = candidates_of(tables(rows), SHARDERS, constraints, workload, "cpu")
    return Space.of(candidates, CostSetting(calibration(), workload, tdsp.Mesh2D(2, 4), sync, 2))


@pytest.mark.parametrize("dense_s", [0.0, 5.0])
def test_large_tables_of_few_ranks_are_spread_together(dense_s: float) -> None:
    """Replica peers average whole shards, for which all wait that have less: three of four ranks
    that have a table each, or three of four tables, change nothing. Whatever the dense part."""
    space = space_of((300_000,) * 3 + (50,), tdsp.WeightSync(rows=tdsp.SyncedRows.ALL), dense_s)
    (found,) = search(space.candidates, [space.setting], ENOUGH).found
    assert {one.kind for one in found.placement.choices[:3]} == {ShardingType.ROW_WISE}

    descent = Descent(space, space.first_prices, ENOUGH)
    whole, in_rows = (
        next(one for one in space.choices[0] if one.kind is kind)
        for kind in (ShardingType.TABLE_WISE, ShardingType.ROW_WISE)
    )
    start = Placement((whole,) * 4, ((0,), (1,), (2,), (3,)))
    for table in range(3):
        assert descent.rated_s(start.replaced(table, in_rows)) > descent.rated_s(start)
    better, _ = descent.improved(start, max_tries=100)
    assert descent.rated_s(better) <= descent.rated_s(start) * 0.9 + 0.1 * dense_s
    assert found.rated_s <= descent.rated_s(better) * (1 + 1e-6)


def test_a_long_dense_part_is_no_reason_for_one_type() -> None:
    """What a further type must gain is a part of what tables take."""
    rows = (10,) * 12 + (200_000,)
    some_types = ParameterConstraints(sharding_types=["table_wise", "data_parallel"])
    constraints = {f"t{number}": some_types for number in range(len(rows))}
    workload = Workload.of_model(tables(rows), batch_size=512)
    found = []
    for dense_s in (0.0, 100.0):
        given = replace(workload, dense=DenseWork(forward_s=dense_s, backward_s=0.0))
        candidates = candidates_of(tables(rows), SHARDERS, constraints, given, "cpu")
        mesh, sync = tdsp.Mesh2D(1, 4), tdsp.GradientSync()
        setting = CostSetting(calibration("200mbit"), given, mesh, sync, 2)
        found.append(search(candidates, [setting], ENOUGH).found[0].placement)
    without, beside = found
    assert {one.kind for one in without.choices} == {
        ShardingType.TABLE_WISE,
        ShardingType.DATA_PARALLEL,
    }
    assert beside.choices == without.choices


def test_no_more_is_tried_than_may_be() -> None:
    space = space_of((300_000,) * 3, tdsp.WeightSync(rows=tdsp.SyncedRows.ALL))
    whole = next(one for one in space.choices[0] if one.is_free)
    start = Placement((whole,) * 3, ((0,), (1,), (2,)))
    descent = Descent(space, space.first_prices, ENOUGH)
    assert descent.improved(start, max_tries=0) == (start, 0)
