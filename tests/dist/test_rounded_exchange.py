"""Rows, bags and gradients in 16, 8 and 4 bits: training equals an oracle that rounds alike."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import torchrec_2dsp as tdsp
from tests.support.loops import shard
from tests.support.models import SEQUENCE_TABLES, ModelSpec, build
from tests.support.oracle import batches_of, local_loss
from tests.support.parity import (
    LR,
    Cell,
    group_plan,
    local_shards,
    local_world_size,
    make_optimizer,
    make_oracle,
    make_sharder,
)
from tests.support.ranks import RankPool
from tests.support.rounding import RoundingOracle

pytestmark = pytest.mark.dealt_file

ONE, TWO = tdsp.Mesh2D(1, 4), tdsp.Mesh2D(2, 2)
CONTIGUOUS = tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS)
SEQUENCE = ModelSpec(SEQUENCE_TABLES, sequence=True)
WEIGHTED = ModelSpec(weighted=True)
MEAN = ModelSpec(pooling="mean")
HOT_ROWS = (("t0", (0, 1, 5)), ("t1", (0, 2)))
TOLERANCE = 2e-6
"""Of sums of the same rounded numbers in another order."""
FLIPPED = 0.01
"""The share of weights that may be off by a unit: where a number is half way between two, another
order of additions decides which it becomes."""
SHORT = [transport.value for transport in tdsp.Transport if transport.value != "fp32"]


def gaps(rank: int, world_size: int, cells: Sequence[Cell]) -> list[tuple[float, float, float]]:
    """For each cell: the gap of the first loss, the share of weights that are off, and the share
    that would be off an oracle that doesn't round."""
    results = []
    for cell in cells:
        sizes = cell.batch_sizes or (6,) * world_size
        stream = [batches_of(cell.spec, 0, sizes, cell.max_length, step) for step in range(2)]
        parallel = shard(cell)
        plan = group_plan(cell, build(cell.spec), make_sharder(cell), local_world_size())
        oracle = RoundingOracle(
            cell,
            plan,
            local_world_size=local_world_size(),
            optimizer=cell.optimizer,
            lr=LR,
            eps=cell.eps,
        )
        exact, optimizer = make_oracle(cell), make_optimizer(parallel)
        loss_gaps = []
        for batches in stream:
            optimizer.zero_grad()
            loss = local_loss(parallel(batches[rank]))
            loss.backward()
            optimizer.step()
            wanted = oracle.step(batches)[rank]
            exact.step(batches)
            loss_gaps.append(abs(loss.item() - wanted) / (1 + wanted))
        off = [share_off(parallel, weights.weights) for weights in (oracle, exact)]
        results.append((loss_gaps[0], *off))
    return results


def share_off(parallel: torch.nn.Module, expected: dict[str, torch.Tensor]) -> float:
    """The share of this rank's weights that aren't as expected; at least one is looked at."""
    num_off = num_seen = 0
    for name, value in parallel.state_dict().items():
        if not name.startswith(("ebc", "ec")):
            continue
        for part, (row, column) in local_shards(value):
            wanted = expected[name.split(".")[-2]]
            wanted = wanted[row : row + part.shape[0], column : column + part.shape[1]]
            num_off += int(((part - wanted).abs() > TOLERANCE).sum())
            num_seen += part.numel()
    return num_off / max(1, num_seen)


def check(ranks: RankPool, cells: Sequence[Cell]) -> None:
    by_rank = ranks.run(gaps, list(cells), timeout_s=200)
    for of_cell in zip(cells, *by_rank, strict=True):
        cell, *of_ranks = of_cell
        assert max(loss_gap for loss_gap, _, _ in of_ranks) <= TOLERANCE, str(cell)
        assert max(off for _, off, _ in of_ranks) <= FLIPPED, f"{cell}: {of_ranks}"
        # Rounding is seen: an oracle without it has other weights.
        unrounded = max(off for _, _, off in of_ranks)
        assert unrounded > max(off for _, off, _ in of_ranks), f"{cell}: {of_ranks}"


@pytest.mark.parametrize("transport", SHORT)
def test_rows_are_rounded_once_each_way(ranks4: RankPool, transport: str) -> None:
    row = Cell(ONE, exchange="row", optimizer="sgd", transport=transport)
    check(
        ranks4,
        [
            row,
            replace(row, mesh=TWO),
            replace(row, spec=WEIGHTED),
            replace(row, spec=MEAN),
            replace(row, spec=SEQUENCE),
            replace(row, hot_rows=HOT_ROWS),
            replace(row, owners="hash"),
            replace(row, exchange="row_per_host"),
            replace(row, optimizer="adagrad"),
        ],
    )


@pytest.mark.parametrize("transport", SHORT)
def test_bags_are_rounded_once_each_way(ranks4: RankPool, transport: str) -> None:
    table_wise = Cell(ONE, "table_wise", optimizer="sgd", transport=transport)
    check(
        ranks4,
        [
            replace(table_wise, mesh=mesh, sharding=sharding, exchange=exchange)
            for mesh in (ONE, TWO)
            for sharding in ("table_wise", "column_wise", "row_wise")
            for exchange in ("pooled", "nonempty")
        ]
        + [
            replace(table_wise, spec=WEIGHTED),
            replace(table_wise, spec=SEQUENCE),
            replace(table_wise, spec=SEQUENCE, sharding="row_wise"),
            replace(table_wise, spec=SEQUENCE, sharding="column_wise"),
            replace(table_wise, batch_sizes=(5, 0, 2, 1)),
            replace(table_wise, sharding="row_wise", batch_sizes=(5, 0, 2, 1)),
        ],
    )


@pytest.mark.parametrize("transport", SHORT)
def test_bags_are_rounded_again_between_hosts(two_hosts: RankPool, transport: str) -> None:
    """A host's sums travel to the other one, and gradients from host to host, then inside."""
    table_row_wise = Cell(ONE, "table_row_wise", optimizer="sgd", transport=transport)
    check(
        two_hosts,
        [
            replace(table_row_wise, mesh=mesh, sharding=sharding)
            for mesh in (ONE, CONTIGUOUS)
            for sharding in ("table_row_wise", "grid_shard", "table_column_wise")
        ]
        + [replace(table_row_wise, sharding="grid_shard", spec=WEIGHTED)],
    )
