"""Synthetic clicks are equal for every world size, learnable, and have the asked interactions."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import binary_cross_entropy
from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.draws import Zipf
from torchrec_2dsp.programs.data.synthetic import (
    LatentVectors,
    PlantedInteractions,
    SparseFeature,
    SyntheticConfig,
    click_probability,
    make_batch,
)

CONFIG = SyntheticConfig(
    num_dense=4,
    features=(
        SparseFeature(name="user", num_rows=50, skew=1.2),
        SparseFeature(name="page", num_rows=30, skew=0.0),
        SparseFeature(name="history", num_rows=40, skew=1.0, min_ids=0, max_ids=4),
    ),
)
INTERACTING = CONFIG.model_copy(update={"interaction_share": 0.5, "signal": 1.5})
with_and_without_interactions = pytest.mark.parametrize(
    "config", [CONFIG, INTERACTING], ids=["rows", "interactions"]
)


def bags(batch: Batch, feature: str) -> list[list[int]]:
    jagged = batch.sparse_features[feature]
    return [part.tolist() for part in jagged.values().split(jagged.lengths().tolist())]


@with_and_without_interactions
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_global_batch_does_not_depend_on_the_world_size(
    world_size: int, config: SyntheticConfig
) -> None:
    whole = make_batch(config, step=3, global_batch_size=16)
    parts = [
        make_batch(config, step=3, global_batch_size=16, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]

    assert torch.equal(torch.cat([part.dense_features for part in parts]), whole.dense_features)
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
    for feature in ("user", "page", "history"):
        assert [bag for part in parts for bag in bags(part, feature)] == bags(whole, feature)
    probabilities = [click_probability(config, part) for part in parts]
    assert torch.equal(torch.cat(probabilities), click_probability(config, whole))


def test_steps_splits_and_seeds_differ() -> None:
    batches = [
        make_batch(CONFIG, step=0, global_batch_size=16),
        make_batch(CONFIG, step=1, global_batch_size=16),
        make_batch(CONFIG, step=0, global_batch_size=16, split=Split.EVAL),
        make_batch(CONFIG.model_copy(update={"seed": 1}), step=0, global_batch_size=16),
    ]

    for index, left in enumerate(batches):
        for right in batches[index + 1 :]:
            assert not torch.equal(left.dense_features, right.dense_features)
            assert bags(left, "user") != bags(right, "user")


def test_bags_have_all_lengths_that_were_asked_for() -> None:
    batch = make_batch(CONFIG, step=0, global_batch_size=500)

    assert {len(bag) for bag in bags(batch, "history")} == {0, 1, 2, 3, 4}
    assert {len(bag) for bag in bags(batch, "user")} == {1}
    for feature in CONFIG.features:
        ids = batch.sparse_features[feature.name].values()
        assert 0 <= ids.min() <= ids.max() < feature.num_rows
    # Ids inside a bag are drawn one by one.
    assert any(len(set(bag)) > 1 for bag in bags(batch, "history"))


@with_and_without_interactions
def test_labels_follow_the_planted_probability(config: SyntheticConfig) -> None:
    batch = make_batch(config, step=0, global_batch_size=50_000)
    probability = click_probability(config, batch)

    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        inside = (probability >= low) & (probability < low + 0.2)
        expected = probability[inside].mean().item()
        tolerance = 5 * math.sqrt(expected * (1 - expected) / int(inside.sum()))
        assert batch.labels[inside].mean().item() == pytest.approx(expected, abs=tolerance)
    planted = binary_cross_entropy(probability, batch.labels.double()).item()
    # The lowest possible loss is the probabilities' mean entropy.
    entropy = binary_cross_entropy(probability, probability).item()
    assert planted == pytest.approx(entropy, rel=0.02)
    assert batch.labels.mean().item() == pytest.approx(config.base_rate, abs=0.03)


def test_slices_of_other_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank=4 is not in 0\.\.3"):
        make_batch(CONFIG, step=0, global_batch_size=8, rank=4, world_size=4)


def test_features_that_are_alike_are_written_once() -> None:
    click = {"name": "click", "num_rows": 9, "count": 2}
    result = SyntheticConfig.model_validate({"features": [click, {"name": "user", "num_rows": 5}]})
    assert [(feature.name, feature.num_rows) for feature in result.features] == [
        ("click1", 9),
        ("click2", 9),
        ("user", 5),
    ]
    for wrong in (0, "two"):
        with pytest.raises(ValidationError, match="count"):
            SyntheticConfig.model_validate({"features": [{**click, "count": wrong}]})
    with pytest.raises(ValidationError, match="features"):
        SyntheticConfig.model_validate({"features": 3})


def test_wrong_features_are_refused() -> None:
    with pytest.raises(ValidationError, match="min_ids=3 is above max_ids=1"):
        SparseFeature(name="f", num_rows=5, min_ids=3)
    twice = SparseFeature(name="f", num_rows=5)
    with pytest.raises(ValidationError, match="the feature name 'f' is used twice"):
        SyntheticConfig(features=(twice, twice))


def logits(config: SyntheticConfig, batch: Batch) -> np.ndarray:
    return torch.logit(click_probability(config, batch)).numpy()


def test_streams_without_interactions_stay_what_they_were() -> None:
    """The numbers are the same as before interactions were introduced."""
    config = CONFIG.model_copy(update={"seed": 3})
    batch = make_batch(config, step=5, global_batch_size=6, split=Split.EVAL)

    assert batch.dense_features.dtype == batch.labels.dtype == torch.float32
    assert batch.sparse_features.values().dtype == torch.int64
    assert batch.sparse_features.lengths().dtype == torch.int32
    rows = [24, 47, 12, 0, 0, 3, 16, 10, 29, 3, 29, 10, 27, 31, 0, 15, 0, 4, 3, 29, 2, 28, 28]
    assert batch.sparse_features.values().tolist() == rows
    lengths = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3, 2, 0, 1, 3]
    assert batch.sparse_features.lengths().tolist() == lengths
    assert batch.labels.tolist() == [0, 0, 1, 0, 0, 0]
    # The last bits are the machine's: its libraries round sines and logarithms in their own way.
    first = [0.102556922, 1.88092566, -0.0239336938, -1.50138128, 1.231998086, -0.219595015]
    assert batch.dense_features[:, 0].tolist() == pytest.approx(first, rel=1e-7)
    assert click_probability(config, batch).tolist() == pytest.approx(
        [
            0.026137079094215344,
            0.08195266695080027,
            0.18086960804411392,
            0.0044691592206239986,
            0.036388186603314776,
            0.08348596949443968,
        ],
        rel=1e-12,
    )


def test_interactions_change_labels_and_nothing_else() -> None:
    additive = make_batch(CONFIG, step=1, global_batch_size=500)
    interacting = make_batch(INTERACTING, step=1, global_batch_size=500)

    assert torch.equal(interacting.dense_features, additive.dense_features)
    assert torch.equal(interacting.sparse_features.values(), additive.sparse_features.values())
    assert not torch.equal(interacting.labels, additive.labels)


def test_all_shares_are_near_what_is_asked() -> None:
    """Row effects aren't normalised, so their share is only accurate with many rare rows.

    Half the features have bags; moments are summed over 10,000 rows, and estimated beyond.
    """
    one_hot = {"name": "f", "num_rows": 20_000, "skew": 0.5, "count": 3}
    features = [one_hot, one_hot | {"name": "bag", "min_ids": 0, "max_ids": 4}]
    config = SyntheticConfig.model_validate(
        {"features": features, "dense_share": 0.1, "interaction_share": 0.5, "signal": 2.0}
    )
    batch = make_batch(config, step=0, global_batch_size=50_000)
    logit = logits(config, batch)

    by_share = {
        "dense": config.model_copy(update={"dense_share": 1.0, "interaction_share": 0.0}),
        "interactions": config.model_copy(update={"dense_share": 0.0, "interaction_share": 1.0}),
        "rows": config.model_copy(update={"dense_share": 0.0, "interaction_share": 0.0}),
    }
    explained = {
        name: np.corrcoef(logit, logits(alone, batch))[0, 1] ** 2
        for name, alone in by_share.items()
    }

    assert logit.std() == pytest.approx(2.0, rel=0.03)
    assert explained == pytest.approx({"dense": 0.1, "interactions": 0.5, "rows": 0.4}, abs=0.02)


def test_no_effect_of_single_rows_is_left_in_the_interactions() -> None:
    vectors = tuple(LatentVectors(Zipf(20, 1.2), index, rank=4, seed=7) for index in range(3))
    planted = PlantedInteractions(vectors, mean_inverse_lengths=(1.0, 1.0, 1.0))
    every = np.stack(np.meshgrid(*[np.arange(20)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    share = np.empty(20)
    ranks = np.arange(1, 21)
    share[vectors[0].ids.row_of_rank(ranks)] = vectors[0].ids.probability(ranks)

    one_id = np.ones(len(every), dtype=np.int64)
    logit = planted.logits([(every[:, place], one_id) for place in range(3)]).reshape(20, 20, 20)

    # Exact sums over all samples, up to rounding.
    assert np.einsum("abc,a,b,c->", logit**2, share, share, share) == pytest.approx(1.0)
    for of_row in (
        np.einsum("abc,b,c->a", logit, share, share),
        np.einsum("abc,a,c->b", logit, share, share),
        np.einsum("abc,a,b->c", logit, share, share),
    ):
        assert np.abs(of_row).max() < 1e-12


def test_the_pairs_are_those_of_a_factorisation_machine() -> None:
    vectors = tuple(LatentVectors(Zipf(9, 0.5), index, rank=3, seed=1) for index in range(3))
    planted = PlantedInteractions(vectors, mean_inverse_lengths=(1.0, 1.0, 0.5))
    bags = [
        (np.array([4, 2]), np.array([1, 1])),
        (np.array([0, 8]), np.array([1, 1])),
        (np.array([1, 1, 5]), np.array([3, 0])),
    ]

    pooled = [vectors[0].of_rows(np.array([4]))[0], vectors[1].of_rows(np.array([0]))[0]]
    pooled.append(vectors[2].of_rows(np.array([1, 1, 5])).mean(axis=0))
    expected = sum(float(left @ right) for left, right in combinations(pooled, 2))
    scale = expected / planted.logits(bags)[0]

    second = float(vectors[0].of_rows(np.array([2]))[0] @ vectors[1].of_rows(np.array([8]))[0])
    assert planted.logits(bags)[1] == pytest.approx(second / scale)


def test_shares_that_make_no_sense_are_refused() -> None:
    features = CONFIG.features
    with pytest.raises(
        ValidationError, match=r"dense_share=0\.6 and interaction_share=0\.5 are pa"
    ):
        SyntheticConfig(features=features, dense_share=0.6, interaction_share=0.5)
    SyntheticConfig(features=features, dense_share=0.1, interaction_share=0.9)
    with pytest.raises(ValidationError, match="needs two features with several rows each, and the"):
        SyntheticConfig(features=features[:1], interaction_share=0.5)
    with pytest.raises(ValidationError, match="interaction_rank"):
        SyntheticConfig(features=features, interaction_rank=0)
