"""Batches whose features have batch sizes of their own (TorchRec's VBE)."""

from typing import Any, cast

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import Tensors, largest_gap, parts_of, shard, snapshot
from tests.support.models import ModelSpec, TableSpec
from tests.support.parity import Cell, make_optimizer
from tests.support.ranks import RankPool, RanksFailed

SPEC = ModelSpec((TableSpec("t0", 400, 8, ("f0",)), TableSpec("t1", 240, 16, ("f1", "f2"))))
"""Few of its rows are in a batch."""
FULL = 6


def variable_batch(seed: int) -> KeyedJaggedTensor:
    """Distinct samples of each feature, and which of them each of `FULL` samples has."""
    generator = torch.Generator().manual_seed(seed)
    keys = [feature for feature, _ in SPEC.features]
    sizes = [2 + (seed + number) % 3 for number in range(len(keys))]
    lengths = torch.randint(0, 4, (sum(sizes),), generator=generator)
    per_feature = [int(part.sum()) for part in lengths.split(sizes)]
    ids = [
        torch.randint(table.num_rows, (count,), generator=generator)
        for (_, table), count in zip(SPEC.features, per_feature, strict=True)
    ]
    inverse = [torch.randint(size, (FULL,), generator=generator) for size in sizes]
    return KeyedJaggedTensor(
        keys,
        torch.cat(ids),
        lengths=lengths,
        stride_per_key_per_rank=[[size] for size in sizes],
        inverse_indices=(keys, torch.stack(inverse)),
    )


def train(
    rank: int, world_size: int, sync: Any, exchange: str = "pooled"
) -> tuple[Tensors, Tensors]:
    """The state before and after some steps of the sharded module."""
    parallel = shard(Cell(tdsp.Mesh2D(2, 2), "table_wise", SPEC, sync=sync, exchange=exchange))
    (part,), optimizer = parts_of(parallel), make_optimizer(parallel)
    start = snapshot(parallel)
    for step in range(3):
        optimizer.zero_grad()
        pooled = cast(Any, part)(variable_batch(10 * step + rank)).values()
        assert pooled.shape[0] == FULL
        pooled.pow(2).sum().backward()
        optimizer.step()
    return start, snapshot(parallel)


def test_touched_rows_are_averaged_as_whole_shards_are(ranks4: RankPool) -> None:
    touched = ranks4.run(train, tdsp.WeightSync())
    whole = ranks4.run(train, tdsp.WeightSync(rows=tdsp.SyncedRows.ALL))
    moved = 0.0
    for (start, end), (_, expected) in zip(touched, whole, strict=True):
        assert largest_gap(end, expected) == 0.0
        moved = max(moved, largest_gap(start, end))
    assert moved > 1e-2


def test_row_gradients_are_refused_by_name(ranks4: RankPool) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks4.run(train, tdsp.GradientSync())
    said = r"variable batch sizes per feature (VBE) can't be trained with GradientSync, nor"
    assert any(said in report for report in failed.value.reports.values())


def test_an_exchange_of_non_empty_bags_refuses_them_on_all_ranks(ranks4: RankPool) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks4.run(train, tdsp.WeightSync(), "nonempty")
    said = "an exchange of non-empty bags needs one batch size for all features of a batch"
    assert len(failed.value.reports) == 4
    assert all(said in report for report in failed.value.reports.values())
