"""The synthetic stream: skewed as told, the same for every world size, and worth learning."""

import math
import tracemalloc
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits
from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.draws import Zipf, normals, uniforms
from torchrec_2dsp.programs.data.synthetic import (
    SparseFeature,
    SyntheticConfig,
    click_probability,
    make_batch,
)
from torchrec_2dsp.programs.data.synthetic_sequences import (
    SyntheticSequences,
    SyntheticSequencesConfig,
)

CONFIG = SyntheticConfig(
    num_dense=4,
    features=(
        SparseFeature(name="user", num_rows=50, skew=1.2),
        SparseFeature(name="page", num_rows=30, skew=0.0),
        SparseFeature(name="history", num_rows=40, skew=1.0, min_ids=0, max_ids=4),
    ),
)


def normalized_entropy(loss: float, labels: torch.Tensor) -> float:
    rate = labels.mean().item()
    return loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def same(left: Batch, right: Batch) -> bool:
    return (
        torch.equal(left.dense_features, right.dense_features)
        and torch.equal(left.labels, right.labels)
        and torch.equal(left.sparse_features.values(), right.sparse_features.values())
        and torch.equal(left.sparse_features.lengths(), right.sparse_features.lengths())
    )


def bags(batch: Batch, feature: str) -> list[list[int]]:
    jagged = batch.sparse_features[feature]
    return [part.tolist() for part in jagged.values().split(jagged.lengths().tolist())]


def test_uniforms_are_uniform_and_independent_of_their_neighbours() -> None:
    draws = uniforms(1, np.arange(1_000)[:, None], np.arange(100))

    assert draws.shape == (1_000, 100)
    assert np.unique(draws).size == draws.size
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    # 49 degrees of freedom: mean 49, standard deviation 9.9.
    assert ((counts - 2_000) ** 2 / 2_000).sum() < 49 + 5 * 9.9
    for left, right in ((draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 5 / math.sqrt(left.size)


def test_normals_have_the_moments_of_the_normal_distribution() -> None:
    draws = normals(2, np.arange(100_000))

    assert abs(draws.mean()) < 5 / math.sqrt(draws.size)
    assert draws.std() == pytest.approx(1.0, abs=0.01)
    assert (np.abs(draws) < 1.96).mean() == pytest.approx(0.95, abs=0.005)


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 1.05, 1.5, 3.0])
def test_zipf_ids_are_as_frequent_as_theory_says(skew: float) -> None:
    num_draws, zipf = 100_000, Zipf(1_000, skew)

    ranks = zipf.sample_ranks(3, np.arange(num_draws))

    head = np.arange(1, 21)
    expected = zipf.probability(head) * num_draws
    counts = np.bincount(ranks, minlength=1_001)[head]
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 1).all()
    tail = num_draws - expected.sum()
    assert abs((ranks > 20).sum() - tail) < 5 * math.sqrt(tail) + 1


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 1.05, 3.0])
def test_probabilities_of_large_tables_add_up(skew: float) -> None:
    """Rows that aren't added up are integrated."""
    num_rows = 3_000_000
    every = np.arange(1, num_rows + 1, dtype=np.float64)
    head = np.array([1, 1_000, num_rows])
    expected = head**-skew / (every**-skew).sum()
    assert Zipf(num_rows, skew).probability(head) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 10, 999, 1_000, 4_096])
def test_every_row_has_one_popularity_rank(num_rows: int) -> None:
    rows = Zipf(num_rows, 1.0).row_of_rank(np.arange(1, num_rows + 1))

    assert sorted(rows.tolist()) == list(range(num_rows))


def test_popular_rows_are_spread_over_the_table() -> None:
    rows = Zipf(1_000, 1.0).row_of_rank(np.arange(1, 101))

    assert np.histogram(rows, bins=4, range=(0, 1_000))[0].tolist() == pytest.approx(
        [25] * 4, abs=5
    )


def test_memory_does_not_grow_with_the_table() -> None:
    tracemalloc.start()
    try:
        rows = Zipf(2**31, 1.05).sample(0, np.arange(1_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows.min() >= 0
    assert rows.max() < 2**31
    assert peak < 1_000_000


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_global_batch_does_not_depend_on_the_world_size(world_size: int) -> None:
    whole = make_batch(CONFIG, step=3, global_batch_size=16)
    parts = [
        make_batch(CONFIG, step=3, global_batch_size=16, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]

    assert torch.equal(torch.cat([part.dense_features for part in parts]), whole.dense_features)
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
    for feature in ("user", "page", "history"):
        assert [bag for part in parts for bag in bags(part, feature)] == bags(whole, feature)


def test_a_batch_is_a_function_of_its_arguments_alone() -> None:
    later = make_batch(CONFIG, step=5, global_batch_size=16)
    make_batch(CONFIG, step=0, global_batch_size=16)
    torch.manual_seed(99)

    assert same(make_batch(CONFIG, step=5, global_batch_size=16), later)


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


def test_batches_have_the_types_of_torchrecs_own() -> None:
    batch = make_batch(CONFIG, step=0, global_batch_size=8, rank=1, world_size=2)

    assert batch.dense_features.shape == (4, 4)
    assert batch.dense_features.dtype == batch.labels.dtype == torch.float32
    assert batch.sparse_features.keys() == ["user", "page", "history"]
    assert batch.sparse_features.stride() == 4
    assert batch.sparse_features.values().dtype == torch.int64
    assert batch.sparse_features.lengths().dtype == torch.int32


def test_bags_have_all_lengths_that_were_asked_for() -> None:
    batch = make_batch(CONFIG, step=0, global_batch_size=500)

    assert {len(bag) for bag in bags(batch, "history")} == {0, 1, 2, 3, 4}
    assert {len(bag) for bag in bags(batch, "user")} == {1}
    for feature in CONFIG.features:
        ids = batch.sparse_features[feature.name].values()
        assert 0 <= ids.min() <= ids.max() < feature.num_rows
    # Ids inside a bag are drawn one by one.
    assert any(len(set(bag)) > 1 for bag in bags(batch, "history"))


def test_labels_follow_the_planted_probability() -> None:
    batch = make_batch(CONFIG, step=0, global_batch_size=20_000)
    probability = click_probability(CONFIG, batch)

    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        inside = (probability >= low) & (probability < low + 0.2)
        expected = probability[inside].mean().item()
        tolerance = 5 * math.sqrt(expected * (1 - expected) / int(inside.sum()))
        assert batch.labels[inside].mean().item() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(("signal", "low", "high"), [(2.0, 0.5, 0.85), (0.0, 0.999, 1.001)])
def test_the_signal_says_how_much_there_is_to_learn(signal: float, low: float, high: float) -> None:
    config = CONFIG.model_copy(update={"signal": signal})
    batch = make_batch(config, step=0, global_batch_size=20_000)

    loss = binary_cross_entropy(click_probability(config, batch), batch.labels.double())

    assert low < normalized_entropy(loss.item(), batch.labels) < high


def test_a_logistic_regression_learns_it() -> None:
    def one_hot(batch: Batch) -> torch.Tensor:
        columns = [batch.dense_features]
        for feature in CONFIG.features:
            jagged = batch.sparse_features[feature.name]
            counts = torch.zeros(jagged.lengths().numel(), feature.num_rows)
            sample = torch.arange(jagged.lengths().numel()).repeat_interleave(jagged.lengths())
            counts.index_put_((sample, jagged.values()), torch.ones(()), accumulate=True)
            columns.append(counts)
        return torch.cat(columns, dim=1)

    model = torch.nn.Linear(one_hot(make_batch(CONFIG, step=0, global_batch_size=1)).shape[1], 1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.2)
    for step in range(60):
        batch = make_batch(CONFIG, step=step, global_batch_size=256)
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(one_hot(batch)).squeeze(1), batch.labels)
        loss.backward()
        optimizer.step()

    held_out = make_batch(CONFIG, step=0, global_batch_size=5_000, split=Split.EVAL)
    with torch.no_grad():
        logits = model(one_hot(held_out)).squeeze(1)
    learned = binary_cross_entropy_with_logits(logits, held_out.labels).item()
    planted = click_probability(CONFIG, held_out)
    best = binary_cross_entropy(planted, held_out.labels.double()).item()
    assert best < learned
    assert normalized_entropy(learned, held_out.labels) < 0.85


@pytest.mark.parametrize(
    ("size", "world_size", "rank", "message"),
    [
        (6, 4, 0, "global_batch_size=6 must be a positive mult"),
        (0, 1, 0, "global_batch_size=0 must be a positive multiple"),
        (8, 4, 4, r"rank=4 is not in 0\.\.3"),
    ],
)
def test_wrong_slices_are_refused(size: int, world_size: int, rank: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_batch(CONFIG, step=0, global_batch_size=size, rank=rank, world_size=world_size)


@pytest.mark.parametrize(
    ("num_rows", "skew", "message"),
    [
        (0, 1.0, r"num_rows=0 is not in 1\.\.2147483648"),
        (10, -0.5, "skew=-0.5 must be a finite number >= 0"),
        (10, math.inf, "skew=inf must be"),
    ],
)
def test_wrong_zipf_figures_are_refused(num_rows: int, skew: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Zipf(num_rows, skew)


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


SEQUENCE_CONFIG = SyntheticSequencesConfig(
    num_items=90, skew=0.8, min_length=2, max_length=12, num_clusters=6, order=0.75
)


def read(
    rank: int = 0,
    world_size: int = 1,
    size: int = 8,
    split: Split = Split.TRAIN,
    start: int = 0,
    num_batches: int = 1,
    config: SyntheticSequencesConfig = SEQUENCE_CONFIG,
) -> list[Batch]:
    batches = config.dataset().batches(
        split, global_batch_size=size, rank=rank, world_size=world_size, start=start
    )
    return [next(batches) for _ in range(num_batches)]


def sequences(batches: list[Batch]) -> list[list[int]]:
    return [
        part.tolist()
        for batch in batches
        for part in batch.sparse_features["item"]
        .values()
        .split(batch.sparse_features["item"].lengths().tolist())
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_global_batch_is_the_same_for_every_world_size(world_size: int) -> None:
    parts = [read(rank, world_size, start=3) for rank in range(world_size)]
    joined = [sequence for part in parts for sequence in sequences(part)]
    assert joined == sequences(read(start=3))


def test_a_stream_begins_anywhere() -> None:
    assert sequences(read(num_batches=3)[2:]) == sequences(read(start=2))
    assert sequences(read()) != sequences(read(start=1))
    assert sequences(read()) != sequences(read(split=Split.EVAL))


def test_short_sequences_are_the_most_frequent() -> None:
    (batch,) = read(size=4_000)
    lengths = batch.sparse_features["item"].lengths()
    counts = torch.bincount(lengths, minlength=13).tolist()
    assert counts[:2] == [0, 0]
    assert counts[2] > 2 * counts[4] > 2 * counts[8] > 0
    assert counts[12] > 0
    # Lengths have a standard deviation of about 3.
    assert lengths.double().mean().item() == pytest.approx(
        SEQUENCE_CONFIG.mean_length, abs=5 * 3 / 63
    )
    (feature,) = SEQUENCE_CONFIG.dataset().features
    assert (feature.name, feature.num_rows, feature.mean_ids) == (
        "item",
        90,
        SEQUENCE_CONFIG.mean_length,
    )


def test_the_next_cluster_follows_from_the_last_two() -> None:
    data: SyntheticSequences = SEQUENCE_CONFIG.dataset()
    rank_of_row = np.argsort(data._items.row_of_rank(np.arange(1, 91))) + 1
    follows = []
    for sequence in sequences(read(size=500)):
        clusters = data.cluster_of_rank(rank_of_row[sequence])
        follows += (data.next_cluster(clusters[:-2], clusters[1:-1]) == clusters[2:]).tolist()
    # Of the others, one of six is in the same cluster by chance.
    expected = SEQUENCE_CONFIG.order + (1 - SEQUENCE_CONFIG.order) / SEQUENCE_CONFIG.num_clusters
    deviation = (expected * (1 - expected) / len(follows)) ** 0.5
    assert len(follows) > 500
    assert np.mean(follows) == pytest.approx(expected, abs=5 * deviation)


def test_without_order_items_have_their_popularity() -> None:
    config = SEQUENCE_CONFIG.model_copy(update={"order": 0.0, "sorted_ids": True})
    items = torch.tensor(list(chain(*sequences(read(size=3_000, config=config)))))
    share = torch.bincount(items, minlength=90)[:10].double() / items.numel()
    expected = config.dataset()._items.probability(np.arange(1, 11))
    assert np.abs(share.numpy() - expected).max() < 5 * (0.25 / items.numel()) ** 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_length": 9, "max_length": 3}, "min_length=9 is above max_length=3"),
        ({"num_clusters": 91}, "num_clusters=91 is above num_items=90"),
        ({"order": 1.5}, "order"),
        ({"kind": "synthetic"}, "synthetic_sequences"),
    ],
)
def test_wrong_figures_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SyntheticSequencesConfig.model_validate({"num_items": 90} | changes)


def test_batches_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ConfigError, match="global_batch_size=6 must be a positive multiple of the"):
        read(world_size=4, size=6)
