"""Files of access statistics that can't be what they say are refused, with file and column."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import torchrec_2dsp as tdsp
from torchrec_2dsp.access.table_access import TableAccess

KEY = b"torchrec_2dsp.access"


def written(tmp_path: Path) -> Path:
    """Five known rows of two tables, with an empty table between them."""
    path = tmp_path / "stats.parquet"
    tables = {
        "a": TableAccess.of_counts([0, 7, 1, 2], num_samples=5),
        "b": TableAccess.of_counts([0, 0], num_samples=5),
        "c": TableAccess.of_counts([3, 0, 9], num_samples=5),
    }
    tdsp.AccessStats(tables).save(path)
    return path


def rewritten(path: Path, columns: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
    """The file with other columns, or other metadata, and without a checksum."""
    content = pq.read_table(path)
    header = json.loads(content.schema.metadata[KEY])
    del header["checksum"]
    header |= metadata or {}
    for name, values in columns.items():
        index = content.column_names.index(name)
        content = content.set_column(index, name, pa.array(values))
    content = content.replace_schema_metadata({KEY: json.dumps(header).encode()})
    pq.write_table(content, path)


def test_files_without_a_checksum_are_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    known = tdsp.AccessStats.load(path)
    rewritten(path, {})
    assert tdsp.AccessStats.load(path)["c"].rows.tolist() == known["c"].rows.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"row": [1, 3, 2, 2, 3]}, r"table 'c', column 'row': 3 is no row of a table of 3 rows"),
        ({"row": [1, 3, -2, 2, 0]}, r"table 'a', column 'row': -2 is no row of a table of 4 rows"),
        ({"row": [1, 3, 2, 2, 2]}, r"table 'c', column 'row': 2 is there more than once"),
        ({"row": [1.0, 3, 2, 2, 0]}, r"column 'row' is double, but should be int64"),
        ({"row": [1, 3, 2, 2, None]}, r"column 'row' has lines without a value"),
        ({"count": [7.0, 2, np.nan, 9, 3]}, r"table 'a', column 'count': nan is no count"),
        ({"count": [np.inf, 2, 1, 9, 3]}, r"table 'a', column 'count': inf is no count"),
        ({"count": [7.0, 2, -1, 9, 3]}, r"table 'a', column 'count': -1.0 is no count"),
        ({"count": [7.0, 2, 1, 3, 9]}, r"table 'c', column 'count': the most used rows aren't fi"),
        ({"count": ["7", "2", "1", "9", "3"]}, r"column 'count' is string, but should be double"),
        ({"table": ["a", "a", "a", "c", "c"]}, r"column 'table' is string, but should be dict"),
    ],
)
def test_impossible_columns_are_named(
    columns: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path)
    rewritten(path, columns)
    with pytest.raises(tdsp.errors.ConfigError, match=message) as error:
        tdsp.AccessStats.load(path)
    assert str(path) in str(error.value)
    assert "count again" in str(error.value)


TABLE: dict[str, Any] = {
    "name": "a",
    "num_rows": 4,
    "num_samples": 5.0,
    "tail_rows": 0,
    "tail_lookups": 0.0,
    "max_error": 0.0,
}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"version": True}, "version: Input should be a valid integer"),
        ({"version": None}, "version: Input should be a valid integer"),
        ({"version": 3}, "of version 3, and this package reads version 1"),
        ({"tables": []}, "column 'table' has 'a', which the metadata doesn't know"),
        ({"tables": [TABLE]}, "column 'table' has '.', which the metadata doesn't know"),
        ({"tables": [TABLE, TABLE]}, "table 'a' is there twice"),
        ({"tables": [TABLE | {"num_rows": 4.5}]}, r"tables\.0\.num_rows: .*integer"),
        ({"tables": [TABLE | {"num_samples": -1}]}, r"tables\.0\.num_samples: .*greater than or"),
        ({"tables": [TABLE | {"tail_lookups": "x"}]}, r"tables\.0\.tail_lookups: .*number"),
        ({"tables": [TABLE | {"max_error": float("nan")}]}, r"tables\.0\.max_error: .*finite"),
        ({"tables": [TABLE | {"other": 1}]}, r"tables\.0\.other: Extra inputs"),
        ({"checksum": "sha256:0"}, "isn't as it was written: its checksum is another"),
    ],
)
def test_impossible_metadata_is_named(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path)
    rewritten(path, {}, metadata)
    with pytest.raises(tdsp.errors.ConfigError, match=message) as error:
        tdsp.AccessStats.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", [b"", b"\xff", b"[1]", b"null", b"[" * 100_000])
def test_metadata_that_is_none(text: bytes, tmp_path: Path) -> None:
    path = written(tmp_path)
    pq.write_table(pq.read_table(path).replace_schema_metadata({KEY: text}), path)
    with pytest.raises(tdsp.errors.ConfigError, match=r"stats\.parquet, metadata"):
        tdsp.AccessStats.load(path)


@pytest.mark.parametrize("changed", [{"counts": np.array([np.nan])}, {"num_samples": -1.0}])
def test_what_could_not_be_read_again_is_not_written(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    access: dict[str, Any] = {
        "num_rows": 4,
        "num_samples": 1.0,
        "rows": np.array([2]),
        "counts": np.array([1.0]),
    }
    with pytest.raises(tdsp.errors.ConfigError, match="table 't' can't be written"):
        tdsp.AccessStats({"t": TableAccess(**access | changed)}).save(tmp_path / "t.parquet")
    assert not list(tmp_path.iterdir())


def test_many_row_groups_are_one_log(tmp_path: Path) -> None:
    path = written(tmp_path)
    known = tdsp.AccessStats.load(path)
    pq.write_table(pq.read_table(path), path, row_group_size=1)
    back = tdsp.AccessStats.load(path)
    for name in known:
        assert back[name].rows.tolist() == known[name].rows.tolist()
        assert back[name].counts.tolist() == known[name].counts.tolist()


@pytest.mark.parametrize("value", [0x07, 0x81, 0xFF])
def test_damage_that_parquet_does_not_notice_is_named(value: int, tmp_path: Path) -> None:
    path = written(tmp_path)
    pq.write_table(pq.read_table(path), path, compression="none", write_statistics=False)
    intact = path.read_bytes()
    for place in range(80):
        path.write_bytes(intact[:place] + bytes([value]) + intact[place + 1 :])
        with contextlib.suppress(tdsp.errors.ConfigError):
            tdsp.AccessStats.load(path)
