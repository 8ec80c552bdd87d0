"""Two towers, and a user's own model, train on ranks as in one process."""

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
    TrainedModel,
    Way,
    batches_of,
    largest_gap,
    train_sharded,
    train_unsharded,
)
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.synthetic import SparseFeature, SyntheticConfig, make_batch
from torchrec_2dsp.programs.models.kinds import build_any_model
from torchrec_2dsp.programs.models.ranking import RankingQuality, rank_all_items
from torchrec_2dsp.programs.models.two_tower import Tower, TwoTowerConfig

pytestmark = pytest.mark.dealt_file

ROUNDING = 2e-6
"""Ranks add float32 numbers in another order; four steps carry it on."""


class Clicks:
    """Synthetic clicks as a `Dataset`."""

    num_dense = 2
    config = SyntheticConfig(
        num_dense=2,
        base_rate=0.5,
        features=(
            SparseFeature(name="user", num_rows=40, min_ids=0, max_ids=3),
            SparseFeature(name="item", num_rows=15),
            SparseFeature(name="unused", num_rows=7),
        ),
    )
    features = config.features

    def num_train_batches(self, global_batch_size: int) -> int:
        return 1_000

    def batches(
        self, split: Split, *, global_batch_size: int, rank: int, world_size: int, start: int = 0
    ) -> Any:
        for step in range(start, 1_000):
            yield make_batch(
                self.config,
                step=step,
                global_batch_size=global_batch_size,
                rank=rank,
                world_size=world_size,
                split=split,
            )


def model_of(loss: str) -> nn.Module:
    settings = {"user_features": ["user"], "item_features": ["item"], "dim": 8, "layers": [8]}
    return build_any_model(Clicks(), TwoTowerConfig.model_validate(settings | {"loss": loss}))


def quality_of(model: Any) -> RankingQuality:
    """Return all ranks' ranking quality for clicked items."""
    group = dist.group.WORLD if dist.is_initialized() else None
    rank, world_size = (group.rank(), group.size()) if group else (0, 1)
    batches = batches_of(Clicks(), rank, world_size, Split.EVAL)
    places = rank_all_items(model, batches, chunk_size=6)
    return RankingQuality.over_ranks(places, 15, group)


PLAN = {"*_tower.hidden._mlp.0._linear": ColwiseParallel(), "*_tower.out": RowwiseParallel()}
WAYS: dict[str, Way] = {
    "ddp": Way(pipeline=TrainPipelineSparseDist),
    "row exchange, two groups": Way(exchange="row", num_groups=2, hot_rows=2),
    "fully sharded": Way("table_wise", dense=lambda: tdsp.FullyShardedDense(units=[Tower])),
    "split over 2": Way(dense=lambda: tdsp.TensorParallelDense(PLAN, tp=2)),
}


def train_all_ways(rank: int, world_size: int, loss: str) -> dict[str, TrainedModel]:
    return {
        name: train_sharded(model_of(loss), Clicks(), way, quality_of) for name, way in WAYS.items()
    }


@pytest.mark.parametrize("loss", ["bce", "in_batch"])
def test_every_way_trains_as_one_process(ranks4: RankPool, loss: str) -> None:
    expected = train_unsharded(model_of(loss), Clicks(), 4, quality_of)
    assert 20 < expected.at_end.num_targets < 64
    assert expected.at_end.recall(1) < expected.at_end.recall(15) == 1
    start = {name: value.detach() for name, value in model_of(loss).named_parameters()}
    assert largest_gap(expected.weights, {name: start[name] for name in expected.weights}) > 3e-3
    by_rank = ranks4.run(train_all_ways, loss)
    for name in WAYS:
        of_ranks = [trained[name] for trained in by_rank]
        losses = torch.tensor([trained.losses for trained in of_ranks]).mean(0)
        assert losses.tolist() == pytest.approx(expected.losses, abs=1e-5), name
        assert set().union(*(trained.weights for trained in of_ranks)) == set(expected.weights)
        for trained in of_ranks:
            assert largest_gap(trained.weights, expected.weights) < ROUNDING, name
            # No two items are so near to each other that rounding changes their order.
            assert trained.at_end == expected.at_end, name
