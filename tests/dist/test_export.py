"""An exported model scores like TorchRec's quantised tables, near the trained one, and alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.datasets.utils import Batch

from tests.support.exporting import (
    CELLS,
    DATA,
    Exported,
    OwnModel,
    Trained,
    as_views,
    exported,
    plain_evaluation,
    plain_scores,
    printed_alone,
    round_rows_,
    stock_model,
    train_all,
)
from tests.support.ranks import RankPool
from torchrec_2dsp.errors import CheckpointError, ConfigError, ExportError, UnsupportedError
from torchrec_2dsp.programs.config.config_file import make_config, with_absolute_paths
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig
from torchrec_2dsp.programs.export.export import ExportRecord, check_output, export_model
from torchrec_2dsp.programs.export.kinds import saying_what_stops, served_model, served_own_model
from torchrec_2dsp.programs.export.served import load_script, quantize_
from torchrec_2dsp.programs.export.source import ExportSource
from torchrec_2dsp.programs.launch import only_rank
from torchrec_2dsp.programs.models.kinds import has_clicks
from torchrec_2dsp.programs.train.config import TrainConfig

pytestmark = pytest.mark.dealt_file


@pytest.fixture(scope="module")
def trained(
    ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Trained]]]:
    """Train all cells; return their folder and each rank's results."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, ranks2.run(train_all, folder)


@pytest.fixture(scope="module")
def served(trained: tuple[Path, Any]) -> dict[str, Exported]:
    return {cell: exported(trained[0] / cell) for cell in CELLS}


@pytest.mark.parametrize("cell", CELLS)
def test_the_file_scores_as_tables_of_eight_bits_do(
    cell: str, served: dict[str, Any], trained: tuple[Path, Any]
) -> None:
    source, output, record = served[cell]
    model = stock_model(source)
    config = source.config
    dataset = config.data.dataset()
    as_served = served_model(model, config.model, dataset)
    held_out = dataset.batches(Split.EVAL, global_batch_size=16, rank=0, world_size=1)
    batches = list(islice(held_out, 2))
    exact = [plain_scores(model, batch) for batch in batches]
    tables = [weight for name, weight in model.named_parameters() if ".t_" in name]
    assert len(tables) == 2
    for weight in tables:
        round_rows_(weight)
    # A number on the border between two steps may be rounded either way: FBGEMM multiplies by the
    # inverse of the scale. One step of one number is 4e-3 of a row's range, which is 0.3. The own
    # model adds up more of them.
    tolerance = 5e-4 if cell == "own" else 2e-4
    script = load_script(output / "model.pt")
    largest = 0.0
    for batch, float_scores in zip(batches, exact, strict=True):
        request = as_served.request(batch)
        assert request is not None
        answer = script(*request)
        assert torch.equal(script(*as_views(*request))["scores"], answer["scores"])
        scores = plain_scores(model, batch)
        torch.testing.assert_close(answer["scores"], scores, atol=tolerance, rtol=0)
        if "probabilities" in answer:
            assert torch.equal(answer["probabilities"], torch.sigmoid(answer["scores"]))
        else:
            products = (answer["user_vectors"] * answer["item_vectors"]).sum(dim=1)
            torch.testing.assert_close(products, answer["scores"], atol=1e-6, rtol=1e-5)
        largest = max(largest, float((answer["scores"] - float_scores).abs().max()))
        # Of the batch, each sample alone, as the guide says a request is.
        for number in (0, 7):
            bags = [batch.sparse_features[name].to_dense()[number] for name in ("user", "item")]
            alone = (
                batch.dense_features[number : number + 1],
                torch.cat(bags),
                torch.tensor([len(bag) for bag in bags]),
            )
            # The rounding of float32.
            torch.testing.assert_close(
                script(*alone)["scores"], answer["scores"][number : number + 1], atol=1e-6, rtol=0
            )
    assert 0 < record.largest_difference < 0.02
    # The rounding of float32.
    assert record.largest_difference == pytest.approx(largest, abs=1e-6)
    # The rounding of float32, in which losses are added up in another order.
    whole = plain_evaluation(source, num_ranks=1)
    assert record.trained == pytest.approx(whole, rel=1e-5)
    assert record == ExportRecord.load(output / "export.json")
    # A byte for each of a row's 8 numbers and 4 for scale and offset, padded to 16.
    assert record.served_table_bytes == 70 * 16
    assert record.table_bytes == 70 * 8 * 4
    assert record.num_samples == 32
    assert (record.metric == "ne") == has_clicks(config.model)


@pytest.mark.parametrize("cell", CELLS)
def test_ranks_evaluate_as_the_plain_model_does_on_their_parts(
    cell: str, served: dict[str, Any], trained: tuple[Path, list[dict[str, Trained]]]
) -> None:
    """All differences between a run's metrics and its export's are explained.

    Ranks rank items within their own smaller batches. "laplace" splits have a threshold per
    rank in training; a save before the last evaluation gives all ranks the first one's.
    """
    source, _, record = served[cell]
    ranks = [metrics[cell] for metrics in trained[1]]
    thresholds = [rank.thresholds for rank in ranks]
    apart = plain_evaluation(source, num_ranks=2, thresholds=thresholds)
    assert [rank.metrics for rank in ranks] == [ranks[0].metrics] * 2
    # The rounding of float32, in which losses are added up in another order.
    assert ranks[0].metrics == pytest.approx(apart, rel=1e-5)
    is_equal = ranks[0].metrics == pytest.approx(record.trained, rel=1e-5)
    assert is_equal == (cell != "towers_in_a_batch")
    assert thresholds[0] == thresholds[1]
    assert bool(thresholds[0]) == (cell == "split")


@pytest.mark.parametrize("cell", ["split", "own"])
def test_a_process_without_the_package_and_a_factory_answers(
    cell: str, served: dict[str, Any]
) -> None:
    _, output, _ = served[cell]
    answers = printed_alone("serve.py", output)
    request = torch.zeros(2, 2), torch.ones(2, dtype=torch.int64), torch.tensor([1, 0, 1, 0])
    here = load_script(output / "model.pt")(*request)
    expected = [f"{name} (2,) {scores.tolist()}" for name, scores in here.items()]
    assert answers == expected


@pytest.mark.parametrize("ids", [[40, 0], [39, 30], [-1, 0]])
def test_ids_that_no_table_has_are_refused(served: dict[str, Any], ids: list[int]) -> None:
    script = load_script(served["dlrm"][1] / "model.pt")
    dense, lengths = torch.zeros(1, 2), torch.tensor([1, 1])
    assert script(dense, torch.tensor([39, 29]), lengths)["scores"].isfinite().all()
    with pytest.raises(torch.jit.Error, match="an id is negative, or its feature has fewer rows"):
        script(dense, torch.tensor(ids), lengths)


@pytest.mark.parametrize(
    ("cell", "kind", "outputs"),
    [
        ("towers", "two_tower", ["scores", "user_vectors", "item_vectors"]),
        ("own", "module:factory", ["scores", "probabilities"]),
    ],
)
def test_the_folder_says_what_a_request_is(
    cell: str, kind: str, outputs: list[str], served: dict[str, Any]
) -> None:
    content = json.loads((served[cell][1] / "features.json").read_text())
    assert (content["kind"], content["num_dense"]) == (kind, 2)
    assert content["features"] == [
        {"name": "user", "table": "t_user", "num_rows": 40, "dim": 8},
        {"name": "item", "table": "t_item", "num_rows": 30, "dim": 8},
    ]
    assert content["outputs"] == outputs


def write_config(folder: Path, config: TrainConfig) -> None:
    folder.mkdir()
    (folder / "config.toml").write_text(tomli_w.dumps(with_absolute_paths(config)))


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
    write_config(tmp_path / "no_folder", config)
    with pytest.raises(ConfigError, match=r"its config has no checkpoint\.folder"):
        ExportSource.find(tmp_path / "no_folder")
    elsewhere = config.checkpoint.model_copy(update={"folder": str(tmp_path / "empty")})
    write_config(tmp_path / "unfinished", config.model_copy(update={"checkpoint": elsewhere}))
    with pytest.raises(CheckpointError, match="has no finished checkpoint"):
        ExportSource.find(tmp_path / "unfinished")


def test_a_checkpoint_of_another_model_is_refused(
    served: dict[str, Any], trained: tuple[Path, Any], tmp_path: Path
) -> None:
    def export(cell: str, checkpoint: Path, **model: Any) -> None:
        source: ExportSource = served[cell][0]
        config = source.config
        config = config.model_copy(update={"model": config.model.model_copy(update=model)})
        with only_rank("export"):
            export_model(replace(source, config=config, checkpoint=checkpoint), tmp_path / "out")

    dlrm, towers = served["dlrm"][0].checkpoint, served["towers_in_a_batch"][0].checkpoint
    with pytest.raises(CheckpointError, match=r"is \(8,\) torch.float32 in .* but \(16,\)"):
        export("dlrm", dlrm, dim=16)
    with pytest.raises(CheckpointError, match="build the model with the tables"):
        export("dlrm", towers)
    # Names and shapes are equal, but the towers' outputs aren't.
    with pytest.raises(CheckpointError, match=r"model\.temperature was 0\.5 when .* is 2\.0 now"):
        export("towers_in_a_batch", towers, temperature=2.0)
    with pytest.raises(CheckpointError, match=r"has no \.metadata; give the folder of a finished"):
        export("dlrm", tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_model_that_serves_worse_leaves_nothing(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = served["dlrm"][0]
    with pytest.raises(ConfigError, match="exists and isn't an empty folder"), only_rank("export"):
        export_model(source, served["dlrm"][1])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is replaced as a whole; name the folder"):
        check_output(Path("."))

    def damaged_(model: nn.Module) -> None:
        quantize_(model)
        for name, buffer in model.named_buffers():
            if "embedding_bags" in name:
                buffer.copy_(buffer.flip(0))

    users_own = tmp_path / "out.draft" / "notes.txt"
    users_own.parent.mkdir()
    users_own.touch()
    monkeypatch.setattr("torchrec_2dsp.programs.export.export.quantize_", damaged_)
    message = r"ne is .* as trained and .* as served, worse by"
    with pytest.raises(ExportError, match=message), only_rank("export"):
        export_model(source, tmp_path / "out", max_loss=0.0)
    assert list(tmp_path.rglob("*")) == [users_own.parent, users_own]


def test_folders_that_cannot_be_replaced_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    volume, link = tmp_path / "volume", tmp_path / "link"
    volume.mkdir()
    link.symlink_to(volume)
    check_output(volume)
    monkeypatch.setattr("os.path.ismount", lambda path: path == volume)
    for folder in (volume, link):
        message = rf"{folder.name} is a link or a mounted volume, .*; name a folder in it"
        with pytest.raises(ConfigError, match=message):
            check_output(folder)
    check_output(link / "served")
    assert not list(volume.iterdir())


DATASET = make_config(SyntheticConfig, DATA).dataset()


class OwnBags(EmbeddingBagCollection):
    """Bags that TorchRec doesn't know."""


class Asking(OwnModel):
    """A model whose control flow depends on its numbers."""

    def forward(self, batch: Batch) -> Any:
        if batch.dense_features.sum() > 0:
            return super().forward(batch)
        return super().forward(batch)


class Unscriptable(OwnModel):
    """A model that calls a function which TorchScript lacks."""

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
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forward = OwnModel.forward

    def telling(self: OwnModel, batch: Batch) -> Any:
        loss, (detached, logits, labels) = forward(self, batch)
        return loss, (detached, logits + 0.1 * labels, labels)

    monkeypatch.setattr(OwnModel, "forward", telling)
    with pytest.raises(UnsupportedError, match="let labels count"), only_rank("export"):
        export_model(served["own"][0], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_diverged_model_is_refused_as_such(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forward = OwnModel.forward

    def diverged(self: OwnModel, batch: Batch) -> Any:
        loss, (detached, logits, labels) = forward(self, batch)
        return loss, (detached, logits * torch.nan, labels)

    monkeypatch.setattr(OwnModel, "forward", diverged)
    message = "32 of 32 scores of the trained model aren't finite"
    with pytest.raises(ExportError, match=message), only_rank("export"):
        export_model(served["own"][0], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_errors_of_the_models_of_the_package_stay_what_they_are() -> None:
    with pytest.raises(ZeroDivisionError), saying_what_stops(""):
        raise ZeroDivisionError
