"""Values become ids and numbers: hashes, vocabularies, times, scales, and well-known logs."""

import gzip
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st
from pyarrow import csv

from tests.support.logs import (
    REAL_LOGS,
    content_of,
    global_batches,
    hashed_row,
    make_rows,
    plain_hash,
    table_config,
    whole_epoch,
    write_log,
)
from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.programs.config.config_file import load_config, make_config
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.logs.config import InteractionsLayout, SparseColumn
from torchrec_2dsp.programs.data.logs.encoder import Moments
from torchrec_2dsp.programs.data.logs.ids import (
    ValueCounter,
    collision_rate,
    hash_texts,
    rows_of,
    texts_of,
    times_of,
    values_behind,
)
from torchrec_2dsp.programs.data.logs.sections import AvazuConfig, CriteoConfig, TableConfig

HEADS = REAL_LOGS / "criteo_avazu_head"
needs_heads = pytest.mark.skipif(not HEADS.exists(), reason="the heads of the logs aren't here")


@given(st.lists(st.binary(max_size=40)), st.integers(0, 3))
def test_the_hash_is_the_plain_one(texts: list[bytes], skipped: int) -> None:
    array = pa.array(texts, pa.binary())[skipped:]
    assert hash_texts(array).tolist() == [plain_hash(text) for text in texts[skipped:]]


def test_hashes_are_spread_evenly_and_collide_as_often_as_computed() -> None:
    num_values, num_rows = 50_000, 100_000
    rows = rows_of(
        hash_texts(pa.array([f"user {n}".encode() for n in range(num_values)])), num_rows
    )
    counts = np.bincount(rows, minlength=num_rows)
    shared = counts[counts > 1].sum() / num_values
    # 50,000 draws: the share's standard deviation is below 0.003.
    assert shared == pytest.approx(collision_rate(num_values, num_rows), abs=0.01)
    assert values_behind((counts > 0).sum(), num_rows) == pytest.approx(num_values, rel=0.02)
    by_tenth = counts.reshape(10, -1).sum(axis=1)
    assert np.abs(by_tenth / num_values - 0.1).max() < 0.01
    assert collision_rate(1, 10) == 0.0
    assert values_behind(10, 10) == math.inf


def test_lists_keep_their_last_values() -> None:
    column = pa.chunked_array([pa.array([["a", "b", "c"], None, [], ["d", None]])])
    values, lengths = texts_of(column, max_ids=2)
    assert lengths is not None
    assert values.to_pylist() == [b"b", b"c", b"d", b""]
    assert lengths.tolist() == [2, 0, 0, 2]
    for array, expected in (
        (pa.array([7, None, -1]), [b"7", b"", b"-1"]),
        (pa.array(["x", "y", "x"]).dictionary_encode(), [b"x", b"y", b"x"]),
        (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), [b"1", b"2"]),
    ):
        assert texts_of(pa.chunked_array([array]))[0].to_pylist() == expected


VOCABULARY = {"encoding": "vocabulary", "min_count": 2}


def vocabulary_config(file: Path, folder: Path, **keys: Any) -> TableConfig:
    features = [
        {"name": "user", **VOCABULARY},
        {"name": "tags", "separator": "|", **VOCABULARY, "num_rows": 6},
    ]
    return table_config(file, prepared=str(folder), features=features, **keys)


def test_a_vocabulary_has_frequent_values_first_and_is_used_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = make_rows(60)
    file = write_log(tmp_path / "a.csv", rows)
    folder = tmp_path / "prepared"
    trained = rows[:40]
    data = vocabulary_config(file, folder, held_out={"share": 1 / 3}).dataset()
    assert data.num_rows(Split.TRAIN) == len(trained)
    users = Counter(row.user for row in trained if row.user)
    tags = Counter(tag for row in trained for tag in row.tags)

    def expected_rows(counts: Counter[str], limit: int) -> dict[str, int]:
        frequent = sorted((-count, text) for text, count in counts.items() if count >= 2)
        return {text: 2 + number for number, (_, text) in enumerate(frequent[:limit])}

    user_rows, tag_rows = expected_rows(users, 100), expected_rows(tags, 4)
    assert [feature.num_rows for feature in data.features] == [2 + len(user_rows), 6]
    assert len(tags) > 4
    for split, part in ((Split.TRAIN, trained), (Split.EVAL, rows[40:])):
        (batch,) = global_batches(data, global_batch_size=len(part), world_size=2, split=split)
        for row, content in zip(part, content_of(batch), strict=True):
            assert content[2] == [user_rows.get(row.user, 1) if row.user else 0]
            assert content[3] == [tag_rows.get(tag, 1) for tag in row.tags]
    caplog.clear()
    vocabulary_config(file, folder, held_out={"share": 1 / 3}).dataset()
    assert "another log" not in caplog.text
    # Another log gets the first log's ids, with a warning.
    other = write_log(tmp_path / "b.csv", make_rows(30, seed=1)[:5])
    again = vocabulary_config(other, folder, held_out={"share": 0.0}).dataset()
    assert [feature.num_rows for feature in again.features] == [
        feature.num_rows for feature in data.features
    ]
    assert "vocabulary_user.parquet, " in caplog.text
    assert "made from another log, whose values keep their rows" in caplog.text
    (batch,) = global_batches(again, global_batch_size=5, world_size=1)
    for row, content in zip(make_rows(30, seed=1), content_of(batch), strict=False):
        assert content[2] == [user_rows.get(row.user, 1) if row.user else 0]


def test_a_vocabulary_with_other_rules_is_refused(tmp_path: Path) -> None:
    file = write_log(tmp_path / "a.csv", make_rows(40))
    vocabulary_config(file, tmp_path / "prepared").dataset()
    other = vocabulary_config(file, tmp_path / "prepared").model_dump()
    other["features"][0]["min_count"] = 5
    with pytest.raises(ConfigError, match=r"vocabulary_user.parquet was made with .*min_count=2"):
        make_config(TableConfig, other).dataset()
    (tmp_path / "prepared" / "vocabulary_user.parquet").write_text("nothing")
    with pytest.raises(ConfigError, match=r"can't be read as a vocabulary: .*; delete it, and it"):
        vocabulary_config(file, tmp_path / "prepared").dataset()


def test_dense_features_are_filled_clipped_and_scaled(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    texts = ["", "-5", "3", "1e6", "nan", "7", "inf", "0.5"]
    lines = [f"1,{text},u,{n}" for n, text in enumerate(texts)]
    file.write_text("label,x,user,y\n" + "\n".join(lines) + "\n")
    dense = [
        {"column": "x", "fill": 2.0, "lowest": 0, "highest": 100, "log1p": True},
        {"column": "y", "scale": "measured"},
    ]
    features = [{"name": "user", "num_rows": 9}]
    keys: dict[str, Any] = {"dense": dense, "features": features, "block_bytes": 20}
    numbers = np.arange(8.0)
    expected = np.stack(
        [np.log1p([2, 0, 3, 100, 2, 7, 2, 0.5]), (numbers - numbers.mean()) / numbers.std()]
    ).T
    folder = tmp_path / "prepared"
    for _ in range(2):
        data = table_config(file, **keys, prepared=str(folder)).dataset()
        # Two roundings to float32.
        np.testing.assert_allclose(whole_epoch(data, 8).dense_features, expected, rtol=3e-7)
    given = [{"column": "x", "scale": "given", "mean": 3, "std": 2}]
    data = table_config(file, **(keys | {"dense": given})).dataset()
    expected_x = (np.array([0, -5, 3, 1e6, 0, 7, 0, 0.5]) - 3) / 2
    np.testing.assert_allclose(whole_epoch(data, 8).dense_features[:, 0], expected_x, rtol=3e-7)
    dense[1]["fill"] = 1.0
    with pytest.raises(ConfigError, match=r"scales.json: 'y' was measured with fill=0.0, lowest"):
        table_config(file, **keys, prepared=str(folder)).dataset()


def test_integers_with_a_sign_are_numbers_and_ids(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("label,size\n1,+7\n0,7\n1,-7\n0,\n1,++7\n")
    sizes = {"name": "size", "num_rows": 100}
    data = table_config(file, features=[sizes], dense=[{"column": "size"}], malformed_limit=1)
    (batch,) = global_batches(data.dataset(), global_batch_size=5, world_size=1)
    # The line before a malformed one takes its place.
    assert batch[0].dense_features[:, 0].tolist() == [7, 7, -7, 0, 0]
    ids = [hashed_row(text, 100) for text in (b"7", b"7", b"-7", b"", b"")]
    assert batch[0].sparse_features["size"].values().tolist() == ids


def test_moments_in_parts_are_those_of_the_whole() -> None:
    numbers = np.random.default_rng(0).normal(1000, 3, 999).astype(np.float32)
    moments = Moments()
    for part in np.array_split(numbers, [0, 10, 500]):
        moments.add(part)
    scale = moments.scale("x")
    assert scale.mean == pytest.approx(numbers.astype(np.float64).mean(), rel=1e-12)
    assert scale.std == pytest.approx(numbers.astype(np.float64).std(), rel=1e-9)
    constant = Moments()
    constant.add(np.ones(5, dtype=np.float32))
    with pytest.raises(ConfigError, match="dense column 'x' has one value in all training rows"):
        constant.scale("x")


MONDAY = 946_857_600
"""2000-01-03, in seconds since 1970."""


NO_TIMES = {
    "milliseconds": ("unix", 1413849600000, "but looks like milliseconds: divide it by 1,000; set"),
    "microseconds": ("unix", 1413849600000000, "but looks like microseconds: divide it by 1,000,"),
    "zero": ("unix", 0, r"isn't a time from 1990 to 2100 in seconds \(unix\); set its time_fo"),
    "before": ("unix", 631151999, "isn't a time from 1990"),
    "after": ("unix", 4133980800, "isn't a time from 1990"),
    **{
        str(digits): ("yymmddhh", digits, r"which isn't a time \(yymmddhh\); set its time_format")
        for digits in (1413849600, 14130100, 14003100, 14023000, 14102124, 14100000, -14102100, 0)
    },
}
"""Formats, numbers that aren't times in them, and the errors about them."""


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("case", NO_TIMES)
def test_numbers_that_are_no_times_are_named(tmp_path: Path, case: str, ending: str) -> None:
    time_format, number, message = NO_TIMES[case]
    right = [14022823, 16022900, None] if time_format == "yymmddhh" else [631152000, 4133980799]
    for times in (right, [*right, None, number]):
        table = pa.table({"label": [1] * len(times), "at": pa.array(times, pa.int64())})
        file = tmp_path / f"{len(times)}.{ending}"
        (pq.write_table if ending == "parquet" else csv.write_csv)(table, file)
        features = [{"name": "at", "encoding": "hour", "time_format": time_format}]
        data = table_config(file, features=features, dense=[]).dataset()
        if times == right:
            assert 0 < whole_epoch(data, len(times)).sparse_features.values().max() <= 24
            continue
        with pytest.raises(InputError, match=f"at is {number}, .*{message}"):
            whole_epoch(data, len(times))


def test_names_of_time_zones_are_refused(tmp_path: Path) -> None:
    message = "time_format='%H %Z' has %Z, and names of time zones aren't read; write offsets such"
    with pytest.raises(ValueError, match=message):
        SparseColumn(name="at", encoding="hour", time_format="%H %Z")
    with pytest.raises(ValueError, match=message):
        InteractionsLayout(files=("a",), time_format="%H %Z")
    assert SparseColumn(name="at", encoding="hour", time_format="%H %%Z").is_time


FORMATS = {"digits": "yymmddhh", "seconds": "unix", "iso": "iso", "log": "%d/%b/%Y:%H"}


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_times_become_hours_and_weekdays(tmp_path: Path, ending: str) -> None:
    # 2014-10-21 was a Tuesday, 2016-02-29 a Monday, and 2000-01-03 a Monday.
    columns = {
        "label": [1, 0, 1],
        "digits": [14102100, 16022923, None],
        "seconds": [MONDAY + 86400 * 3, MONDAY + 3600 * 5, None],
        "iso": ["2014-10-21T01:30:00+01:00", "2016-02-29 23:59:59.5", ""],
        "log": ["21/Oct/2014:00", "29/Feb/2016:23", ""],
    }
    file, table = tmp_path / f"a.{ending}", pa.table(columns)
    if ending == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        (pq.write_table if ending == "parquet" else csv.write_csv)(table, file)
    features = [
        {"name": f"{part}_{column}", "column": column, "encoding": part, "time_format": form}
        for part in ("hour", "weekday")
        for column, form in FORMATS.items()
    ]
    data = table_config(file, features=features, dense=[]).dataset()
    assert [feature.num_rows for feature in data.features] == [25] * 4 + [8] * 4
    batch = whole_epoch(data, 3)
    hours = [[1, 24, 0], [1, 6, 0], [1, 24, 0], [1, 24, 0]]
    weekdays = [[2, 1, 0], [4, 1, 0], [2, 1, 0], [2, 1, 0]]
    assert batch.sparse_features.values().view(8, 3).tolist() == hours + weekdays
    assert batch.dense_features.shape == (3, 0)
    with pytest.raises(ConfigError, match="time_format='soon' isn't a time format; use 'unix', "):
        table_config(file, features=[features[2] | {"time_format": "soon"}])
    with pytest.raises(ConfigError, match=r"column 'iso' is a time \(iso\) for one feature, and"):
        table_config(
            file, features=[features[2], {"name": "x", "column": "iso", "num_rows": 9}], dense=[]
        ).dataset()


def test_a_text_that_is_no_time_is_malformed(tmp_path: Path) -> None:
    lines = ["label,time", "1,2014-10-21", "0,soon", "1,2016-02-29"]
    features = [{"name": "day", "column": "time", "encoding": "weekday", "time_format": "iso"}]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    config = table_config(tmp_path / "a.csv", features=features, dense=[], malformed_limit=1)
    data = config.dataset()
    assert whole_epoch(data, 3).sparse_features.values().tolist() == [2, 2, 1]
    (line,) = data.malformed.examples
    assert (line.line, line.reason) == (3, "time is b'soon', which isn't a time (iso)")
    pq.write_table(pa.table({"label": [1], "time": ["soon"]}), tmp_path / "a.parquet")
    data = table_config(tmp_path / "a.parquet", features=features, dense=[]).dataset()
    with pytest.raises(InputError, match=r"time is 'soon', which isn't a time \(iso\); set its"):
        whole_epoch(data, 1)


@pytest.mark.parametrize(
    ("time_format", "right", "wrong"),
    [
        ("%Y-%m-%d %H:%M", ["2014-02-28 23:59", "2016-2-29 0:00"], ["2014-02-29 00:00"]),
        ("%d/%b/%y:%H%z", ["31/Jan/14:23-0500", "01/Feb/14:00+1400"], ["31/Apr/14:12+0000"]),
        ("%FT%T", ["2014-12-31T00:00:00", "2014-05-01T23:59:60"], ["2014-06-31T00:00:00"]),
        ("%%d %D", ["%d 02/28/14"], ["%d 02/30/14"]),
        ("%Y-%m", ["2014-02"], []),
        ("%d %b", ["29 Feb"], []),
    ],
)
def test_days_that_a_month_lacks_are_no_times(
    time_format: str, right: list[str], wrong: list[str]
) -> None:
    texts = pa.chunked_array([["", *right, *wrong]])
    times, is_wrong = times_of(texts, time_format)
    assert is_wrong.tolist() == [False] * (1 + len(right)) + [True] * len(wrong)
    assert len(times) == len(texts)


@needs_heads
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_criteo(tmp_path: Path, ending: str) -> None:
    source = HEADS / "criteo_train.csv"
    lines = source.read_text().splitlines()
    file = tmp_path / f"train.txt{ending}"
    content = source.read_bytes()
    file.write_bytes(gzip.compress(content) if ending else content)
    config = CriteoConfig(files=(str(file),), rows={"C3": 500}, block_bytes=200_000)
    data = config.dataset()
    assert data.num_dense == 13
    assert [feature.num_rows for feature in data.features][:4] == [10**6, 10**6, 500, 10**6]
    assert data.num_rows(Split.TRAIN) + data.num_rows(Split.EVAL) == len(lines)
    start = 20
    batches = global_batches(data, global_batch_size=128, world_size=2, start=start)
    for line, content in zip(lines[128 * start :], content_of(next(batches)), strict=False):
        values = line.split("\t")
        label, dense, *bags = content
        assert label == float(values[0])
        expected = [math.log1p(max(float(text or 0), 0)) for text in values[1:14]]
        assert dense == pytest.approx(expected, rel=1e-6)
        rows = [500 if number == 2 else 10**6 for number in range(26)]
        assert bags == [
            [hashed_row(text.encode(), size)] for text, size in zip(values[14:], rows, strict=True)
        ]
    with pytest.raises(ConfigError, match="rows: there is no feature 'C27'; use C1, C2"):
        make_config(CriteoConfig, {"files": [str(file)], "rows": {"C27": 9}})


@needs_heads
def test_avazu() -> None:
    files = (str(HEADS / "avazu_train.csv"), str(HEADS / "avazu_dev.csv"))
    data = AvazuConfig(files=files, num_rows=1000).dataset()
    lines = [line for file in files for line in Path(file).read_text().splitlines()][1:]
    assert data.num_rows(Split.TRAIN) + data.num_rows(Split.EVAL) == len(lines)
    names = [feature.name for feature in data.features]
    batch = next(global_batches(data, global_batch_size=64, world_size=2, start=100))
    for line, content in zip(lines[6400:], content_of(batch), strict=False):
        values = line.split(",")
        label, dense, *bags = content
        assert label == float(values[1])
        assert dense == pytest.approx([math.log1p(float(text)) for text in values[17:19]])
        expected = [[hashed_row(text.encode(), 1000)] for text in values[3:]]
        # The whole head is from 2014-10-21, a Tuesday.
        assert bags == [[int(values[2][6:]) + 1], [2], *expected]
    assert names[:3] == ["hour", "weekday", "C1"]


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path) -> None:
    write_log(tmp_path / "a.csv", make_rows(20))
    config = tmp_path / "config.toml"
    config.write_text(
        'files = ["*.csv"]\nlabel = "label"\nprepared = "prepared"\n'
        'features = [{ name = "user", num_rows = 9 }]\n'
        '[held_out]\nby = "files"\nfiles = ["b/*.csv"]\n'
    )
    section = load_config(TableConfig, config)
    assert section.files == (str(tmp_path / "*.csv"),)
    assert section.held_out.files == (str(tmp_path / "b/*.csv"),)
    assert section.prepared == str(tmp_path / "prepared")


ROWS = make_rows(40)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"held_out": {"by": "hash"}}, "held_out: by='hash' and column='' don't belong together"),
        ({"held_out": {"files": ["a"]}}, r"held_out: by='last' and files=\('a',\) don't belong"),
        ({"features": [{"name": "user"}]}, "num_rows=0 leaves no row for hashed values"),
        (
            {"features": [{"name": "user", "encoding": "vocabulary", "num_rows": 2}]},
            "num_rows=2 leaves no row for a value, since missing and unknown values have",
        ),
        (
            {"features": [{"name": "user", "num_rows": 9}, {"name": "user", "num_rows": 8}]},
            "features: 'user' is used twice",
        ),
        ({"features": [{"name": "label", "num_rows": 9}]}, "label='label' is also a feature"),
        ({"dense": [{"column": "number", "log1p": True}]}, "log1p needs lowest above -1, and it"),
        ({"dense": [{"column": "number", "mean": 1}]}, "mean and std are for scale='given', and"),
        (
            {"dense": [{"column": "number", "lowest": 2, "highest": 1}]},
            "lowest=2.0 is not below highest=1.0",
        ),
    ],
)
def test_sections_that_contradict_themselves(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table_config(Path("a.csv"), **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"held_out": {"by": "hash", "column": "page"}}, "held_out.column='page' is the column of"),
        (
            {"held_out": {"by": "hash", "column": "number"}},
            "'number' is a dense feature, a time or",
        ),
        (
            {"features": [{"name": "user", "encoding": "vocabulary"}], "prepared": ""},
            "prepared is empty, and 'user' needs a vocabulary",
        ),
        ({"prepared": "/proc/none"}, "prepared: /proc/none/logs/.*parquet can't be written"),
    ],
)
def test_logs_that_cannot_be_opened(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    file = write_log(tmp_path / "a.csv", ROWS)
    with pytest.raises(ConfigError, match=message):
        table_config(file, **keys).dataset()


@pytest.mark.parametrize("path", ["a.csv", "./a.csv", "{}/a.csv", "file://{}/a.csv", "link.csv"])
def test_a_file_is_not_trained_on_and_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "a.csv", ROWS)
    (tmp_path / "link.csv").symlink_to("a.csv")
    path = path.format(tmp_path)
    with pytest.raises(ConfigError, match=r"(a|link)\.csv is among files and among held_out"):
        table_config(Path("a.csv"), held_out={"by": "files", "files": [path]}).dataset()
    if path != "a.csv":
        with pytest.raises(ConfigError, match=r"(a|link)\.csv is listed twice"):
            table_config(Path("a.csv"), files=["a.csv", path]).dataset()


def test_values_are_merged_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrec_2dsp.programs.data.logs.ids._MAX_PENDING", 2)
    counter = ValueCounter()
    for values in ([b"a", b"b", b"a", b""], [b"c", b"b"], [b"d", b"a"]):
        counter.add(pa.array(values))
    expected = {"value": [b"a", b"b", b"c"], "count": [3, 2, 1]}
    assert counter.frequent(1, 3).to_pydict() == expected
    assert counter.frequent(2, 0).num_rows == 2
