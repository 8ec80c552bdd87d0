"""Damaged plan, statistics and calibration files: each loads as it was, or is refused."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType

import torchrec_2dsp as tdsp
from tests.support.damaged_files import damage_file, damage_folder
from tests.support.plans import sharding
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.plan.serialize import load, save


@dataclass(frozen=True)
class Reader:
    """A kind of file that users hand to the package."""

    name: str
    """The file's name."""
    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    is_intact: Callable[[Any, Any], bool]
    """Whether what was read after the damage, given first, is as good as what was written."""


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
    """Calibrations are edited by hand and have no checksum; a number may be another one."""
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


def outcomes(reader: Reader, folder: Path, damages: int, seed: int = 0) -> Counter[str]:
    """Return how often a damaged file was refused, and how often it loaded as it was.

    Raises:
        AssertionError: a damage loaded as something else, or failed without a typed error.
    """
    path = folder / reader.name
    reader.write(path)
    intact, written = path.read_bytes(), reader.read(path)
    seen: Counter[str] = Counter()
    for number in range(damages):
        path.write_bytes(intact)
        damage = damage_file(path, Random(f"{seed}, {number}"))
        seen[_outcome(reader, path, written, f"seed {seed}, damage {number}: {damage}")] += 1
    return seen


def folder_outcomes(folder: Path, damages: int, seed: int = 0) -> Counter[str]:
    """Return what comes of files that are deleted, or exchanged for another kind of file."""
    seen: Counter[str] = Counter()
    for number in range(damages):
        for reader in READERS:
            reader.write(folder / reader.name)
        written = [reader.read(folder / reader.name) for reader in READERS]
        damage = damage_folder(folder, Random(f"{seed}, {number}"), ["delete", "swap"])
        for reader, content in zip(READERS, written, strict=True):
            where = f"seed {seed}, damage {number}: {damage}"
            seen[_outcome(reader, folder / reader.name, content, where)] += 1
    return seen


def _outcome(reader: Reader, path: Path, written: Any, where: str) -> str:
    try:
        read = reader.read(path)
    except tdsp.TwoDError as error:
        if path.name not in str(error):
            raise AssertionError(f"{where}: the message doesn't name the file") from error
        return "refused"
    except BaseException as error:
        raise AssertionError(f"{reader.name}, {where}: {type(error).__name__}: {error}") from error
    assert reader.is_intact(read, written), f"{reader.name}, {where}: loaded as something else"
    return "loaded"
