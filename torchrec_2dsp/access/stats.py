"""`AccessStats`: lookup statistics for a model's tables."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.report.charts import Axis, Line, LineChart, draw_lines


def merged(table: str, logs: Sequence[TableAccess]) -> TableAccess:
    """Sum a table's statistics over several logs.

    A row that is known in one log may be in another's tail. Its count lacks those lookups, which
    stay in the tail, so the tail's row count is an upper bound.
    """
    num_rows = logs[0].num_rows
    sizes = sorted({log.num_rows for log in logs})
    if len(sizes) > 1:
        raise ConfigError(
            f"table {table!r} had {sizes} rows in different logs; their rows aren't the same, "
            "so count them again"
        )
    rows, places = np.unique(np.concatenate([log.rows for log in logs]), return_inverse=True)
    counts = np.zeros(len(rows))
    np.add.at(counts, places, np.concatenate([log.counts for log in logs]))
    return TableAccess.of_rows(
        num_rows,
        sum(log.num_samples for log in logs),
        rows,
        counts,
        tail_rows=min(sum(log.tail_rows for log in logs), num_rows - len(rows)),
        tail_lookups=sum(log.tail_lookups for log in logs),
        max_error=sum(log.max_error for log in logs),
    )


_MAX_POINTS = 400
"""The most points in a line."""


def cdf_chart(
    tables: Mapping[str, TableAccess], hot_rows: Mapping[str, int] | None = None
) -> LineChart:
    """Draw the lookup share that the hottest rows take.

    Args:
        tables: each table's statistics, by name.
        hot_rows: how many hot rows to mark on a table's line; tables it lacks have no mark.

    Example:
        >>> from torchrec_2dsp.access.stats import cdf_chart
        >>> from torchrec_2dsp.access.table_access import TableAccess
        >>> table = TableAccess.of_counts([0, 7, 0, 2, 1], num_samples=5)
        >>> line, mark = cdf_chart({"t": table}, hot_rows={"t": 1}).lines
        >>> line.y, mark.x, mark.y, mark.hover
        ([70.0, 90.0, 100.0], [20.0], [70.0], ['t: 1 hot row takes 70.0 %'])
    """
    lines = []
    for name, table in tables.items():
        if not len(table.rows):
            continue
        num_hot = np.unique(np.geomspace(1, len(table.rows), _MAX_POINTS).astype(np.int64))
        shares = 100 * table.counts.cumsum()[num_hot - 1] / table.num_lookups
        lines.append(
            Line(name=name, x=(100 * num_hot / table.num_rows).tolist(), y=shares.tolist())
        )
    chart = LineChart(
        lines,
        x=Axis(title="hottest rows, % of the table", is_log=True),
        y=Axis(title="lookups that they take, %", limits=(0, 100)),
    )
    marks = [
        _hot_mark(tables[line.name], line, count)
        for line in chart.styled()
        if (count := (hot_rows or {}).get(line.name))
    ]
    return replace(chart, lines=[*lines, *marks])


def _hot_mark(table: TableAccess, line: Line, num_hot: int) -> Line:
    """Return the mark at a table's hot row count."""
    share = 100 * table.share_of(num_hot)
    rows = "1 hot row takes" if num_hot == 1 else f"{num_hot:,} hot rows take"
    return Line(
        x=[100 * num_hot / table.num_rows],
        y=[share],
        hover=[f"{line.name}: {rows} {share:.1f} %"],
        way="points",
        marker="D",
        colour=line.colour,
    )


class AccessStats(dict[str, TableAccess]):
    """A `RowCounter`'s counts by table: a dict that can be saved, merged and plotted.

    Example:
        >>> from torchrec_2dsp.access.stats import AccessStats
        >>> from torchrec_2dsp.access.table_access import TableAccess
        >>> stats = AccessStats({"t": TableAccess.of_counts([0, 7, 0, 2, 1], num_samples=5)})
        >>> both = stats.merge(stats)
        >>> both["t"].num_lookups, both["t"].share_of(1)
        (20.0, 0.7)
    """

    def __init__(self, tables: Mapping[str, TableAccess]) -> None:
        super().__init__(tables)

    def __missing__(self, table: str) -> TableAccess:
        raise ConfigError(
            f"nothing was counted for table {table!r}; these were counted: "
            f"{', '.join(self) or 'none'}"
        )

    def __repr__(self) -> str:
        lookups = sum(table.num_lookups for table in self.values())
        return f"AccessStats({len(self)} tables, {lookups:.4g} lookups)"

    def expected_distinct_rows(self, table: str, batch_size: int) -> float:
        """Estimate how many distinct rows a batch touches on average."""
        return self.expected_touched_rows(table, batch_size, steps=1)

    def expected_touched_rows(self, table: str, batch_size: int, steps: int) -> float:
        """Estimate how many distinct rows several batches touch together on average."""
        access = self[table]
        return access.expected_distinct(steps * batch_size * access.lookups_per_sample)

    def merge(self, *others: "AccessStats") -> "AccessStats":
        """Merge the statistics from several logs."""
        every = [self, *others]
        names = dict.fromkeys(name for stats in every for name in stats)
        return AccessStats(
            {
                name: merged(name, [stats[name] for stats in every if name in stats])
                for name in names
            }
        )

    def save(self, path: str | Path) -> None:
        """Write the statistics as a Parquet file, atomically.

        It has a line per known row, and everything else as metadata, with a checksum over all. Any
        Parquet reader shows ``table``, ``row`` and ``count``, table by table, the most used rows
        first.
        """
        path = Path(path)
        for name, table in self.items():
            _check_table(name, table)
        places = np.repeat(np.arange(len(self)), [len(table.rows) for table in self.values()])
        rows = np.concatenate([np.empty(0, np.int64), *(table.rows for table in self.values())])
        counts = np.concatenate([np.empty(0), *(table.counts for table in self.values())])
        stored = [
            {"name": name} | {key: kind(getattr(table, key)) for key, kind in _FIELDS.items()}
            for name, table in self.items()
        ]
        header = {"version": _VERSION, "tables": stored, "checksum": None}
        header["checksum"] = _checksum(json.dumps(header).encode(), (places, rows, counts))
        names = pa.DictionaryArray.from_arrays(
            pa.array(places.astype(np.int32)), pa.array(list(self), pa.string())
        )
        content = pa.table([names, pa.array(rows), pa.array(counts)], schema=_SCHEMA)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.unfinished")
        metadata = {_KEY: json.dumps(header).encode()}
        pq.write_table(content.replace_schema_metadata(metadata), unfinished, compression="zstd")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> "AccessStats":
        """Read statistics that `save` wrote.

        Args:
            path: a file; or a folder, whose ``*.parquet`` files are merged: one per rank, or day.
        """
        path = Path(path)
        files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"{path} has no *.parquet files; AccessStats.save writes them")
        first, *others = (cls(_read_tables(file)) for file in files)
        return first.merge(*others) if others else first

    def plot(self, path: str | Path) -> None:
        """Plot the lookup share that the hottest rows take, as an SVG."""
        draw_lines([cdf_chart(self)], path)


_KEY = b"torchrec_2dsp.access"
_VERSION = 1
_REMEDY = "take a copy of the file, or count again and write it with AccessStats.save"
_SCHEMA = pa.schema(
    {"table": pa.dictionary(pa.int32(), pa.string()), "row": pa.int64(), "count": pa.float64()}
)
_FIELDS = {
    "num_rows": int,
    "num_samples": float,
    "tail_rows": int,
    "tail_lookups": float,
    "max_error": float,
}
"""A table's statistics in the metadata."""


def _check_table(name: str, table: TableAccess) -> None:
    """Raise if a table's statistics are impossible."""
    rows, counts = table.rows, table.counts
    where = f"table {name!r} can't be written"
    for field, kind in _FIELDS.items():
        value = getattr(table, field)
        if not 0 <= value < np.inf or kind(value) != value:
            raise ConfigError(f"{where}: {field}={value} isn't a count; count again")
    outside = rows[(rows < 0) | (rows >= table.num_rows)]
    if len(outside):
        raise ConfigError(
            f"{where}, column 'row': {outside[0]} isn't in a table with {table.num_rows} rows; "
            "count again"
        )
    distinct, times = np.unique(rows, return_counts=True)
    if len(distinct) < len(rows):
        raise ConfigError(
            f"{where}, column 'row': {distinct[times > 1][0]} is there more than once; count again"
        )
    impossible = counts[~(np.isfinite(counts) & (counts >= 0))]
    if len(impossible):
        raise ConfigError(f"{where}, column 'count': {impossible[0]} isn't a count; count again")
    if (np.diff(counts) > 0).any():
        raise ConfigError(f"{where}, column 'count': the most used rows aren't first; count again")


def _checksum(metadata: bytes, columns: Sequence[NDArray[Any]]) -> str:
    """Return the checksum over the columns and the metadata without it."""
    digest = hashlib.sha256(metadata)
    for column in columns:
        digest.update(np.ascontiguousarray(column, column.dtype.newbyteorder("<")).tobytes())
    return f"sha256:{digest.hexdigest()}"


def _read_tables(path: Path) -> dict[str, TableAccess]:
    """Read a file that `AccessStats.save` wrote, or raise an error that names it."""
    content = _content(path)
    text = (content.schema.metadata or {}).get(_KEY)
    if text is None:
        raise ConfigError(
            f"{path} is Parquet, but no access statistics; AccessStats.save writes it"
        )
    try:
        header = json.loads(text)
        version = header["version"]
        if version == _VERSION:
            return _tables(header, text, content)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} was changed or damaged after writing; {_REMEDY}") from error
    raise ConfigError(
        f"{path} has access statistics of version {version}, and this package reads version "
        f"{_VERSION}; count again, or install the package that wrote it"
    )


def _tables(header: dict[str, Any], text: bytes, content: pa.Table) -> dict[str, TableAccess]:
    """Return the tables, or raise any error if the content has changed since it was written."""
    if content.schema.remove_metadata() != _SCHEMA:
        raise ValueError("other columns")
    stored = header["tables"]
    place_of = {table["name"]: place for place, table in enumerate(stored)}
    names = content.column("table").combine_chunks()
    in_file = np.array([place_of[name] for name in names.dictionary.to_pylist()], np.int64)
    places = in_file[names.indices.to_numpy()]
    rows, counts = (content.column(name).to_numpy() for name in ("row", "count"))
    unsigned = text.replace(f'"{header["checksum"]}"'.encode(), b"null")
    if header["checksum"] != _checksum(unsigned, (places, rows, counts)):
        raise ValueError("another checksum")
    starts = np.searchsorted(places, np.arange(len(stored)), side="left")
    ends = np.searchsorted(places, np.arange(len(stored)), side="right")
    return {
        table["name"]: TableAccess(
            rows=rows[start:end],
            counts=counts[start:end],
            **{field: table[field] for field in _FIELDS},
        )
        for table, start, end in zip(stored, starts, ends, strict=True)
    }


def _content(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            content = file.read()
        content.validate(full=True)
        return content
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(f"there are no access statistics at {path}") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a Parquet file, or damaged: {error}; {_REMEDY}"
        ) from error
