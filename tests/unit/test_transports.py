"""Which way tables travel: as the user allows, and as the search by cost finds best."""

from typing import Any

import pytest
from torchrec.distributed.planner import ParameterConstraints

import torchrec_2dsp as tdsp
from tests.support.planning import SHARDERS, planner, skewed, tables
from tests.unit.test_planner import nothing_reserved, world

pytestmark = pytest.mark.dealt_file


def transports_of(plan: tdsp.Plan2D) -> set[tdsp.Transport]:
    (module,) = (module for _, module in plan.modules())
    return {table.transport for _, table in module.tables()}


def sharded_planner(link: str, **settings: Any) -> tdsp.Planner2D:
    """Return a planner for one group, in which no table is on every rank."""
    demands = {
        name: ParameterConstraints(sharding_types=["table_wise", "row_wise"])
        for name in tables().embedding_bags
    }
    mesh = tdsp.Mesh2D(1, 4)
    return planner(link=link, access=skewed(), mesh=mesh, constraints=demands, **settings)


def test_tables_travel_as_the_user_allows_and_the_network_wants() -> None:
    model, either = tables(), ["fp32", "int8"]
    exact, short = sharded_planner("200mbit"), sharded_planner("200mbit", transports=either)
    assert transports_of(exact.plan(model, SHARDERS)) == {tdsp.Transport.FP32}
    assert transports_of(short.plan(model, SHARDERS)) == {tdsp.Transport.INT8}
    exact_s, short_s = (
        each.search(model, SHARDERS).placements[0].cost.total_s for each in (exact, short)
    )
    assert short_s < 0.7 * exact_s
    assert "int8" in str(short.explain())
    free = sharded_planner("no_limit", transports=either)
    assert transports_of(free.plan(model, SHARDERS)) == {tdsp.Transport.FP32}


def test_a_table_may_be_kept_exact() -> None:
    demands = {"t0": tdsp.ParameterConstraints2D(transport=["fp32"])}
    planned = planner(
        link="200mbit",
        access=skewed(),
        mesh=tdsp.Mesh2D(1, 4),
        transports=["int4"],
        constraints=demands,
    )
    (module,) = (module for _, module in planned.plan(tables(), SHARDERS).modules())
    ways = {name: table.transport.value for name, table in module.tables()}
    assert ways["t0"] == "fp32"
    assert {way for name, way in ways.items() if name != "t0"} <= {"int4", "fp32"}
    assert "int4" in ways.values()


def test_transports_are_checked() -> None:
    with pytest.raises(tdsp.errors.ConfigError, match=r"transports=\['int3'\]: use some of 'fp32'"):
        planner(transports=["int3"])
    with pytest.raises(tdsp.errors.ConfigError, match=r"transports=\[\] allows nothing"):
        planner(transports=[])
    with pytest.raises(
        tdsp.errors.ConfigError, match=r"\['fp32', 'int8'\] is for a search by cost"
    ):
        tdsp.Planner2D(topology=world(4, 2), mesh=tdsp.Mesh2D(1, 4), transports=["fp32", "int8"])
    with pytest.raises(tdsp.errors.ConfigError, match="transport='int9': use some of"):
        tdsp.ParameterConstraints2D(transport="int9")  # type: ignore[arg-type]


def test_torchrecs_search_gives_all_tables_one_transport() -> None:
    stock = tdsp.Planner2D(
        topology=world(4, 2),
        batch_size=512,
        storage_reservation=nothing_reserved(),
        mesh=tdsp.Mesh2D(1, 4),
        constraints={
            name: ParameterConstraints(["table_wise"]) for name in tables().embedding_bags
        },
        transports=["int8"],
    )
    assert transports_of(stock.plan(tables(), SHARDERS)) == {tdsp.Transport.INT8}
