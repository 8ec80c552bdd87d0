"""The training program trains every kind of model, the same in all of its runs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.datasets.utils import Batch

from tests.support.ranks import RankPool
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.data.dataset import DatasetFeature
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train

pytestmark = pytest.mark.dealt_file

LOOP = {"steps": 5, "global_batch_size": 16, "eval_steps": 2, "eval_every": 3, "report_every": 2}
RUNS: dict[str, Any] = {
    "one_group": {},
    "exact": {"num_groups": 2, "dense": {"kind": "fully_sharded"}},
    "rows": {"sharding_types": ["row_wise"], "exchange": "row", "prefetch_rows": True},
}
CLICKS = {
    "num_dense": 2,
    "features": [{"name": "user", "num_rows": 40}, {"name": "item", "num_rows": 30, "max_ids": 1}],
}
SEQUENCES = {"kind": "synthetic_sequences", "num_items": 60, "max_length": 8, "num_clusters": 5}


class OwnModel(nn.Module):
    """Bags of users and sequences of items, in one model."""

    def __init__(self, features: Sequence[DatasetFeature], num_dense: int, dim: int) -> None:
        super().__init__()
        users, items = features
        self.bags = EmbeddingBagCollection(
            [EmbeddingBagConfig(users.num_rows, dim, name="t_user", feature_names=["user"])]
        )
        self.items = EmbeddingCollection(
            [EmbeddingConfig(items.num_rows, dim, name="t_item", feature_names=["item"])]
        )
        self.over = nn.Linear(num_dense + 2 * dim, 1)

    def forward(self, batch: Batch) -> Any:
        users, items = self.bags(batch.sparse_features), self.items(batch.sparse_features)
        inputs = [batch.dense_features, users["user"], items["item"].values()]
        logits = self.over(torch.cat(inputs, dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


def make_model(
    features: Sequence[DatasetFeature], num_dense: int, options: Mapping[str, Any]
) -> nn.Module:
    return OwnModel(features, num_dense, options["dim"])


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "sequence": (
        SEQUENCES,
        {"kind": "sequence", "dim": 8, "max_length": 8, "num_negatives": 4},
        {"loss", "recall@10", "ndcg@10"},
    ),
    "two towers": (
        CLICKS,
        {"kind": "two_tower", "user_features": ["user"], "item_features": ["item"], "dim": 8},
        {"loss", "ne", "auc", "calibration"},
    ),
    "two towers in a batch": (
        CLICKS,
        {
            "kind": "two_tower",
            "user_features": ["user"],
            "item_features": ["item"],
            "dim": 8,
            "loss": "in_batch",
            "ranking": {"among": "sampled", "k": [3]},
        },
        {"loss", "recall@3", "ndcg@3"},
    ),
    "own": (
        CLICKS,
        {"kind": "module:factory", "factory": f"{__name__}:make_model", "options": {"dim": 8}},
        {"loss", "ne", "auc", "calibration"},
    ),
}


def config_of(data: dict[str, Any], model: dict[str, Any]) -> TrainConfig:
    tree = {"data": data, "model": model, "loop": LOOP, "runs": RUNS}
    return make_config(TrainConfig, tree)


def train_all(rank: int, world_size: int) -> dict[str, list[tuple[list[float], dict[str, float]]]]:
    return {
        name: [
            ([*run.losses, *run.evaluated.losses], run.evaluated.metrics)
            for run in train(config_of(data, model)).runs
        ]
        for name, (data, model, _) in KINDS.items()
    }


def test_every_kind_trains_alike_in_all_runs(ranks4: RankPool) -> None:
    for name, runs in ranks4.run(train_all)[0].items():
        (losses, metrics), *others = runs
        assert len(losses) == 7
        assert losses[0] != losses[4]
        assert {key for key, value in metrics.items() if not math.isnan(value)} == KINDS[name][2]
        for other_losses, other_metrics in others:
            # Sums are added in another order.
            assert other_losses == pytest.approx(losses, abs=1e-5), name
            assert other_metrics == pytest.approx(metrics, abs=1e-5, nan_ok=True), name


def test_a_metric_that_the_model_has_not_is_refused() -> None:
    data, model, _ = KINDS["sequence"]
    tree = {"data": data, "model": model, "loop": {"metric": "auc"}, "runs": RUNS}
    with pytest.raises(
        ConfigError, match=r"loop\.metric='auc' isn't computed for model\.kind='sequence'; use one"
    ):
        make_config(TrainConfig, tree)
