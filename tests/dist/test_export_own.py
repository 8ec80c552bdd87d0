"""A user's own model is exported as those of the package are, or refused with what stops it."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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

from tests.support.exporting import (
    DATA,
    HALF_PRECISION,
    printed_alone,
    quantized_by_hand,
    stock_model,
    train_config,
)
from tests.support.ranks import RankPool
from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.data.dataset import DatasetFeature, Split
from torchrec_2dsp.programs.export.export import ExportRecord, export_model
from torchrec_2dsp.programs.export.kinds import saying_what_stops, served_own_model
from torchrec_2dsp.programs.export.served import load_script, quantize_
from torchrec_2dsp.programs.export.source import ExportSource
from torchrec_2dsp.programs.launch import only_rank
from torchrec_2dsp.programs.train.config import TrainConfig

pytestmark = pytest.mark.dealt_file

NUM_USERS, NUM_ITEMS, MOST_IDS, DIM = 40, 30, 3, 8
DATASET = make_config(TrainConfig, {"data": DATA, "runs": {"main": {}}}).data.dataset()


class OwnModel(nn.Module):
    """Bags of users and sequences of items, whose ids the model changes before it looks them up."""

    def __init__(self) -> None:
        super().__init__()
        bags = EmbeddingBagConfig(NUM_USERS, DIM, name="t_user", feature_names=["user"])
        rows = EmbeddingConfig(NUM_ITEMS, DIM, name="t_item", feature_names=["item"])
        self.bags = EmbeddingBagCollection([bags])
        self.items = EmbeddingCollection([rows])
        self.over = nn.Linear(2 + (1 + MOST_IDS) * DIM, 1)

    def forward(self, batch: Batch) -> Any:
        users = self.bags(batch.sparse_features)["user"]
        items = self.items(batch.sparse_features)["item"].to_padded_dense(MOST_IDS)
        inputs = torch.cat([batch.dense_features, users, items.flatten(1)], dim=1)
        logits = self.over(torch.relu(inputs)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


def make_model(
    features: Sequence[DatasetFeature], num_dense: int, options: Mapping[str, Any]
) -> nn.Module:
    return OwnModel()


@pytest.fixture(scope="module")
def served(
    ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ExportSource, Path, ExportRecord]:
    folder = tmp_path_factory.mktemp("own")
    tree = {
        "data": DATA,
        "model": {"kind": "module:factory", "factory": f"{__name__}:make_model"},
        "loop": {"steps": 4, "global_batch_size": 16, "eval_steps": 2},
        "checkpoint": {"folder": str(folder / "checkpoints")},
        "output": {"folder": str(folder / "out")},
        "runs": {"main": {"num_groups": 2}},
    }
    ranks2.run(train_config, make_config(TrainConfig, tree))
    source, output = ExportSource.find(folder / "out"), folder / "served"
    with only_rank("export"):
        return source, output, export_model(source, output, max_loss=0.01)


def test_the_file_scores_as_the_model_does_over_rounded_rows(
    served: tuple[ExportSource, Path, ExportRecord],
) -> None:
    source, output, record = served
    model: Any = stock_model(source)
    script = load_script(output / "model.pt")
    batches = DATASET.batches(Split.EVAL, global_batch_size=16, rank=0, world_size=1)
    held_out = [batch for _, batch in zip(range(2), batches, strict=False)]
    exact = [model(batch)[1][1] for batch in held_out]
    for table in (model.bags.embedding_bags["t_user"], model.items.embeddings["t_item"]):
        rounded = quantized_by_hand(table.weight)
        span = table.weight.amax(dim=1) - table.weight.amin(dim=1)
        bound = span / 510 + 2 * HALF_PRECISION * table.weight.abs().amax(dim=1)
        assert ((rounded - table.weight).abs().amax(dim=1) <= bound).all()
        table.weight.copy_(rounded)
    largest = 0.0
    for batch, exact_scores in zip(held_out, exact, strict=True):
        ids = batch.sparse_features
        answer = script(batch.dense_features, ids.values(), ids.lengths())
        # A number on the border between two steps may be rounded either way.
        torch.testing.assert_close(answer["scores"], model(batch)[1][1], atol=5e-4, rtol=0)
        assert torch.equal(answer["probabilities"], torch.sigmoid(answer["scores"]))
        largest = max(largest, float((answer["scores"] - exact_scores).abs().max()))
        # Of the batch, each sample alone, as the guide says a request is.
        for number in (0, 7):
            bags = [ids[name].to_dense()[number] for name in ("user", "item")]
            alone = (
                batch.dense_features[number : number + 1],
                torch.cat(bags),
                torch.tensor([len(bag) for bag in bags]),
            )
            # The rounding of float32.
            torch.testing.assert_close(
                script(*alone)["scores"], answer["scores"][number : number + 1], atol=1e-6, rtol=0
            )
    # The rounding of float32.
    assert 0 < record.largest_difference == pytest.approx(largest, abs=1e-6)
    assert record.largest_difference < 0.02
    assert (record.metric, record.num_samples) == ("ne", 32)
    assert record.served_table_bytes == (NUM_USERS + NUM_ITEMS) * 16
    content = json.loads((output / "features.json").read_text())
    assert content["features"] == [
        {"name": "user", "table": "t_user", "num_rows": NUM_USERS, "dim": DIM},
        {"name": "item", "table": "t_item", "num_rows": NUM_ITEMS, "dim": DIM},
    ]
    assert (content["kind"], content["num_dense"]) == ("module:factory", 2)


def test_a_process_without_the_package_and_the_factory_answers(
    served: tuple[ExportSource, Path, ExportRecord],
) -> None:
    _, output, _ = served
    request = torch.zeros(2, 2), torch.ones(2, dtype=torch.int64), torch.tensor([1, 0, 1, 0])
    here = load_script(output / "model.pt")(*request)
    assert printed_alone("serve.py", output) == [
        f"{name} (2,) {numbers.tolist()}" for name, numbers in here.items()
    ]


class OwnBags(EmbeddingBagCollection):
    """Bags that TorchRec doesn't know."""


class Asking(OwnModel):
    """A model that looks at its numbers before it computes."""

    def forward(self, batch: Batch) -> Any:
        if batch.dense_features.sum() > 0:
            return super().forward(batch)
        return super().forward(batch)


class Unscriptable(OwnModel):
    """A model that calls what no script has."""

    def forward(self, batch: Batch) -> Any:
        loss, (detached, logits, labels) = super().forward(batch)
        return loss, (detached, torch.func.vmap(torch.sin)(logits), labels)


def with_own_bags() -> nn.Module:
    model = OwnModel()
    model.bags = OwnBags(model.bags.embedding_bag_configs())
    return model


def scripted(model: nn.Module) -> torch.jit.ScriptModule:
    with saying_what_stops("mine:make"):
        served_model = served_own_model(model, DATASET, "mine:make")
        quantize_(model)
        return served_model.script()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 2), "has no EmbeddingBagCollection and no EmbeddingCollection"),
        (with_own_bags, "bags is a OwnBags, which TorchRec doesn't quantise; use an Embedding"),
        (Asking, "TraceError: symbolically traced variables cannot be used as inputs to control"),
        (Unscriptable, "can't be exported: "),
    ],
)
def test_what_stops_an_export_is_named(make: Callable[[], nn.Module], message: str) -> None:
    model = make().eval().requires_grad_(False)
    with pytest.raises(UnsupportedError, match=message) as caught:
        scripted(model)
    assert "the model of factory='mine:make' can't be exported" in str(caught.value)


def test_another_number_of_scores_is_refused() -> None:
    class OneScore(OwnModel):
        def forward(self, batch: Batch) -> Any:
            loss, (detached, logits, labels) = super().forward(batch)
            return loss, (detached, logits.sum(), labels)

    served_model = served_own_model(OneScore().eval(), DATASET, "mine:make")
    batch = next(iter(DATASET.batches(Split.EVAL, global_batch_size=4, rank=0, world_size=1)))
    with pytest.raises(UnsupportedError, match="gives 1 scores for 4 samples; return one for each"):
        served_model.scores(served_model.module(), batch)


def test_scores_that_need_labels_are_refused(
    served: tuple[ExportSource, Path, ExportRecord], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forward = OwnModel.forward

    def telling(self: OwnModel, batch: Batch) -> Any:
        loss, (detached, logits, labels) = forward(self, batch)
        return loss, (detached, logits + 0.1 * labels, labels)

    monkeypatch.setattr(OwnModel, "forward", telling)
    with pytest.raises(UnsupportedError, match="let labels count"), only_rank("export"):
        export_model(served[0], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_errors_of_the_models_of_the_package_stay_what_they_are() -> None:
    with pytest.raises(ZeroDivisionError), saying_what_stops(""):
        raise ZeroDivisionError
