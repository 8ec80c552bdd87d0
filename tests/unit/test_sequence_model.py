"""The sequence model in one process: its inputs, its loss, and its predictions."""

import math
from itertools import chain
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.errors import InputError
from torchrec_2dsp.programs.data.negatives import NegativeItems, NegativeKind
from torchrec_2dsp.programs.models.ranking import rank_all_items
from torchrec_2dsp.programs.models.sequence import NextItemModel, SequenceModelConfig
from torchrec_2dsp.programs.models.sequence_layers import SampledSoftmax

NUM_ITEMS, NUM_NEGATIVES, MAX_LENGTH = 20, 3, 5
SEQUENCES = [[4, 9, 2], [7], [], [1, 2, 3, 4, 5, 6, 7], [8, 8]]
NEGATIVES = [[2, 5, 5], [0, 1, 2], [3, 4, 5], [7, 7, 19], [0, 1, 2]]


def model_of(**options: Any) -> NextItemModel:
    settings = {"dim": 8, "max_length": MAX_LENGTH, "num_negatives": NUM_NEGATIVES} | options
    torch.manual_seed(0)
    return NextItemModel(SequenceModelConfig.model_validate(settings), NUM_ITEMS)


def table_of(model: NextItemModel) -> torch.Tensor:
    """Return all items' vectors."""
    return cast(torch.Tensor, model.get_parameter("embeddings.embeddings.t_item.weight"))


def batch_of(sequences: list[list[int]], negatives: list[list[int]]) -> Batch:
    rows = [*sequences, *negatives]
    features = KeyedJaggedTensor(
        keys=["item", "item_negatives"],
        values=torch.tensor(list(chain(*rows)), dtype=torch.int64),
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.int32),
    )
    return Batch(torch.zeros(len(sequences), 0), features, torch.ones(len(sequences)))


BATCH = batch_of(SEQUENCES, NEGATIVES)


def outputs_of(model: NextItemModel, items: list[int]) -> torch.Tensor:
    """Return the model's outputs for these items, without any padding."""
    table = table_of(model)
    return model.dense(table[items].unsqueeze(0))[0]


def tokens_of(model: NextItemModel) -> list[list[tuple[torch.Tensor, int, list[int]]]]:
    """List each predicted position: output, true item and negatives."""
    samples = []
    for sequence, negatives in zip(SEQUENCES, NEGATIVES, strict=True):
        last = sequence[-MAX_LENGTH:]
        outputs = outputs_of(model, last[:-1]) if len(last) > 1 else []
        samples.append(
            [(output, true, negatives) for output, true in zip(outputs, last[1:], strict=True)]
            if len(last) > 1
            else []
        )
    return samples


def plain_loss(model: NextItemModel, items: NegativeItems, mean: str) -> float:
    """Compute the loss by loops over samples and positions."""
    table = table_of(model)
    log_q = items.log_probability(torch.arange(NUM_ITEMS)).tolist()
    samples = []
    for tokens in tokens_of(model):
        losses = []
        for output, true, negatives in tokens:
            candidates = [true, *(item for item in negatives if item != true)]
            logits = [(output @ table[item]).item() - log_q[item] for item in candidates]
            losses.append(math.log(sum(map(math.exp, logits))) - logits[0])
        samples.append(losses)
    if mean == "tokens":
        return sum(map(sum, samples)) / sum(map(len, samples))
    return sum(sum(losses) / max(1, len(losses)) for losses in samples) / len(samples)


@pytest.mark.parametrize("mean", ["tokens", "samples"])
@pytest.mark.parametrize("kind", NegativeKind)
def test_the_loss_is_that_of_plain_loops(kind: NegativeKind, mean: str) -> None:
    model = model_of(negatives=kind, loss_mean=mean)
    with torch.no_grad():
        # Larger vectors, so that logits differ.
        table_of(model).mul_(30)
        loss, (detached, scores, labels) = model(BATCH)
        expected = plain_loss(model, NegativeItems(NUM_ITEMS, kind), mean)
    # Float32 sums in another order.
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert detached.item() == loss.item()
    assert scores.sum().item() == pytest.approx(loss.item(), rel=1e-5)
    assert scores[1:3].tolist() == [0, 0]
    assert torch.equal(labels, BATCH.labels)


@pytest.mark.parametrize("num_chunks", [2, 5, 7])
@pytest.mark.parametrize("mean", ["tokens", "samples"])
def test_chunks_of_equal_lengths_train_the_same(num_chunks: int, mean: str) -> None:
    """Also with chunks of one sequence, and with empty chunks."""
    losses, scores, gradients = zip(
        *(trained_once(loss_mean=mean, length_chunks=chunks) for chunks in (1, num_chunks)),
        strict=True,
    )
    # The same numbers in float32, in products of other shapes.
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-5, atol=1e-6)
    for whole, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)
    assert max(gradient.abs().max().item() for gradient in gradients[0]) > 0.01


def trained_once(**options: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the loss, the samples' scores and all gradients."""
    model = model_of(**options)
    loss, (_, scores, _) = model(BATCH)
    loss.backward()
    named = dict(model.named_parameters())
    assert all(param.grad is not None for param in named.values())
    return loss.detach(), scores, [cast(torch.Tensor, param.grad) for param in named.values()]


def test_chunks_are_filled_up_no_farther_than_they_need() -> None:
    model = model_of(length_chunks=5)
    shapes = []
    model.dense.layers[0].register_forward_hook(
        lambda _, inputs, output: shapes.append(tuple(inputs[0].shape[:2]))
    )
    model(BATCH)
    # Sequences of 0, 1, 2, 3 and 7 items, of which 5 are used; the last one is predicted.
    assert shapes == [(1, 1), (1, 1), (1, 1), (1, 2), (1, 4)]


def test_in_evaluation_the_score_is_the_place_among_the_negatives() -> None:
    model = model_of().eval()
    table = table_of(model)
    with torch.no_grad():
        table.mul_(30)
        loss, (_, places, _) = model(BATCH)
        assert loss.item() == pytest.approx(model.train()(BATCH)[0].item(), rel=1e-6)
        for place, tokens in zip(places.tolist(), tokens_of(model), strict=True):
            if not tokens:
                assert place == 0
                continue
            output, true, negatives = tokens[-1]
            rivals = [item for item in negatives if item != true]
            assert place == 1 + sum(
                (output @ table[item] >= output @ table[true]).item() for item in rivals
            )


@pytest.mark.parametrize("excludes", [False, True])
def test_all_items_are_ranked_for_the_last_position(excludes: bool) -> None:
    model = model_of().eval()
    table = table_of(model)
    with torch.no_grad():
        table.mul_(30)
        places = rank_all_items(model, [BATCH], chunk_size=6, exclude_seen=excludes)
        for place, tokens, items in zip(places.tolist(), tokens_of(model), SEQUENCES, strict=True):
            if not tokens:
                assert place == 0
                continue
            output, true, _ = tokens[-1]
            rivals = set(range(NUM_ITEMS)) - {true} - (set(items) if excludes else set())
            assert place == 1 + sum(
                (output @ table[item] >= output @ table[true]).item() for item in rivals
            )
    assert places.max() > 1


def test_no_position_sees_what_comes_after_it() -> None:
    model = model_of()
    with torch.no_grad():
        whole, other_end = outputs_of(model, [3, 1, 4, 5]), outputs_of(model, [3, 1, 9, 2])
    assert torch.equal(whole[:2], other_end[:2])
    assert not torch.allclose(whole[2:], other_end[2:])


def test_the_order_of_items_matters() -> None:
    # In the first block alone, what is before the last position would be a set.
    model = model_of(num_blocks=1)
    with torch.no_grad():
        assert not torch.allclose(
            outputs_of(model, [3, 1, 4])[-1], outputs_of(model, [1, 3, 4])[-1], atol=1e-4
        )


@pytest.mark.parametrize("kind", NegativeKind)
def test_with_many_negatives_it_is_the_softmax_over_all_items(kind: NegativeKind) -> None:
    generator = torch.Generator().manual_seed(0)
    table, output = (torch.randn(n, 4, generator=generator) for n in (NUM_ITEMS, 1))
    items, num_draws = NegativeItems(NUM_ITEMS, kind), 50_000
    drawn = torch.from_numpy(items.draw((torch.arange(num_draws) + 0.5).numpy() / num_draws))
    true = torch.tensor([[6]])
    loss = SampledSoftmax(items)(
        output.unsqueeze(0),
        table[true],
        table[drawn].unsqueeze(0),
        torch.ones(1, 1),
        true,
        drawn.unsqueeze(0),
    )
    # The negatives stand for the sum over all items but the true one, as often as they are many.
    logits = (output @ table.t()).double()[0]
    others = logits[torch.arange(NUM_ITEMS) != 6].exp().sum().log() + math.log(num_draws)
    correction = items.log_probability(true).double().item()
    expected = torch.logaddexp(others, logits[6] - correction) - (logits[6] - correction)
    # Items are drawn to the nearest two of the draws.
    assert loss.item() == pytest.approx(expected.item(), abs=1e-2)


def test_vectors_of_targets_and_negatives_learn() -> None:
    model = model_of()
    model(BATCH)[0].backward()
    gradient = table_of(model).grad
    assert gradient is not None
    # Inputs, targets and negatives of samples with something to predict, after the cut.
    used = {4, 9, 2, 5} | {3, 4, 5, 6, 7, 19} | {8, 0, 1, 2}
    assert set(gradient.abs().sum(1).nonzero().flatten().tolist()) == used


def test_a_batch_may_have_nothing_to_predict() -> None:
    batch = batch_of([[5], []], [[1, 2, 3]] * 2)
    for model in (model_of(), model_of(loss_mean="samples"), model_of().eval()):
        loss, (_, scores, _) = model(batch)
        loss.backward()
        assert loss.item() == 0
        assert scores.tolist() == [0, 0]
        # A rank with such a batch has gradients like the others.
        assert all(param.grad is not None for param in model.dense.parameters())
    assert rank_all_items(model, [batch]).tolist() == [0, 0]


def test_batches_without_fitting_negatives_are_refused() -> None:
    model = model_of()
    alone = KeyedJaggedTensor(["item"], torch.tensor([1, 2]), lengths=torch.tensor([2]))
    with pytest.raises(InputError, match="no feature 'item_negatives'; give the model the batches"):
        model(Batch(torch.zeros(1, 0), alone, torch.ones(1)))
    with pytest.raises(InputError, match="7 negatives for 2 samples; give each sample as many"):
        model(batch_of([[1, 2], [3, 4]], [[1, 2, 3], [4, 5, 6, 7]]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 does not divide dim=32"),
        ({"max_length": 1}, "max_length"),
        ({"sharding_types": []}, "sharding_types"),
        ({"sharding_types": ["sideways"]}, "sideways"),
        ({"negatives": "popular"}, "'uniform' or 'log_uniform'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SequenceModelConfig.model_validate(options)
