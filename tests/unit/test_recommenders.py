"""Sequence and two-tower models in one process, against their definitions."""

import math
from itertools import chain
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.errors import ConfigError, InputError, UnsupportedError
from torchrec_2dsp.programs.data.negatives import NegativeItems, NegativeKind
from torchrec_2dsp.programs.data.synthetic import SparseFeature, SyntheticConfig, make_batch
from torchrec_2dsp.programs.models.kinds import build_any_model
from torchrec_2dsp.programs.models.ranking import rank_all_items
from torchrec_2dsp.programs.models.sequence import NextItemModel, SequenceModelConfig
from torchrec_2dsp.programs.models.sequence_layers import SampledSoftmax
from torchrec_2dsp.programs.models.two_tower import TwoTowerConfig, TwoTowerModel

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
    """This includes chunks with a single sequence, and empty chunks."""
    losses, scores, gradients = zip(
        *(trained_once(loss_mean=mean, length_chunks=chunks) for chunks in (1, num_chunks)),
        strict=True,
    )
    # The same float32 numbers, in products with other shapes.
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
    # Sequences with 0, 1, 2, 3 and 7 items, at most 5 used; the last one is predicted.
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
@pytest.mark.parametrize("chunk_size", [1, 6, 20, 100])
def test_all_items_are_ranked_for_the_last_position(chunk_size: int, excludes: bool) -> None:
    model = model_of().eval()
    table = table_of(model)
    with torch.no_grad():
        table.mul_(30)
        twice = rank_all_items(model, [BATCH] * 2, chunk_size=chunk_size, exclude_seen=excludes)
        places = twice[: len(SEQUENCES)]
        assert torch.equal(twice, places.repeat(2))
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
    assert rank_all_items(model, []).numel() == 0


def test_no_position_sees_what_comes_after_it() -> None:
    model = model_of()
    with torch.no_grad():
        whole, other_end = outputs_of(model, [3, 1, 4, 5]), outputs_of(model, [3, 1, 9, 2])
    assert torch.equal(whole[:2], other_end[:2])
    assert not torch.allclose(whole[2:], other_end[2:])


def test_the_order_of_items_matters() -> None:
    # In the first block alone, the items before the last position would form a set.
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
    # Draw counts are exact to the nearest two.
    assert loss.item() == pytest.approx(expected.item(), abs=1e-2)


def test_vectors_of_targets_and_negatives_learn() -> None:
    model = model_of()
    model(BATCH)[0].backward()
    gradient = table_of(model).grad
    assert gradient is not None
    # Inputs, targets and negatives for samples with something to predict, after the cut.
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


DATA = SyntheticConfig(
    num_dense=2,
    base_rate=0.5,
    features=(
        SparseFeature(name="user", num_rows=40),
        SparseFeature(name="item", num_rows=9),
        SparseFeature(name="tags", num_rows=2, min_ids=0, max_ids=2),
    ),
)
DATA_NAMES = [feature.name for feature in DATA.features]
TOWER_BATCH = make_batch(DATA, step=0, global_batch_size=24)


def towers_of(items: tuple[str, ...], **options: Any) -> TwoTowerModel:
    settings = {"user_features": ["user"], "item_features": items, "dim": 8, "layers": [6]}
    model = build_any_model(DATA.dataset(), TwoTowerConfig.model_validate(settings | options))
    assert isinstance(model, TwoTowerModel)
    return model


def vectors_of(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    pooled = model.embeddings(batch.sparse_features)
    items = [pooled[name] for name in model._config.item_features]
    users = torch.cat([pooled["user"], batch.dense_features], dim=1)
    return model.user_tower(users), model.item_tower(torch.cat(items, dim=1))


def test_clicks_are_predicted_by_dot_products() -> None:
    model = towers_of(("item", "tags"), temperature=0.5)
    users, items = vectors_of(model, TOWER_BATCH)
    loss, (_, logits, labels) = model(TOWER_BATCH)
    expected = torch.stack([user @ item for user, item in zip(users, items, strict=True)])
    torch.testing.assert_close(logits, expected.detach())
    torch.testing.assert_close(loss, binary_cross_entropy_with_logits(expected, TOWER_BATCH.labels))
    assert torch.equal(labels, TOWER_BATCH.labels)


def test_logits_are_cosines_over_the_temperature() -> None:
    plain, cosines = towers_of(("item",)), towers_of(("item",), normalized=True, temperature=0.1)
    _, (_, logits, _) = cosines(TOWER_BATCH)
    users, items = vectors_of(plain, TOWER_BATCH)
    expected = torch.nn.functional.cosine_similarity(users, items) / 0.1
    torch.testing.assert_close(logits, expected.detach())


@pytest.mark.parametrize("items", [("item",), ("item", "tags")])
def test_in_a_batch_each_other_item_counts_once(items: tuple[str, ...]) -> None:
    model = towers_of(items, loss="in_batch")
    with torch.no_grad():
        users, vectors = vectors_of(model, TOWER_BATCH)
        loss = model(TOWER_BATCH)[0]
        places = model.eval()(TOWER_BATCH)[1][1].tolist()
    jagged = [TOWER_BATCH.sparse_features[name].to_dense() for name in items]
    keys = [
        tuple(tuple(sorted(ids.tolist())) for ids in sample) for sample in zip(*jagged, strict=True)
    ]
    assert 1 < len(set(keys)) < 24
    by_key = dict(zip(keys, vectors, strict=True))
    losses = []
    for sample, key in enumerate(keys):
        if not TOWER_BATCH.labels[sample]:
            assert places[sample] == 0
            continue
        scores = {other: users[sample] @ vector for other, vector in by_key.items()}
        losses.append(torch.stack(list(scores.values())).logsumexp(0) - scores[key])
        ahead = [other for other in scores if other != key and scores[other] >= scores[key]]
        assert places[sample] == 1 + len(ahead)
    assert 0 < len(losses) < 24
    torch.testing.assert_close(loss, torch.stack(losses).mean())


def test_a_batch_may_have_no_items() -> None:
    size = 3
    features = KeyedJaggedTensor(
        DATA_NAMES, torch.empty(0, dtype=torch.int64), lengths=torch.zeros(3 * size).int()
    )
    model = towers_of(("item", "tags"), loss="in_batch")
    loss, (_, scores, _) = model(Batch(torch.zeros(size, 2), features, torch.ones(size)))
    # All samples have the same item, which is told from no other.
    assert loss.item() == 0
    assert scores.shape == (size,)
    assert model.eval()(Batch(torch.zeros(size, 2), features, torch.ones(size)))[1][1].tolist() == (
        [1] * size
    )


def test_all_items_are_ranked() -> None:
    model = towers_of(("item",)).eval()
    places = rank_all_items(model, [TOWER_BATCH], chunk_size=4)
    with torch.no_grad():
        users, _ = vectors_of(model, TOWER_BATCH)
        table = model.embeddings.embedding_bags["t_item"].weight
        scores = users @ model.item_tower(table).t()
    for sample, item in enumerate(TOWER_BATCH.sparse_features["item"].values().tolist()):
        ahead = (scores[sample] > scores[sample, item]).sum().item()
        assert places[sample] == (1 + ahead if TOWER_BATCH.labels[sample] else 0)


def test_items_that_cannot_be_listed_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="features item, tags can't be listed from one"):
        rank_all_items(towers_of(("item", "tags")), [TOWER_BATCH])
    with pytest.raises(UnsupportedError, match="between 0 and 2 ids of 'tags'; to rank all"):
        rank_all_items(towers_of(("tags",)), [TOWER_BATCH])


def test_wrong_options_of_towers_are_refused() -> None:
    with pytest.raises(ValidationError, match="the feature 'user' is named twice"):
        towers_of(("user",))
    among_all, sampled = {"among": "all"}, {"among": "sampled"}
    with pytest.raises(ValidationError, match="among='all' lists all items from one table, and"):
        towers_of(("item", "tags"), ranking=among_all)
    with pytest.raises(ValidationError, match="among='sampled' ranks the items of a batch, for"):
        towers_of(("item",), ranking=sampled)
    with pytest.raises(ValidationError, match="item_features"):
        towers_of(())
    with pytest.raises(ConfigError, match="no sparse feature 'page'; the model may use user, item"):
        towers_of(("page",))
