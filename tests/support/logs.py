"""Small logs in files, and their expected batches by plain Python."""

import gzip
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torchrec.datasets.utils import Batch

from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.data.dataset import Dataset, Split
from torchrec_2dsp.programs.data.logs.sections import TableConfig

_MASK = (1 << 64) - 1
NUM_USERS, NUM_TAGS = 50, 30
"""The numbers of rows in the features' tables."""


@dataclass(frozen=True)
class Row:
    """A log's row."""

    number: int
    """Its number in the log, which is a dense feature as well."""

    label: int
    user: str
    tags: tuple[str, ...]

    @property
    def line(self) -> str:
        """The row as a line of CSV."""
        return f"{self.label},{self.number},{self.user},{'|'.join(self.tags)}\n"


NAMES = ("label", "number", "user", "tags")
"""The columns."""
FEATURES = [
    {"name": "user", "num_rows": NUM_USERS},
    {"name": "tags", "num_rows": NUM_TAGS, "separator": "|"},
]


def make_rows(num_rows: int, seed: int = 0) -> list[Row]:
    """Draw rows with a few users, some missing, and zero to three tags each."""
    random = np.random.default_rng(seed)
    return [
        Row(
            number=number,
            label=int(random.integers(2)),
            user=random.choice(["", "ann", "a longer name than eight", "7", "bob"]),
            tags=tuple(f"t{tag}" for tag in random.integers(0, 9, random.integers(4))),
        )
        for number in range(num_rows)
    ]


def write_log(path: Path, rows: Sequence[Row], *, row_group: int = 7) -> Path:
    """Write rows in the format that the file name says."""
    if path.suffix == ".parquet":
        table = pa.table(
            {
                "label": [row.label for row in rows],
                "number": [row.number for row in rows],
                "user": [row.user or None for row in rows],
                "tags": pa.array([list(row.tags) for row in rows], pa.list_(pa.string())),
            }
        )
        pq.write_table(table, path, row_group_size=row_group)
        return path
    text = ",".join(NAMES) + "\n" + "".join(row.line for row in rows)
    # Without a last line end: that line counts as well.
    content = text.rstrip("\n").encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


Interaction = tuple[str, str, int]
"""A user, an item, and when."""


def make_interactions(num_rows: int, seed: int = 0, num_users: int = 12) -> list[Interaction]:
    """Draw interactions in random order, some at the same time."""
    random = np.random.default_rng(seed)
    return [
        (f"u{random.integers(num_users)}", f"i{random.zipf(1.5) % 30}", int(random.integers(50)))
        for _ in range(num_rows)
    ]


def write_interactions(path: Path, log: Sequence[Interaction]) -> Path:
    """Write interactions in the format that the file name says."""
    if path.suffix == ".parquet":
        users, items, times = zip(*log, strict=True)
        table = {"user_id:token": users, "item_id:token": items, "timestamp:float": times}
        pq.write_table(pa.table(table), path, row_group_size=9)
        return path
    lines = [f"{item}\t{at}\t{user}" for user, item, at in log]
    path.write_text("\n".join(["item_id:token\ttimestamp:float\tuser_id:token", *lines]))
    return path


def table_config(*files: Path, **keys: Any) -> TableConfig:
    """Return the config section for a log in these files, in small blocks and without a thread."""
    is_parquet = files[0].suffix == ".parquet"
    features = [dict(feature) for feature in FEATURES]
    if is_parquet:
        features[1].pop("separator")
    tree = {
        "prepared": str(files[0].parent / "prepared"),
        "files": [str(file) for file in files],
        "label": "label",
        "dense": [{"column": "number"}],
        "features": features,
        "held_out": {"share": 0.0},
        "block_bytes": 100,
        "block_rows": 5,
        "num_ahead": 0,
    }
    return make_config(TableConfig, {**tree, **keys})


def global_batches(
    data: Dataset,
    *,
    global_batch_size: int,
    world_size: int,
    start: int = 0,
    split: Split = Split.TRAIN,
    batches_per_step: int = 1,
) -> Iterator[list[Batch]]:
    """Yield each batch as a list of all ranks' parts."""
    streams = [
        data.batches(
            split,
            global_batch_size=global_batch_size,
            rank=rank,
            world_size=world_size,
            start=start,
            batches_per_step=batches_per_step,
        )
        for rank in range(world_size)
    ]
    yield from map(list, zip(*streams, strict=True))


def contents(
    data: Dataset, global_batch_size: int, world_size: int = 2, **keys: Any
) -> list[list[tuple[object, ...]]]:
    """Return each batch's rows; see `content_of`."""
    batches = global_batches(
        data, global_batch_size=global_batch_size, world_size=world_size, **keys
    )
    return [content_of(parts) for parts in batches]


def whole_epoch(data: Dataset, num_rows: int, split: Split = Split.TRAIN) -> Batch:
    """Return an epoch's only batch."""
    ((batch,),) = global_batches(data, global_batch_size=num_rows, world_size=1, split=split)
    return batch


def numbers_of(parts: Sequence[Batch]) -> list[int]:
    """Return a batch's row numbers, in order."""
    return torch.cat([part.dense_features[:, 0] for part in parts]).int().tolist()


def content_of(parts: Sequence[Batch]) -> list[tuple[object, ...]]:
    """Return each row's label, dense features and ids in a batch, in row order."""
    content: list[tuple[object, ...]] = []
    for part in parts:
        features = part.sparse_features
        lengths = features.lengths().view(len(features.keys()), -1).tolist()
        ids = iter(features.values().tolist())
        bags = [[list(islice(ids, length)) for length in row] for row in lengths]
        content += zip(part.labels.tolist(), part.dense_features.tolist(), *bags, strict=True)
    return content


@cache
def expected_content(row: Row) -> tuple[object, ...]:
    """Return a row's expected content in a batch, hashed with plain integers."""
    tags = [hashed_row(tag.encode(), NUM_TAGS) for tag in row.tags]
    return float(row.label), [float(row.number)], [hashed_row(row.user.encode(), NUM_USERS)], tags


def hashed_row(text: bytes, num_rows: int) -> int:
    """Return a text's row: 0 if the text is missing, otherwise by its hash."""
    return 1 + (((plain_hash(text) >> 32) * (num_rows - 1)) >> 32) if text else 0


def plain_hash(text: bytes) -> int:
    """Hash a text, word by word."""
    state = len(text) * 0x9E3779B97F4A7C15 & _MASK
    for word in range(math.ceil(len(text) / 8)):
        state ^= int.from_bytes(text[8 * word : 8 * word + 8], "little")
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


REAL_LOGS = Path(os.environ.get("REAL_LOGS", "real_logs"))
"""The environment names it: ``REAL_LOGS=~/logs make test``."""
