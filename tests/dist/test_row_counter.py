"""Counters of several ranks."""

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.ranks import RankPool

TABLE = EmbeddingBagConfig(100, 8, name="t", feature_names=["f"])


def counted(rank: int, world_size: int, exact_rows: int) -> tuple[dict[int, float], float]:
    """Each rank looks up its own number, and all of them row 50."""
    counter = tdsp.RowCounter([TABLE], exact_rows=exact_rows)
    for _ in range(rank + 1):
        counter.update(KeyedJaggedTensor(["f"], torch.tensor([rank, 50]), lengths=torch.tensor([1, 1])))
    counter.gather()
    table = counter.stats()["t"]
    assert table.tail_lookups == table.tail_rows == 0
    return dict(zip(table.rows.tolist(), table.counts.tolist(), strict=True)), table.num_samples


@pytest.mark.parametrize("exact_rows", [100, 10])
def test_all_ranks_get_the_counts_of_all(ranks2: RankPool, exact_rows: int) -> None:
    expected = ({50: 3, 1: 2, 0: 1}, 6)
    assert ranks2.run(counted, exact_rows) == [expected] * 2
