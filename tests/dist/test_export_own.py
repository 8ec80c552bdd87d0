"""Exports of users' own models: the same scores, or an error that says what stops them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch

from tests.support.exporting import quantized_by_hand, stock_model
from tests.support.ranks import RankPool
from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.data.dataset import DatasetFeature
from torchrec_2dsp.programs.export.export import export_model
from torchrec_2dsp.programs.export.own import served_own_model
from torchrec_2dsp.programs.export.quality import HeldOutBatches
from torchrec_2dsp.programs.export.served import request_of
from torchrec_2dsp.programs.export.serving import load_script
from torchrec_2dsp.programs.export.source import ExportSource
from torchrec_2dsp.programs.launch.world import only_rank
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.datasets import shape_of
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.run_folder import RunFolder

NAMES = ["user", "item"]


class OwnModel(nn.Module):
    """A linear model over bags; on demand what it computes depends on the numbers of a batch."""

    def __init__(self, features: Sequence[DatasetFeature], num_dense: int, *, looks: bool) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{feature.name}",
                    num_embeddings=feature.num_rows,
                    embedding_dim=8,
                    feature_names=[feature.name],
                )
                for feature in features
            ]
        )
        self.over, self.looks = nn.Linear(num_dense + 8 * len(features), 1), looks

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        bags = self.bags(batch.sparse_features).values()
        logits = self.over(torch.cat([batch.dense_features, bags], dim=1)).squeeze(1)
        if self.looks and not self.training and bool(batch.dense_features.sum() > 1e9):
            logits = 2 * logits
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


def make_model(
    features: Sequence[DatasetFeature], num_dense: int, options: Mapping[str, Any]
) -> nn.Module:
    return OwnModel(features, num_dense, looks=options["looks"])


def train_own_models(rank: int, world_size: int, folder: Path) -> None:
    for looks in (False, True):
        options = {"looks": looks}
        config = make_config(
            TrainConfig,
            {
                "data": {
                    "num_dense": 2,
                    "features": [
                        {"name": "user", "num_rows": 40},
                        {"name": "item", "num_rows": 30, "min_ids": 0, "max_ids": 3},
                    ],
                },
                "model": {
                    "kind": "module:factory",
                    "factory": f"{__name__}:make_model",
                    "options": options,
                },
                "loop": {"steps": 4, "global_batch_size": 16, "eval_steps": 2, "report_every": 4},
                "checkpoint": {"folder": str(folder / f"checkpoints_{looks}")},
                "output": {"folder": str(folder / f"out_{looks}")},
                "runs": {"main": {"num_groups": 2}},
            },
        )
        train(config, [] if rank else [RunFolder(config.output.folder, config)])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_own_models_score_as_rounded_tables_do(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(train_own_models, tmp_path)
    source = ExportSource.find(tmp_path / "out_False")
    with only_rank("export"):
        record = export_model(source, tmp_path / "served", max_loss=0.01)
    model: Any = stock_model(source)
    for table in model.bags.embedding_bags.children():
        table.weight.copy_(quantized_by_hand(table.weight))
    script = load_script(tmp_path / "served" / "model.pt")
    for batch in HeldOutBatches(source.config, source.config.data.dataset()):
        answer = script(*request_of(batch.dense_features, batch.sparse_features, NAMES))
        _, (_, logits, _) = model(batch)
        # A number on the border between two steps may be rounded either way.
        torch.testing.assert_close(answer["scores"], logits, atol=2e-3, rtol=0)
        assert torch.equal(answer["probabilities"], torch.sigmoid(answer["scores"]))
    assert 0 < record.largest_difference < 0.02

    looking = ExportSource.find(tmp_path / "out_True")
    said = r"factory='.*:make_model' can't be exported: .*\nThe forward is recorded without a batch"
    with pytest.raises(UnsupportedError, match=f"(?s){said}"), only_rank("export"):
        export_model(looking, tmp_path / "never", max_loss=0.01)
    assert not (tmp_path / "never").exists()


class MyBags(EmbeddingBagCollection):
    """Bags that do something else, for all that TorchRec knows."""


def my_bags() -> nn.Module:
    return MyBags(
        tables=[
            EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=3, feature_names=["f"])
        ]
    )


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(2, 2), "it has no EmbeddingBagCollection and no EmbeddingCollection"),
        (nn.ModuleDict({"bags": my_bags()}), "bags is a MyBags, which TorchRec doesn't quantise"),
    ],
)
def test_models_without_tables_to_quantise_are_refused(model: nn.Module, said: str) -> None:
    config = make_config(
        TrainConfig,
        {"data": {"features": [{"name": "f", "num_rows": 3}]}, "runs": {"main": {}}},
    )
    shape = shape_of(config.data, config.data.dataset())
    with pytest.raises(UnsupportedError, match=said):
        served_own_model(model, shape, "mine:make")
