"""Batches with a size per feature (TorchRec's VBE) in pipelines, their bytes, and their errors."""

from collections.abc import Callable

import pytest
import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.batches import changed, make_variable_batch, written_out
from tests.support.devices import KERNEL_ROUNDING
from tests.support.loops import (
    largest_gap,
    plain_loop,
    shard,
    shard_loss_model,
    snapshot,
)
from tests.support.models import SEQUENCES, ModelSpec, TableSpec, build, make_batch
from tests.support.oracle import local_loss
from tests.support.parity import Cell, make_optimizer, make_sharder
from tests.support.ranks import RankPool, error_of, error_text
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.shard.batch import with_parts

pytestmark = pytest.mark.dealt_file

SUM, MEAN = ModelSpec(), ModelSpec(pooling="mean")
ONE, TWO = tdsp.Mesh2D(1, 4), tdsp.Mesh2D(2, 2)
STEPS = 3


def bytes_of_a_step(rank: int, world_size: int, cell: Cell) -> tuple[int, int]:
    """Return a step's bytes with a variable batch, and with the same batch written out."""
    batch = make_variable_batch(cell.spec, 1 + rank, 40, plain_every=0)
    sent = []
    for features in (batch, written_out(batch)):
        parallel = shard(cell)
        parallel(features).sum().backward()  # The first step compares replicas.
        with count_collectives() as counts:
            parallel(features).sum().backward()
        sent.append(counts.total_bytes())
    return sent[0], sent[1]


@pytest.mark.parametrize(
    "cell",
    [
        Cell(ONE, "table_wise"),
        Cell(ONE, "table_wise", exchange="nonempty"),
    ],
    ids=str,
)
def test_bags_that_samples_share_travel_once(ranks4: RankPool, cell: Cell) -> None:
    for shared, apart in ranks4.run(bytes_of_a_step, cell):
        assert 0 < shared < apart


def trained_twice(rank: int, world_size: int) -> float:
    """Return the gap between training on the same batches with differently ordered indices."""
    ends = []
    for turned in (False, True):
        parallel = shard(Cell(TWO, "table_wise"))
        batches = []
        for step in range(STEPS):
            batch = make_variable_batch(SUM, 10 * step + rank, plain_every=0)
            names, indices = batch.inverse_indices()
            if turned and step:
                batch = changed(batch, inverse_indices=(names[::-1], indices.flip(0)))
            batches.append(batch)
        plain_loop(parallel, make_optimizer(parallel), batches)
        ends.append(snapshot(parallel))
    return largest_gap(*ends)


def test_the_order_of_inverse_indices_may_change(ranks4: RankPool) -> None:
    """TorchRec remembers the first batch's order."""
    assert max(ranks4.run(trained_twice)) <= KERNEL_ROUNDING


def shared_in_one_size(rank: int, world_size: int, cell: Cell) -> float:
    """Return the gap to the unsharded module for a batch with shared bags and one batch size."""
    parallel, model = shard(cell), build(cell.spec, seed=0)
    batch = make_batch(cell.spec, rank)
    names = batch.keys()[::-1]
    indices = torch.randint(batch.stride(), (len(names), batch.stride() + rank))
    gaps = []
    for shape in (indices, indices[:, :0]):
        shared = with_parts(batch, inverse_indices=(names, shape))
        gaps.append((parallel(shared) - model(shared)).abs().max().item())
    return max(gaps)


@pytest.mark.parametrize(
    "cell",
    [
        Cell(TWO, "table_wise"),
        Cell(ONE, exchange="row"),
        Cell(TWO, exchange="row", spec=SEQUENCES),
        Cell(TWO, "table_wise", ModelSpec(weighted=True, positions="collection")),
    ],
    ids=str,
)
def test_bags_of_one_size_are_shared_as_unsharded(ranks4: RankPool, cell: Cell) -> None:
    """In TorchRec, sequences and bags with position weights aren't shared."""
    assert max(ranks4.run(shared_in_one_size, cell)) <= KERNEL_ROUNDING


def with_a_bad_id(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the batch with an out-of-range id appended to each bag for f1."""
    sizes = batch.stride_per_key()
    start = sum(sizes[: batch.keys().index("f1")])
    in_f1 = torch.zeros(sum(sizes), dtype=torch.int64)
    in_f1[start : start + sizes[batch.keys().index("f1")]] = 1
    ids: list[torch.Tensor] = []
    for bag, is_longer in zip(
        batch.values().split(batch.lengths().tolist()), in_f1.tolist(), strict=True
    ):
        ids += [bag, bag.new_full((is_longer,), 24)]
    return KeyedJaggedTensor(
        batch.keys(),
        torch.cat(ids),
        lengths=batch.lengths() + in_f1,
        stride_per_key_per_rank=batch.stride_per_key_per_rank(),
        inverse_indices=batch.inverse_indices(),
    )


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


def refused(rank: int, world_size: int, cell: Cell, spoil: Spoil) -> tuple[str, float]:
    """Return this rank's error for a batch that is wrong only on rank 2, and the model's change."""
    parallel = shard_loss_model(cell)
    start = snapshot(parallel)
    good = make_variable_batch(cell.spec, 1 + rank, plain_every=0)
    batch = spoil(good) if rank == 2 else good
    text = error_text(lambda: parallel(batch), tdsp.errors.InputError)
    moved = largest_gap(start, snapshot(parallel))
    parallel(good)
    return text, moved


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
        assert all(expected in message for message, _ in answers), answers
        assert len({message for message, _ in answers}) == 1
        assert all(moved == 0.0 for _, moved in answers)


WIDE = ModelSpec((TableSpec("t0", 40, 32, ("f0",)), TableSpec("t1", 24, 64, ("f1", "f2"))))


def with_int8(rank: int, world_size: int, cell: Cell) -> str:
    """Return the error for rank 1's variable batch, or for sharding, with TorchRec's INT8."""

    def train() -> None:
        parallel = shard(cell, make_sharder(cell, CommType.INT8))
        batch = (make_variable_batch if rank == 1 else make_batch)(cell.spec, 1 + rank)
        loss = local_loss(parallel(batch))
        loss.backward()
        exact = local_loss(shard(cell)(batch))
        assert abs(loss.item() / exact.item() - 1) < 0.05

    return error_of(train)


def test_variable_batches_that_would_travel_in_torchrecs_int8(ranks4: RankPool) -> None:
    errors = {
        Cell(TWO, "table_wise"): "InputError: a batch with a batch size for each feature has bags",
        Cell(TWO, "row_wise"): "UnsupportedError: table 't0' is row_wise, whose bags TorchRec can",
        Cell(TWO, exchange="row"): "UnsupportedError: the rows of table 't0' don't fill packs of",
    }
    for cell, expected in errors.items():
        for error in ranks4.run(with_int8, cell, timeout_s=60):
            assert error.startswith(expected)
    assert ranks4.run(with_int8, Cell(TWO, "table_wise", WIDE), timeout_s=60) == [""] * 4
