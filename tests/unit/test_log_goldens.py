"""Digests of batches that logs of every kind gave before text files were converted to Parquet.

Samples of trained models depend on them: which rows a batch holds, their ids, and what stands in
for a line that can't be read.
"""

import gzip
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.data.dataset import Dataset, Split
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
    """Write a log in the format that its name says."""
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
    delimiter = "\t" if ".tsv" in name else ","
    lines = [delimiter.join(COLUMNS), *(delimiter.join(row) for row in table)]
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


def interactions(folder: Path, ending: str, **keys: Any) -> Dataset:
    random = np.random.default_rng(4)
    uses = [
        (f"u{random.integers(20)}", f"i{random.zipf(1.5) % 30}", int(random.integers(50)))
        for _ in range(300)
    ]
    users, items, times = zip(*uses, strict=True)
    names = ("user_id:token", "item_id:token", "timestamp:float")
    file = folder / f"log.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table([users, items, times], names=names), file, row_group_size=9)
    else:
        lines = ["\t".join(names), "u1\ti2", *("\t".join(map(str, use)) for use in uses)]
        file.write_text("\n".join(lines))
    tree = {"files": [str(file)], "num_ahead": 0, "malformed_limit": 1, "max_length": 7}
    return make_config(InteractionsConfig, tree | keys).dataset()


def digest(data: Dataset, *, world_size: int = 2, start: int = 0) -> str:
    """Return a digest of both splits' batches, the features and the malformed lines."""
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
    "tsv": lambda folder: table(folder, "a.tsv", delimiter="\t", quote=""),
    "gz": lambda folder: table(folder, "a.csv.gz", "b.csv.gz"),
    "parquet": lambda folder: table(folder, "a.parquet", "b.parquet"),
    "mixed": lambda folder: table(folder, "a.csv", "b.parquet", "c.csv.gz"),
    "vocabulary": lambda folder: table(folder, "a.csv", features=VOCABULARIES, dense=MEASURED),
    "vocabulary_parquet": lambda folder: table(
        folder, "a.parquet", features=VOCABULARIES, dense=MEASURED
    ),
    "padded": lambda folder: table(folder, "a.csv", rest="pad", epochs=2),
    "shuffled_csv": lambda folder: table(folder, "a.csv", "b.csv", shuffled_blocks=3, epochs=2),
    "shuffled_gz": lambda folder: table(
        folder, "a.csv.gz", "b.csv.gz", "c.csv.gz", shuffled_blocks=3, epochs=3, rest="pad"
    ),
    "shuffled_parquet": lambda folder: table(
        folder, "a.parquet", "b.parquet", shuffled_blocks=2, epochs=2, seed=5
    ),
    "hash_split": lambda folder: table(folder, "a.csv", "b.csv", held_out=HASHED),
    "hash_split_parquet": lambda folder: table(
        folder, "a.parquet", held_out=HASHED, shuffled_blocks=2
    ),
    "file_split": lambda folder: table(
        folder, "a.csv", held_out={"by": "files", "files": [str(write(folder, "b.csv.gz", 9))]}
    ),
    "malformed": lambda folder: damaged(folder, "a.csv"),
    "malformed_gz": lambda folder: damaged(folder, "a.csv.gz", "b.csv", shuffled_blocks=2),
    "malformed_hash_split": lambda folder: damaged(folder, "a.csv", held_out=HASHED),
    "malformed_vocabulary": lambda folder: damaged(folder, "a.csv", features=VOCABULARIES),
    "large_blocks": lambda folder: damaged(folder, "a.csv", block_bytes=10**6, shuffled_blocks=1),
    "criteo": lambda folder: known(folder, CriteoConfig, held_out={"share": 0.3}),
    "criteo_vocabulary": lambda folder: known(
        folder, CriteoConfig, encoding="vocabulary", min_count=2, held_out={"share": 0.3}
    ),
    "avazu": lambda folder: known(folder, AvazuConfig, shuffled_blocks=2, epochs=2),
    "interactions": lambda folder: interactions(folder, "inter", epochs=2),
    "interactions_parquet": lambda folder: interactions(folder, "parquet", rest="pad"),
}
DIGESTS = {
    "csv": ["247577707e993d65", "e5d5cc00e3a9a978"],
    "tsv": ["b9004512a3533d4a", "7fb0999357fabd76"],
    "gz": ["247577707e993d65", "e5d5cc00e3a9a978"],
    "parquet": ["247577707e993d65", "e5d5cc00e3a9a978"],
    "mixed": ["8795f56984429877", "baadfed1ed0ac9a8"],
    "vocabulary": ["e5b35c24596d7bcf", "2507a20d1887573e"],
    "vocabulary_parquet": ["e5b35c24596d7bcf", "2507a20d1887573e"],
    "padded": ["5ca8e8b6415f353a", "8085227023f50526"],
    "shuffled_csv": ["5f24ffec1abd3ed0", "7a1b899e7681cc06"],
    "shuffled_gz": ["796f6ba072616a65", "58ef29239f20107c"],
    "shuffled_parquet": ["d8b0805c25c8a58e", "d5eca5ad7754ede3"],
    "hash_split": ["a2b5377c2f018b4e", "9375ba9965392955"],
    "hash_split_parquet": ["d3f551e7f62bb9c2", "0b7c5e6a511da3a6"],
    "file_split": ["57a5560803e1cd49", "916b5aa72c5595ff"],
    "malformed": ["8ef982e56107fec9", "a87c249c3427b234"],
    "malformed_gz": ["0396245b8089e878", "1a1882fb4743eca4"],
    "malformed_hash_split": ["4794e58cc0a5ee5d", "f4865d98d791df90"],
    "malformed_vocabulary": ["e23e6e231197611b", "97ecf89701ae7f80"],
    "large_blocks": ["f6b6bfc78bc7fe1e", "235d372d12515c9d"],
    "criteo": ["28083249623ecc75", "7be6131d311fb8de"],
    "criteo_vocabulary": ["95c72efaec5b0d76", "f7af7d5c164a53b6"],
    "avazu": ["487cba84746c8bb9", "716b5f0436768453"],
    "interactions": ["30313d1e2ec4ba55", "ca9604e4714cd60a"],
    "interactions_parquet": ["46419520a60b9117", "d80d1fded6934fc3"],
}


@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_before(tmp_path: Path, name: str) -> None:
    data = CASES[name](tmp_path)
    digests = [digest(data, world_size=size, start=start) for size, start in ((2, 0), (3, 1))]
    assert digests == DIGESTS[name]
