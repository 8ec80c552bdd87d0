"""Hot ids behind id maps: replicas move with the rows that the maps give them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig

import torchrec_2dsp as tdsp
from tests.support.loops import drain, plain_loop
from tests.support.managed_collisions import (
    BAGS,
    HOT_IDS,
    LATER_HOT_IDS,
    SEQUENCES,
    STEPS,
    TABLES,
    TOLERANCE,
    Case,
    ManagedModel,
    Twin,
    batch_of,
    replicas_of,
    sharded,
    state_gap,
    train,
    train_beside_twin,
)
from tests.support.oracle import local_loss
from tests.support.parity import TWO, Cell, make_optimizer, relative_gap
from tests.support.ranks import RankPool, error_of

HOT_CASES = [
    Case(Cell(tdsp.Mesh2D(1, 4), spec=BAGS, hot_rows=HOT_IDS), "lru"),
    Case(Cell(TWO, spec=BAGS, exchange="nonempty", hot_rows=HOT_IDS), "lru", hashed=True),
    Case(
        Cell(TWO, spec=BAGS, exchange="row", owners="hash", hot_rows=HOT_IDS),
        "lru",
        loop="sparse dist",
    ),
    Case(
        Cell(TWO, spec=SEQUENCES, exchange="row", optimizer="adam", hot_rows=HOT_IDS),
        "lru",
        loop="prefetch",
    ),
    Case(
        Cell(tdsp.Mesh2D(1, 4), "column_wise", SEQUENCES, hot_rows=HOT_IDS),
        "lru",
        2,
        loop="sparse dist",
    ),
    Case(
        Cell(TWO, spec=BAGS, optimizer="sgd", sync=tdsp.WeightSync(), hot_rows=HOT_IDS),
        "lru",
        loop="sparse dist",
    ),
    Case(Cell(TWO, "row_wise", BAGS, "lamb", in_world=("t1",), hot_rows=HOT_IDS), "lru"),
    Case(Cell(TWO, spec=BAGS, optimizer="partial_adam", hot_rows=HOT_IDS), "lru", 2),
    Case(Cell(TWO, spec=BAGS, hot_rows=HOT_IDS, stock_wrapper=True), "lru", resets=False),
    Case(Cell(TWO, spec=BAGS, exchange="nonempty", hot_rows=HOT_IDS), "hash ttl"),
    Case(Cell(TWO, spec=SEQUENCES, exchange="row", hot_rows=HOT_IDS), "hash ttls", loop="prefetch"),
    Case(Cell(tdsp.Mesh2D(1, 4), spec=BAGS, hot_rows=HOT_IDS), "hash reserved", loop="sparse dist"),
    # Maps that hash ids work even if a bag shared by several samples is seen once.
    Case(Cell(TWO, spec=BAGS, variable=True, hot_rows=HOT_IDS), "hash ttl"),
    Case(Cell(TWO, spec=BAGS, exchange="row", variable=True, hot_rows=HOT_IDS), "hash reserved"),
]
"""With ids whose rows are on every rank while they have some."""


@pytest.mark.dealt
@pytest.mark.parametrize("case", HOT_CASES, ids=str)
def test_hot_ids_move_with_their_rows(ranks4: RankPool, case: Case) -> None:
    results = ranks4.run(train_beside_twin, case, timeout_s=60)
    for loss_gap, gap, (_, num_cooled, num_back), bits in results:
        assert loss_gap < TOLERANCE
        assert gap < TOLERANCE
        assert num_cooled > 3
        assert num_back > 0 or case.interval > 1
        assert bits
        assert bits == results[0][3]


def refresh_between_steps(rank: int, world_size: int, case: Case) -> float:
    """Change the hot ids after some steps, by hand or by counts; return the gap to the twin."""
    twin, parallel, gap, num_refreshes = Twin(case), sharded(case), 0.0, 0
    # Of ids, which are more than rows.
    configs = [
        EmbeddingBagConfig(2**50, 8, name=table.name, feature_names=list(table.features))
        for table in TABLES
    ]
    counter = tdsp.RowCounter(configs, half_life=2)
    by_count = tdsp.HotSetRefresh(parallel, counter, every=2)
    for step in range(STEPS):
        counter.update(batch_of(case, step, rank))
        losses = train(case, parallel, rank, range(step, step + 1))
        gap = max(gap, relative_gap(losses, [twin.step(step)[rank]]))
        assert replicas_of(parallel, twin)
        num_refreshes += by_count.step()
        if step == 2:
            parallel.refresh_hot_sets(dict(LATER_HOT_IDS))
        hot_sets = parallel.hot_sets.items()
        twin.name_hot_ids(tuple((table, hot_set.row_ids) for table, hot_set in hot_sets))
    assert num_refreshes == 3
    with pytest.raises(tdsp.errors.PlanError, match="'t0' was planned with 5 hot rows and has no"):
        parallel.refresh_hot_sets({"t0": range(6)})
    return max(gap, state_gap(parallel, twin))


@pytest.mark.parametrize("policy", ["lru", "hash ttl"])
def test_a_refresh_names_ids(ranks4: RankPool, policy: str) -> None:
    case = replace(HOT_CASES[1], policy=policy)
    assert max(ranks4.run(refresh_between_steps, case, timeout_s=60)) < TOLERANCE


class LooksUpTwice(ManagedModel):
    """Looks up two batches in one forward, before computing scores for either."""

    def forward(self, features: Any) -> Any:
        rows = [self.mc(of_batch)[0] for of_batch in features]
        scores = [self.head(of_batch) for of_batch in rows]
        return local_loss(scores[0]) + local_loss(scores[1]), scores


def train_twice_at_once(rank: int, world_size: int, case: Case) -> tuple[float, str]:
    """Train on two batches per step; return the gap to the twin, and the error for two forwards.

    Maps give rows to other ids between the two lookups.
    """
    twin, parallel = Twin(case), sharded(case, LooksUpTwice)
    optimizer, gap = make_optimizer(parallel), 0.0
    for step in range(STEPS):
        numbers = (2 * step, 2 * step + 1)
        optimizer.zero_grad()
        loss, _ = parallel([batch_of(case, number, rank) for number in numbers])
        loss.backward()
        optimizer.step()
        gap = max(gap, relative_gap([loss.item()], [twin.step_twice(numbers)[rank]]))
    gap = max(gap, state_gap(parallel, twin))
    pairs = [[batch_of(case, number, rank)] * 2 for number in (0, 4)]
    losses = [parallel(pair)[0] for pair in pairs]
    return gap, error_of((losses[0] + losses[1]).backward)


@pytest.mark.parametrize(
    ("cell", "policy"),
    [
        (Cell(TWO, spec=BAGS, hot_rows=HOT_IDS), "lru"),
        (Cell(TWO, spec=BAGS, exchange="row", hot_rows=HOT_IDS), "hash ttl"),
        (Cell(tdsp.Mesh2D(1, 4), spec=SEQUENCES, optimizer="sgd", hot_rows=HOT_IDS), "lru"),
    ],
    ids=str,
)
def test_lookups_in_one_forward_have_the_same_hot_rows(
    ranks4: RankPool, cell: Cell, policy: str
) -> None:
    for gap, text in ranks4.run(train_twice_at_once, Case(cell, policy), timeout_s=60):
        assert gap < TOLERANCE
        assert text.startswith("UnsupportedError: a backward reaches lookups with different hot")


def train_between(rank: int, world_size: int, case: Case) -> float:
    """Train a batch directly while a detached pipeline holds one; return the gap to the twin."""
    twin, parallel = Twin(case), sharded(case)
    optimizer = make_optimizer(parallel)
    pipeline = TrainPipelineSparseDist(parallel, optimizer, torch.device("cpu"))
    stream = iter([batch_of(case, step, rank) for step in range(6)])
    for step in range(3):
        pipeline.progress(stream)
        twin.step(step)
    pipeline.detach()
    plain_loop(parallel, optimizer, [batch_of(case, 50, rank)])
    # The maps have seen the held batch first.
    features = {step: twin.see(step) for step in (3, 50)}
    for step in (50, 3):
        twin.step(step, features[step])
    drain(pipeline, stream)
    for step in (4, 5):
        twin.step(step)
    assert replicas_of(parallel, twin)
    return state_gap(parallel, twin)


@pytest.mark.parametrize("policy", ["lru", "hash ttl"])
def test_a_held_batch_meets_newer_replicas(ranks4: RankPool, policy: str) -> None:
    case = replace(HOT_CASES[2], policy=policy)
    assert max(ranks4.run(train_between, case, timeout_s=60)) < TOLERANCE
