"""An exported model scores as TorchRec's quantised tables do, near the trained one, and alone."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
    CELLS,
    DATA,
    HALF_PRECISION,
    Trained,
    plain_evaluation,
    plain_scores,
    printed_alone,
    quantized_by_hand,
    stock_model,
    train_all,
    train_config,
)
from tests.support.ranks import RankPool
from torchrec_2dsp.errors import CheckpointError, ConfigError, ExportError, UnsupportedError
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.data.dataset import DatasetFeature, Split
from torchrec_2dsp.programs.export.export import ExportRecord, export_model
from torchrec_2dsp.programs.export.kinds import saying_what_stops, served_model, served_own_model
from torchrec_2dsp.programs.export.quality import HeldOutBatches
from torchrec_2dsp.programs.export.served import load_script, quantize_
from torchrec_2dsp.programs.export.source import ExportSource
from torchrec_2dsp.programs.launch import only_rank
from torchrec_2dsp.programs.models.kinds import dataset_for
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.results import RunFolder

pytestmark = pytest.mark.dealt_file


@pytest.fixture(scope="module")
def trained(
    ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Trained]]]:
    """Train all cells; return their folder and each rank's results."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, ranks2.run(train_all, folder)


@pytest.fixture(scope="module")
def served(trained: tuple[Path, Any]) -> dict[str, tuple[ExportSource, Path, ExportRecord]]:
    folder, exports = trained[0], {}
    for cell in CELLS:
        source = ExportSource.find(folder / cell / "out")
        output = folder / cell / "served"
        with only_rank("export"):
            exports[cell] = source, output, export_model(source, output, max_loss=0.01)
    return exports


@pytest.mark.parametrize("cell", CELLS)
def test_the_file_scores_as_tables_of_eight_bits_do(
    cell: str, served: dict[str, Any], trained: tuple[Path, Any]
) -> None:
    source, output, record = served[cell]
    model = stock_model(source)
    config = source.config
    as_served = served_model(model, config.model, config.data.dataset())
    held_out = HeldOutBatches(config, dataset_for(config.model, config.data.dataset()))
    batches = list(held_out)
    exact = [plain_scores(model, batch) for batch in batches]
    tables: Any = next(
        module for module in model.modules() if hasattr(module, "embedding_bag_configs")
    )
    for table in tables.embedding_bags.children():
        weight: Any = table.weight
        rounded = quantized_by_hand(weight)
        span = weight.amax(dim=1) - weight.amin(dim=1)
        bound = span / 510 + 2 * HALF_PRECISION * weight.abs().amax(dim=1)
        assert ((rounded - weight).abs().amax(dim=1) <= bound).all()
        weight.copy_(rounded)
    script = load_script(output / "model.pt")
    largest = 0.0
    for batch, float_scores in zip(batches, exact, strict=True):
        request = as_served.request(batch)
        assert request is not None
        answer = script(*request)
        # A number on the border between two steps may be rounded either way: FBGEMM multiplies by
        # the inverse of the scale. One step of one number is 4e-3 of a row's range, which is 0.3.
        torch.testing.assert_close(answer["scores"], plain_scores(model, batch), atol=2e-4, rtol=0)
        if "probabilities" in answer:
            assert torch.equal(answer["probabilities"], torch.sigmoid(answer["scores"]))
        else:
            products = (answer["user_vectors"] * answer["item_vectors"]).sum(dim=1)
            torch.testing.assert_close(products, answer["scores"], atol=1e-6, rtol=1e-5)
        largest = max(largest, float((answer["scores"] - float_scores).abs().max()))
    assert 0 < record.largest_difference < 0.02
    # The rounding of float32.
    assert record.largest_difference == pytest.approx(largest, abs=1e-6)
    # The rounding of float32, in which losses are added up in another order.
    whole = plain_evaluation(source, num_ranks=1)
    assert record.trained == pytest.approx(whole, rel=1e-5)
    assert record == ExportRecord.load(output / "export.json")
    # A byte for each of a row's 8 numbers and 4 for its scale and offset, padded to 16.
    assert record.served_table_bytes == 70 * 16
    assert record.table_bytes == 70 * 8 * 4


@pytest.mark.parametrize("cell", CELLS)
def test_ranks_evaluate_as_the_plain_model_does_on_their_parts(
    cell: str, served: dict[str, Any], trained: tuple[Path, list[dict[str, Trained]]]
) -> None:
    """Explain all differences between a run's metrics and its export's.

    Ranks rank items within their own smaller batches. Splits by "laplace" have a threshold per
    rank, but the checkpoint keeps only one.
    """
    source, _, record = served[cell]
    ranks = [metrics[cell] for metrics in trained[1]]
    thresholds = [rank.thresholds for rank in ranks]
    apart = plain_evaluation(source, num_ranks=2, thresholds=thresholds)
    assert [rank.metrics for rank in ranks] == [ranks[0].metrics] * 2
    # The rounding of float32, in which losses are added up in another order.
    assert ranks[0].metrics == pytest.approx(apart, rel=1e-5)
    is_equal = ranks[0].metrics == pytest.approx(record.trained, rel=1e-5)
    assert is_equal == (cell not in ("split", "towers_in_a_batch"))
    assert (thresholds[0] != thresholds[1]) == (cell == "split")


def test_a_process_without_the_package_answers(served: dict[str, Any]) -> None:
    _, output, _ = served["split"]
    answers = printed_alone("serve.py", output)
    request = torch.zeros(2, 2), torch.ones(2, dtype=torch.int64), torch.tensor([1, 0, 1, 0])
    here = load_script(output / "model.pt")(*request)
    expected = [f"{name} (2,) {scores.tolist()}" for name, scores in here.items()]
    assert answers == expected


@pytest.mark.parametrize(
    ("dense", "values", "lengths", "message"),
    [
        ((1, 2), [40, 0], [1, 1], "an id is negative, or its feature has fewer rows"),
        ((1, 2), [39, 30], [1, 1], "an id is negative, or its feature has fewer rows"),
        ((1, 2), [-1, 0], [1, 1], "an id is negative, or its feature has fewer rows"),
        ((1, 2), [1, 1, 1], [1, 1], "lengths add up to 2, and there are 3 values"),
        ((1, 2), [1, 1], [3, -1], "no negative length"),
        ((1, 2), [1], [1], r"lengths has the shape \[1\]; give 2 numbers"),
        ((1, 3), [1, 1], [1, 1], r"dense has the shape \[1, 3\]; .* and 2 numbers in each"),
        ((0, 2), [], [], "give a row for each sample, one at least"),
    ],
)
def test_a_request_that_cannot_be_right_is_refused(
    served: dict[str, Any],
    dense: tuple[int, int],
    values: list[int],
    lengths: list[int],
    message: str,
) -> None:
    script = load_script(served["dlrm"][1] / "model.pt")
    last_rows = torch.zeros(1, 2), torch.tensor([39, 29]), torch.tensor([1, 1])
    assert script(*last_rows)["scores"].isfinite().all()
    ids, counts = (torch.tensor(numbers, dtype=torch.int64) for numbers in (values, lengths))
    with pytest.raises(torch.jit.Error, match=message):
        script(torch.zeros(dense), ids, counts)


def test_the_folder_says_what_a_request_is(served: dict[str, Any]) -> None:
    content = json.loads((served["towers"][1] / "features.json").read_text())
    assert content["kind"] == "two_tower"
    assert content["num_dense"] == 2
    assert [(each["name"], each["num_rows"], each["dim"]) for each in content["features"]] == [
        ("user", 40, 8),
        ("item", 30, 8),
    ]
    assert content["outputs"] == ["scores", "user_vectors", "item_vectors"]


def test_a_source_that_cannot_be_exported_is_named(
    served: dict[str, Any], trained: tuple[Path, Any], tmp_path: Path
) -> None:
    out, (source, _, _) = trained[0] / "dlrm" / "out", served["dlrm"]
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere"):
        ExportSource.find(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="there is no run 'other'; the config has main"):
        ExportSource.find(out, run="other")
    with pytest.raises(ConfigError, match="has its config already, and --config demo is another"):
        ExportSource.find(out, config="demo")
    with pytest.raises(ConfigError, match="name the config that it was trained by with --config"):
        ExportSource.find(source.checkpoint)
    again = ExportSource.find(source.checkpoint, config=str(out / "config.toml"))
    assert again == replace(source, checkpoint=source.checkpoint)
    with pytest.raises(ConfigError, match="choose the one to export with --only"):
        ExportSource.find(source.checkpoint, config="demo")
    config = source.config.model_copy(
        update={"checkpoint": source.config.checkpoint.model_copy(update={"folder": ""})}
    )
    RunFolder(tmp_path / "no_folder", config)
    with pytest.raises(ConfigError, match=r"its config has no checkpoint\.folder"):
        ExportSource.find(tmp_path / "no_folder")
    elsewhere = config.checkpoint.model_copy(update={"folder": str(tmp_path / "empty")})
    RunFolder(tmp_path / "unfinished", config.model_copy(update={"checkpoint": elsewhere}))
    with pytest.raises(CheckpointError, match="has no finished checkpoint"):
        ExportSource.find(tmp_path / "unfinished")


def test_a_checkpoint_of_another_model_is_refused(
    served: dict[str, Any], trained: tuple[Path, Any], tmp_path: Path
) -> None:
    def exported(cell: str, checkpoint: Path, **model: Any) -> None:
        source: ExportSource = served[cell][0]
        config = source.config
        config = config.model_copy(update={"model": config.model.model_copy(update=model)})
        with only_rank("export"):
            export_model(replace(source, config=config, checkpoint=checkpoint), tmp_path / "out")

    dlrm, towers = served["dlrm"][0].checkpoint, served["towers_in_a_batch"][0].checkpoint
    with pytest.raises(CheckpointError, match=r"is \(8,\) torch.float32 in .* but \(16,\)"):
        exported("dlrm", dlrm, dim=16)
    with pytest.raises(CheckpointError, match="build the model with the tables"):
        exported("dlrm", towers)
    # Names and shapes are equal, and what the towers give isn't.
    with pytest.raises(CheckpointError, match=r"model\.temperature was 0\.5 when .* says 2\.0"):
        exported("towers_in_a_batch", towers, temperature=2.0)
    with pytest.raises(CheckpointError, match=r"has no \.metadata; give the folder of a finished"):
        exported("dlrm", tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_model_that_serves_worse_leaves_nothing(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = served["dlrm"][0]
    with pytest.raises(ConfigError, match="exists and isn't an empty folder"), only_rank("export"):
        export_model(source, served["dlrm"][1])

    def damaged_(model: nn.Module) -> None:
        quantize_(model)
        for name, buffer in model.named_buffers():
            if "embedding_bags" in name:
                buffer.copy_(buffer.flip(0))

    monkeypatch.setattr("torchrec_2dsp.programs.export.export.quantize_", damaged_)
    message = r"ne is .* as trained and .* as served, worse by"
    with pytest.raises(ExportError, match=message), only_rank("export"):
        export_model(source, tmp_path / "out", max_loss=0.0)
    assert not list(tmp_path.iterdir())


NUM_USERS, NUM_ITEMS, MOST_IDS, DIM = 40, 30, 3, 8
DATASET = make_config(TrainConfig, {"data": DATA, "runs": {"main": {}}}).data.dataset()


class OwnModel(nn.Module):
    """User bags and item sequences, in a model that isn't one of the built-in kinds."""

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
def served_own(
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
    served_own: tuple[ExportSource, Path, ExportRecord],
) -> None:
    source, output, record = served_own
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
    served_own: tuple[ExportSource, Path, ExportRecord],
) -> None:
    _, output, _ = served_own
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
    served_own: tuple[ExportSource, Path, ExportRecord],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    forward = OwnModel.forward

    def telling(self: OwnModel, batch: Batch) -> Any:
        loss, (detached, logits, labels) = forward(self, batch)
        return loss, (detached, logits + 0.1 * labels, labels)

    monkeypatch.setattr(OwnModel, "forward", telling)
    with pytest.raises(UnsupportedError, match="let labels count"), only_rank("export"):
        export_model(served_own[0], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_errors_of_the_models_of_the_package_stay_what_they_are() -> None:
    with pytest.raises(ZeroDivisionError), saying_what_stops(""):
        raise ZeroDivisionError
