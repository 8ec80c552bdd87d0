"""Access statistics as a Parquet file: a line per known row, and everything else as metadata.

Any Parquet reader shows the counts: ``table``, ``row``, ``count``, table by table, the most used
rows first. A checksum in the metadata covers everything.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.errors import ConfigError

_KEY = b"torchrec_2dsp.access"
_VERSION = 1
_MAX_ROWS = 2**63 - 1
_REMEDY = "take a copy of the file, or count again and write it with AccessStats.save"


class _Metadata(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _StoredTable(_Metadata):
    """A table's statistics without its rows' counts."""

    name: str
    num_rows: int = Field(ge=0, le=_MAX_ROWS)
    num_samples: float = Field(ge=0)
    tail_rows: int = Field(ge=0, le=_MAX_ROWS)
    tail_lookups: float = Field(ge=0)
    max_error: float = Field(ge=0)


_FIELDS = tuple(name for name in _StoredTable.model_fields if name != "name")


class _Header(_Metadata):
    version: int
    tables: list[_StoredTable]
    checksum: str | None = None
    """The checksum, which files from older releases lack."""


class _Columns(NamedTuple):
    tables: NDArray[np.int64]
    """The index of each line's table."""

    rows: NDArray[np.int64]
    counts: NDArray[np.float64]


def write_tables(path: Path, tables: Mapping[str, TableAccess]) -> None:
    """Write the file atomically."""
    names = list(tables)
    columns = _Columns(
        np.repeat(np.arange(len(names)), [len(tables[name].rows) for name in names]),
        np.concatenate([np.empty(0, np.int64), *(table.rows for table in tables.values())]),
        np.concatenate([np.empty(0, np.float64), *(table.counts for table in tables.values())]),
    )
    header = _Header(version=_VERSION, tables=[_checked(*item) for item in tables.items()])
    header = header.model_copy(update={"checksum": _checksum(header, columns)})
    codes = pa.array(columns.tables.astype(np.int32))
    content = pa.table(
        {
            "table": pa.DictionaryArray.from_arrays(codes, pa.array(names, pa.string())),
            "row": pa.array(columns.rows),
            "count": pa.array(columns.counts),
        }
    ).replace_schema_metadata({_KEY: header.model_dump_json().encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    pq.write_table(content, unfinished, compression="zstd")
    unfinished.replace(path)


def _checked(name: str, table: TableAccess) -> _StoredTable:
    """Return a table's metadata, or raise if it couldn't be read back."""
    _check_table(f"table {name!r} can't be written", table, "count again")
    data = {"name": name, **{field: getattr(table, field) for field in _FIELDS}}
    try:
        return _StoredTable.model_validate(data, strict=False)
    except ValidationError as error:
        raise ConfigError(f"table {name!r} can't be written: {_first(error)}") from error


def read_tables(path: Path) -> dict[str, TableAccess]:
    """Read what `write_tables` wrote.

    Raises:
        ConfigError: the file is missing, damaged, or something else; the message names the file and
            the column.
    """
    content = _content(path)
    header = _header(path, content)
    columns = _columns(path, content, [table.name for table in header.tables])
    if header.checksum is not None and header.checksum != _checksum(header, columns):
        raise ConfigError(
            f"{path} was changed or damaged after writing: its checksum differs; {_REMEDY}"
        )
    ends = np.searchsorted(columns.tables, np.arange(len(header.tables)), side="right")
    starts = [0, *ends[:-1]]
    tables = {
        table.name: TableAccess(
            rows=columns.rows[start:end],
            counts=columns.counts[start:end],
            **{field: getattr(table, field) for field in _FIELDS},
        )
        for table, start, end in zip(header.tables, starts, ends, strict=True)
    }
    for name, table in tables.items():
        _check_table(f"{path}, table {name!r}", table)
    return tables


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


def _header(path: Path, content: pa.Table) -> _Header:
    text = (content.schema.metadata or {}).get(_KEY)
    if text is None:
        raise ConfigError(
            f"{path} is Parquet, but no access statistics; AccessStats.save writes it"
        )
    try:
        data = json.loads(text)
        version = data.get("version") if isinstance(data, dict) else None
        if type(version) is int and version != _VERSION:
            raise ConfigError(
                f"{path} has access statistics of version {version}, and this package reads "
                f"version {_VERSION}; count again, or install the package that wrote it"
            )
        header = _Header.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}, metadata, {_first(error)}; {_REMEDY}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}, metadata: {error}; {_REMEDY}") from error
    names = [table.name for table in header.tables]
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{path}, metadata: table {name!r} is there twice; {_REMEDY}")
    return header


def _first(error: ValidationError) -> str:
    """Describe the first error and its location."""
    wrong = error.errors()[0]
    return f"{'.'.join(str(part) for part in wrong['loc']) or 'all of it'}: {wrong['msg']}"


def _columns(path: Path, content: pa.Table, names: list[str]) -> _Columns:
    kinds = {"table": pa.dictionary(pa.int32(), pa.string()), "row": pa.int64()}
    kinds["count"] = pa.float64()
    for name, kind in kinds.items():
        present = content.schema.field(name).type if name in content.column_names else None
        if present != kind:
            shown = "is missing" if present is None else f"is {present}"
            raise ConfigError(f"{path}, column {name!r} {shown}, but should be {kind}; {_REMEDY}")
        if content.column(name).null_count:
            raise ConfigError(f"{path}, column {name!r} has lines without a value; {_REMEDY}")
    table_column = content.column("table").combine_chunks()
    places = {name: place for place, name in enumerate(names)}
    in_file = table_column.dictionary.to_pylist()
    others = [name for name in in_file if name not in places]
    if others:
        raise ConfigError(
            f"{path}, column 'table' has {others[0]!r}, which the metadata doesn't know; {_REMEDY}"
        )
    place_of = np.array([places[name] for name in in_file], np.int64)
    tables = place_of[table_column.indices.to_numpy()]
    if (np.diff(tables) < 0).any():
        raise ConfigError(
            f"{path}, column 'table' isn't in the order of the metadata's tables; {_REMEDY}"
        )
    rows, counts = (content.column(name).to_numpy() for name in ("row", "count"))
    return _Columns(tables, rows, counts)


def _check_table(where: str, table: TableAccess, remedy: str = _REMEDY) -> None:
    rows, counts = table.rows, table.counts
    outside = rows[(rows < 0) | (rows >= table.num_rows)]
    if len(outside):
        raise ConfigError(
            f"{where}, column 'row': {outside[0]} isn't in a table with {table.num_rows} rows; "
            f"{remedy}"
        )
    distinct, times = np.unique(rows, return_counts=True)
    if len(distinct) < len(rows):
        raise ConfigError(
            f"{where}, column 'row': {distinct[times > 1][0]} is there more than once; {remedy}"
        )
    impossible = counts[~(np.isfinite(counts) & (counts >= 0))]
    if len(impossible):
        raise ConfigError(f"{where}, column 'count': {impossible[0]} isn't a count; {remedy}")
    if (np.diff(counts) > 0).any():
        raise ConfigError(f"{where}, column 'count': the most used rows aren't first; {remedy}")


def _checksum(header: _Header, columns: _Columns) -> str:
    """Return the checksum over the columns and all other metadata."""
    digest = hashlib.sha256(header.model_copy(update={"checksum": None}).model_dump_json().encode())
    for column in columns:
        digest.update(np.ascontiguousarray(column, column.dtype.newbyteorder("<")).tobytes())
    return f"sha256:{digest.hexdigest()}"
