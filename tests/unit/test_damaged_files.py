"""Damage always changes something, repeats with its seed, and is refused by readers."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType

import torchrec_2dsp as tdsp
from tests.support.damaged_files import (
    BYTE_DAMAGES,
    FILE_DAMAGES,
    damage_file,
    damage_folder,
    damaged,
)
from tests.support.plans import sharding
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.plan.serialize import load, save

DATA = bytes(range(256))


@pytest.mark.parametrize("kind", BYTE_DAMAGES)
def test_bytes_are_others_after_each_damage(kind: str) -> None:
    for data in (DATA, b"x", bytes(5) + b"1"):
        for seed in range(20):
            damage = damaged(data, Random(seed), kind)
            assert damage.data != data
            # There is no other place in one byte to copy from.
            assert damage.kind == ("flip" if (data, kind) == (b"x", "copy") else kind)
    assert damaged(DATA, Random(1), kind) == damaged(DATA, Random(1), kind)


def test_files_of_a_folder_are_deleted_swapped_or_damaged(tmp_path: Path) -> None:
    kinds = set()
    for seed in range(100):
        folder = tmp_path / str(seed)
        folder.mkdir()
        before = {"a": DATA, "b": b"b" * 7, "c": b""}
        for name, data in before.items():
            (folder / name).write_bytes(data)
        kinds.add(damage_folder(folder, Random(seed)).split()[0])
        assert {path.name: path.read_bytes() for path in folder.iterdir()} != before
    assert kinds == {*BYTE_DAMAGES, *FILE_DAMAGES}


@dataclass(frozen=True)
class Reader:
    """A file type that users give to the package."""

    name: str
    """The file's name."""
    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    is_intact: Callable[[Any, Any], bool]
    """True if the first argument, read after the damage, is as good as the written second."""


def _plan() -> tdsp.Plan2D:
    tables = {
        "rows": sharding(ShardingType.ROW_WISE, [0, 1], 500),
        "columns": sharding(ShardingType.COLUMN_WISE, [1, 0, 1], 77),
        "whole": sharding(ShardingType.TABLE_WISE, [1], 12),
        "copies": sharding(ShardingType.DATA_PARALLEL, [0, 1], 10),
    }
    stock = ShardingPlan({"model.bags": EmbeddingModuleShardingPlan(tables)})
    sync = tdsp.WeightSync(policy=tdsp.after(100, tdsp.every(4)), dense_above=0.25)
    plan = tdsp.pin(tdsp.Plan2D.from_stock(stock, tdsp.Mesh2D(2, 2), sync), "whole", hot_rows=[3])
    return tdsp.pin(plan, "rows", exchange="row", owners="hash", hot_rows=range(0, 900, 31))


def _statistics() -> tdsp.AccessStats:
    numbers = np.random.default_rng(5)
    many = TableAccess.of_counts(numbers.zipf(1.3, 2_000).clip(0, 10**6) - 1, num_samples=7_000)
    tail = TableAccess(90, 2.5, np.array([7, 3]), np.array([2 / 3, 0.5]), 20, 4.5, 0.5)
    return tdsp.AccessStats({"many": many, "none": TableAccess.of_counts([0, 0], 9), "tail": tail})


def _are_equal(read: tdsp.AccessStats, written: tdsp.AccessStats) -> bool:
    return list(read) == list(written) and all(
        np.array_equal(getattr(read[name], field), value)
        for name in written
        for field, value in vars(written[name]).items()
        if not field.startswith("_")
    )


def _is_sound(read: tdsp.Calibration, written: tdsp.Calibration) -> bool:
    """Tell whether all costs are valid: calibrations have no checksum, so numbers may differ."""
    costs = [*dict(read.collectives).values(), *dict(read.kernels).values()]
    numbers = [
        value for cost in costs if cost for value in dict(cost).values() if value is not None
    ]
    return all(np.isfinite(value) and value >= 0 for value in numbers) and type(read) is type(
        written
    )


READERS = (
    Reader("plan.json", lambda path: save(_plan(), path), load, lambda a, b: a == b),
    Reader(
        "statistics.parquet",
        lambda path: _statistics().save(path),
        tdsp.AccessStats.load,
        _are_equal,
    ),
    Reader(
        "calibration.toml",
        lambda path: tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml").save(path),
        tdsp.Calibration.load,
        _is_sound,
    ),
)


def outcomes(reader: Reader, folder: Path, damages: int) -> Counter[str]:
    """Count how often a damaged file was refused, and how often it loaded unchanged."""
    path = folder / reader.name
    reader.write(path)
    intact, written = path.read_bytes(), reader.read(path)
    seen: Counter[str] = Counter()
    for number in range(damages):
        path.write_bytes(intact)
        damage = damage_file(path, Random(number))
        seen[outcome(reader, path, written, f"damage {number}: {damage}")] += 1
    return seen


def folder_outcomes(folder: Path, damages: int) -> Counter[str]:
    """Count the outcomes for files that are deleted, or replaced by another file type."""
    seen: Counter[str] = Counter()
    for number in range(damages):
        for reader in READERS:
            reader.write(folder / reader.name)
        written = [reader.read(folder / reader.name) for reader in READERS]
        damage = damage_folder(folder, Random(number), *FILE_DAMAGES)
        for reader, content in zip(READERS, written, strict=True):
            where = f"damage {number}: {damage}"
            seen[outcome(reader, folder / reader.name, content, where)] += 1
    return seen


def outcome(reader: Reader, path: Path, written: Any, where: str) -> str:
    """Fail if a damaged file loads as something else, or fails without a typed error."""
    try:
        read = reader.read(path)
    except tdsp.TwoDError as error:
        return "refused" if path.name in str(error) else "refused without the file's name"
    except BaseException as error:
        raise AssertionError(f"{reader.name}, {where}: {type(error).__name__}: {error}") from error
    assert reader.is_intact(read, written), f"{reader.name}, {where}: loaded as something else"
    return "loaded"


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damaged_files_are_refused(reader: Reader, tmp_path: Path) -> None:
    seen = outcomes(reader, tmp_path, damages=150)
    assert seen.keys() <= {"refused", "loaded"}
    assert seen["refused"] > 100


def test_deleted_and_exchanged_files_are_refused(tmp_path: Path) -> None:
    seen = folder_outcomes(tmp_path, damages=12)
    assert seen.keys() == {"refused", "loaded"}
    assert seen["refused"] >= 12
    assert seen["loaded"] >= 12
