"""Sequence and two-tower models train every way as one process does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import torchrec_2dsp as tdsp
from tests.support.ranks import RankPool
from tests.support.recommenders import (
    GLOBAL_BATCH,
    STEPS,
    TrainedModel,
    Way,
    batches_of,
    largest_gap,
    train_sharded,
    train_unsharded,
)
from torchrec_2dsp.programs.data.dataset import Dataset, Split
from torchrec_2dsp.programs.data.negatives import NegativeKind, WithNegatives
from torchrec_2dsp.programs.data.synthetic import SparseFeature, SyntheticConfig
from torchrec_2dsp.programs.data.synthetic_sequences import SyntheticSequencesConfig
from torchrec_2dsp.programs.models.kinds import build_any_model
from torchrec_2dsp.programs.models.ranking import RankingQuality, rank_all_items
from torchrec_2dsp.programs.models.sequence import NextItemModel, SequenceModelConfig
from torchrec_2dsp.programs.models.sequence_layers import SEQUENCE_TENSOR_PLAN, TransformerBlock
from torchrec_2dsp.programs.models.two_tower import Tower, TwoTowerConfig

pytestmark = pytest.mark.dealt_file

NUM_ITEMS = 50
ROUNDING = 2e-6
"""Ranks add float32 numbers in another order; four steps carry it on."""


def model_of(**options: Any) -> NextItemModel:
    settings = {"dim": 8, "max_length": 6, "num_negatives": 5, "hidden_factor": 2} | options
    torch.manual_seed(0)
    return NextItemModel(SequenceModelConfig.model_validate(settings), NUM_ITEMS)


def data_of(kind: NegativeKind = NegativeKind.UNIFORM) -> Dataset:
    # Some sequences are longer than what the model uses, and some have nothing to predict.
    data = SyntheticSequencesConfig(
        num_items=NUM_ITEMS, min_length=1, max_length=9, length_skew=0.3, num_clusters=5
    )
    return WithNegatives(data.dataset(), "item", num_negatives=5, kind=kind, seed=3)


def table_and_quality(model: Any) -> tuple[torch.Tensor, RankingQuality]:
    """Return the whole table, and all ranks' ranking quality among all items."""
    table = torch.cat([chunk.vectors for chunk in model.item_chunks(17, torch.device("cpu"))])
    group = dist.group.WORLD if dist.is_initialized() else None
    rank, world_size = (group.rank(), group.size()) if group else (0, 1)
    places = rank_all_items(
        model, batches_of(data_of(), rank, world_size, Split.EVAL), chunk_size=17
    )
    return table.clone(), RankingQuality.over_ranks(places, NUM_ITEMS, group)


WAYS: dict[str, Way] = {
    "ddp": Way(),
    "two groups": Way(num_groups=2),
    "table-wise": Way("table_wise", pipeline=TrainPipelineSparseDist),
    "column-wise": Way("column_wise", num_groups=2),
    "row exchange": Way(exchange="row", pipeline=tdsp.TrainPipelineRowPrefetch),
    "hot rows": Way(exchange="row", num_groups=2, hot_rows=4, pipeline=TrainPipelineSparseDist),
    "fully sharded": Way(dense=lambda: tdsp.FullyShardedDense(units=[TransformerBlock])),
    "fully sharded, pipelined": Way(
        dense=lambda: tdsp.FullyShardedDense(units=[TransformerBlock], num_copies=2),
        exchange="row",
        pipeline=TrainPipelineSparseDist,
    ),
    "split over 2": Way(dense=lambda: tdsp.TensorParallelDense(SEQUENCE_TENSOR_PLAN, tp=2)),
    "split, pipelined": Way(
        dense=lambda: tdsp.TensorParallelDense(SEQUENCE_TENSOR_PLAN, tp=2),
        num_groups=2,
        pipeline=TrainPipelineSparseDist,
    ),
    "split, two copies": Way(
        dense=lambda: tdsp.TensorParallelDense(SEQUENCE_TENSOR_PLAN, tp=2, num_copies=2)
    ),
    "thresholds of 1": Way(dense=lambda: tdsp.ThresholdedDataParallel(1.0)),
    "meetings": Way(dense=tdsp.LocalDense),
}


def train_all_ways(rank: int, world_size: int, names: list[str]) -> dict[str, TrainedModel]:
    return {
        name: train_sharded(model_of(), data_of(), WAYS[name], table_and_quality) for name in names
    }


def check_ways(by_rank: list[dict[str, TrainedModel]], expected: TrainedModel) -> None:
    for name in by_rank[0]:
        of_ranks = [by_name[name] for by_name in by_rank]
        losses = torch.tensor([trained.losses for trained in of_ranks]).mean(0)
        assert losses.tolist() == pytest.approx(expected.losses, abs=1e-5), name
        assert set().union(*(trained.weights for trained in of_ranks)) == set(expected.weights)
        for trained in of_ranks:
            assert largest_gap(trained.weights, expected.weights) < ROUNDING, name


@pytest.mark.slow
def test_every_way_trains_as_one_process(ranks4: RankPool) -> None:
    expected = train_unsharded(model_of(), data_of(), 4, table_and_quality)
    table, quality = expected.at_end
    assert 20 < quality.num_targets < STEPS * GLOBAL_BATCH
    assert quality.recall(1) < quality.recall(10) < quality.recall(NUM_ITEMS) == 1
    start = model_of()
    assert (table - next(start.embeddings.parameters())).abs().max() > 1e-2
    assert (
        largest_gap(
            expected.weights,
            {name: value for name, value in start.named_parameters() if name.startswith("dense")},
        )
        > 1e-2
    )
    by_rank = ranks4.run(train_all_ways, list(WAYS))
    check_ways(by_rank, expected)
    for name, trained in ((name, by_name[name]) for by_name in by_rank for name in WAYS):
        assert (trained.at_end[0] - table).abs().max() < ROUNDING, name
        # No two items are so near to each other that rounding changes their order.
        assert trained.at_end[1] == quality, name


def train_on_few_ranks(rank: int, world_size: int) -> TrainedModel:
    way = Way(exchange="row", pipeline=TrainPipelineSparseDist)
    return train_sharded(model_of(loss_mean="samples"), data_of(NegativeKind.LOG_UNIFORM), way)


def test_the_mean_over_samples_is_the_same_for_every_number_of_ranks(
    ranks2: RankPool, ranks4: RankPool
) -> None:
    data = data_of(NegativeKind.LOG_UNIFORM)
    expected = train_unsharded(model_of(loss_mean="samples"), data, 1)
    by_token = train_unsharded(model_of(), data, 1)
    assert largest_gap(expected.weights, by_token.weights) > 1e-3
    for pool in (ranks2, ranks4):
        of_ranks = pool.run(train_on_few_ranks)
        losses = torch.tensor([trained.losses for trained in of_ranks]).mean(0)
        assert losses.tolist() == pytest.approx(expected.losses, abs=1e-5)
        assert largest_gap(of_ranks[0].weights, expected.weights) < ROUNDING


CLICKS = SyntheticConfig(
    num_dense=2,
    base_rate=0.5,
    features=(
        SparseFeature(name="user", num_rows=40, min_ids=0, max_ids=3),
        SparseFeature(name="item", num_rows=15),
        SparseFeature(name="unused", num_rows=7),
    ),
).dataset()


def two_towers(loss: str) -> nn.Module:
    settings = {"user_features": ["user"], "item_features": ["item"], "dim": 8, "layers": [8]}
    return build_any_model(CLICKS, TwoTowerConfig.model_validate(settings | {"loss": loss}))


def quality_of(model: Any) -> RankingQuality:
    """Return all ranks' ranking quality for clicked items."""
    group = dist.group.WORLD if dist.is_initialized() else None
    rank, world_size = (group.rank(), group.size()) if group else (0, 1)
    batches = batches_of(CLICKS, rank, world_size, Split.EVAL)
    places = rank_all_items(model, batches, chunk_size=6)
    return RankingQuality.over_ranks(places, 15, group)


PLAN = {"*_tower.hidden._mlp.0._linear": ColwiseParallel(), "*_tower.out": RowwiseParallel()}
TWO_TOWER_WAYS: dict[str, Way] = {
    "ddp": Way(pipeline=TrainPipelineSparseDist),
    "row exchange, two groups": Way(exchange="row", num_groups=2, hot_rows=2),
    "fully sharded": Way("table_wise", dense=lambda: tdsp.FullyShardedDense(units=[Tower])),
    "split over 2": Way(dense=lambda: tdsp.TensorParallelDense(PLAN, tp=2)),
}


def train_towers(rank: int, world_size: int, loss: str) -> dict[str, TrainedModel]:
    return {
        name: train_sharded(two_towers(loss), CLICKS, way, quality_of)
        for name, way in TWO_TOWER_WAYS.items()
    }


@pytest.mark.parametrize("loss", ["bce", "in_batch"])
def test_two_towers_train_every_way_as_one_process(ranks4: RankPool, loss: str) -> None:
    expected = train_unsharded(two_towers(loss), CLICKS, 4, quality_of)
    assert 20 < expected.at_end.num_targets < 64
    assert expected.at_end.recall(1) < expected.at_end.recall(15) == 1
    start = {name: value.detach() for name, value in two_towers(loss).named_parameters()}
    assert largest_gap(expected.weights, {name: start[name] for name in expected.weights}) > 3e-3
    by_rank = ranks4.run(train_towers, loss)
    check_ways(by_rank, expected)
    assert all(
        trained.at_end == expected.at_end for by_name in by_rank for trained in by_name.values()
    )
