"""`Planner2D` and memory: what fits, and what it says when nothing does."""

from typing import Any

import pytest
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import DynamicProgrammingProposer
from torchrec.distributed.planner.storage_reservations import (
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import (
    PlannerError,
    ShardingOption,
    Storage,
)

import torchrec_2dsp as tdsp
from tests.unit.test_planner import (
    SHARDERS,
    bags,
    constrained,
    layout,
    nothing_reserved,
    planner_for,
    world,
)
from torchrec_2dsp.planner.topology import Shortfall, shortfall
from torchrec_2dsp.planner.torchrec.enumerator import Enumerator2D


def test_a_table_is_spread_over_the_group_when_it_fits_no_rank() -> None:
    rows, dim = 10_000, 64
    table_bytes = rows * dim * 4
    model = bags(num_tables=1, rows=rows, dim=dim)
    cap = int(0.75 * table_bytes)

    with pytest.raises(tdsp.errors.PlanError):
        planner_for(tdsp.Mesh2D(4, 1), world(4, ddr_cap=cap)).plan(model, SHARDERS)
    planner = planner_for(tdsp.Mesh2D(2, 2), world(4, ddr_cap=cap))
    plan = planner.plan(model, SHARDERS)

    largest = max(size[0] * size[1] * 4 for _, _, size in layout(plan, "t0"))
    assert {rank for rank, _, _ in layout(plan, "t0")} == {0, 1}
    assert largest == table_bytes / 2


@pytest.mark.parametrize("num_groups", [1, 2, 8])
def test_the_memory_of_a_rank_does_not_depend_on_the_number_of_groups(num_groups: int) -> None:
    mesh = tdsp.Mesh2D(num_groups=num_groups, group_size=2)
    model = bags(num_tables=4, rows=1_000)
    needed = stock_bytes_per_rank(model)

    planner_for(
        mesh, world(2 * num_groups, 2, ddr_cap=needed), constraints=constrained("row_wise", 4)
    ).plan(model, SHARDERS)
    with pytest.raises(tdsp.errors.PlanError):
        planner_for(
            mesh,
            world(2 * num_groups, 2, ddr_cap=needed - 1),
            constraints=constrained("row_wise", 4),
        ).plan(model, SHARDERS)


def stock_bytes_per_rank(model: nn.Module) -> int:
    """What TorchRec counts on a rank for the row-wise plan of two ranks."""
    seen: list[ShardingOption] = []

    def keep(options: list[ShardingOption]) -> list[ShardingOption]:
        seen.extend(options)
        return options

    EmbeddingShardingPlanner(
        topology=world(2),
        batch_size=8,
        storage_reservation=nothing_reserved(),
        constraints=constrained("row_wise", 4),
        callbacks=[keep],
    ).plan(model, SHARDERS)
    used = [0, 0]
    for option in seen:
        for shard in option.shards:
            assert shard.storage is not None
            assert shard.rank is not None
            used[shard.rank] += shard.storage.ddr
    assert used[0] == used[1] > 0
    return used[0]


def test_a_dense_part_takes_its_share_of_the_memory_as_in_torchrec() -> None:
    model = nn.ModuleDict({"sparse": bags(num_tables=1, rows=1_000), "dense": nn.Linear(512, 512)})
    cap = 3_000_000  # the table alone takes 0.3 MB; six times the dense part 6.3 MB

    planner_for(tdsp.Mesh2D(2, 2), world(4, ddr_cap=cap)).plan(model, SHARDERS)
    with pytest.warns(FutureWarning, match="HeuristicalStorageReservation"):
        reservation = HeuristicalStorageReservation(0.15)
    with pytest.raises(tdsp.errors.PlanError, match="no plan fits"):
        planner_for(tdsp.Mesh2D(2, 2), world(4, ddr_cap=cap), storage_reservation=reservation).plan(
            model, SHARDERS
        )


# ---- nothing fits


def test_the_error_names_the_table_that_fits_no_rank() -> None:
    planner = planner_for(
        tdsp.Mesh2D(2, 2), world(4, ddr_cap=1_000_000), constraints=constrained("table_wise", 1)
    )

    with pytest.raises(tdsp.errors.PlanError) as raised:
        planner.plan(bags(num_tables=1, rows=10_000), SHARDERS)

    text = str(raised.value)
    # 10,000 rows of 64 floats, and the buffers of the exchange
    assert "Mesh2D(2x2, strided): table 't0' needs 2,5" in text
    assert "more than the 1,000,000 there are" in text
    assert "use a larger group_size, reserve a smaller share of the memory" in text
    assert isinstance(raised.value.__cause__, PlannerError)
    assert str(raised.value.__cause__) in text


def test_a_fault_of_the_enumerator_is_not_taken_for_missing_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = planner_for(tdsp.Mesh2D(2, 2), world(4, ddr_cap=1_000))
    enumerated = Enumerator2D.enumerate
    calls: list[Enumerator2D] = []

    def failing_the_second_time(
        self: Enumerator2D, *args: Any, **named: Any
    ) -> list[ShardingOption]:
        calls.append(self)
        if len(calls) > 1:
            raise ZeroDivisionError("a fault")
        return enumerated(self, *args, **named)

    monkeypatch.setattr(Enumerator2D, "enumerate", failing_the_second_time)
    with pytest.raises(ZeroDivisionError, match="a fault"):
        planner.plan(bags(num_tables=1, rows=10_000), SHARDERS)
    assert len(calls) == 2


def test_the_error_sums_the_tables_when_each_alone_fits() -> None:
    planner = planner_for(tdsp.Mesh2D(2, 2), world(4, ddr_cap=1_000_000))

    with pytest.raises(
        tdsp.errors.PlanError, match=r"the tables need 2,\d{3},\d{3} bytes on a group"
    ):
        planner.plan(bags(num_tables=10, rows=1_000), SHARDERS)


def test_constraints_that_leave_no_type_name_the_original_error() -> None:
    only_table_wise = EmbeddingBagCollectionSharder()
    planner = planner_for(tdsp.Mesh2D(2, 2), constraints=constrained("grid_shard"))

    with pytest.raises(
        tdsp.errors.PlanError, match="RuntimeError: No available sharding type"
    ) as raised:
        planner.plan(bags(), [only_table_wise])  # pyright: ignore[reportArgumentType]
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_an_error_of_a_component_names_its_type() -> None:
    planner = planner_for(tdsp.Mesh2D(2, 2), proposer=DynamicProgrammingProposer())

    with pytest.raises(
        tdsp.errors.PlanError, match=r"Mesh2D\(2x2, strided\) failed: ZeroDivisionError"
    ):
        planner.plan(bags(), SHARDERS)


def test_the_scarcer_memory_is_reported() -> None:
    options = Enumerator2D(
        world(4), 8, constrained("table_wise"), mesh=tdsp.Mesh2D(2, 2)
    ).enumerate(bags(), SHARDERS)  # pyright: ignore[reportArgumentType]
    needs = [option.shards[0].storage.ddr for option in options]  # pyright: ignore

    found = shortfall(options, [Storage(hbm=0, ddr=100), Storage(hbm=0, ddr=200)])

    assert found == Shortfall("t0", needs[0], 200, sum(needs), 300)
    assert shortfall([], [Storage(0, 0)]) is None


def test_no_sentence_where_the_sums_explain_nothing() -> None:
    assert Shortfall("t", 10, 10, 20, 20).sentence() == ""
    assert "tables need 21 bytes on a group, 1 more" in Shortfall("t", 10, 10, 21, 20).sentence()
