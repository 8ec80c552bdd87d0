"""Damaged plan, statistics and calibration files load as they were written, or are refused."""

from pathlib import Path

import pytest

from tests.support.damaged_inputs import READERS, Reader, folder_outcomes, outcomes


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damaged_files_are_refused(reader: Reader, tmp_path: Path) -> None:
    seen = outcomes(reader, tmp_path, damages=150)
    assert seen["refused"] > 100


def test_deleted_and_exchanged_files_are_refused(tmp_path: Path) -> None:
    seen = folder_outcomes(tmp_path, damages=12)
    assert seen["refused"] >= 12
    assert seen["loaded"] >= 12
