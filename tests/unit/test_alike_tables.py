"""Loads computed for many tables at once equal each table's own."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingType

import torchrec_2dsp as tdsp
from tests.support.planning import ENOUGH, SHARDERS, calibration, problem, skewed, tables
from torchrec_2dsp.codecs.rows import transports_of
from torchrec_2dsp.cost.loads import LOADS
from torchrec_2dsp.cost.model import CostSetting, kept_bytes
from torchrec_2dsp.cost.step_cost import StepCost, rated
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.plan.parameter_sharding import Exchange, Pipeline
from torchrec_2dsp.planner.search.candidates import candidates_of
from torchrec_2dsp.planner.search.choices import Choice
from torchrec_2dsp.planner.search.placement import Descent, Placement
from torchrec_2dsp.planner.search.space import Space

TYPES = (
    ShardingType.DATA_PARALLEL,
    ShardingType.TABLE_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.ROW_WISE,
    ShardingType.TABLE_ROW_WISE,
    ShardingType.TABLE_COLUMN_WISE,
    ShardingType.GRID_SHARD,
)


def test_alike_tables_have_each_the_loads_of_its_own() -> None:
    """Loads computed for many tables at once equal the mean over each table's ranks."""
    rows = (300, 9_000, 40_000, 70, 5_000)
    access = tdsp.AccessStats({name: skewed(rows)[name] for name in ("t1", "t2")})
    several: dict[str, Any] = {
        "sharding_types": [kind.value for kind in TYPES],
        "pooling_factors": [3.0],
    }
    longer: dict[str, Any] = several | {"pooling_factors": [7.0], "skew": 0.4}
    constraints: dict[str, ParameterConstraints] = {
        "t0": tdsp.ParameterConstraints2D(**several),
        "t3": tdsp.ParameterConstraints2D(**longer),
        "t4": tdsp.ParameterConstraints2D(hot_rows=20),
    }
    workload = replace(
        Workload.of_model(
            tables(rows), batch_size=64, constraints=constraints, access=access, skew=1.05
        ),
        forward_wire_bytes=2.0,
    )
    assert workload.table("t3").skew == 0.4
    candidates = candidates_of(
        tables(rows), SHARDERS, constraints, workload, "cpu", transports_of("any")
    )
    num_compared = 0
    for sync, pipeline in (
        (tdsp.GradientSync(), Pipeline.ROW_PREFETCH),
        (tdsp.WeightSync(policy=tdsp.every(4)), Pipeline.BASE),
    ):
        for mesh in (tdsp.Mesh2D(1, 8), tdsp.Mesh2D(2, 4, tdsp.RankLayout.CONTIGUOUS)):
            setting = CostSetting(calibration(), workload, mesh, sync, 4, pipeline)
            space = Space.of(candidates, setting)
            for table, candidate in enumerate(candidates):
                for number, choice in enumerate(space.choices[table]):
                    placed = candidate.somewhere(choice, setting.group)
                    loads = setting.loads([placed]).values.mean(axis=1)
                    by_rank, _ = kept_bytes(placed, setting.group.num_ranks)
                    num_bytes = by_rank.mean() + setting.buffer_bytes @ loads
                    np.testing.assert_allclose(space.loads[table, number], loads, 1e-9, 1e-7)
                    np.testing.assert_allclose(space.bytes_of_rank[table, number], num_bytes)
                    assert space.bytes_of_shard[table, number] == by_rank.max()
                    num_compared += 1
    assert num_compared > 500


def ratings_asked(rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    """Improve a placement, and count the predicted steps; check the cached ratings."""
    space = Space.of(*problem(tdsp.Mesh2D(1, 2), rows, batch_size=64, skew=1.05))
    num_asked, predict = 0, CostSetting.step_cost

    def count(*args: Any) -> StepCost:
        nonlocal num_asked
        num_asked += 1
        return predict(*args)

    descent = Descent(space, space.prices(np.zeros(len(LOADS))), ENOUGH)
    by_rows = Choice(ShardingType.ROW_WISE, Exchange.ROW)
    start = Placement((by_rows,) * len(rows), ((),) * len(rows))
    with monkeypatch.context() as patch:
        patch.setattr(CostSetting, "step_cost", count)
        descent.improved(start, 10_000)
    # Inside a host, these exchanges differ in their message types only.
    for exchange in (Exchange.POOLED, Exchange.ROW, Exchange.ROW_PER_HOST):
        changed = start.replaced(0, replace(by_rows, exchange=exchange))
        types = {choice.message_type for choice in changed.choices}
        assert descent.rated_s(changed) == rated(descent.step_cost(changed), types)
    return num_asked


def test_alike_tables_are_rated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    alike = ratings_asked((9_000,) * 8, monkeypatch)
    different = ratings_asked(tuple(range(9_000, 9_800, 100)), monkeypatch)
    assert 3 * alike < different
