"""Batches have the same digests as before text files were converted to Parquet.

Trained models depend on them: on the rows in a batch, their ids, and the stand-ins for
unreadable lines.
"""

import gzip
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.logs import make_interactions, write_interactions
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.data.dataset import Dataset, Split
from torchrec_2dsp.programs.data.logs import encoder
from torchrec_2dsp.programs.data.logs.sections import (
    AvazuConfig,
    CriteoConfig,
    InteractionsConfig,
    TableConfig,
)

NUM_ROWS = 150
COLUMNS = ("label", "time", "hour", "user", "tags", "price", "number")
BAD_LINES = {7: "1,2", 8: "x,,,,,,", 9: "", 40: "1,0,14102100,u1,a,much,3", 41: '1,0,,"u,,1,3'}
FEATURES = [
    {"name": "user", "num_rows": 40},
    {"name": "tags", "num_rows": 30, "separator": "|", "max_ids": 2},
    {"name": "weekday", "column": "time", "encoding": "weekday"},
    {"name": "clock", "column": "hour", "encoding": "hour", "time_format": "yymmddhh"},
]
VOCABULARIES = [
    {"name": "user", "encoding": "vocabulary", "min_count": 2},
    {"name": "tags", "encoding": "vocabulary", "separator": "|", "num_rows": 7},
]
DENSE = [
    {"column": "price", "lowest": 0.0, "log1p": True},
    {"column": "number", "scale": "given", "mean": 3, "std": 2},
]
MEASURED = [{"column": "price", "fill": 2.0, "scale": "measured"}]


def rows(seed: int) -> list[list[str]]:
    random = np.random.default_rng(seed)
    return [
        [
            str(random.integers(2)),
            str(random.integers(10**6, 10**9)) if random.random() < 0.9 else "",
            f"1410{random.integers(10, 29)}{random.integers(24):02d}",
            random.choice(["", "ann", "a longer name than eight", "7", "é", f"u{number}"]),
            "|".join(f"t{tag}" for tag in random.integers(0, 9, random.integers(4))),
            random.choice(["", "-1", "nan", f"{random.normal(5, 3):.4f}"]),
            str(number),
        ]
        for number in range(NUM_ROWS)
    ]


def write(folder: Path, name: str, seed: int = 0, *, is_damaged: bool = False) -> Path:
    """Write a log in its name's format."""
    path, table = folder / name, rows(seed)
    if path.suffix == ".parquet":
        text = list(zip(*table, strict=True))
        columns = {
            "label": pa.array([int(value) for value in text[0]]),
            "time": pa.array([int(value) if value else None for value in text[1]]),
            "hour": pa.array([int(value) for value in text[2]]),
            "user": pa.array([value or None for value in text[3]]).dictionary_encode(),
            "tags": pa.array(text[4]),
            "price": pa.array([float(value) if value else None for value in text[5]]),
            "number": pa.array([int(value) for value in text[6]]),
        }
        pq.write_table(pa.table(columns), path, row_group_size=37)
        return path
    lines = [",".join(COLUMNS), *map(",".join, table)]
    for number, line in BAD_LINES.items() if is_damaged else ():
        lines[number] = line
    content = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def table(folder: Path, *names: str, **keys: Any) -> Dataset:
    files = [write(folder, name, seed) for seed, name in enumerate(names)]
    return opened(folder, files, **keys)


def opened(folder: Path, files: list[Path], **keys: Any) -> Dataset:
    tree = {
        "files": [str(file) for file in files],
        "label": "label",
        "features": FEATURES,
        "dense": DENSE,
        "held_out": {"share": 0.2},
        "prepared": str(folder / "prepared"),
        "block_bytes": 700,
        "block_rows": 10,
        "num_ahead": 0,
    }
    return make_config(TableConfig, tree | keys).dataset()


def damaged(folder: Path, *names: str, **keys: Any) -> Dataset:
    files = [write(folder, name, is_damaged=True) for name in names]
    return opened(folder, files, malformed_limit=20, **keys)


def known(folder: Path, kind: type[CriteoConfig] | type[AvazuConfig], **keys: Any) -> Dataset:
    random = np.random.default_rng(3)
    is_criteo = kind is CriteoConfig
    lines = []
    for _ in range(NUM_ROWS):
        values = [f"{value:08x}" for value in random.zipf(1.3, 26) % 2**31]
        if is_criteo:
            counts = ["" if count < 0 else str(count) for count in random.integers(-3, 99, 13)]
            lines.append("\t".join([str(random.integers(2)), *counts, *values]))
        else:
            parts = [values[0], str(random.integers(2)), f"141021{random.integers(24):02d}"]
            lines.append(",".join([*parts, *values[1:15], "320", "50", *values[15:20]]))
    file = folder / "log.txt"
    file.write_text("\n".join(lines) + "\n")
    prepared = str(folder / "prepared")
    tree = {"files": str(file), "num_rows": 50, "block_bytes": 3000, "prepared": prepared}
    return make_config(kind, tree | keys).dataset()


def interactions(folder: Path) -> Dataset:
    file = write_interactions(folder / "log.inter", make_interactions(300, seed=4, num_users=20))
    names, *lines = file.read_text().split("\n")
    file.write_text("\n".join([names, "u1\ti2", *lines]))
    tree = {"files": [str(file)], "num_ahead": 0, "malformed_limit": 1}
    return make_config(InteractionsConfig, tree | {"max_length": 7, "epochs": 2}).dataset()


def digest(data: Dataset, *, world_size: int = 2, start: int = 0) -> str:
    """Return a digest over both splits' batches, the features and the malformed lines."""
    total = hashlib.sha256()
    for feature in data.features:
        total.update(f"{feature.name} {feature.num_rows}".encode())
    for split in Split:
        for rank in range(world_size):
            batches = data.batches(
                split, global_batch_size=12, rank=rank, world_size=world_size, start=start
            )
            for batch in batches:
                # Three digits: logarithms may differ in the last bit between processors.
                total.update((batch.dense_features.double() * 1000).round().int().numpy().tobytes())
                total.update(batch.labels.numpy().tobytes())
                total.update(batch.sparse_features.values().numpy().tobytes())
                total.update(batch.sparse_features.lengths().numpy().tobytes())
    malformed: Any = data.malformed  # type: ignore[attr-defined]
    total.update(str(len(malformed)).encode())
    for line in malformed.examples:
        reason = line.reason.replace("isn't a", "is no")  # The digests are older than its words.
        total.update(f"{Path(line.file).name}:{line.line}:{reason}:{line.text}".encode())
    return total.hexdigest()[:16]


HASHED = {"by": "hash", "column": "user", "share": 0.4}
CASES: dict[str, Any] = {
    "csv": lambda folder: table(folder, "a.csv", "b.csv"),
    "vocabulary": lambda folder: table(folder, "a.csv", features=VOCABULARIES, dense=MEASURED),
    "shuffled_gz": lambda folder: table(
        folder, "a.csv.gz", "b.csv.gz", "c.csv.gz", shuffled_blocks=3, epochs=3, rest="pad"
    ),
    "shuffled_parquet": lambda folder: table(
        folder, "a.parquet", "b.parquet", shuffled_blocks=2, epochs=2, seed=5
    ),
    "hash_split": lambda folder: table(folder, "a.csv", "b.csv", held_out=HASHED),
    "malformed_gz": lambda folder: damaged(folder, "a.csv.gz", "b.csv", shuffled_blocks=2),
    "malformed_vocabulary": lambda folder: damaged(folder, "a.csv", features=VOCABULARIES),
    "criteo_vocabulary": lambda folder: known(
        folder, CriteoConfig, encoding="vocabulary", min_count=2, held_out={"share": 0.3}
    ),
    "avazu": lambda folder: known(folder, AvazuConfig, shuffled_blocks=2, epochs=2),
    "interactions": interactions,
}
DIGESTS = {
    "csv": ["247577707e993d65", "e5d5cc00e3a9a978"],
    "vocabulary": ["e5b35c24596d7bcf", "2507a20d1887573e"],
    "shuffled_gz": ["796f6ba072616a65", "58ef29239f20107c"],
    "shuffled_parquet": ["d8b0805c25c8a58e", "d5eca5ad7754ede3"],
    "hash_split": ["a2b5377c2f018b4e", "9375ba9965392955"],
    "malformed_gz": ["0396245b8089e878", "1a1882fb4743eca4"],
    "malformed_vocabulary": ["e23e6e231197611b", "97ecf89701ae7f80"],
    "criteo_vocabulary": ["95c72efaec5b0d76", "f7af7d5c164a53b6"],
    "avazu": ["487cba84746c8bb9", "716b5f0436768453"],
    "interactions": ["30313d1e2ec4ba55", "ca9604e4714cd60a"],
}


@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # The log's times begin in 1970, and are refused otherwise; their digits are in the digests.
    monkeypatch.setattr(encoder, "_FIRST_SECOND", 0)
    data = CASES[name](tmp_path)
    digests = [digest(data, world_size=size, start=start) for size, start in ((2, 0), (3, 1))]
    assert digests == DIGESTS[name]
