"""Damages change something for certain and repeat with a seed; files damaged so are refused."""

from pathlib import Path
from random import Random

import pytest

from tests.support.damaged_files import (
    BYTE_DAMAGES,
    FILE_DAMAGES,
    damage_file,
    damage_folder,
    damaged,
)
from tests.support.damaged_inputs import READERS, Reader, folder_outcomes, outcomes

DATA = bytes(range(256))


@pytest.mark.parametrize("kind", BYTE_DAMAGES)
def test_bytes_are_others_after_each_damage(kind: str) -> None:
    for data in (DATA, b"x", bytes(5) + b"1"):
        for seed in range(20):
            damage = damaged(data, Random(seed), [kind])
            assert damage.data != data
            assert damage.where.endswith(f" of {len(data)}")
            # There is no other place in one byte to copy from.
            assert damage.kind == ("flip" if (data, kind) == (b"x", "copy") else kind)


def test_all_kinds_come_up_and_a_seed_repeats_them() -> None:
    damages = [damaged(DATA, Random(seed)) for seed in range(200)]
    assert {damage.kind for damage in damages} == set(BYTE_DAMAGES)
    assert damages == [damaged(DATA, Random(seed)) for seed in range(200)]


def test_a_flip_is_one_bit() -> None:
    after = damaged(DATA, Random(1), ["flip"]).data
    assert sum((a ^ b).bit_count() for a, b in zip(DATA, after, strict=True)) == 1


def test_nothing_to_damage_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to damage"):
        damaged(b"", Random(0))


def test_files_are_damaged_in_place(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(DATA)
    damage = damage_file(path, Random(3))
    assert path.read_bytes() == damage.data != DATA
    assert str(damage).endswith("in plan.json")


def test_files_of_a_folder_are_deleted_swapped_or_damaged(tmp_path: Path) -> None:
    kinds = set()
    for seed in range(100):
        folder = tmp_path / str(seed)
        folder.mkdir()
        before = {"a": DATA, "b": b"b" * 7, "c": b""}
        for name, data in before.items():
            (folder / name).write_bytes(data)
        kinds.add(damage_folder(folder, Random(seed)).kind)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} != before
    assert kinds == {*BYTE_DAMAGES, *FILE_DAMAGES}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damaged_files_are_refused(reader: Reader, tmp_path: Path) -> None:
    seen = outcomes(reader, tmp_path, damages=150)
    assert seen["refused"] > 100


def test_deleted_and_exchanged_files_are_refused(tmp_path: Path) -> None:
    seen = folder_outcomes(tmp_path, damages=12)
    assert seen["refused"] >= 12
    assert seen["loaded"] >= 12
