"""On a real log the sequence model ranks the next item better than popularity does.

The log is MovieLens-100K, which isn't part of this project: the test runs where it is.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.support.logs import REAL_LOGS
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.synthetic_sequences import SequenceFeature
from torchrec_2dsp.programs.models.kinds import build_any_model, dataset_for
from torchrec_2dsp.programs.models.ranking import RankingQuality, places_of, rank_all_items
from torchrec_2dsp.programs.models.sequence import SequenceModelConfig

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
