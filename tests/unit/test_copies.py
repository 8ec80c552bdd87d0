"""The search for how many copies each table has: one in the world, or one in each group."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

import torchrec_2dsp as tdsp
from tests.support.planning import (
    ENOUGH,
    SHARDERS,
    calibration,
    plan_of,
    planner,
    skewed,
    tables,
)
from torchrec_2dsp.cost.model import CostModel, CostSetting
from torchrec_2dsp.cost.workload import DenseWork, Workload
from torchrec_2dsp.planner.search.choices import Candidate, candidates_of
from torchrec_2dsp.planner.search.cost_search import meshes_of, search, search_copies
from torchrec_2dsp.planner.search.placement import Found

pytestmark = pytest.mark.dealt_file

TWO_GROUPS = tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS)
ROWS = (300, 9_000, 200_000)


def problem(
    constraints: dict[str, ParameterConstraints] | None = None,
) -> tuple[list[Candidate], CostSetting]:
    workload = Workload.of_model(tables(ROWS), batch_size=512, access=skewed(ROWS))
    candidates = candidates_of(tables(ROWS), SHARDERS, constraints, workload, "cpu")
    return candidates, CostSetting(calibration(), workload, TWO_GROUPS, tdsp.GradientSync(), 2)


def names_once(found: Found) -> set[str]:
    return set() if found.once is None else {one.name for one in found.once.candidates}


def demand(*names: str, num_groups: Any = 1, **more: Any) -> dict[str, ParameterConstraints]:
    one = tdsp.ParameterConstraints2D(num_groups=num_groups, **more)
    return dict.fromkeys(names, one)


def test_no_set_of_tables_is_much_better_than_what_is_found() -> None:
    """Against every set of tables, each demanded to have one copy."""
    some_types: dict[str, Any] = {
        "sharding_types": ["row_wise", "table_wise"],
        "exchange": ["row", "pooled"],
    }
    best = np.inf
    for size in range(len(ROWS)):
        for some in itertools.combinations(range(len(ROWS)), size):
            rest = (f"t{number}" for number in range(len(ROWS)) if number not in some)
            asked = demand(*rest, num_groups=2, **some_types)
            asked |= demand(*(f"t{number}" for number in some), **some_types)
            candidates, setting = problem(constraints=asked)
            (found, *_) = search_copies(candidates, [setting], ENOUGH).found
            assert names_once(found) == {f"t{number}" for number in some}
            best = min(best, found.rated_s)
    free = tdsp.ParameterConstraints2D(**some_types)
    candidates, setting = problem(constraints=dict.fromkeys(("t0", "t1", "t2"), free))
    assert search_copies(candidates, [setting], ENOUGH).found[0].rated_s <= 1.02 * best


@pytest.mark.slow
def test_huge_tables_have_one_copy_where_groups_have_no_room_for_them() -> None:
    """And where the others are looked up so often that one group for all of them is slower."""
    model = tables((1_000_000,) * 24 + (3_000_000_000,) * 2)
    workload = Workload.of_model(model, batch_size=4_096)
    often = {
        name: replace(work, ids_per_sample=80.0 if work.num_rows == 1_000_000 else 1.0)
        for name, work in workload.tables.items()
    }
    dense = DenseWork(forward_s=0.005, backward_s=0.01, gradient_bytes=1e8)
    workload = replace(workload, tables=often, dense=dense)
    candidates = candidates_of(model, SHARDERS, None, workload, "cuda")
    hardware = tdsp.Calibration.load("configs/hardware/h100_8_datasheet.toml")
    settings = [
        CostSetting(hardware, workload, mesh, tdsp.GradientSync(), 8)
        for mesh in meshes_of(64, 8, 64)
    ]
    alike = search(candidates, settings, 20e9).found[0]
    (found, *_) = search_copies(candidates, settings, 20e9).found
    assert alike.setting.mesh.num_groups == 1
    assert found.setting.mesh.num_groups > 1
    assert names_once(found) == {"t24", "t25"}
    assert found.rated_s < 0.95 * alike.rated_s


def too_little(candidates: list[Candidate], setting: CostSetting) -> float:
    """Not much less memory than a group needs for all tables."""
    (roomy,) = search(candidates, [setting], ENOUGH).found
    rooms = (share * float(roomy.bytes_by_rank.max()) for share in (0.8, 0.7, 0.6, 0.5))
    return next(one for one in rooms if not search(candidates, [setting], one).found)


def test_what_fits_no_group_fits_the_world() -> None:
    candidates, setting = problem()
    room = too_little(candidates, setting)
    (found, *_) = search_copies(candidates, [setting], room).found
    assert names_once(found)
    assert found.bytes_by_rank.max() <= room


def test_what_is_found_costs_what_its_plan_costs() -> None:
    candidates, setting = problem(demand("t2"))
    (found, *_) = search_copies(candidates, [setting], ENOUGH).found
    plan = found.plan("cpu")
    cost = CostModel(setting.calibration, 2).step_cost(plan, setting.workload)
    assert cost.as_dict() == pytest.approx(found.cost.as_dict(), rel=1e-6, abs=1e-9)
    kept = CostModel(setting.calibration, 2).memory_cost(plan, setting.workload)
    assert kept.total_bytes == pytest.approx(float(found.bytes_by_rank.max()))
    once = {
        name for _, part in plan.modules() for name, one in part.tables() if one.num_groups == 1
    }
    assert once == names_once(found)


def test_demands_are_met_or_refused_by_name() -> None:
    model = tables(ROWS)
    asked = demand("t0") | demand("t1", num_groups=2)
    plan = plan_of(model, mesh=TWO_GROUPS, constraints=asked | demand("t2", num_groups=2))
    assert {name: one.num_groups for _, part in plan.modules() for name, one in part.tables()} == {
        "t0": 1,
        "t1": None,
        "t2": None,
    }
    free = plan_of(model, constraints=demand("t0", "t1", "t2", num_groups=2))
    assert free.mesh.num_groups == 2
    with pytest.raises(
        tdsp.errors.PlanError, match=r"num_groups=3 for 't1'.*there may be 1, 2, 4 here"
    ):
        plan_of(model, constraints=demand("t1", num_groups=3))
    with pytest.raises(
        tdsp.errors.PlanError, match="'t1' has num_groups=1, and nothing but data_paral"
    ):
        plan_of(
            model,
            mesh=TWO_GROUPS,
            constraints=demand("t1", sharding_types=["data_parallel"]),
        )
    with pytest.raises(
        tdsp.errors.PlanError, match=r"all tables have num_groups=1, which is a plan for"
    ):
        plan_of(model, mesh=TWO_GROUPS, constraints=demand("t0", "t1", "t2"))
    assert plan_of(model, constraints=demand("t0", "t1", "t2")).mesh.num_groups == 1
    for wrong in (0, "all"):
        with pytest.raises(
            tdsp.errors.ConfigError, match=f"num_groups={wrong!r} is no number of copies"
        ):
            tdsp.ParameterConstraints2D(num_groups=wrong)  # type: ignore[arg-type]


def test_one_in_each_group_is_no_demand_on_the_mesh() -> None:
    """What doesn't fit a group could be in the world once, were that not excluded."""
    asked = demand("t0", "t1", "t2", num_groups="each")
    candidates, setting = problem(asked)
    assert not search_copies(candidates, [setting], too_little(candidates, setting)).found
    assert plan_of(tables(ROWS), constraints=asked).mesh in meshes_of(4, 2, 4)
    tdsp.Planner2D(mesh=TWO_GROUPS, constraints=asked)  # As TorchRec's own search does it.


@pytest.mark.parametrize("demands", [{"num_groups": 1}, {"exchange": "row"}, {"hot_rows": 3}])
def test_torchrecs_search_takes_no_demands_that_it_cannot_fulfil(demands: dict[str, Any]) -> None:
    asked = {"t1": tdsp.ParameterConstraints2D(**demands)}
    with pytest.raises(
        tdsp.errors.ConfigError, match="for table 't1' is for a search by cost: give a"
    ):
        tdsp.Planner2D(mesh=TWO_GROUPS, constraints=asked)


def test_in_one_group_every_table_has_one_copy() -> None:
    plan = plan_of(tables(ROWS), mesh=tdsp.Mesh2D(1, 4), constraints=demand("t2"))
    assert all(one.num_groups is None for _, part in plan.modules() for _, one in part.tables())


def test_proposals_have_no_copies_of_their_own() -> None:
    from torchrec.distributed.planner import EmbeddingShardingPlanner

    topology = calibration().topology(4, local_world_size=2)
    constraints = demand("t1")
    stock = EmbeddingShardingPlanner(
        topology=topology,
        proposer=tdsp.ExchangeProposer(topology, calibration(), constraints=constraints),
        partitioner=tdsp.BalancedPartitioner(),
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        stats=[],
    )
    with pytest.raises(
        tdsp.errors.ConfigError, match="'t1' has num_groups=1, but TorchRec's planner"
    ):
        stock.plan(tables(ROWS), SHARDERS)


def test_an_explanation_tells_copies_apart() -> None:
    constraints = demand("t1") | demand("t0", "t2", num_groups=2)
    by_cost = planner(mesh=TWO_GROUPS, constraints=constraints, access=skewed(ROWS))
    by_cost.plan(tables(ROWS), SHARDERS)
    explained = by_cost.explain()
    assert {line.name: line.is_once for line in explained.tables} == {
        "t0": False,
        "t1": True,
        "t2": False,
    }
    text = str(explained)
    assert "one copy" in text
    assert text.startswith(f"{TWO_GROUPS}, 1 in the world on two_hosts_1gbit")
    assert f"{TWO_GROUPS}, 1 in the world, placed" in text
    lost = [line.lost_by_s for line in explained.tables if line.runner_up is not None]
    assert lost
    assert min(lost) > -1e-9
    seconds = sum(line.seconds for line in explained.tables)
    assert 0 < seconds < explained.cost.total_s
