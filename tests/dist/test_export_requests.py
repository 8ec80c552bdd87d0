"""A log's raw values, encoded by an export's request encoder, get the trained scores."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.exporting import (
    LAYERS,
    exported,
    plain_scores,
    run_config,
    stock_model,
)
from tests.support.logs import Row, hashed_row, make_rows, write_interactions, write_log
from tests.support.ranks import RankPool
from tests.support.train_runs import train_in_folder
from torchrec_2dsp.errors import CheckpointError, ConfigError, InputError
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.logs.config import DenseColumn
from torchrec_2dsp.programs.export.export import ExportRecord, export_model
from torchrec_2dsp.programs.export.requests import HistoryEncoder, RequestEncoder
from torchrec_2dsp.programs.export.served import load_script
from torchrec_2dsp.programs.export.source import ExportSource
from torchrec_2dsp.programs.launch import only_rank
from torchrec_2dsp.programs.train.config import TrainConfig

NUM_TAGS = 20
ROWS = make_rows(160)
HELD_OUT = ROWS[-40:]


def config_in(folder: Path) -> TrainConfig:
    data = {
        "kind": "table",
        "files": [str(folder / "log.csv")],
        "label": "label",
        "dense": [{"column": "number", "lowest": 0, "log1p": True, "scale": "measured"}],
        "features": [
            {"name": "site/user", "column": "user", "encoding": "vocabulary", "min_count": 2},
            {"name": "tags", "separator": "|", "num_rows": NUM_TAGS},
        ],
        "held_out": {"by": "last", "share": len(HELD_OUT) / len(ROWS)},
        "prepared": str(folder / "made"),
        "epochs": 0,
    }
    return run_config(folder, data, LAYERS, lr=0.1, steps=8, global_batch_size=40, eval_steps=1)


def check_refusals(encoder: RequestEncoder, columns: dict[str, list[Any]], served: Path) -> None:
    """Check that invalid columns, and folders without a complete export of a log, are refused."""
    for wrong_columns, message in (
        ({"number": [1], "user": ["u"]}, "the column 'tags' is missing; a request has"),
        (columns | {"label": [0]}, "the column 'label' isn't known"),
        (columns | {"number": [1]}, "columns have different numbers of values"),
    ):
        with pytest.raises(ConfigError, match=message):
            encoder.encode(wrong_columns)
    two = {"number": [1, None], "user": ["ann", None], "tags": ["t1|t2", ""]}
    for column, values in (
        ("user", [1.0, None]),
        ("user", ["a", 3]),
        ("user", [2**64 - 1, 1]),
        ("user", [2**70, 1]),
        ("tags", [{"a": 1}, None]),
        ("number", ["1.0", ""]),
        ("number", [[1.0], [2.0]]),
    ):
        with pytest.raises(InputError, match=f"^column '{column}' can't be encoded: .*; give ids"):
            encoder.encode(two | {column: values})
    as_lists = encoder.encode(two | {"tags": [["t1", "t2"], []]})
    for part, expected in zip(as_lists, encoder.encode(two), strict=True):
        assert torch.equal(part, expected)
    (served / "prepared" / "vocabulary_site" / "user.parquet").unlink()
    with pytest.raises(ConfigError, match=r"lacks .*vocabulary_site/user\.parquet; copy it whole"):
        RequestEncoder.load(served)
    (served / "data.toml").unlink()
    with pytest.raises(ConfigError, match=r"has no data\.toml"):
        RequestEncoder.load(served)


def expected_ids(row: Row, vocabulary: list[str]) -> tuple[list[int], list[int]]:
    """Return the table rows for a log row's values, as the guide defines them."""
    known = vocabulary.index(row.user) + 2 if row.user in vocabulary else 1
    tags = [hashed_row(tag.encode(), NUM_TAGS) for tag in row.tags]
    return [known if row.user else 0], tags


def test_raw_values_get_the_scores_of_the_trained_model(ranks2: RankPool, tmp_path: Path) -> None:
    write_log(tmp_path / "log.csv", ROWS)
    ranks2.run(train_in_folder, config_in(tmp_path))
    source, served, record = exported(tmp_path)
    config = source.config
    (trained_on,) = config.data.dataset().batches(
        Split.EVAL, global_batch_size=len(HELD_OUT), rank=0, world_size=1
    )
    exact = plain_scores(stock_model(source), trained_on)

    shutil.rmtree(tmp_path / "made")
    (tmp_path / "log.csv").unlink()
    strangers = [Row(7, 0, "a user of whom nobody knew", ("t1", "a new tag")), Row(3, 1, "", ())]
    asked = [*HELD_OUT, *strangers]
    encoder = RequestEncoder.load(served)
    columns = {
        "number": [row.number for row in asked],
        "user": [row.user or None for row in asked],
        "tags": ["|".join(row.tags) for row in asked],
    }
    assert sorted(encoder.columns) == sorted(columns)
    dense, ids, lengths = encoder.encode(columns)
    vocabulary = pq.read_table(served / "prepared" / "vocabulary_site" / "user.parquet")["value"]
    values = [value.decode() for value in vocabulary.cast(pa.binary()).to_pylist()]
    assert set(values) == {row.user for row in ROWS if row.user}
    by_feature = [*zip(*(expected_ids(row, values) for row in asked), strict=True)]
    assert lengths.tolist() == [len(bag) for bags in by_feature for bag in bags]
    assert ids.tolist() == [row for bags in by_feature for bag in bags for row in bag]
    scale = json.loads((served / "prepared" / "scales.json").read_text())["number"]
    numbers = np.log1p([row.number for row in asked])
    # The rounding of float32.
    standard = torch.from_numpy((numbers - scale["mean"]) / scale["std"]).float()
    torch.testing.assert_close(dense[:, 0], standard, rtol=1e-5, atol=1e-6)
    rows_of_training = np.log1p([row.number for row in ROWS[: -len(HELD_OUT)]])
    assert scale["mean"] == pytest.approx(rows_of_training.mean(), rel=1e-6)

    inputs = json.loads((served / "features.json").read_text())
    assert [(each["name"], each["num_rows"]) for each in inputs["features"]] == [
        ("site/user", len(values) + 2),
        ("tags", NUM_TAGS),
    ]
    script = load_script(served / "model.pt")
    answer = script(dense, ids, lengths)["scores"]
    assert answer.isfinite().all()
    differences = (answer[: len(HELD_OUT)] - exact).abs()
    # Rows are about a tenth, in steps of a 255th of their range, as the export itself measured.
    assert 0 < differences.max() <= record.largest_difference * (1 + 1e-3) < 0.01
    # Which rows are looked up is seen in the scores.
    wrong = script(dense, ids.flip(0) % 5, lengths)
    assert (wrong["scores"][: len(HELD_OUT)] - exact).abs().max() > 5 * differences.max()
    assert record == ExportRecord.load(served / "export.json")
    check_refusals(encoder, columns, served)


def refused_export(source: ExportSource, folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused, only_rank("export"):
        export_model(source, folder / "served")
    assert not (folder / "served").exists()
    return str(refused.value)


def test_an_export_by_another_encoding_or_log_is_refused(ranks2: RankPool, tmp_path: Path) -> None:
    write_log(tmp_path / "log.csv", ROWS)
    ranks2.run(train_in_folder, config_in(tmp_path))
    (tmp_path / "made").rename(tmp_path / "moved")
    source = ExportSource.find(tmp_path / "out")

    def with_data(**keys: Any) -> ExportSource:
        data = source.config.data.model_copy(update={"prepared": str(tmp_path / "moved"), **keys})
        return replace(source, config=source.config.model_copy(update={"data": data}))

    with only_rank("export"):
        record = export_model(with_data(), tmp_path / "by_another_path", max_loss=0.01)
    assert record.num_samples == len(HELD_OUT)
    unscaled = DenseColumn(column="number", lowest=0, log1p=True)
    key = 'data.dense.0.scale was "measured" when it was saved, and is "none" now; give the'
    assert key in refused_export(with_data(dense=(unscaled,)), tmp_path)
    run = source.config.runs["main"].model_copy(update={"splits": {"over": 0.5}})
    split = source.config.model_copy(update={"runs": {"main": run}})
    key = "run.splits.over was nothing when it was saved, and is 0.5 now"
    assert key in refused_export(replace(source, config=split), tmp_path)
    # As many users; the formerly least frequent one is now the most frequent.
    users = [row.user for row in ROWS[: -len(HELD_OUT)] if row.user]
    ordered = sorted(set(users), key=users.count)
    swapped = {ordered[0]: ordered[-1], ordered[-1]: ordered[0]}
    rows = [replace(row, user=swapped.get(row.user, row.user)) for row in ROWS]
    write_log(tmp_path / "log.csv", rows)
    key = "the log's vocabulary of site/user was "
    assert key in refused_export(with_data(prepared=str(tmp_path / "anew")), tmp_path)


MAX_LENGTH = 5


def write_histories(path: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Write a log with numeric item names and one non-ASCII name.

    Returns:
        Each user's items in time order, and all items, the most frequent first.
    """
    random = np.random.default_rng(0)
    rows = [
        (f"u{random.integers(20)}", ["né", "1193", "12", "7"][min(random.zipf(1.7), 4) - 1], time)
        for time in range(150)
    ]
    write_interactions(path, rows)
    items: dict[str, list[str]] = {}
    for user, item, _ in rows:
        items.setdefault(user, []).append(item)
    counts = {item: sum(item == other for _, other, _ in rows) for _, item, _ in rows}
    return items, sorted(counts, key=lambda item: (-counts[item], item))


@pytest.mark.dealt_suite
def test_names_of_items_get_the_scores_of_the_trained_model(
    ranks2: RankPool, tmp_path: Path
) -> None:
    by_user, by_frequency = write_histories(tmp_path / "log.inter")
    data = {
        "kind": "interactions",
        "files": [str(tmp_path / "log.inter")],
        "feature": "movie",
        "epochs": 0,
        "num_ahead": 0,
    }
    sequences = {"kind": "sequence", "feature": "movie", "dim": 8, "max_length": MAX_LENGTH}
    ranks2.run(train_in_folder, run_config(tmp_path, data, sequences, eval_steps=1))
    source, served, _ = exported(tmp_path, max_loss=1.0)
    model = stock_model(source)
    weight = model.get_parameter("embeddings.embeddings.t_movie.weight")
    script = load_script(served / "model.pt")
    weight.copy_(script.item_vectors(torch.arange(len(by_frequency))))

    (tmp_path / "log.inter").unlink()
    encoder = HistoryEncoder.load(served)
    histories = [*by_user.values(), ["a film that nobody saw", "12", ""], [1193, "né".encode()]]
    known = [*by_user.values(), ["12"], ["1193", "né"]]
    dense, ids, lengths = encoder.encode(histories)
    assert dense.shape == (len(histories), 0)
    assert lengths.tolist() == [len(history) for history in known]
    assert ids.tolist() == [by_frequency.index(item) for history in known for item in history]
    answer = script.next_items(dense, ids, lengths, len(by_frequency), False)
    for history, names, scores in zip(
        known, encoder.names(answer["items"]), answer["scores"], strict=True
    ):
        numbers = [by_frequency.index(item) for item in history][1 - MAX_LENGTH :]
        vector = model.get_submodule("dense")(weight[numbers].unsqueeze(0))[0, -1]
        order = [by_frequency.index(str(name)) for name in names]
        assert sorted(order) == list(range(len(by_frequency)))
        # The rounding of float32.
        torch.testing.assert_close(scores, (weight @ vector)[order], atol=5e-5, rtol=1e-5)
        assert (scores.diff() <= 0).all()
    assert encoder.names(torch.tensor([[1, -1], [-1, 0]])) == [
        [by_frequency[1], None],
        [None, by_frequency[0]],
    ]
    for items in (answer["items"][0], answer["items"] + 1, answer["scores"]):
        with pytest.raises(InputError, match=r"items aren't rows of numbers below 4; give those"):
            encoder.names(items)

    with pytest.raises(ConfigError, match="histories of items; use HistoryEncoder"):
        RequestEncoder.load(served)
    (served / "prepared" / "vocabulary_movie.parquet").unlink()
    with pytest.raises(ConfigError, match=r"lacks .*vocabulary_movie\.parquet; copy it whole"):
        HistoryEncoder.load(served)
    (served / "data.toml").unlink()
    with pytest.raises(ConfigError, match=r"has no data\.toml"):
        HistoryEncoder.load(served)
