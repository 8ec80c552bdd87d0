"""`Planner2D.collective_plan`: one plan or one error on all ranks."""

import time
from typing import NoReturn

import pytest
from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

import torchrec_2dsp as tdsp
from tests.support.planning import (
    STOCK_SHARDERS,
    bags,
    calibration,
    constrained,
    planner_for,
    tables_in,
    torchrecs_planner,
    world,
)
from tests.support.ranks import RankPool
from torchrec_2dsp.plan.serialize import from_json, to_json
from torchrec_2dsp.planner.torchrec.adapters import Stats2D

MESH = tdsp.Mesh2D(num_groups=2, group_size=2)


def plan_as_json(rank: int, world_size: int, sharding_type: str) -> str:
    planner = planner_for(MESH, constraints=constrained(sharding_type))
    return to_json(planner.collective_plan(bags(), STOCK_SHARDERS))


@pytest.mark.parametrize("sharding_type", ["row_wise", "2d_table_wise", "data_parallel"])
def test_every_rank_gets_the_plan(ranks4: RankPool, sharding_type: str) -> None:
    plans = ranks4.run(plan_as_json, sharding_type)

    alone = planner_for(MESH, constraints=constrained(sharding_type)).plan(bags(), STOCK_SHARDERS)
    assert plans == [to_json(alone)] * 4


def plan_by_cost(rank: int, world_size: int) -> str:
    planner = tdsp.Planner2D(batch_size=64, calibration=calibration())
    plan = planner.collective_plan(bags(), STOCK_SHARDERS)
    assert ("t0" in str(planner.explain())) if rank == 0 else True
    return to_json(plan)


def test_every_rank_gets_the_plan_of_a_search_by_cost(ranks4: RankPool) -> None:
    """Only the process group determines the world."""
    plans = ranks4.run(plan_by_cost)
    assert len(set(plans)) == 1
    plan = from_json(plans[0])
    assert plan.mesh.world_size == 4
    assert set(tables_in(plan)) == {"t0", "t1"}


def plan_of_proposals(rank: int, world_size: int) -> str:
    topology = calibration().topology(world_size, local_world_size=2)
    planner = torchrecs_planner(
        topology,
        batch_size=64,
        proposer=tdsp.GroupSizeProposer(topology, calibration()),
        partitioner=tdsp.BalancedPartitioner(),
        stats=Stats2D(),
    )
    return to_json(tdsp.Plan2D.from_stock(planner.collective_plan(bags(), STOCK_SHARDERS)))


def test_what_was_proposed_on_rank_0_reaches_every_rank(ranks4: RankPool) -> None:
    """TorchRec sends the plan; our choices travel in the type's name."""
    plans = ranks4.run(plan_of_proposals)
    assert len(set(plans)) == 1
    exchanges = {table.exchange for table in tables_in(from_json(plans[0])).values()}
    assert exchanges == {tdsp.Exchange.ROW}


class CountingStats(NoopEmbeddingStats):
    num_plans = 0

    def log(self, *args: object, **kwargs: object) -> None:
        self.num_plans += 1


def num_searches(rank: int, world_size: int) -> int:
    stats = CountingStats()
    plan = planner_for(MESH, stats=[stats]).collective_plan(bags(), STOCK_SHARDERS)
    assert type(plan) is tdsp.Plan2D
    return stats.num_plans


def test_only_rank_0_searches(ranks4: RankPool) -> None:
    assert ranks4.run(num_searches) == [1, 0, 0, 0]


def empty_plan(rank: int, world_size: int) -> str:
    return to_json(planner_for(MESH).collective_plan(nn.Linear(2, 2), STOCK_SHARDERS))


def test_no_tables_give_an_empty_plan_everywhere(ranks4: RankPool) -> None:
    alone = planner_for(MESH).plan(nn.Linear(2, 2), STOCK_SHARDERS)

    assert (alone.plan, alone.mesh) == ({}, MESH)
    assert ranks4.run(empty_plan) == [to_json(alone)] * 4


def nothing_fits(rank: int, world_size: int) -> None:
    planner_for(MESH, world(4, ddr_cap=1_000)).collective_plan(bags(), STOCK_SHARDERS)


class FailingReservation(FixedPercentageStorageReservation):
    def __init__(self, error: Exception) -> None:
        super().__init__(0.0)
        self.error = error

    def reserve(self, *args: object, **kwargs: object) -> NoReturn:
        raise self.error


def a_part_breaks(rank: int, world_size: int) -> None:
    reservation = FailingReservation(KeyError("lost on rank 0"))
    planner_for(MESH, storage_reservation=reservation).collective_plan(bags(), STOCK_SHARDERS)


def the_plan_cannot_travel(rank: int, world_size: int) -> None:
    unpicklable = ParameterConstraints(
        sharding_types=["row_wise"],
        output_dtype=lambda: None,  # type: ignore[arg-type]
    )
    planner_for(MESH, constraints={"t0": unpicklable}).collective_plan(bags(), STOCK_SHARDERS)


def a_part_refuses(rank: int, world_size: int) -> None:
    reservation = FailingReservation(tdsp.errors.UnsupportedError("refused by name"))
    planner_for(MESH, storage_reservation=reservation).collective_plan(bags(), STOCK_SHARDERS)


def the_mesh_is_another(rank: int, world_size: int) -> None:
    planner_for(tdsp.Mesh2D(4, 2)).collective_plan(bags(), STOCK_SHARDERS)


ErrorSeen = tuple[str, str, str | None, float]


def error_of(rank: int, world_size: int, planning: str) -> ErrorSeen:
    start = time.monotonic()
    try:
        globals()[planning](rank, world_size)
    except Exception as error:
        cause = None if error.__cause__ is None else type(error.__cause__).__name__
        return type(error).__name__, str(error), cause, time.monotonic() - start
    raise AssertionError(f"{planning} raised nothing")


@pytest.mark.parametrize(
    ("planning", "kind", "text", "causes"),
    [
        ("nothing_fits", "PlanError", "no plan fits a sharding group", [None]),
        ("a_part_breaks", "PlanError", "on rank 0: KeyError: 'lost on rank 0'", ["KeyError"]),
        (
            "the_plan_cannot_travel",
            "PlanError",
            "planning failed on rank 0",
            ["AttributeError", "PicklingError"],
        ),
        ("a_part_refuses", "UnsupportedError", "refused by name", [None]),
        ("the_mesh_is_another", "MeshError", "has 8 ranks but the world has 4", [None]),
    ],
)
def test_every_rank_raises_the_same_error_within_seconds(
    ranks4: RankPool, planning: str, kind: str, text: str, causes: list[str | None]
) -> None:
    errors = ranks4.run(error_of, planning, timeout_s=30)

    assert {(seen_kind, seen_text) for seen_kind, seen_text, _, _ in errors} == {
        (kind, errors[0][1])
    }
    assert text in errors[0][1]
    assert errors[0][2] in causes
    assert max(seconds for _, _, _, seconds in errors) < 5
    # The ranks are still in step: a plan can be made.
    assert len(set(ranks4.run(plan_as_json, "row_wise"))) == 1


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(
        tdsp.errors.MeshError, match=r"init_process_group\(...\) first, or use plan"
    ):
        planner_for(MESH).collective_plan(bags(), STOCK_SHARDERS)
