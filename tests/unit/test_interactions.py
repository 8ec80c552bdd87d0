"""Planted interactions: as much of the logit as asked for, and nothing that rows could explain."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch.nn.functional import binary_cross_entropy
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.support.logs import REAL_LOGS
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer
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
from torchrec_2dsp.programs.data.synthetic_sequences import SequenceFeature
from torchrec_2dsp.programs.models.kinds import build_any_model, dataset_for
from torchrec_2dsp.programs.models.ranking import RankingQuality, places_of, rank_all_items
from torchrec_2dsp.programs.models.sequence import SequenceModelConfig
from torchrec_2dsp.programs.train.record import normalized_entropy

ADDITIVE = SyntheticConfig(
    num_dense=4,
    features=(
        SparseFeature(name="user", num_rows=50, skew=1.2),
        SparseFeature(name="page", num_rows=30, skew=0.0),
        SparseFeature(name="history", num_rows=40, skew=1.0, min_ids=0, max_ids=4),
    ),
)
INTERACTING = ADDITIVE.model_copy(update={"interaction_share": 0.5, "signal": 1.5})


def logits(config: SyntheticConfig, batch: Batch) -> np.ndarray:
    return torch.logit(click_probability(config, batch)).numpy()


def test_streams_without_interactions_stay_what_they_were() -> None:
    """The numbers are those of the version before there were interactions."""
    config = ADDITIVE.model_copy(update={"seed": 3})
    batch = make_batch(config, step=5, global_batch_size=6, split=Split.EVAL)

    rows = [24, 47, 12, 0, 0, 3, 16, 10, 29, 3, 29, 10, 27, 31, 0, 15, 0, 4, 3, 29, 2, 28, 28]
    assert batch.sparse_features.values().tolist() == rows
    lengths = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3, 2, 0, 1, 3]
    assert batch.sparse_features.lengths().tolist() == lengths
    assert batch.labels.tolist() == [0, 0, 1, 0, 0, 0]
    # The last bits are the machine's: its libraries round sines and logarithms in their own way.
    assert batch.dense_features[:, 0].tolist() == pytest.approx(
        [
            0.10255692154169083,
            1.8809256553649902,
            -0.023933693766593933,
            -1.501381278038025,
            1.231998085975647,
            -0.2195950150489807,
        ],
        rel=1e-7,
    )
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
    additive = make_batch(ADDITIVE, step=1, global_batch_size=500)
    interacting = make_batch(INTERACTING, step=1, global_batch_size=500)

    assert torch.equal(interacting.dense_features, additive.dense_features)
    assert torch.equal(interacting.sparse_features.values(), additive.sparse_features.values())
    assert not torch.equal(interacting.labels, additive.labels)


@pytest.mark.dealt
@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_interactions_explain_the_share_that_is_asked(share: float, rank: int) -> None:
    config = ADDITIVE.model_copy(
        update={"interaction_share": share, "interaction_rank": rank, "dense_share": 0.2}
    )
    batch = make_batch(config, step=0, global_batch_size=200_000)
    # All terms are in proportion to the root of their share, so they can be told apart.
    only = config.model_copy(update={"interaction_share": 1.0, "dense_share": 0.0, "signal": 1.0})
    unit = logits(only, batch)

    # The variance is exact over all samples; 200,000 of heavy tails leave a few percent.
    assert unit.var() == pytest.approx(1.0, rel=0.05)
    fitted = np.cov(logits(config, batch), unit)[0, 1] / unit.var()
    assert fitted**2 / config.signal**2 == pytest.approx(share, rel=0.05)


def test_all_shares_are_near_what_is_asked() -> None:
    """Row effects are not normalised, so rare rows and several seeds are needed to see theirs."""
    features = tuple(SparseFeature(name=f"f{i}", num_rows=5_000, skew=0.3) for i in range(6))
    config = SyntheticConfig(features=features, dense_share=0.1, interaction_share=0.5, signal=2.0)
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


def test_large_tables_have_nearly_a_variance_of_one() -> None:
    features = tuple(SparseFeature(name=f"f{i}", num_rows=10**6, skew=0.8) for i in range(3))
    config = SyntheticConfig(features=features, dense_share=0.0, interaction_share=1.0, signal=1.0)
    batch = make_batch(config, step=0, global_batch_size=50_000)

    assert logits(config, batch).std() == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("world_size", [2, 8])
def test_any_rank_makes_any_part_of_a_batch(world_size: int) -> None:
    whole = make_batch(INTERACTING, step=3, global_batch_size=16)
    parts = [
        make_batch(INTERACTING, step=3, global_batch_size=16, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
    probabilities = [click_probability(INTERACTING, part) for part in parts]
    assert torch.equal(torch.cat(probabilities), click_probability(INTERACTING, whole))


def test_labels_follow_the_planted_probability() -> None:
    batch = make_batch(INTERACTING, step=0, global_batch_size=50_000)
    probability = click_probability(INTERACTING, batch)

    planted = binary_cross_entropy(probability, batch.labels.double()).item()
    # The best that is possible is the mean entropy of the probabilities themselves.
    entropy = binary_cross_entropy(probability, probability).item()
    assert planted == pytest.approx(entropy, rel=0.02)
    rate = batch.labels.mean().item()
    assert rate == pytest.approx(INTERACTING.base_rate, abs=0.03)
    assert 0.5 < normalized_entropy(planted, rate) < 0.9


def test_shares_that_make_no_sense_are_refused() -> None:
    features = ADDITIVE.features
    with pytest.raises(
        ValidationError, match=r"dense_share=0\.6 and interaction_share=0\.5 are pa"
    ):
        SyntheticConfig(features=features, dense_share=0.6, interaction_share=0.5)
    SyntheticConfig(features=features, dense_share=0.1, interaction_share=0.9)
    with pytest.raises(ValidationError, match="needs two features with several rows each, and the"):
        SyntheticConfig(features=features[:1], interaction_share=0.5)
    with pytest.raises(ValidationError, match="interaction_rank"):
        SyntheticConfig(features=features, interaction_rank=0)


LOG = REAL_LOGS / "movielens100k/ml-100k.inter"
MAX_LENGTH, BATCH, STEPS = 32, 64, 160

Sequences = list[NDArray[np.int64]]


def read_sequences() -> Sequences:
    """Return items of each user in the order of time; equal times stay in the order of the file."""
    user, item, _, time = np.loadtxt(LOG, skiprows=1, dtype=np.int64).T
    order = np.lexsort((time, user))
    ends = np.flatnonzero(np.diff(user[order])) + 1
    return np.split(item[order] - 1, ends)


class LeaveLastOut:
    """Each user's last item is held out; training sees any stretch of the items before it."""

    num_dense = 0

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        num_items = 1 + max(int(sequence.max()) for sequence in sequences)
        self.features = (SequenceFeature("item", num_items, MAX_LENGTH),)

    def num_train_batches(self, global_batch_size: int) -> None:
        return None

    def batches(
        self, split: Split, *, global_batch_size: int, rank: int, world_size: int, start: int = 0
    ) -> Iterator[Batch]:
        assert (rank, world_size, start) == (0, 1, 0)
        if split is Split.EVAL:
            for first in range(0, len(self._sequences), global_batch_size):
                yield batch_of(self._sequences[first : first + global_batch_size])
            return
        generator = np.random.default_rng(0)
        while True:
            users = generator.integers(0, len(self._sequences), global_batch_size)
            seen = [self._sequences[user][:-1] for user in users]
            ends = generator.integers(
                [min(len(items), MAX_LENGTH) for items in seen],
                endpoint=True,
                high=[len(items) for items in seen],
            )
            yield batch_of([items[:end] for items, end in zip(seen, ends, strict=True)])


def batch_of(sequences: Sequences) -> Batch:
    last = [sequence[-MAX_LENGTH:] for sequence in sequences]
    lengths = torch.tensor([len(items) for items in last], dtype=torch.int32)
    features = KeyedJaggedTensor(["item"], torch.from_numpy(np.concatenate(last)), lengths=lengths)
    return Batch(torch.zeros(len(last), 0), features, torch.ones(len(last)))


def popularity_quality(sequences: Sequences, num_items: int) -> RankingQuality:
    counts = np.bincount(np.concatenate([items[:-1] for items in sequences]), minlength=num_items)
    scores = torch.from_numpy(counts).expand(len(sequences), -1)
    targets = torch.tensor([int(items[-1]) for items in sequences])
    others = torch.arange(num_items) != targets.unsqueeze(1)
    places = places_of(scores.gather(1, targets.unsqueeze(1)).squeeze(1), scores, others)
    return RankingQuality.of(places, up_to=10)


@pytest.mark.slow
@pytest.mark.skipif(not LOG.exists(), reason="the log isn't on this machine")
def test_the_sequence_model_beats_popularity() -> None:
    sequences = read_sequences()
    assert (len(sequences), sum(map(len, sequences))) == (943, 100_000)
    config = SequenceModelConfig(
        dim=32, max_length=MAX_LENGTH, num_negatives=100, hidden_factor=2, dropout=0.1
    )
    data = dataset_for(config, LeaveLastOut(sequences))
    torch.manual_seed(0)
    model = build_any_model(data, config)
    named = dict(model.named_parameters())
    tables = [value for name, value in named.items() if name.startswith("embeddings")]
    others = [value for name, value in named.items() if not name.startswith("embeddings")]
    optimizers = [
        MomentScaledRowWiseAdaGradOptimizer(tables, lr=0.1, moment_scale=1.0),
        torch.optim.Adam(others, lr=2e-3),
    ]
    batches = data.batches(Split.TRAIN, global_batch_size=BATCH, rank=0, world_size=1)
    for _ in range(STEPS):
        loss, _ = model(next(batches))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    model.eval()
    held_out = data.batches(Split.EVAL, global_batch_size=BATCH, rank=0, world_size=1)
    ours = RankingQuality.of(rank_all_items(model, held_out), up_to=10)  # pyright: ignore
    popular = popularity_quality(sequences, data.features[0].num_rows)
    print(
        f"recall@10 {ours.recall(10):.4f} NDCG@10 {ours.ndcg(10):.4f}, of popularity "
        f"{popular.recall(10):.4f} and {popular.ndcg(10):.4f}"
    )
    assert ours.num_targets == popular.num_targets == 943
    # With 943 users a recall of 0.1 has a standard error of 0.01.
    assert ours.recall(10) > 1.5 * popular.recall(10) > 0.05
    assert ours.ndcg(10) > 1.5 * popular.ndcg(10)
