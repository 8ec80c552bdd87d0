"""The two-tower model in one process, against plain loops."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.errors import ConfigError, UnsupportedError
from torchrec_2dsp.programs.data.synthetic import SparseFeature, SyntheticConfig, make_batch
from torchrec_2dsp.programs.models.kinds import build_any_model
from torchrec_2dsp.programs.models.ranking import rank_all_items
from torchrec_2dsp.programs.models.two_tower import TwoTowerConfig, TwoTowerModel

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
BATCH = make_batch(DATA, step=0, global_batch_size=24)


def model_of(items: tuple[str, ...], **options: Any) -> TwoTowerModel:
    settings = {"user_features": ["user"], "item_features": items, "dim": 8, "layers": [6]}
    model = build_any_model(DATA, TwoTowerConfig.model_validate(settings | options))
    assert isinstance(model, TwoTowerModel)
    return model


def vectors_of(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    pooled = model.embeddings(batch.sparse_features)
    items = [pooled[name] for name in model._config.item_features]
    users = torch.cat([pooled["user"], batch.dense_features], dim=1)
    return model.user_tower(users), model.item_tower(torch.cat(items, dim=1))


def test_clicks_are_predicted_by_dot_products() -> None:
    model = model_of(("item", "tags"), temperature=0.5)
    users, items = vectors_of(model, BATCH)
    loss, (_, logits, labels) = model(BATCH)
    expected = torch.stack([user @ item for user, item in zip(users, items, strict=True)])
    torch.testing.assert_close(logits, expected.detach())
    torch.testing.assert_close(loss, binary_cross_entropy_with_logits(expected, BATCH.labels))
    assert torch.equal(labels, BATCH.labels)


def test_logits_are_cosines_over_the_temperature() -> None:
    plain, cosines = model_of(("item",)), model_of(("item",), normalized=True, temperature=0.1)
    _, (_, logits, _) = cosines(BATCH)
    users, items = vectors_of(plain, BATCH)
    expected = torch.nn.functional.cosine_similarity(users, items) / 0.1
    torch.testing.assert_close(logits, expected.detach())


@pytest.mark.parametrize("items", [("item",), ("item", "tags")])
def test_in_a_batch_each_other_item_counts_once(items: tuple[str, ...]) -> None:
    model = model_of(items, loss="in_batch")
    with torch.no_grad():
        users, vectors = vectors_of(model, BATCH)
        loss = model(BATCH)[0]
        places = model.eval()(BATCH)[1][1].tolist()
    jagged = [BATCH.sparse_features[name].to_dense() for name in items]
    keys = [
        tuple(tuple(sorted(ids.tolist())) for ids in sample) for sample in zip(*jagged, strict=True)
    ]
    assert 1 < len(set(keys)) < 24
    by_key = dict(zip(keys, vectors, strict=True))
    losses = []
    for sample, key in enumerate(keys):
        if not BATCH.labels[sample]:
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
    model = model_of(("item", "tags"), loss="in_batch")
    loss, (_, scores, _) = model(Batch(torch.zeros(size, 2), features, torch.ones(size)))
    # All samples have the same item, which is told from no other.
    assert loss.item() == 0
    assert scores.shape == (size,)
    assert model.eval()(Batch(torch.zeros(size, 2), features, torch.ones(size)))[1][1].tolist() == (
        [1] * size
    )


def test_all_items_are_ranked() -> None:
    model = model_of(("item",)).eval()
    places = rank_all_items(model, [BATCH], chunk_size=4)
    with torch.no_grad():
        users, _ = vectors_of(model, BATCH)
        table = model.embeddings.embedding_bags["t_item"].weight
        scores = users @ model.item_tower(table).t()
    for sample, item in enumerate(BATCH.sparse_features["item"].values().tolist()):
        ahead = (scores[sample] > scores[sample, item]).sum().item()
        assert places[sample] == (1 + ahead if BATCH.labels[sample] else 0)


def test_items_that_cannot_be_listed_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="features item, tags can't be listed from one"):
        rank_all_items(model_of(("item", "tags")), [BATCH])
    with pytest.raises(UnsupportedError, match="between 0 and 2 ids of 'tags'; to rank all"):
        rank_all_items(model_of(("tags",)), [BATCH])


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValidationError, match="the feature 'user' is named twice"):
        model_of(("user",))
    among_all, sampled = {"among": "all"}, {"among": "sampled"}
    with pytest.raises(ValidationError, match="among='all' lists all items from one table, and"):
        model_of(("item", "tags"), ranking=among_all)
    with pytest.raises(ValidationError, match="among='sampled' ranks the items of a batch, for"):
        model_of(("item",), ranking=sampled)
    with pytest.raises(ValidationError, match="item_features"):
        model_of(())
    with pytest.raises(ConfigError, match="no sparse feature 'page'; the model may use user, item"):
        model_of(("page",))
