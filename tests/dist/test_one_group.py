"""One sharding group is stock TorchRec, bit for bit; on GPUs up to rounding.

Row-wise mean pooling is left out: TorchRec divides bags by their length + 1e-6, this package by
their length, as the unsharded model does.
"""

from torchrec.distributed.types import ShardingPlan

from tests.support.devices import are_equal, rounded
from tests.support.loops import plain_loop
from tests.support.models import SEQUENCES, ModelSpec, build, make_batch
from tests.support.parity import (
    ONE,
    Cell,
    group_plan,
    local_shards,
    local_world_size,
    make_optimizer,
    make_sharder,
    shard,
)
from tests.support.ranks import RankPool
from tests.support.slices import Deal
from tests.support.trips import make_stock
from torchrec_2dsp.plan.plan2d import plan_for_rank

CELLS = [
    Cell(ONE, sharding, spec, optimizer)
    for sharding, spec in (
        ("table_wise", ModelSpec()),
        ("column_wise", ModelSpec()),
        ("row_wise", ModelSpec()),
        ("table_row_wise", ModelSpec()),
        ("grid_shard", ModelSpec()),
        ("table_wise", ModelSpec(pooling="mean")),
        ("column_wise", ModelSpec(pooling="mean")),
        ("row_wise", SEQUENCES),
        ("table_wise", SEQUENCES),
    )
    for optimizer in ("sgd", "rowwise_adagrad")
]


def differing_entries(rank: int, world_size: int, cell: Cell) -> list[str]:
    """List the losses and weights that differ from stock TorchRec's in three steps."""
    # By TorchRec alone, with the same placement.
    plan = group_plan(cell, build(cell.spec), make_sharder(cell))
    of_rank = plan_for_rank(plan, rank, local_world_size=local_world_size())
    ours, stock = shard(cell), make_stock(cell, ShardingPlan(of_rank.plan))
    batches = [make_batch(cell.spec, seed=10 * step + rank) for step in range(3)]
    losses, expected_losses = (
        plain_loop(model, make_optimizer(model), batches) for model in (ours, stock)
    )
    is_alike = losses == rounded(expected_losses)
    results = [] if is_alike else [f"losses: {losses} for {expected_losses}"]
    expected = stock.state_dict()
    for name, value in ours.state_dict().items():
        pairs = zip(local_shards(value), local_shards(expected[name]), strict=True)
        for (own, offset), (theirs, their_offset) in pairs:
            if offset != their_offset or not are_equal(own, theirs):
                results.append(f"{name} at {offset}")
    return results


def check(ranks: RankPool, cells: list[Cell]) -> None:
    for cell in cells:
        assert ranks.run(differing_entries, cell) == [[]] * 4, cell


def test_one_group_with_the_fused_backward(ranks4: RankPool, dealt: Deal) -> None:
    check(ranks4, dealt(CELLS))
