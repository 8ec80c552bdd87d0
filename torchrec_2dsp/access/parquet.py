"""Access statistics as a Parquet file: a line per known row, and everything else as metadata.

Any Parquet reader shows the counts: ``table``, ``row``, ``count``, table by table, the most used
rows first. A checksum in the metadata covers everything.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.errors import ConfigError

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


def write_tables(path: Path, tables: Mapping[str, TableAccess]) -> None:
    """Write the file atomically."""
    for name, table in tables.items():
        _check_table(name, table)
    places = np.repeat(np.arange(len(tables)), [len(table.rows) for table in tables.values()])
    rows = np.concatenate([np.empty(0, np.int64), *(table.rows for table in tables.values())])
    counts = np.concatenate([np.empty(0, np.float64), *(table.counts for table in tables.values())])
    stored = [
        {"name": name, **{field: kind(getattr(table, field)) for field, kind in _FIELDS.items()}}
        for name, table in tables.items()
    ]
    header = {"version": _VERSION, "tables": stored, "checksum": None}
    header["checksum"] = _checksum(json.dumps(header).encode(), (places, rows, counts))
    names = pa.DictionaryArray.from_arrays(
        pa.array(places.astype(np.int32)), pa.array(list(tables), pa.string())
    )
    content = pa.table([names, pa.array(rows), pa.array(counts)], schema=_SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    metadata = {_KEY: json.dumps(header).encode()}
    pq.write_table(content.replace_schema_metadata(metadata), unfinished, compression="zstd")
    unfinished.replace(path)


def read_tables(path: Path) -> dict[str, TableAccess]:
    """Read what `write_tables` wrote.

    Raises:
        ConfigError: the file is missing, damaged, or something else; the message names the file.
    """
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
    """Return the tables, or raise any error if the content isn't what was written."""
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


def _check_table(name: str, table: TableAccess) -> None:
    """Raise if a table's statistics can't be."""
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
