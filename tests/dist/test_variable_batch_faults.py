"""Batches with a batch size for each feature that can't be right: corrected, or refused by all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import (
    largest_gap,
    plain_loop,
    shard,
    shard_loss_model,
    sharded_tables,
    snapshot,
)
from tests.support.models import SEQUENCE_TABLES, ModelSpec, TableSpec, make_batch
from tests.support.oracle import local_loss
from tests.support.parity import Cell, make_optimizer, make_sharder
from tests.support.rank_device import rank_device
from tests.support.ranks import RankPool
from tests.support.variable_batches import changed, make_variable_batch
from torchrec_2dsp.shard.batch import BadIds

pytestmark = pytest.mark.dealt_file

STEPS = 3
TWO = tdsp.Mesh2D(2, 2)
HOT_ROWS = (("t0", (0, 1, 5, 39)), ("t1", (0, 2)))
MEAN = ModelSpec(pooling="mean")
SEQUENCES = ModelSpec(SEQUENCE_TABLES, sequence=True)


def with_bad_ids(batch: KeyedJaggedTensor, bad: int | None) -> KeyedJaggedTensor:
    """The batch with ``bad`` at the end of each bag of f1, or as it is."""
    if bad is None:
        return batch
    sizes = batch.stride_per_key()
    start = sum(sizes[: batch.keys().index("f1")])
    in_f1 = torch.zeros(sum(sizes), dtype=torch.int64)
    in_f1[start : start + sizes[batch.keys().index("f1")]] = 1
    ids: list[torch.Tensor] = []
    for bag, is_longer in zip(
        batch.values().split(batch.lengths().tolist()), in_f1.tolist(), strict=True
    ):
        ids += [bag, bag.new_full((is_longer,), bad)]
    return KeyedJaggedTensor(
        batch.keys(),
        torch.cat(ids),
        lengths=batch.lengths() + in_f1,
        stride_per_key_per_rank=batch.stride_per_key_per_rank(),
        inverse_indices=batch.inverse_indices(),
    )


def corrected(
    rank: int, world_size: int, cell: Cell, policy: str, bad: int, good: int | None
) -> tuple[float, int]:
    """How far training with a bad id ends from training with a good one or with none; how many
    bad ids were found."""
    batches = [make_variable_batch(cell.spec, 10 * n + rank, plain_every=0) for n in range(STEPS)]
    ends, num_bad = [], []
    for last in (bad, good):
        sharder: Any = make_sharder(cell)
        sharder.bad_ids = BadIds.of(policy)
        parallel = shard(cell, sharder)
        plain_loop(
            parallel, make_optimizer(parallel), [with_bad_ids(batch, last) for batch in batches]
        )
        ends.append(snapshot(parallel))
        num_bad.append(sum(part.num_bad_ids for part in sharded_tables(parallel)))
    return largest_gap(*ends), num_bad[0]


@pytest.mark.parametrize(("policy", "good"), [("drop", None), ("clamp", 23)])
@pytest.mark.parametrize(
    "cell", [Cell(TWO, "table_wise", MEAN), Cell(TWO, exchange="row", hot_rows=HOT_ROWS)], ids=str
)
def test_bad_ids(ranks4: RankPool, cell: Cell, policy: str, good: int | None) -> None:
    for gap, num_bad in ranks4.run(corrected, cell, policy, 24, good):
        assert gap == 0.0
        assert num_bad > 0


Spoil = Callable[[KeyedJaggedTensor], KeyedJaggedTensor]


def without_indices(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return changed(batch, inverse_indices=None)


def with_a_bag_too_many(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    names, indices = batch.inverse_indices()
    indices = indices.clone()
    indices[names.index("f1"), 2] = batch.stride_per_key()[batch.keys().index("f1")]
    return changed(batch, inverse_indices=(names, indices))


def without_a_feature(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    names, indices = batch.inverse_indices()
    kept = [row for row, name in enumerate(names) if name != "f2"]
    return changed(batch, inverse_indices=([names[row] for row in kept], indices[kept]))


def with_a_bad_id(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return with_bad_ids(batch, 24)


def refused(rank: int, world_size: int, cell: Cell, spoil: Spoil) -> tuple[str, float]:
    """What this rank says to a batch that only rank 2 has wrong; how far the model has moved."""
    parallel = shard_loss_model(cell)
    start = snapshot(parallel)
    batch = make_variable_batch(cell.spec, 1 + rank, plain_every=0)
    with pytest.raises(tdsp.errors.InputError) as caught:
        parallel(spoil(batch) if rank == 2 else batch)
    good = make_variable_batch(cell.spec, 1 + rank, plain_every=0)
    moved = largest_gap(start, snapshot(parallel))
    parallel(good)
    return str(caught.value), moved


@pytest.mark.parametrize(
    "cell", [Cell(TWO, "table_wise"), Cell(TWO, exchange="row", spec=SEQUENCES)], ids=str
)
def test_all_ranks_refuse_a_batch_that_cannot_be_right(ranks4: RankPool, cell: Cell) -> None:
    for spoil, expected in (
        (without_indices, "must say which bag each sample has; pass inverse_indices"),
        (with_a_bag_too_many, "inverse_indices give sample 2 the bag"),
        (without_a_feature, "inverse_indices lack the feature 'f2'"),
        (with_a_bad_id, "feature 'f1' has the id 24 in sample 0"),
    ):
        answers = ranks4.run(refused, cell, spoil)
        assert all(expected in said for said, _ in answers), answers
        assert len({said for said, _ in answers}) == 1
        assert all(moved == 0.0 for _, moved in answers)


WIDE = ModelSpec((TableSpec("t0", 40, 32, ("f0",)), TableSpec("t1", 24, 64, ("f1", "f2"))))


def with_int8(rank: int, world_size: int, cells: list[Cell]) -> list[str]:
    """What is said to variable batches of rank 1 and to sharding, where TorchRec's INT8 travels."""
    answers = []
    for cell in cells:
        sharder: Any = make_sharder(cell)
        codecs = QCommsConfig(CommType.INT8, CommType.INT8)
        sharder._qcomm_codecs_registry = get_qcomm_codecs_registry(codecs, device=rank_device())
        try:
            parallel = shard(cell, sharder)
            batch = (make_variable_batch if rank == 1 else make_batch)(cell.spec, 1 + rank)
            loss = local_loss(parallel(batch))
            loss.backward()
            exact = local_loss(shard(cell)(batch))
            answers.append(f"loss is right: {abs(loss.item() / exact.item() - 1) < 0.05}")
        except tdsp.errors.TwoDError as error:
            answers.append(f"{type(error).__name__}: {error}")
    return answers


def test_variable_batches_that_would_travel_in_torchrecs_int8(ranks4: RankPool) -> None:
    cells = {
        Cell(TWO, "table_wise"): "InputError: a batch with a batch size for each feature has bags",
        Cell(TWO, "row_wise"): "UnsupportedError: table 't0' is row_wise, whose bags TorchRec can",
        Cell(TWO, exchange="row"): "UnsupportedError: the rows of table 't0' don't fill packs of",
        Cell(TWO, "table_wise", WIDE): "loss is right: True",
    }
    for answers in ranks4.run(with_int8, list(cells), timeout_s=60):
        for answer, expected in zip(answers, cells.values(), strict=True):
            assert expected in answer
