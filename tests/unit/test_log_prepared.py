"""Prepared vocabularies, scales and counts are reused, or rebuilt for another layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support.logs import make_rows, table_config, write_log
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.logs.batches import TableData
from torchrec_2dsp.programs.data.logs.sections import TableConfig

RIGHT, SWAPPED = ("label", "user", "item", "x", "y"), ("label", "item", "user", "y", "x")
HASHED = {
    "held_out": {"by": "hash", "column": "user", "share": 0.3},
    "features": [{"name": name, "num_rows": 50} for name in ("user", "item")],
}
COUNTED = {
    "features": [{"name": name, "encoding": "vocabulary"} for name in ("user", "item")],
    "dense": [{"column": "x", "scale": "measured"}],
    "held_out": {"share": 0},
}


def log_data(folder: Path, prepared: str, columns: tuple[str, ...], **keys: Any) -> TableData:
    """Open a log with 60 rows and no header, with three users and 20 items."""
    file = folder / "log.csv"
    if not file.exists():
        file.write_text("".join(f"{n % 2},u{n % 3},'i{n % 20}',{n},{n * n}\n" for n in range(60)))
    tree = {"files": [str(file)], "label": "label", "columns": columns, "quote": "'", **keys}
    return make_config(TableConfig, {"prepared": str(folder / prepared), **tree}).dataset()


@pytest.mark.parametrize("last", ["1,u1", "1,u1\n", "1,u1,'i2',3,4"])
def test_a_last_line_may_be_cut_off(tmp_path: Path, last: str) -> None:
    log_data(tmp_path, "whole", RIGHT, **HASHED)
    log = tmp_path / "log.csv"
    log.write_text(log.read_text() + last)
    data = log_data(tmp_path, "cut", RIGHT, malformed_limit=1, **HASHED)
    batches = data.batches(Split.TRAIN, rank=0, world_size=1, global_batch_size=1)
    assert len(list(batches)) == data.num_rows(Split.TRAIN)
    assert len(data.malformed) == last.startswith("1,u1") - last.endswith("4")


@pytest.mark.parametrize("keys", [HASHED, COUNTED], ids=["counts", "vocabularies and scales"])
def test_another_layout_of_the_same_files_prepares_anew(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    log_data(tmp_path, "both", SWAPPED, **keys)
    again, fresh = (log_data(tmp_path, name, RIGHT, **keys) for name in ("both", "fresh"))
    assert again.fingerprint == fresh.fingerprint
    for split in Split:
        assert again.num_rows(split) == fresh.num_rows(split)
    unquoted = [log_data(tmp_path, name, RIGHT, quote="", **keys) for name in ("both", "unquoted")]
    assert unquoted[0].fingerprint == unquoted[1].fingerprint


def test_what_is_prepared_stays_where_its_column_does(tmp_path: Path) -> None:
    log_data(tmp_path, "prepared", RIGHT, **COUNTED)
    files = [*tmp_path.glob("prepared/*.*")]
    assert len(files) == 3
    times = [file.stat().st_mtime_ns for file in files]
    log_data(tmp_path, "prepared", (*RIGHT[:4], "other"), **COUNTED)
    # Another log may have another layout: its values are counted by the first one's.
    (tmp_path / "log.csv").write_text("0;1;u0;i1\n" * 9)
    columns = ("label", "x", "user", "item")
    other = log_data(tmp_path, "prepared", columns, delimiter=";", **COUNTED)
    assert [feature.num_rows for feature in other.features] == [5, 22]
    assert [file.stat().st_mtime_ns for file in files] == times


def test_what_an_earlier_version_prepared_is_taken_as_it_is(tmp_path: Path) -> None:
    first = log_data(tmp_path, "prepared", SWAPPED, **COUNTED)
    for file in tmp_path.glob("prepared/vocabulary_*"):
        table = pq.read_table(file)
        metadata = table.schema.metadata
        rules = {key: metadata[key] for key in (b"rules", b"log")}
        pq.write_table(table.replace_schema_metadata(rules), file)
    scales = tmp_path / "prepared" / "scales.json"
    stored = json.loads(scales.read_text())
    stored["x"] = {key: stored["x"][key] for key in ("rules", "mean", "std")}
    scales.write_text(json.dumps(stored))
    assert log_data(tmp_path, "prepared", RIGHT, **COUNTED).fingerprint == first.fingerprint


def test_scales_of_other_configs_stay_and_another_log_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fingerprint(column: str) -> Mapping[str, str]:
        keys = {**HASHED, "dense": [{"column": column, "scale": "measured"}]}
        return log_data(tmp_path, "prepared", RIGHT, **keys).fingerprint

    before = fingerprint("x")["scale of x"]
    fingerprint("y")
    assert json.loads((tmp_path / "prepared" / "scales.json").read_text()).keys() == {"x", "y"}
    assert "another log" not in caplog.text
    (tmp_path / "log.csv").write_text("0,u0,i1,1,1\n" * 9)
    assert fingerprint("x")["scale of x"] == before
    assert "scales.json ('x'): made from another log, and its values are scaled as" in caplog.text


def test_counts_of_a_split_are_remembered(tmp_path: Path) -> None:
    file = write_log(tmp_path / "a.csv", make_rows(40))
    held_out = {"by": "hash", "column": "user", "share": 0.5}
    data = table_config(file, held_out=held_out).dataset()
    counts = tmp_path / "prepared" / "row_counts.json"
    content = counts.read_text()
    again = table_config(file, held_out=held_out).dataset()
    assert again.num_rows(Split.EVAL) == data.num_rows(Split.EVAL) > 0
    assert counts.read_text() == content
    counts.write_text("{")
    with pytest.raises(ConfigError, match=r"row_counts.json can't be read: .*; delete it"):
        table_config(file, held_out=held_out).dataset()
