"""Counters of several ranks."""

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.ranks import RankPool, RanksFailed

TABLE = EmbeddingBagConfig(100, 8, name="t", feature_names=["f"])


def counted(rank: int, world_size: int, exact_rows: int) -> tuple[dict[int, float], float]:
    """Each rank looks up its own number, and all of them row 50."""
    counter = tdsp.RowCounter([TABLE], exact_rows=exact_rows)
    for _ in range(rank + 1):
        counter.update(
            KeyedJaggedTensor(["f"], torch.tensor([rank, 50]), lengths=torch.tensor([1, 1]))
        )
    counter.gather()
    table = counter.gather()["t"]
    assert counter.stats()["t"].num_samples == 2 * (rank + 1), "gathering changes nothing"
    assert table.tail_lookups == table.tail_rows == 0
    return dict(zip(table.rows.tolist(), table.counts.tolist(), strict=True)), table.num_samples


@pytest.mark.parametrize("exact_rows", [100, 10])
def test_all_ranks_get_the_counts_of_all(ranks2: RankPool, exact_rows: int) -> None:
    expected = ({50: 3, 1: 2, 0: 1}, 6)
    assert ranks2.run(counted, exact_rows) == [expected] * 2


def gather_what_differs(rank: int, world_size: int) -> None:
    tdsp.RowCounter([TABLE], exact_rows=10 if rank else 100).gather()


def test_ranks_that_count_differently_are_told(ranks2: RankPool) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks2.run(gather_what_differs)
    said = "rank 0 has t: 100 rows, exactly, rank 1 has t: 100 rows, by a sketch of 65536"
    assert len(failed.value.reports) == 2
    assert all(said in report for report in failed.value.reports.values())
