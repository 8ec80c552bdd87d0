"""One sharding group is stock TorchRec, bit for bit.

Averages of row-wise bags aren't among these: TorchRec divides them by their length + 1e-6, this
package by their length, as the unsharded model does.
"""

from dataclasses import replace

import torch

from tests.support.models import SEQUENCES, ModelSpec, make_batch
from tests.support.oracle import local_loss
from tests.support.parity import (
    ONE,
    Cell,
    local_shards,
    local_world_size,
    make_optimizer,
    make_parallel,
)
from tests.support.ranks import RankPool
from tests.support.slices import Deal
from tests.support.trips import make_stock_group

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


def differing_entries(rank: int, world_size: int, cells: list[Cell]) -> list[str]:
    """Return which losses or weights of three steps differ in any bit from stock TorchRec's."""
    results = []
    for cell in cells:
        ours, stock = (
            make_parallel(cell, world_size, local_world_size()),
            make_stock_group(cell, world_size),
        )
        optimizers = make_optimizer(ours), make_optimizer(stock)
        for step in range(3):
            batch = make_batch(cell.spec, seed=10 * step + rank)
            losses = []
            for model, optimizer in zip((ours, stock), optimizers, strict=True):
                optimizer.zero_grad()
                loss = local_loss(model(batch))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            if losses[0] != losses[1]:
                results.append(f"{cell}: loss of step {step}")
        expected = stock.state_dict()
        for name, value in ours.state_dict().items():
            pairs = zip(local_shards(value), local_shards(expected[name]), strict=True)
            for (own, offset), (theirs, their_offset) in pairs:
                if offset != their_offset or not torch.equal(own, theirs):
                    results.append(f"{cell}: {name} at {offset}")
    return results


def test_one_group_with_the_fused_backward(ranks4: RankPool, dealt: Deal) -> None:
    assert ranks4.run(differing_entries, dealt(CELLS)) == [[]] * 4


def test_one_group_with_captured_rows(ranks4: RankPool, dealt: Deal) -> None:
    """Match the fused update bit by bit where TorchRec defines its order of additions.

    These are one feature per table, unweighted sums, and sequences.
    """
    one_feature = tuple(replace(table, features=table.features[:1]) for table in ModelSpec().tables)
    cells = [
        replace(
            cell,
            always_capture=True,
            spec=cell.spec if cell.spec.sequence else replace(cell.spec, tables=one_feature),
        )
        for cell in CELLS
    ]
    assert ranks4.run(differing_entries, dealt(cells)) == [[]] * 4
