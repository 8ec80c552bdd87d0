"""Negatives are the same for every number of ranks, and as frequent as they say."""

import math

import numpy as np
import pytest
import torch
from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.negatives import NegativeItems, NegativeKind, WithNegatives
from torchrec_2dsp.programs.data.synthetic_sequences import SyntheticSequencesConfig

DATA = SyntheticSequencesConfig(num_items=40, max_length=6, num_clusters=4)


def read(
    rank: int,
    world_size: int,
    *,
    start: int = 0,
    split: Split = Split.TRAIN,
    seed: int = 0,
    num_batches: int = 3,
) -> list[Batch]:
    data = WithNegatives(DATA.dataset(), "item", num_negatives=5, seed=seed)
    batches = data.batches(
        split, global_batch_size=8, rank=rank, world_size=world_size, start=start
    )
    return [next(batches) for _ in range(num_batches)]


def negatives(batches: list[Batch]) -> torch.Tensor:
    return torch.stack(
        [batch.sparse_features["item_negatives"].values().view(-1, 5) for batch in batches]
    )


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_together_draw_what_one_rank_draws(world_size: int) -> None:
    parts = [negatives(read(rank, world_size)) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts, dim=1), negatives(read(0, 1)))


def test_a_run_that_goes_on_draws_what_it_would_have_drawn() -> None:
    whole = read(1, 2, num_batches=5)
    assert torch.equal(negatives(read(1, 2, start=2)), negatives(whole[2:]))


def test_samples_seeds_splits_and_batches_draw_others() -> None:
    drawn = negatives(read(0, 1))
    rows = drawn.view(-1, 5)
    assert rows.unique(dim=0).shape == rows.shape
    assert not torch.equal(drawn, negatives(read(0, 1, seed=1)))
    assert not torch.equal(drawn, negatives(read(0, 1, split=Split.EVAL)))


def test_the_batch_is_otherwise_the_dataset_s() -> None:
    plain = next(DATA.dataset().batches(Split.TRAIN, global_batch_size=8, rank=0, world_size=1))
    (batch,) = read(0, 1, num_batches=1)
    assert batch.sparse_features.keys() == ["item", "item_negatives"]
    for name in ("values", "lengths"):
        own, wanted = batch.sparse_features["item"], plain.sparse_features["item"]
        assert torch.equal(getattr(own, name)(), getattr(wanted, name)())
    data = WithNegatives(DATA.dataset(), "item", num_negatives=5, seed=0)
    assert [feature.name for feature in data.features] == ["item"]
    assert data.num_dense == 0


@pytest.mark.parametrize("kind", NegativeKind)
def test_items_are_as_frequent_as_their_probability(kind: NegativeKind) -> None:
    items, num_draws = NegativeItems(50, kind), 200_000
    drawn = items.draw((np.arange(num_draws) + 0.5) / num_draws)
    share = np.bincount(drawn, minlength=50) / num_draws
    probability = items.log_probability(torch.arange(50)).double().exp().numpy()
    # Evenly spread numbers hit an interval to the nearest two of them.
    assert np.abs(share - probability).max() < 2 / num_draws
    assert drawn.max() == 49
    assert drawn.min() == 0


def test_rare_items_of_large_tables_have_a_probability() -> None:
    items = NegativeItems(2**31, NegativeKind.LOG_UNIFORM)
    (log_probability,) = items.log_probability(torch.tensor([2**31 - 1])).tolist()
    assert log_probability == pytest.approx(-31 * math.log(2) - math.log(31 * math.log(2)), 1e-6)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_negatives=0 isn't a count; use 1 or more"):
        WithNegatives(DATA.dataset(), "item", num_negatives=0, seed=0)
    with pytest.raises(ConfigError, match="no sparse feature 'page'; the model may use item"):
        WithNegatives(DATA.dataset(), "page", num_negatives=1, seed=0)
