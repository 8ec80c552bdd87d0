"""Access statistics as a Parquet file: a line for each known row, and all else as metadata.

Any reader of Parquet shows the counts: ``table``, ``row``, ``count``, table by table, the most used
rows first.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.errors import ConfigError

_KEY = b"torchrec_2dsp.access"
_VERSION = 1
_FIELDS = ("num_rows", "num_samples", "tail_rows", "tail_lookups", "max_error")
"""What a table has beside its rows' counts."""


def write_tables(path: Path, tables: Mapping[str, TableAccess]) -> None:
    """Write the file, all of it or nothing."""
    names = list(tables)
    sizes = [len(tables[name].rows) for name in names]
    codes = np.repeat(np.arange(len(names), dtype=np.int32), sizes)
    columns = {
        "table": pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.string())),
        "row": pa.array(_joined([one.rows for one in tables.values()], np.int64)),
        "count": pa.array(_joined([one.counts for one in tables.values()], np.float64)),
    }
    metadata = {
        "version": _VERSION,
        "tables": [
            {"name": name, **{field: getattr(tables[name], field) for field in _FIELDS}}
            for name in names
        ],
    }
    content = pa.table(columns).replace_schema_metadata({_KEY: json.dumps(metadata).encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    pq.write_table(content, unfinished, compression="zstd")
    unfinished.replace(path)


def read_tables(path: Path) -> dict[str, TableAccess]:
    """Read what `write_tables` has written."""
    try:
        content = pq.read_table(path)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(f"there are no access statistics at {path}") from error
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path} is not a Parquet file") from error
    metadata = _metadata(path, content)
    rows, counts = (content.column(name).to_numpy() for name in ("row", "count"))
    codes = content.column("table").combine_chunks()
    sizes = np.bincount(codes.indices.to_numpy(), minlength=len(metadata["tables"]))
    ends = sizes.cumsum()
    return {
        one["name"]: TableAccess(
            rows=rows[end - size : end],
            counts=counts[end - size : end],
            **{field: one[field] for field in _FIELDS},
        )
        for one, size, end in zip(metadata["tables"], sizes, ends, strict=True)
    }


def _metadata(path: Path, content: pa.Table) -> dict[str, Any]:
    found = (content.schema.metadata or {}).get(_KEY)
    if found is None:
        raise ConfigError(
            f"{path} is Parquet, but no access statistics; AccessStats.save writes it"
        )
    metadata = json.loads(found)
    if metadata["version"] != _VERSION:
        raise ConfigError(
            f"{path} has access statistics of version {metadata['version']}, and this package "
            f"reads version {_VERSION}; count again, or install the package that wrote it"
        )
    return metadata


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *parts])
