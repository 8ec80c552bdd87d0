"""Figures from access counts, against brute force."""

import json
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

import torchrec_2dsp as tdsp
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.errors import ConfigError

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def access(counts: list[int], num_samples: int = 10) -> TableAccess:
    return TableAccess.of_counts(counts, num_samples)


@given(COUNTS.filter(lambda counts: 0 < sum(counts) <= 10), st.data())
def test_expected_distinct_rows_are_the_mean_over_all_draws(
    counts: list[int], data: st.DataObject
) -> None:
    log = [row for row, count in enumerate(counts) for _ in range(count)]
    num_drawn = data.draw(st.integers(0, len(log)))
    draws = list(combinations(log, num_drawn))
    by_hand = sum(len(set(draw)) for draw in draws) / len(draws)

    assert access(counts).expected_distinct(num_drawn) == pytest.approx(by_hand, abs=1e-9)


@given(COUNTS, st.lists(st.floats(0, 100), min_size=2, max_size=20))
def test_more_lookups_touch_no_fewer_rows_and_none_that_is_not_there(
    counts: list[int], lookups: list[float]
) -> None:
    actual = [access(counts).expected_distinct(num) for num in sorted(lookups)]

    assert all(low <= high + 1e-9 for low, high in pairwise(actual))
    assert all(0 <= entry <= np.count_nonzero(counts) + 1e-9 for entry in actual)


@given(COUNTS.filter(any))
def test_hot_rows_take_their_share(counts: list[int]) -> None:
    table = access(counts)
    descending = sorted(counts, reverse=True)

    for num_hot in range(len(counts) + 2):
        share = table.share_of(num_hot)
        assert share == pytest.approx(sum(descending[:num_hot]) / sum(counts))
        if 0 < num_hot <= len(table.rows):
            assert table.rows_for(share) == num_hot


def test_rows_that_are_used_alike_come_in_their_order() -> None:
    assert access([2, 3, 0, 2, 3]).rows.tolist() == [1, 4, 0, 3]


@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=4))
def test_merged_logs_are_one_log(logs: list[list[int]]) -> None:
    first, *others = (tdsp.AccessStats({"t": access(counts)}) for counts in logs)
    merged = first.merge(*others)["t"]
    whole = access([sum(counts) for counts in zip(*logs, strict=True)], 10 * len(logs))

    assert merged.rows.tolist() == whole.rows.tolist()
    assert merged.counts.tolist() == whole.counts.tolist()
    assert merged.num_samples == whole.num_samples
    assert merged.tail_rows == merged.tail_lookups == 0


def test_merged_tails_lose_no_lookups() -> None:
    known = access([4, 0, 2, 0, 0, 0])
    entry = TableAccess(6, 10, known.rows, known.counts, 2, 3.0, 1.0)
    other = TableAccess(6, 10, known.rows[:1], known.counts[:1], 3, 5.0, 2.0)
    merged = tdsp.AccessStats({"t": entry}).merge(tdsp.AccessStats({"t": other}))["t"]

    assert merged.num_lookups == entry.num_lookups + other.num_lookups
    assert (merged.tail_rows, merged.tail_lookups, merged.max_error) == (4, 8.0, 3.0)


def test_logs_of_different_tables_are_not_merged() -> None:
    few, many = (tdsp.AccessStats({"t": access([1] * size)}) for size in (3, 4))
    with pytest.raises(ConfigError, match=r"'t' had \[3, 4\] rows"):
        few.merge(many)


def test_a_tail_is_taken_as_used_alike() -> None:
    known = access([0, 0, 6, 0, 0])
    table = TableAccess(5, 10, known.rows, known.counts, tail_rows=3, tail_lookups=6.0)
    whole = access([2, 2, 6, 2, 0])

    assert table.num_lookups == 12
    assert table.share_of(1) == 0.5
    for num_drawn in (1, 4, 12, 100):
        assert table.expected_distinct(num_drawn) == pytest.approx(
            whole.expected_distinct(num_drawn)
        )
    with pytest.raises(ConfigError, match=r"share=0\.7: the counted rows take 0\.5"):
        table.rows_for(0.7)


def test_long_draws_touch_every_used_row_and_a_tail_that_may_be_hot() -> None:
    """Hot rows beyond the counted ones come from the tail, at unknown rows."""
    counted = TableAccess.of_counts([5, 3], num_samples=10)
    table = TableAccess(9, 10, counted.rows, counted.counts, tail_rows=4, tail_lookups=4.0)
    assert [table.expected_distinct(20, num_hot=num_hot) for num_hot in (0, 1, 2)] == [6, 5, 4]
    beyond = table.expected_distinct(20, num_hot=4)
    assert beyond == pytest.approx(4 * (1 - (1 - 1 / 12) ** 20))
    assert beyond > table.num_used_rows - 4


def test_batches_and_steps_are_lookups() -> None:
    stats = tdsp.AccessStats({"t": access([5, 3, 2, 0], num_samples=5)})

    assert stats["t"].lookups_per_sample == 2
    assert stats.expected_distinct_rows("t", 2) == stats["t"].expected_distinct(4)
    assert stats.expected_touched_rows("t", 2, steps=2) == stats["t"].expected_distinct(8)


def test_saved_stats_come_back(tmp_path: Path) -> None:
    known = access([0, 4, 4])
    tables = {
        "b": known,
        "empty": access([0, 0]),
        "a": TableAccess(9, 2.5, known.rows, known.counts / 3, 2, 1.5, 0.5),
    }
    tdsp.AccessStats(tables).save(tmp_path / "new" / "stats.parquet")
    back = tdsp.AccessStats.load(tmp_path / "new" / "stats.parquet")

    assert list(back) == list(tables)
    for name, table in tables.items():
        for field, value in vars(table).items():
            assert np.array_equal(getattr(back[name], field), value), field
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["stats.parquet"]
    tdsp.AccessStats({}).save(tmp_path / "none.parquet")
    assert not tdsp.AccessStats.load(tmp_path / "none.parquet")


def test_any_reader_sees_the_counts(tmp_path: Path) -> None:
    tdsp.AccessStats({"ads": access([0, 1, 4])}).save(tmp_path / "stats.parquet")

    assert pq.read_table(tmp_path / "stats.parquet").to_pylist() == [
        {"table": "ads", "row": 2, "count": 4.0},
        {"table": "ads", "row": 1, "count": 1.0},
    ]


def test_the_files_of_a_folder_are_merged(tmp_path: Path) -> None:
    for rank, counts in enumerate(([1, 0], [2, 3])):
        tdsp.AccessStats({"t": access(counts)}).save(tmp_path / f"rank_{rank}.parquet")

    assert tdsp.AccessStats.load(tmp_path)["t"].counts.tolist() == [3, 3]


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no access statistics at"):
        tdsp.AccessStats.load(tmp_path / "missing.parquet")
    with pytest.raises(ConfigError, match=r"no \*\.parquet files"):
        tdsp.AccessStats.load(tmp_path)
    (tmp_path / "text").write_text("no parquet")
    with pytest.raises(ConfigError, match="text is not a Parquet file, or damaged"):
        tdsp.AccessStats.load(tmp_path / "text")
    pq.write_table(pa.table({"row": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match="is Parquet, but no access statistics"):
        tdsp.AccessStats.load(tmp_path / "other.parquet")
    newer = pa.table({"row": [1]}).replace_schema_metadata(
        {"torchrec_2dsp.access": '{"version": 2}'}
    )
    pq.write_table(newer, tmp_path / "newer.parquet")
    with pytest.raises(ConfigError, match="version 2, and this package reads version 1"):
        tdsp.AccessStats.load(tmp_path / "newer.parquet")


def test_hot_sets_are_the_most_used_rows() -> None:
    stats = tdsp.AccessStats({"t": access([1, 5, 0, 4])})

    assert tdsp.HotSet.from_stats(stats, "t", rows=2).row_ids == (1, 3)
    assert tdsp.HotSet.from_stats(stats, "t", rows=100).row_ids == (0, 1, 3)
    assert tdsp.HotSet.from_stats(stats, "t", share=0.5).row_ids == (1,)
    assert tdsp.HotSet.from_stats(stats, "t", share=0.9).row_ids == (1, 3)
    assert tdsp.HotSet.from_stats(stats, "t", share=1.0).row_ids == (0, 1, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "say how many rows"),
        ({"rows": 1, "share": 0.5}, "and not both"),
        ({"share": 0.0}, "share=0.0 must be above 0"),
        ({"share": 1.1}, "at most 1"),
    ],
)
def test_hot_sets_that_make_no_sense(arguments: dict[str, float], message: str) -> None:
    stats = tdsp.AccessStats({"t": access([1, 5])})
    with pytest.raises(ConfigError, match=message):
        tdsp.HotSet.from_stats(stats, "t", **arguments)  # pyright: ignore[reportArgumentType]


def test_a_table_that_was_never_looked_up_has_no_hot_rows() -> None:
    with pytest.raises(ConfigError, match="'t' was never looked up"):
        tdsp.HotSet.from_stats(tdsp.AccessStats({"t": access([0, 0])}), "t", rows=1)


def test_a_table_without_counts_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nothing was counted for table 'x'.* ads"):
        tdsp.AccessStats({"ads": access([1])})["x"]
    assert tdsp.AccessStats({}).get("x") is None


def test_a_plot_shows_every_table(tmp_path: Path) -> None:
    tables = {f"table_{number}": access([number + 1, 2, 1]) for number in range(9)}
    tdsp.AccessStats({**tables, "unused": access([0])}).plot(tmp_path / "cdf.svg")
    drawn = (tmp_path / "cdf.svg").read_text()

    assert all(name in drawn for name in tables)
    assert "unused" not in drawn


@given(COUNTS.filter(any), st.integers(1, 6), st.integers(1, 200))
def test_blocks_are_parts_of_the_whole(
    counts: list[int], num_blocks: int, num_lookups: int
) -> None:
    table = TableAccess.of_counts(counts, num_samples=10)
    block_rows = -(-len(counts) // num_blocks)
    blocks = [counts[start : start + block_rows] for start in range(0, len(counts), block_rows)]
    blocks += [[]] * (num_blocks - len(blocks))
    shares = table.share_by_block(num_blocks)
    assert shares == pytest.approx([sum(block) / sum(counts) for block in blocks])
    distinct = table.distinct_by_block(num_lookups, num_blocks)
    assert distinct.sum() == pytest.approx(table.expected_distinct(num_lookups))
    assert all(
        actual <= len([count for count in block if count]) + 1e-9
        for actual, block in zip(distinct, blocks, strict=True)
    )


KEY = b"torchrec_2dsp.access"


def written(tmp_path: Path) -> Path:
    """Save five known rows in two tables, with an empty table between them; return the path."""
    path = tmp_path / "stats.parquet"
    tables = {
        "a": TableAccess.of_counts([0, 7, 1, 2], num_samples=5),
        "b": TableAccess.of_counts([0, 0], num_samples=5),
        "c": TableAccess.of_counts([3, 0, 9], num_samples=5),
    }
    tdsp.AccessStats(tables).save(path)
    return path


CHANGES: list[Callable[[dict[str, Any]], object]] = [
    lambda header: header.pop("checksum"),
    lambda header: header.update(checksum=None),
    lambda header: header.update(version=True),
    lambda header: header.update(tables=[]),
    lambda header: header["tables"].append(header["tables"][0]),
    lambda header: header["tables"].reverse(),
    lambda header: header["tables"][1].update(name="a"),
    lambda header: header["tables"][0].update(other=1),
    lambda header: header["tables"][1].pop("max_error"),
    *(
        lambda header, field=field: header["tables"][1].update({field: 3})
        for field in ("num_rows", "num_samples", "tail_rows", "tail_lookups", "max_error")
    ),
]


COLUMNS: list[tuple[str, Any]] = [
    ("row", [1, 3, 2, 2, 1]),
    ("row", [1.0, 3, 2, 2, 0]),
    ("row", [1, 3, 2, 2, None]),
    ("count", [7.0, 2, 1, 9, np.nan]),
    ("count", ["7", "2", "1", "9", "3"]),
    ("table", ["a", "a", "a", "c", "c"]),
    ("table", pa.array(["a", "a", "c", "c", "c"]).dictionary_encode()),
    ("table", pa.array(["a", "a", "a", "c", "d"]).dictionary_encode()),
]
NO_HEADERS = [b"", b"\xff", b"[1]", b"null", b"[" * 100_000]


@pytest.mark.parametrize("change", [*CHANGES, *COLUMNS, *NO_HEADERS], ids=lambda change: "")
def test_changed_files_are_refused(change: Any, tmp_path: Path) -> None:
    """Neither changed columns nor changed or invalid metadata are accepted."""
    path = written(tmp_path)
    content = pq.read_table(path)
    if isinstance(change, tuple):
        column, values = change
        place = content.column_names.index(column)
        content = content.set_column(place, column, pa.array(values))
    elif isinstance(change, bytes):
        content = content.replace_schema_metadata({KEY: change})
    else:
        header = json.loads(content.schema.metadata[KEY])
        change(header)
        content = content.replace_schema_metadata({KEY: json.dumps(header).encode()})
    pq.write_table(content, path)
    with pytest.raises(ConfigError, match=r"stats\.parquet was changed.*count again"):
        tdsp.AccessStats.load(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_samples": -1.0}, r"num_samples=-1\.0 isn't a count"),
        ({"max_error": np.nan}, "max_error=nan isn't a count"),
        ({"tail_rows": 4.5}, r"tail_rows=4\.5 isn't a count"),
        ({"rows": np.array([2, 4])}, "column 'row': 4 isn't in a table with 4 rows"),
        ({"rows": np.array([-2, 2])}, "column 'row': -2 isn't in a table with 4 rows"),
        ({"rows": np.array([2, 2])}, "column 'row': 2 is there more than once"),
        ({"counts": np.array([np.inf, 1])}, "column 'count': inf isn't a count"),
        ({"counts": np.array([1.0, -1])}, r"column 'count': -1\.0 isn't a count"),
        ({"counts": np.array([1.0, 2])}, "column 'count': the most used rows aren't first"),
    ],
)
def test_statistics_that_cannot_be_are_not_written(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    access: dict[str, Any] = {
        "num_rows": 4,
        "num_samples": 1.0,
        "rows": np.array([2, 0]),
        "counts": np.array([1.0, 1.0]),
    }
    with pytest.raises(ConfigError, match=f"table 't' can't be written.*{message}"):
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
