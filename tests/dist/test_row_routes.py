"""Row gradients are routed over hosts and owners, and every rank gets the same sums."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

import torchrec_2dsp as tdsp
from tests.support.devices import rank_device
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.comms.groups import MeshGroups
from torchrec_2dsp.replicas.exchange import (
    GradientExchange,
    GradientState,
    PendingGradients,
    TrackedLookup,
)
from torchrec_2dsp.rows.gradients import Block, BlockGradients

pytestmark = pytest.mark.dealt_file

BLOCKS = (Block(8, (0,), (0,), (0,), 1000), Block(4, (1,), (1,), (0,), 50))
NUM_ROWS = 40
"""Touched by a rank, of each block."""

Rows = Sequence[BlockGradients]
Sent = Counter[tuple[str, str]]
"""Bytes by process group and operation."""


@dataclass(frozen=True)
class Shape:
    """The pattern of rows that ranks touch."""

    name: str
    share_in_common: float
    """The share of rows that all ranks touch."""
    idle_ranks: tuple[int, ...] = ()
    """They touch nothing."""

    def __str__(self) -> str:
        return self.name


ALIKE, APART = Shape("alike", 1.0), Shape("apart", 0.0)
SHAPES = [ALIKE, APART, Shape("one idle", 0.5, (1,)), Shape("all idle", 0.0, tuple(range(8)))]


def rows_of(rank: int, step: int, shape: Shape) -> Rows:
    """Draw whole numbers, whose sums are exact in any order."""
    actual = []
    for block in BLOCKS:
        common = torch.Generator().manual_seed(step)
        own = torch.Generator().manual_seed(1000 * step + rank + 1)
        count = 0 if rank in shape.idle_ranks else NUM_ROWS
        num_shared = int(shape.share_in_common * count)
        keys = torch.cat(
            [
                torch.randperm(block.num_rows, generator=common)[:num_shared],
                torch.randperm(block.num_rows // 9, generator=own)[: count - num_shared] * 9 + rank,
            ]
        ).unique()
        grads = torch.randint(-8, 9, (keys.numel(), block.dim), generator=own)
        actual.append(BlockGradients(keys, grads.float()))
    return actual


def dense(rows: Rows) -> list[torch.Tensor]:
    tables = [torch.zeros(block.num_rows, block.dim) for block in BLOCKS]
    for table, entry in zip(tables, rows, strict=True):
        table[entry.keys] += entry.grads
    return tables


def exchange_rows(
    rank: int, world_size: int, shape: Shape, transport: str = "fp32"
) -> list[tuple[bool, Sent]]:
    """Return for three steps whether sums are over all ranks, and the bytes sent."""
    groups = MeshGroups.for_mesh(tdsp.Mesh2D(world_size, 1), "cpu")
    codec = tdsp.Transport(transport).codec
    exchange = GradientExchange(BLOCKS, rank_device(), groups.replica_rows, codec)
    answers = []
    for step in range(3):
        by_rank = [rows_of(peer, step, shape) for peer in range(world_size)]
        own_part = by_rank[rank]
        with count_collectives() as seen:
            announcement = exchange.announce([block.keys for block in own_part], 0.5)
            lookup = TrackedLookup(None, 1, announcement)  # pyright: ignore[reportArgumentType]
            pending = PendingGradients(own_part, lookup, divisor=world_size)
            assert pending.state is GradientState.CAPTURED
            exchange.send(pending)
            pending.send_to_other_hosts()
            assert pending.state is GradientState.ON_OTHER_HOSTS
            merged = pending.gradients().blocks
            assert pending.state is GradientState.ARRIVED
        sent: Sent = Counter()
        for entry in seen.records:
            sent[entry.group, entry.op] += entry.num_bytes
        is_sum = [
            bool((actual.keys.diff() > 0).all())
            and torch.equal(table, torch.stack(tables).sum(dim=0) / world_size)
            for actual, table, tables in zip(
                merged, dense(merged), zip(*map(dense, by_rank), strict=True), strict=True
            )
        ]
        answers.append((all(is_sum) and pending.learning_rate == 0.5, sent))
    tdsp.release_groups()
    return answers


@pytest.mark.parametrize("transport", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pool", ["ranks2", "ranks4", "two_hosts", "ranks8"])
def test_all_ranks_get_the_sum(
    request: pytest.FixtureRequest, pool: str, shape: Shape, transport: str
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    for answers in ranks.run(exchange_rows, shape, transport):
        assert [is_right for is_right, _ in answers] == [True] * 3


def bytes_of(num_rows: int) -> int:
    """Count the bytes in both blocks' rows: 4 per key, and 4 per number."""
    return sum(min(num_rows, block.num_rows) * (4 + 4 * block.dim) for block in BLOCKS)


A2A = "all_to_all_single"


def test_a_row_leaves_its_host_once(two_hosts: RankPool) -> None:
    by_rank = two_hosts.run(exchange_rows, ALIKE)
    for step in range(3):
        for host in (by_rank[:2], by_rank[2:]):
            sent = sum((answers[step][1] for answers in host), Counter())
            assert sent["replica_rows_across", A2A] == bytes_of(NUM_ROWS)
            # Each rank sums one half; then they exchange the halves.
            assert sent["replica_rows_in_host", A2A] == 2 * bytes_of(NUM_ROWS)
            assert sent["replica_rows", A2A] == 0


@pytest.mark.parametrize(("pool", "group"), [("ranks4", ""), ("ranks8", "_across")])
def test_rows_that_all_ranks_have_go_to_owners(
    request: pytest.FixtureRequest, pool: str, group: str
) -> None:
    """Owners sum from the second step on; before, the overlap is unknown."""
    ranks: RankPool = request.getfixturevalue(pool)
    by_rank = ranks.run(exchange_rows, ALIKE)
    sent = [
        sum(answers[step][1][f"replica_rows{group}", A2A] for answers in by_rank)
        for step in range(3)
    ]
    # All to three others; to the owners three quarters, and from each owner to three others.
    assert sent == [bytes_of(NUM_ROWS) * times for times in (4 * 3, 3 + 3, 3 + 3)]


def test_owners_share_the_work(ranks8: RankPool) -> None:
    """The host's rows are dealt to owners on all hosts, too."""
    answers = ranks8.run(exchange_rows, ALIKE)
    sent = [steps[1][1]["replica_rows_across", A2A] for steps in answers]
    assert max(sent) < 1.2 * sum(sent) / len(sent)


def test_rows_of_one_rank_each_are_gathered(ranks4: RankPool) -> None:
    for rank, answers in enumerate(ranks4.run(exchange_rows, APART)):
        for step, (_, sent) in enumerate(answers):
            assert sent["replica_rows", A2A] == 3 * sum(
                entry.keys.nbytes // 2 + entry.grads.nbytes for entry in rows_of(rank, step, APART)
            )
