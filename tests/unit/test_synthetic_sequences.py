"""Draws have the given frequencies; so do the sequences and negatives built from them."""

import math
import tracemalloc
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Dataset, Split
from torchrec_2dsp.programs.data.draws import Zipf, normals, uniforms
from torchrec_2dsp.programs.data.negatives import NegativeItems, NegativeKind, WithNegatives
from torchrec_2dsp.programs.data.synthetic_sequences import (
    SyntheticSequences,
    SyntheticSequencesConfig,
)


def test_uniforms_are_uniform_and_independent_of_their_neighbours() -> None:
    draws = uniforms(1, np.arange(1_000)[:, None], np.arange(100))

    assert draws.shape == (1_000, 100)
    assert np.unique(draws).size == draws.size
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    # With 49 degrees of freedom: mean 49, standard deviation 9.9.
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
    """Rows that aren't summed are integrated."""
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
    data: Dataset | None = None,
) -> list[Batch]:
    batches = (data or SEQUENCE_CONFIG.dataset()).batches(
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
    # Lengths' standard deviation is about 3.
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
    # One in six of the others is in the same cluster by chance.
    expected = SEQUENCE_CONFIG.order + (1 - SEQUENCE_CONFIG.order) / SEQUENCE_CONFIG.num_clusters
    deviation = (expected * (1 - expected) / len(follows)) ** 0.5
    assert len(follows) > 500
    assert np.mean(follows) == pytest.approx(expected, abs=5 * deviation)


def test_without_order_items_have_their_popularity() -> None:
    config = SEQUENCE_CONFIG.model_copy(update={"order": 0.0, "sorted_ids": True})
    items = torch.tensor(list(chain(*sequences(read(size=3_000, data=config.dataset())))))
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


NEGATIVES_DATA = SyntheticSequencesConfig(num_items=40, max_length=6, num_clusters=4)


def read_with_negatives(
    rank: int, world_size: int, *, seed: int = 0, num_batches: int = 3, **place: Any
) -> list[Batch]:
    data = WithNegatives(NEGATIVES_DATA.dataset(), "item", num_negatives=5, seed=seed)
    return read(rank, world_size, num_batches=num_batches, data=data, **place)


def negatives(batches: list[Batch]) -> torch.Tensor:
    return torch.stack(
        [batch.sparse_features["item_negatives"].values().view(-1, 5) for batch in batches]
    )


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_together_draw_what_one_rank_draws(world_size: int) -> None:
    parts = [negatives(read_with_negatives(rank, world_size)) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts, dim=1), negatives(read_with_negatives(0, 1)))


def test_a_run_that_goes_on_draws_what_it_would_have_drawn() -> None:
    whole = read_with_negatives(1, 2, num_batches=5)
    assert torch.equal(negatives(read_with_negatives(1, 2, start=2)), negatives(whole[2:]))


def test_samples_seeds_splits_and_batches_draw_others() -> None:
    drawn = negatives(read_with_negatives(0, 1))
    rows = drawn.view(-1, 5)
    assert rows.unique(dim=0).shape == rows.shape
    assert not torch.equal(drawn, negatives(read_with_negatives(0, 1, seed=1)))
    assert not torch.equal(drawn, negatives(read_with_negatives(0, 1, split=Split.EVAL)))


def test_the_batch_is_otherwise_the_dataset_s() -> None:
    (plain,) = read(data=NEGATIVES_DATA.dataset())
    (batch,) = read_with_negatives(0, 1, num_batches=1)
    assert batch.sparse_features.keys() == ["item", "item_negatives"]
    for name in ("values", "lengths"):
        own, wanted = batch.sparse_features["item"], plain.sparse_features["item"]
        assert torch.equal(getattr(own, name)(), getattr(wanted, name)())
    data = WithNegatives(NEGATIVES_DATA.dataset(), "item", num_negatives=5, seed=0)
    assert [feature.name for feature in data.features] == ["item"]
    assert data.num_dense == 0


@pytest.mark.parametrize("kind", NegativeKind)
def test_items_are_as_frequent_as_their_probability(kind: NegativeKind) -> None:
    items, num_draws = NegativeItems(50, kind), 200_000
    drawn = items.draw((np.arange(num_draws) + 0.5) / num_draws)
    share = np.bincount(drawn, minlength=50) / num_draws
    probability = items.log_probability(torch.arange(50)).double().exp().numpy()
    # Evenly spread numbers hit an interval as often as expected, up to two.
    assert np.abs(share - probability).max() < 2 / num_draws
    assert drawn.max() == 49
    assert drawn.min() == 0


def test_rare_items_of_large_tables_have_a_probability() -> None:
    items = NegativeItems(2**31, NegativeKind.LOG_UNIFORM)
    (log_probability,) = items.log_probability(torch.tensor([2**31 - 1])).tolist()
    assert log_probability == pytest.approx(-31 * math.log(2) - math.log(31 * math.log(2)), 1e-6)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_negatives=0 isn't a count; use 1 or more"):
        WithNegatives(NEGATIVES_DATA.dataset(), "item", num_negatives=0, seed=0)
    with pytest.raises(ConfigError, match="no sparse feature 'page'; the model may use item"):
        WithNegatives(NEGATIVES_DATA.dataset(), "page", num_negatives=1, seed=0)
