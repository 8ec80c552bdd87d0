"""Synthetic sequences: the same for every world size, long-tailed, and worth learning."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.synthetic_sequences import (
    SyntheticSequences,
    SyntheticSequencesConfig,
)

CONFIG = SyntheticSequencesConfig(
    num_items=90, skew=0.8, min_length=2, max_length=12, num_clusters=6, order=0.75
)


def read(
    rank: int = 0,
    world_size: int = 1,
    size: int = 8,
    split: Split = Split.TRAIN,
    start: int = 0,
    num_batches: int = 1,
    config: SyntheticSequencesConfig = CONFIG,
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
    assert lengths.double().mean().item() == pytest.approx(CONFIG.mean_length, abs=5 * 3 / 63)
    (feature,) = CONFIG.dataset().features
    assert (feature.name, feature.num_rows, feature.mean_ids) == ("item", 90, CONFIG.mean_length)


def test_the_next_cluster_follows_from_the_last_two() -> None:
    data: SyntheticSequences = CONFIG.dataset()
    rank_of_row = np.argsort(data._items.row_of_rank(np.arange(1, 91))) + 1
    follows = []
    for sequence in sequences(read(size=500)):
        clusters = data.cluster_of_rank(rank_of_row[sequence])
        follows += (data.next_cluster(clusters[:-2], clusters[1:-1]) == clusters[2:]).tolist()
    # Of the others, one of six is in the same cluster by chance.
    expected = CONFIG.order + (1 - CONFIG.order) / CONFIG.num_clusters
    deviation = (expected * (1 - expected) / len(follows)) ** 0.5
    assert len(follows) > 500
    assert np.mean(follows) == pytest.approx(expected, abs=5 * deviation)


def test_without_order_items_have_their_popularity() -> None:
    config = CONFIG.model_copy(update={"order": 0.0, "sorted_ids": True})
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
