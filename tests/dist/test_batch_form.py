"""Batches that differ from the first, or between ranks, work or are refused on all ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.devices import KERNEL_ROUNDING, cpu_only, rounded
from tests.support.loops import largest_gap, make_stream, plain_loop, shard, snapshot
from tests.support.models import SEQUENCES, ModelSpec, make_batch
from tests.support.oracle import batches_of, local_loss
from tests.support.parity import TWO, Cell, make_optimizer
from tests.support.ranks import RankPool, error_text
from tests.support.slices import Deal
from torchrec_2dsp.shard.batch import with_parts
from torchrec_2dsp.shard.parted import sharded_tables
from torchrec_2dsp.shard.sharded_modules import EmptyBatches
from torchrec_2dsp.shard.stages import BatchNotes

CELLS = [
    Cell(TWO, "table_wise"),
    Cell(TWO, "row_wise", hot_rows=(("t0", (0, 1, 5)),), spec=ModelSpec(pooling="mean")),
    Cell(tdsp.Mesh2D(1, 4), exchange="row", spec=ModelSpec(weighted=True)),
    Cell(tdsp.Mesh2D(1, 4), exchange="nonempty", in_world=()),
    Cell(TWO, exchange="row", spec=SEQUENCES),
]
Change = Callable[[KeyedJaggedTensor], Any]


def in_reverse(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return batch.permute(list(range(len(batch.keys())))[::-1])


def with_another_feature(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    weights = batch.weights_or_none()
    return KeyedJaggedTensor(
        keys=["another", *batch.keys()],
        values=torch.cat([torch.tensor([10**9]), batch.values()]),
        lengths=torch.cat([torch.tensor([1] + [0] * (batch.stride() - 1)), batch.lengths()]),
        weights=None if weights is None else torch.cat([torch.ones(1), weights]),
    )


def with_short_ids(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return with_parts(batch, values=batch.values().int(), lengths=batch.lengths().int())


def with_strides(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the batch with every tensor a column in a wider one."""
    parts = {"values": batch.values(), "lengths": batch.lengths()}
    if batch.weights_or_none() is not None:
        parts["weights"] = batch.weights()
    return with_parts(batch, **{name: in_a_column(part) for name, part in parts.items()})


def in_a_column(part: torch.Tensor) -> torch.Tensor:
    return torch.stack([part, torch.full_like(part, 3)], dim=1)[:, 0]


def with_long_weights(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    weights = batch.weights_or_none()
    return with_parts(batch, weights=None if weights is None else weights.double())


def with_needless_weights(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Add weights for tables that don't take any."""
    if batch.weights_or_none() is not None:
        return batch
    return with_parts(batch, weights=torch.rand(batch.values().numel()))


def in_a_dict(batch: KeyedJaggedTensor) -> Any:
    """Return a batch without weights as a dict of nested tensors in reverse order, plus labels."""
    if batch.weights_or_none() is not None:
        return batch
    features = {name: nested(part) for name, part in in_reverse(batch).to_dict().items()}
    return TensorDict({"labels": torch.ones(batch.stride()), **features})


def nested(bags: JaggedTensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(bags.values(), bags.offsets())


def as_it_is(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return batch


HARMLESS: list[Change] = [
    in_reverse,
    in_a_dict,
    with_another_feature,
    with_short_ids,
    with_strides,
    with_long_weights,
    with_needless_weights,
]


def trained(rank: int, cell: Cell, change: Change, first: int) -> tuple[list[float], Any]:
    """Return losses and state after three steps; one rank's batches change from ``first`` on."""
    parallel = shard(cell)
    batches = [step[rank] for step in make_stream(cell, 3)]
    if rank == 1:
        batches[first:] = map(change, batches[first:])
    losses = plain_loop(parallel, make_optimizer(parallel), batches)
    return losses, snapshot(parallel)


def harmless_gaps(rank: int, world_size: int, cell: Cell) -> dict[str, float]:
    """Return the gaps to training on unchanged batches."""
    gaps = {}
    expected_losses, expected = trained(rank, cell, as_it_is, 0)
    for change, first in product(HARMLESS, (0, 1)):
        losses, tensors = trained(rank, cell, change, first)
        name = f"{change.__name__} from step {first}"
        assert losses == rounded(expected_losses), name
        gaps[name] = largest_gap(tensors, expected)
    return gaps


def test_batches_in_another_form_train_the_same(ranks4: RankPool, dealt: Deal) -> None:
    for cell in dealt(CELLS):
        for gaps in ranks4.run(harmless_gaps, cell):
            assert len(gaps) == 2 * len(HARMLESS)
            assert max(gaps.values()) <= KERNEL_ROUNDING, (cell, gaps)


def empty_losses(rank: int, world_size: int) -> list[list[float]]:
    """Return losses where rank 1 has no samples, with weights in its batch, and without."""
    cell = replace(CELLS[2], batch_sizes=(6, 0, 6, 6))
    by_form = []
    for has_weights in (True, False):
        parallel = shard(cell)
        batches = [batches_of(cell.spec, 0, cell.batch_sizes, 4, step)[rank] for step in range(3)]
        if rank == 1 and not has_weights:
            batches = [with_parts(batch, weights=None, stride=0) for batch in batches]
        by_form.append(plain_loop(parallel, make_optimizer(parallel), batches))
    return by_form


def test_ranks_without_samples_need_no_weights(ranks4: RankPool) -> None:
    for with_weights, without in ranks4.run(empty_losses):
        assert with_weights == rounded(without)
        assert len(with_weights) == 3


def losses_of_short_weights(rank: int, world_size: int, cell: Cell) -> list[list[float]]:
    """Return the losses with 16-bit weights, and with the same numbers in 32 bits."""
    batches = [step[rank] for step in make_stream(cell, 3)]
    short = [with_parts(batch, weights=batch.weights().bfloat16()) for batch in batches]
    long = [with_parts(batch, weights=batch.weights().float()) for batch in short]
    models = shard(cell), shard(cell)
    return [
        plain_loop(model, make_optimizer(model), stream)
        for model, stream in zip(models, (short, long), strict=True)
    ]


def test_short_weights_are_looked_up_in_fp32(ranks4: RankPool) -> None:
    for sharding in ("table_wise", "row_wise"):
        cell = replace(CELLS[2], sharding=sharding, exchange="pooled")
        for short, long in ranks4.run(losses_of_short_weights, cell):
            assert short == long


class NotedBatches(EmptyBatches):
    """Records the number of samples in each batch that TorchRec gets."""

    num_samples: ClassVar[list[int]] = []

    def before_ids_travel(self, notes: BatchNotes, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        batch = super().before_ids_travel(notes, batch)
        self.num_samples.append(batch.stride())
        return batch


def filled_gap(rank: int, world_size: int, cell: Cell) -> tuple[float, list[int]]:
    """Compare training with and without samples for empty batches, as GPUs need them."""
    NotedBatches.num_samples.clear()
    snapshots = []
    for is_filled in (False, True):
        parallel = shard(cell)
        for part in sharded_tables(parallel) if is_filled else ():
            part.stages.append(NotedBatches())
        batches = [batches_of(cell.spec, 0, cell.batch_sizes, 4, step)[rank] for step in range(3)]
        plain_loop(parallel, make_optimizer(parallel), batches)
        snapshots.append(snapshot(parallel))
    return largest_gap(*snapshots), [*NotedBatches.num_samples]


@cpu_only("on GPUs all tables have this stage already, which can't be left out or run twice")
def test_batches_without_samples_train_the_same_with_one_that_is_cut(
    ranks4: RankPool, dealt: Deal
) -> None:
    for cell in dealt([cell for cell in CELLS if not cell.spec.sequence]):
        answers = ranks4.run(filled_gap, replace(cell, batch_sizes=(3, 0, 5, 0)))
        assert [gap for gap, _ in answers] == [0.0] * 4
        num_samples = [of_rank[:3] for _, of_rank in answers]
        assert num_samples == [[3] * 3, [1] * 3, [5] * 3, [1] * 3]


def without_a_feature(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return batch.permute(list(range(1, len(batch.keys()))))


def in_a_dict_without_a_feature(batch: KeyedJaggedTensor) -> Any:
    return in_a_dict(without_a_feature(batch))


def in_a_dict_of_padded_bags(batch: KeyedJaggedTensor) -> Any:
    return TensorDict({name: torch.ones(batch.stride(), 3) for name in batch.to_dict()})


def in_a_dict_with_a_padded_feature(batch: KeyedJaggedTensor) -> Any:
    features = {name: nested(part) for name, part in batch.to_dict().items()}
    return TensorDict({**features, "f0": torch.ones(batch.stride(), 3)})


def with_fractions(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return with_parts(batch, values=batch.values().float())


def with_long_lengths(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return with_parts(batch, lengths=batch.lengths() + 1)


def with_a_negative_length(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    lengths = batch.lengths().clone()
    lengths[0], lengths[1] = -1, lengths[0] + lengths[1] + 1
    return with_parts(batch, lengths=lengths)


def without_weights(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return with_parts(batch, weights=None)


def with_integer_weights(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return with_parts(batch, weights=torch.ones_like(batch.values()))


def with_weights_in_a_column(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return with_parts(batch, weights=torch.ones(batch.values().numel(), 1))


def with_weights_in_a_row(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return with_parts(batch, weights=torch.ones(1, batch.values().numel()))


def with_weights_to_train(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return with_parts(batch, weights=torch.ones(batch.values().numel(), requires_grad=True))


REFUSED: dict[Change, str] = {
    without_a_feature: "has no feature 'f0'",
    in_a_dict_without_a_feature: "has no feature 'f0'",
    in_a_dict_of_padded_bags: "has no feature 'f0', but []; give each batch",
    in_a_dict_with_a_padded_feature: "has no feature 'f0', but ['f1', ",
    with_fractions: "are torch.float32; make them int32 or int64",
    with_long_lengths: "add up to",
    with_a_negative_length: "a length of this rank's batch is -1",
}
REFUSED_OF_WEIGHTED: dict[Change, str] = {
    without_weights: "has no weights, which the tables need (is_weighted=True)",
    with_integer_weights: "the weights of this rank's batch are torch.int64; make them floating",
    with_weights_in_a_column: ", 1]; give each id a weight, in one dimension",
    with_weights_in_a_row: "weights of the shape [1, ",
    with_weights_to_train: "has weights that need a gradient, which they would not get",
}


def refused_of(cell: Cell) -> dict[Change, str]:
    return {**REFUSED, **(REFUSED_OF_WEIGHTED if cell.spec.weighted else {})}


def refusals(rank: int, world_size: int, cell: Cell) -> list[str]:
    """Return the errors for bad batches, which leave the state unchanged."""
    messages, parallel = [], shard(cell)
    first, second, third = make_stream(cell, 3)
    local_loss(parallel(first[rank])).backward()
    parallel.sync_now()  # type: ignore[operator]
    for change in refused_of(cell):
        before = snapshot(parallel)
        batch = change(second[rank]) if rank == 1 else second[rank]
        messages.append(error_text(partial(parallel, batch), tdsp.errors.InputError))
        assert largest_gap(snapshot(parallel), before) == 0.0
    local_loss(parallel(third[rank])).backward()
    return messages


def test_bad_batches_are_refused_by_all_ranks(ranks4: RankPool) -> None:
    for cell in CELLS:
        for messages in ranks4.run(refusals, cell):
            for text, part in zip(messages, refused_of(cell).values(), strict=True):
                assert part in text, text
                assert text.endswith("(found on rank 1)"), text


def refusal_of_first_batches(rank: int, world_size: int, cell: Cell) -> str:
    parallel, batch = shard(cell), without_weights(make_stream(cell, 1)[0][rank])
    return error_text(lambda: parallel(batch), tdsp.errors.InputError)


def test_weighted_tables_need_weights_from_the_first_batch_on(ranks4: RankPool) -> None:
    for cell in (CELLS[2], Cell(TWO, "table_wise", ModelSpec(weighted=True))):
        for message in ranks4.run(refusal_of_first_batches, cell):
            assert "has no weights, which the tables need" in message


def gaps_of_single_samples(rank: int, world_size: int, cell: Cell) -> list[float]:
    """Return the gaps to training on contiguous tensors, with one sample per rank."""
    ends = []
    for change in (as_it_is, with_strides, with_equal_weights):
        parallel = shard(cell)
        drawn = [make_batch(cell.spec, 10 * step + rank, 1) for step in range(3)]
        batches = [change(with_equal_weights(batch, copy=True)) for batch in drawn]
        plain_loop(parallel, make_optimizer(parallel), batches)
        ends.append(snapshot(parallel))
    return [largest_gap(ends[0], other) for other in ends[1:]]


def with_equal_weights(batch: KeyedJaggedTensor, *, copy: bool = False) -> KeyedJaggedTensor:
    """Return the batch with all weights 0.5, as one number in memory unless ``copy``."""
    weights = torch.full((1,), 0.5).expand(batch.values().numel())
    return with_parts(batch, weights=weights.clone() if copy else weights)


def test_parts_of_larger_tensors(ranks4: RankPool) -> None:
    weighted = ModelSpec(weighted=True)
    cells = [
        Cell(TWO, "table_wise", weighted),
        Cell(TWO, "row_wise", weighted, sync=tdsp.WeightSync(), optimizer="sgd"),
        Cell(tdsp.Mesh2D(1, 4), "row_wise", weighted, exchange="row"),
    ]
    for cell in cells:
        for gaps in ranks4.run(gaps_of_single_samples, cell):
            assert max(gaps) <= KERNEL_ROUNDING, cell
