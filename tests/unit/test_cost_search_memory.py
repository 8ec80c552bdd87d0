"""The search by cost where memory is short."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingType

import torchrec_2dsp as tdsp
from tests.support.planning import (
    ENOUGH,
    SHARDERS,
    best_of_all,
    calibration,
    plan_of,
    planner,
    tables,
)
from tests.unit.test_planner import world
from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.planner.search.choices import Choice, candidates_of
from torchrec_2dsp.planner.search.cost_search import meshes_of, placements, search
from torchrec_2dsp.planner.search.placement import Found
from torchrec_2dsp.planner.search.space import Effort, Selected, Space, selections, smallest

pytestmark = pytest.mark.dealt_file


@pytest.mark.parametrize("share", [0.9, 0.7, 0.6, 0.2])
def test_memory_that_doesnt_suffice_is_given_where_it_saves_most(share: float) -> None:
    rows = (4_000, 9_000, 60_000)
    workload = Workload.of_model(tables(rows), batch_size=64)
    pooled = {f"t{number}": tdsp.ParameterConstraints2D(exchange="pooled") for number in range(3)}
    candidates = candidates_of(tables(rows), SHARDERS, pooled, workload, "cpu")
    setting = CostSetting(calibration(), workload, tdsp.Mesh2D(1, 4), tdsp.GradientSync(), 2)
    (roomy,) = search(candidates, [setting], ENOUGH).found
    room = share * float(roomy.bytes_by_rank.max())
    found = search(candidates, [setting], room).found
    best = best_of_all(candidates, setting, room)
    assert bool(found) == bool(np.isfinite(best))
    for one in found:
        assert one.bytes_by_rank.max() <= room
        assert roomy.rated_s <= one.rated_s <= 1.06 * best


@pytest.mark.parametrize("room", [8e6, 15e6, 24e6])
def test_those_tables_get_memory_that_save_most_by_it(room: float) -> None:
    """Dealt evenly, against all choices that fit: nearer to the best than to the smallest."""
    rows = (500, 1_000, 2_000, 3_000, 4_000)
    workload = Workload.of_model(tables(rows), batch_size=2_048)
    asked = tdsp.ParameterConstraints2D(exchange="pooled", sharding_types=["row_wise"])
    constraints = {f"t{number}": asked for number in range(5)}
    split = candidates_of(tables(rows), SHARDERS, constraints, workload, "cpu")
    copied = Choice(ShardingType.DATA_PARALLEL)
    both = [replace(one, choices=[copied, *one.choices]) for one in split]
    setting = CostSetting(calibration(), workload, tdsp.Mesh2D(1, 4), tdsp.GradientSync(), 2)
    # Copies of small tables take most, so that what saves most isn't what is largest.
    num_bytes = np.array([[9e6, 1e6], [7e6, 1e6], [5e6, 1e6], [3e6, 1e6], [8e6, 1e6]])
    space = replace(Space.of(both, setting), bytes_of_rank=num_bytes, bytes_of_shard=num_bytes)
    every = [np.array(one) for one in itertools.product(range(2), repeat=5)]
    best = min(Selected.of(space, one).cost.total_s for one in every if space.bytes_of(one) <= room)
    smallest = Selected.of(space, np.ones(5, dtype=np.int64)).cost.total_s
    found = selections(space, room)[0]
    assert space.bytes_of(found.selection) <= room
    assert best < 0.95 * smallest
    assert best <= found.cost.total_s <= best + (smallest - best) / 2


def test_what_hardly_fits_is_split() -> None:
    """Three equal tables on four ranks, each of which has room for less than one."""
    model = tables((30_000,) * 3)
    whole_bytes = 3 * 30_000 * (32 * 4 + 4)
    tight = planner(topology=world(4, 2, ddr_cap=int(0.29 * whole_bytes)), batch_size=16)
    found = tight.search(model, SHARDERS)
    kinds = {choice.kind for choice in found.found[0].placement.choices}
    assert kinds == {ShardingType.ROW_WISE}


def bytes_of(found: Found) -> float:
    return float(found.bytes_by_rank.max())


@pytest.mark.parametrize("share", [2.0, 0.6, 0.45, 0.34])
def test_no_rank_keeps_more_than_it_has_room_for(share: float) -> None:
    rows = (60_000, 20_000, 20_000, 20_000)
    workload = Workload.of_model(tables(rows), batch_size=64)
    candidates = candidates_of(tables(rows), SHARDERS, None, workload, "cpu")
    settings = [
        CostSetting(calibration(), workload, mesh, tdsp.GradientSync(), 2)
        for mesh in meshes_of(4, 2, 4)
    ]
    room = share * sum(rows) * (32 * 4 + 4)
    found = search(candidates, settings, room).found
    assert found
    assert max(bytes_of(one) for one in found) <= room
    sizes = {one.setting.mesh.group_size for one in found}
    assert min(sizes) >= 1 / share


def test_what_doesnt_fit_is_named_with_what_is_missing() -> None:
    with pytest.raises(
        tdsp.errors.PlanError,
        match=r"no plan fits a sharding group of Mesh2D\(1x4, strided\): the tables need "
        "5,386,920 bytes on a group, 1,386,920 more than the 4,000,000 there are",
    ):
        plan_of(tables((30_000, 10_810)), topology=world(4, 2, ddr_cap=1_000_000))


def test_batches_that_dont_fit_beside_their_tables_are_named() -> None:
    with pytest.raises(
        tdsp.errors.PlanError,
        match=r"the tables need 1,320,000 bytes on a group, and a step's batches and vectors "
        r"[\d,]+, [\d,]+ more than the 4,000,000 there are, which a smaller batch_size changes",
    ):
        plan_of(tables((10_000,)), topology=world(4, 2, ddr_cap=1_000_000), batch_size=8_192)


def test_buffers_of_one_rank_are_counted_where_they_are() -> None:
    """Whoever has the large table sends to all others: on average, there would be room."""
    rows = (500, 500, 500, 500, 40_000)
    asked = ParameterConstraints(sharding_types=["data_parallel", "table_wise"])
    constraints = {f"t{number}": asked for number in range(len(rows))}
    mesh = tdsp.Mesh2D(1, 4)

    def found(room: float) -> list[Found]:
        workload = Workload.of_model(tables(rows), batch_size=512)
        candidates = candidates_of(tables(rows), SHARDERS, constraints, workload, "cpu")
        setting = CostSetting(calibration("no_limit"), workload, mesh, tdsp.GradientSync(), 2)
        return list(search(candidates, [setting], room).found)

    (roomy,) = found(ENOUGH)
    needed = bytes_of(roomy)
    assert found(needed)
    for share in (1.0, 0.95, 0.9, 0.85, 0.8):
        assert all(bytes_of(one) <= share * needed for one in found(share * needed))


def test_where_shards_cannot_be_dealt_tables_are_chosen_for_less_memory() -> None:
    """Forty tables, for which there is room on average, are not left as small as they can be."""
    rows = np.exp(np.random.default_rng(0).uniform(np.log(100), np.log(2e7), 40)).astype(int)
    model = tables(tuple(int(num_rows) for num_rows in rows))
    workload = Workload.of_model(model, batch_size=1_024)
    candidates = candidates_of(model, SHARDERS, {}, workload, "cpu")
    setting = CostSetting(calibration(), workload, tdsp.Mesh2D(1, 8), tdsp.GradientSync(), 8)
    space = Space.of(candidates, setting)
    least = smallest(space)
    room = 1.7 * space.bytes_of(least.selection)
    effort = Effort(meshes=1, selections=1, tries=0)
    found = list(placements(space, selections(space, room), room, effort))
    assert all(descent.bytes_by_rank(one).max() <= room for one, descent in found)
    assert min(descent.rated_s(one) for one, descent in found) < 0.8 * least.rated_s
