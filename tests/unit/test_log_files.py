"""Log files: malformed lines, wrong files, and cached conversions."""

import gzip
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather, orc

from tests.support.logs import (
    content_of,
    contents,
    expected_content,
    global_batches,
    make_rows,
    numbers_of,
    table_config,
    whole_epoch,
    write_log,
)
from tests.support.slices import patient
from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.logs import conversion, text
from torchrec_2dsp.programs.data.logs.config import ColumnKind, LogColumn
from torchrec_2dsp.programs.data.logs.conversion import ConvertedFile
from torchrec_2dsp.programs.data.logs.files import list_files
from torchrec_2dsp.programs.data.logs.sections import InteractionsConfig
from torchrec_2dsp.programs.data.logs.text import TextParser

ROWS = make_rows(40)
BAD_LINES = {
    3: ("1,2\n", "2 values for 4 columns"),
    4: ("a,3,ann,t1\n", "label is b'a', which isn't a number"),
    5: ("1,x,ann,t1\n", "number is b'x', which isn't a number"),
    17: ('1,16,"ann,t1\n', "a quote that doesn't close"),
    18: ("1,17,a\rnn,t1\n", "a carriage return in the line"),
    19: ("\n", "label is nan, which isn't a label from 0 to 1"),
    30: ("7,29,ann,t1\n", "label is 7.0, which isn't a label from 0 to 1"),
}
"""Lines by their number, and their errors."""
HEAD = b"label,number,user,tags\n"


def damaged_log(path: Path) -> Path:
    lines = ["label,number,user,tags\n", *(row.line for row in ROWS)]
    for number, (line, _) in BAD_LINES.items():
        lines[number - 1] = line
    content = "".join(lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
@pytest.mark.parametrize("shuffled_blocks", [0, 2])
def test_a_malformed_line_is_counted_and_its_neighbour_takes_its_place(
    tmp_path: Path, name: str, shuffled_blocks: int
) -> None:
    # Blocks have about six lines, so that some stand-ins come before and some after.
    file = damaged_log(tmp_path / name)
    by_world_size = []
    for world_size in (1, 2, 4):
        config = table_config(file, malformed_limit=len(BAD_LINES), shuffled_blocks=shuffled_blocks)
        data = config.dataset()
        parts = list(global_batches(data, global_batch_size=8, world_size=world_size))
        by_world_size.append([content_of(part) for part in parts])
        assert len(data.malformed) == len(BAD_LINES)
        for line in data.malformed.examples:
            assert line.file == str(file)
            assert BAD_LINES[line.line] == (line.text + "\n", line.reason)
        numbers = [number for part in parts for number in numbers_of(part)]
        bad_numbers = {line - 2 for line in BAD_LINES}
        assert set(numbers) == {row.number for row in ROWS} - bad_numbers
        if not shuffled_blocks:
            for place, number in enumerate(numbers):
                assert number == place or place in bad_numbers
                assert abs(number - place) <= 4
    assert by_world_size[0] == by_world_size[1] == by_world_size[2]
    for batch in by_world_size[0]:
        for content in batch:
            (number,) = content[1]  # type: ignore[misc]
            assert content == expected_content(ROWS[int(number)])


@pytest.mark.parametrize("is_older", [False, True])
def test_too_many_malformed_lines_are_an_error_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_older: bool
) -> None:
    """Earlier versions converted files without statistics."""
    if is_older:
        writer = partial(pq.ParquetWriter, write_statistics=False)
        monkeypatch.setattr(
            pq, "ParquetWriter", lambda *args, write_statistics, **keys: writer(*args, **keys)
        )
    file = damaged_log(tmp_path / "log.csv")
    with pytest.raises(InputError) as caught:
        table_config(file, malformed_limit=1).dataset()
    message = str(caught.value)
    assert message.startswith("more than malformed_limit=1 lines can't be read; check the columns")
    assert f"{file}:3: 2 values for 4 columns: '1,2'" in message
    assert f"{file}:4: label is b'a', which isn't a number: 'a,3,ann,t1'" in message
    # Held-out rows' lines count as well.
    keys = {"held_out": {"by": "last", "share": 0.3}}
    with pytest.raises(InputError, match="more than malformed_limit=6 lines"):
        table_config(file, malformed_limit=len(BAD_LINES) - 1, **keys).dataset()
    assert not table_config(file, malformed_limit=len(BAD_LINES), **keys).dataset().malformed


NUMBERS = ("inf", "-Infinity", " 1.5", "2 ", "+3", "4.", " nan", "9_0", "1.5.", " ", "0x10")
INTEGERS = (" 5", "6 ", "0x10", "1414368000000000000", "9223372036854775807", "7.0", "inf")


@pytest.mark.parametrize(
    ("kind", "values"), [(ColumnKind.NUMBER, NUMBERS), (ColumnKind.INTEGER, INTEGERS)]
)
def test_a_malformed_line_changes_no_other(kind: ColumnKind, values: tuple[str, ...]) -> None:
    hour = {"name": "hour", "column": "a", "encoding": "hour"}
    features = [hour] if kind is ColumnKind.INTEGER else [{"name": "b", "num_rows": 9}]
    dense = [{"column": "a"}] if kind is ColumnKind.NUMBER else []
    section = table_config(Path("log.csv"), features=features, dense=dense)
    assert section.read_columns().get("a") == LogColumn(kind)
    parser = TextParser(["a", "b", "label"], section)
    num_readable = 0
    for value in values:
        alone = parser.parse(f"{value},b,1\n".encode())
        beside = parser.parse(f"{value},b,1\nx,b,1\n".encode())
        assert str(beside.table["a"].to_pylist()) == str(alone.table["a"].to_pylist()), value
        assert beside.reasons == {**alone.reasons, 1: "a is b'x', which isn't a number"}
        num_readable += alone.table.num_rows
    assert num_readable == (7 if kind is ColumnKind.NUMBER else 5)


def test_malformed_lines_are_held_out_with_their_stand_ins(tmp_path: Path) -> None:
    file = damaged_log(tmp_path / "log.csv")
    held_out = {"by": "hash", "column": "user", "share": 0.5}
    data = table_config(
        file, malformed_limit=len(BAD_LINES), held_out=held_out, rest="pad"
    ).dataset()
    users = []
    for split in Split:
        batch = whole_epoch(data, data.num_rows(split), split)
        users.append({ROWS[number].user for number in numbers_of([batch])})
    assert data.num_rows(Split.TRAIN) + data.num_rows(Split.EVAL) == len(ROWS)
    assert users[0]
    assert not users[0] & users[1]


def test_quotes_and_returns_that_belong_there(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_bytes(b'\xef\xbb\xbflabel,number,"user",tags\r\n1,0,"a,""b",\r\n0,1,"",t1|t2\r\n')
    expected = tmp_path / "log.parquet"
    table = {
        "label": [1, 0],
        "number": [0, 1],
        "user": ['a,"b', None],
        "tags": [None, ["t1", "t2"]],
    }
    pq.write_table(pa.table(table), expected)
    batches = contents(table_config(file).dataset(), 2)
    assert batches == contents(table_config(expected).dataset(), 2)
    assert len(batches[0][1][3]) == 2  # type: ignore[arg-type]


def test_files_of_a_pattern_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = ["a.csv", "day_0.csv", "day_2.csv", "day_9.csv", "day_9b.csv", "day_10.csv"]
    for name in names[::-1]:
        (tmp_path / name).touch()
    assert list_files([f"{tmp_path}/*.csv"]) == tuple(f"{tmp_path}/{name}" for name in names)


def other_schema(tmp_path: Path) -> list[Path]:
    first = write_log(tmp_path / "a.parquet", ROWS[:3])
    second = tmp_path / "b.parquet"
    table = pq.read_table(first)
    table = table.set_column(2, "user", pa.array([1, 2, 3]))
    pq.write_table(table, second)
    return [first, second]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: [folder / "none_*.csv"], "files: nothing matches '.*none_.*csv'; check"),
        (lambda folder: [folder], "is a folder; name its files, such as"),
        (lambda folder: [written(folder / "a.csv", b"")], "a.csv is empty; leave it out"),
        (
            lambda folder: [written(folder / "a.csv", HEAD)],
            "a.csv has no row, at most the names of columns; leave it out",
        ),
        (
            lambda folder: [written(folder / "a.csv", HEAD + b"1\n" * 9)],
            "none of the lines 2 to 10 of .*a.csv can be read",
        ),
        (
            lambda folder: [
                write_log(folder / "a.csv", ROWS),
                written(folder / "other.csv", b"label,user\n1,ann\n"),
            ],
            "other.csv has no column 'number'; it has 'label', 'user'",
        ),
        (
            lambda folder: [written(folder / "a.csv", b"a,a\n1,1\n")],
            "a.csv has two columns 'a'; rename one",
        ),
        (
            lambda folder: [written(folder / "a.csv.gz", b"no gzip")],
            "a.csv.gz can't be read: zlib inflate failed: .*; check the path",
        ),
        (
            lambda folder: [written(folder / "a.csv.gz", gzip.compress(HEAD + b"1")[:-9])],
            "a.csv.gz can't be read",
        ),
        (
            lambda folder: [written(folder / "a.parquet", b"PAR1, but no table")],
            "a.parquet isn't in Parquet format, or it is damaged",
        ),
        (
            lambda folder: [write_log(folder / "a.parquet", [])],
            "a.parquet has no row; leave it out",
        ),
        (
            other_schema,
            "b.parquet: column 'user' has integers, and in .*a.parquet it has text; write all",
        ),
    ],
)
def test_files_that_cannot_be_are_named(tmp_path: Path, prepare: Any, message: str) -> None:
    files = prepare(tmp_path)
    with pytest.raises((ConfigError, InputError), match=message):
        table_config(*files, malformed_limit=9).dataset()


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_wrong_type_of_a_column_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    table = {"label": ["yes"], "number": [1.0], "user": [1.5], "tags": [[1]]}
    pq.write_table(pa.table(table), file)
    with pytest.raises(ConfigError, match="column 'user' has double, and should have text, integ"):
        table_config(file).dataset()
    pq.write_table(pa.Table.from_arrays([pa.array([1])] * 5, [*table, "user"]), file)
    with pytest.raises(ConfigError, match=r"a.parquet has two columns 'user'; rename one"):
        table_config(file).dataset()


@pytest.mark.parametrize("ending", ["parquet", "feather"])
def test_lists_and_times_that_are_no_ids_are_named(tmp_path: Path, ending: str) -> None:
    times = pa.array([0, 1, 2, 3], pa.timestamp("us"))
    table = pa.table({"label": [1, 0, 1, 0], "tags": [["a"], [], ["a", "b"], None], "at": times})
    file = tmp_path / f"a.{ending}"
    (pq.write_table if ending == "parquet" else feather.write_feather)(table, file)
    hour = {"name": "hour", "column": "at", "encoding": "hour"}
    features = [{"name": "tags", "num_rows": 9}, hour]
    for column, kind in (("tags", r"list<\w+: string>"), ("at", r"timestamp\[us\]")):
        held_out = {"by": "hash", "column": column, "share": 0.5}
        message = f"a.{ending}: column '{column}' has {kind}, and held_out.column needs one text, "
        with pytest.raises(ConfigError, match=message):
            table_config(file, features=features, dense=[], held_out=held_out).dataset()
    split = {"name": "tags", "num_rows": 9, "separator": "|"}
    message = (
        r"column 'tags' has list<\w+: string>, and a separator needs .*, or leave separator out"
    )
    with pytest.raises(ConfigError, match=message):
        table_config(file, features=[split], dense=[]).dataset()
    also = {"name": "moment", "column": "at", "num_rows": 9}
    number = [{"column": "at"}]
    for twice, dense in (([hour, also], []), ([hour], number)):
        message = r"'at' has timestamp\[us\], and a feature that is no time needs one text"
        with pytest.raises(ConfigError, match=message):
            table_config(file, features=twice, dense=dense).dataset()
    interactions = InteractionsConfig(
        files=(str(file),), user="tags", item="label", time="at", prepared=str(tmp_path / "p")
    )
    with pytest.raises(ConfigError, match="and an interaction needs one text, integer or boolean"):
        interactions.dataset()


def test_a_parquet_row_without_label_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    labels = pa.array([1, 0, 1, 1, 0, 1, None, 1])
    table = pa.table({"label": labels, "number": range(8), "user": ["a"] * 8, "tags": [["t"]] * 8})
    pq.write_table(table, file)
    data = table_config(file).dataset()
    with pytest.raises(
        InputError, match=r"a.parquet: 'label' of row 6 is nan, which isn't a label"
    ):
        list(data.batches(Split.TRAIN, global_batch_size=4, rank=1, world_size=2))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    file = write_log(tmp_path / "a.csv", ROWS)
    file.chmod(0)
    with pytest.raises(ConfigError, match=r"a.csv can't be read: Permission denied; check"):
        table_config(file).dataset()


def test_columns_that_are_named_by_the_config(tmp_path: Path) -> None:
    lines = "".join(row.line for row in ROWS)
    columns = ["label", "number", "user", "tags"]
    for name, header in (("a.csv", b""), ("b.csv", HEAD)):
        file = written(tmp_path / name, header + lines.encode())
        data = table_config(file, columns=columns).dataset()
        assert numbers_of([whole_epoch(data, 40)]) == list(range(40))
    with pytest.raises(ConfigError, match=r"a.csv has 4 columns, and columns names 3; check the"):
        table_config(tmp_path / "a.csv", columns=columns[:3]).dataset()


def noted_conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the names of files whose parts are converted."""
    names: list[str] = []
    original = ConvertedFile.convert

    def noted(source: ConvertedFile, part: int, advance: Any) -> None:
        names.append(Path(source.file).name)
        original(source, part, advance)

    monkeypatch.setattr(ConvertedFile, "convert", noted)
    return names


def test_files_are_converted_once_until_they_or_the_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = noted_conversions(monkeypatch)
    files = [write_log(tmp_path / "a.csv", ROWS), write_log(tmp_path / "b.csv.gz", ROWS)]
    for _ in range(2):
        assert table_config(*files).dataset().num_rows(Split.TRAIN) == 80
    assert names == ["a.csv", "b.csv.gz"]
    write_log(files[1], ROWS[:30])
    assert table_config(*files).dataset().num_rows(Split.TRAIN) == 70
    assert names == ["a.csv", "b.csv.gz", "b.csv.gz"]
    for keys in ({"block_bytes": 50}, {"dense": []}, {"quote": ""}):
        names.clear()
        table_config(*files, **keys).dataset()
        assert names == ["a.csv", "b.csv.gz"]


def test_a_conversion_that_is_interrupted_leaves_nothing_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_log(tmp_path / "a.csv", ROWS)
    original, num_parsed = TextParser.parse, []

    def failing(parser: TextParser, data: bytes) -> Any:
        num_parsed.append(1)
        if len(num_parsed) == 3:
            raise KeyboardInterrupt
        return original(parser, data)

    monkeypatch.setattr(TextParser, "parse", failing)
    with pytest.raises(KeyboardInterrupt):
        table_config(file).dataset()
    assert list(tmp_path.rglob("prepared/logs/*/*")) == []
    assert numbers_of([whole_epoch(table_config(file).dataset(), 40)]) == list(range(40))


def test_a_file_that_changes_while_it_is_converted_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_log(tmp_path / "a.csv", ROWS)
    original = TextParser.parse

    def changing(parser: TextParser, data: bytes) -> Any:
        os.utime(file, (0, 0))
        return original(parser, data)

    monkeypatch.setattr(TextParser, "parse", changing)
    with pytest.raises(ConfigError, match=r"a.csv changed during conversion; start again"):
        table_config(file).dataset()
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = write_log(tmp_path / "a.csv", ROWS)
    folder = written(tmp_path / "prepared", b"a file")
    with pytest.raises(ConfigError, match=r"prepared: .* can't be written: Not a directory; give"):
        table_config(file, prepared=str(folder)).dataset()


@pytest.mark.parametrize("part_bytes", [1, 250, 10**6])
def test_ranks_share_the_parts_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """Parts are cut at the whole file's block boundaries, and reports name the same lines."""
    monkeypatch.setattr(conversion, "_PART_BYTES", part_bytes)
    file = damaged_log(tmp_path / "log.csv")
    keys: dict[str, Any] = {"malformed_limit": len(BAD_LINES), "shuffled_blocks": 3, "rest": "pad"}
    config = table_config(file, **keys)
    names = noted_conversions(monkeypatch)
    shown: list[tuple[str, int, int]] = []
    for rank in range(3):
        config.convert(rank, 3, lambda *progress: shown.append(progress))
    data = config.dataset()
    assert names == ["log.csv"] * len(names)
    assert (len(names) >= 3) == (part_bytes < 1000)
    assert all(what == f"converting {file}" for what, _, _ in shown)
    assert shown[-1][1] <= shown[-1][2] + 250
    batches = contents(data, 8)
    monkeypatch.setattr(conversion, "_PART_BYTES", 10**9)
    whole = table_config(file, prepared=str(tmp_path / "other"), **keys).dataset()
    assert batches == contents(whole, 8)
    assert data.malformed.examples == whole.malformed.examples


def test_without_a_folder_files_are_converted_among_temporary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    file = write_log(tmp_path / "a.csv", ROWS)
    assert table_config(file, prepared="").dataset().num_rows(Split.TRAIN) == 40
    assert list(tmp_path.glob("temporary/torchrec_2dsp_*/logs/a.csv-*/0000.parquet"))


def test_a_long_first_line_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "a.csv", b"x" * 30_000_000)
    start = time.perf_counter()
    with pytest.raises(ConfigError, match=r"a.csv:1: the line has more than 4194304 bytes; is it"):
        table_config(file).dataset()
    assert time.perf_counter() - start < patient(2)
    file = written(tmp_path / "b.csv", b"x" * 200_000 + b",y")
    with pytest.raises(ConfigError, match=r"b.csv:1: field larger than field limit .*; is it a te"):
        table_config(file).dataset()
    file = written(tmp_path / "c.csv", HEAD + b"1" * 400)
    monkeypatch.setattr(text, "_MAX_LINE_BYTES", 300)
    with pytest.raises(ConfigError, match=r"c.csv has 300 bytes without a line end"):
        table_config(file).dataset()


@pytest.mark.parametrize("ending", ["orc", "feather", "jsonl", "jsonl.gz"])
def test_other_formats_give_the_batches_of_parquet(tmp_path: Path, ending: str) -> None:
    expected = table_config(write_log(tmp_path / "a.parquet", ROWS), block_rows=7).dataset()
    table = pq.read_table(tmp_path / "a.parquet")
    file = tmp_path / f"b.{ending}"
    if ending == "orc":
        orc.write_table(table, file)
    elif ending == "feather":
        feather.write_feather(table, file)
    else:
        content = "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()
        file.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    features = [{"name": "user", "num_rows": 50}, {"name": "tags", "num_rows": 30}]
    data = table_config(file, features=features, block_rows=7).dataset()
    assert contents(data, 8) == contents(expected, 8)
    with pytest.raises(ConfigError, match=r"has no column 'none'; it has 'label', 'number', 'user"):
        table_config(file, features=[{"name": "none", "num_rows": 9}]).dataset()
    damaged = written(tmp_path / f"c.{ending}", b"{nothing of the kind")
    with pytest.raises((ConfigError, InputError), match=rf"c.{ending} "):
        table_config(damaged, features=features).dataset()


@pytest.mark.parametrize("scheme", ["memory://", "file://"])
def test_logs_on_other_file_systems(tmp_path: Path, scheme: str) -> None:
    folder = f"{scheme}{tmp_path}/day"
    system, _ = fsspec.core.url_to_fs(folder)
    system.makedirs(f"{tmp_path}/day", exist_ok=True)
    for number, name in enumerate(["a_9.csv", "a_10.csv.gz", "b.parquet"]):
        local = write_log(tmp_path / name, ROWS[10 * number : 10 * number + 10])
        with system.open(f"{tmp_path}/day/{name}", "wb") as remote:
            remote.write(local.read_bytes())
    files = [f"{folder}/a_*", f"{folder}/b.parquet"]
    features = [{"name": "user", "num_rows": 50}]
    keys = {"features": features, "prepared": str(tmp_path / "prepared")}
    data = table_config(tmp_path / "a_9.csv", files=files, **keys).dataset()
    (batch,) = global_batches(data, global_batch_size=30, world_size=2)
    assert numbers_of(batch) == list(range(30))
    with pytest.raises(ConfigError, match=r"files: nothing matches '.*://.*/none_.*'; check"):
        table_config(tmp_path / "x.csv", files=[f"{folder}/none_*"], **keys).dataset()
    with pytest.raises(ConfigError, match=r"files: none://x can't be opened: .*none"):
        table_config(tmp_path / "x.csv", files=["none://x"], **keys).dataset()


def test_lines_that_a_quote_joins_are_an_error(tmp_path: Path) -> None:
    lines = ["label,number,user,tags", *["1,0,ann,t1"] * 3, '1,0,a"b,"t1', *["1,0,ann,t1"] * 3]
    file = written(tmp_path / "a.csv", "\n".join(lines).encode())
    message = r"the lines 2 to 7 of .*a.csv run together: 6 lines were read as 4 rows; close"
    with pytest.raises(InputError, match=message):
        table_config(file, block_bytes=1000).dataset()
    data = table_config(file, quote="").dataset()
    assert len(list(global_batches(data, global_batch_size=1, world_size=1))) == 7
