"""Sections of logs that contradict themselves, or their files."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.logs import make_rows, table_config, write_log
from torchrec_2dsp.errors import ConfigError

ROWS = make_rows(40)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"held_out": {"by": "hash"}}, "held_out: by='hash' and column='' don't belong together"),
        ({"held_out": {"files": ["a"]}}, r"held_out: by='last' and files=\('a',\) don't belong"),
        ({"features": [{"name": "user"}]}, "num_rows=0 leaves no row to hash to beside"),
        (
            {"features": [{"name": "user", "encoding": "vocabulary", "num_rows": 2}]},
            "num_rows=2 leaves no row to a value beside those for missing and unknown",
        ),
        (
            {"features": [{"name": "user", "num_rows": 9}, {"name": "user", "num_rows": 8}]},
            "features: 'user' is used twice",
        ),
        ({"features": [{"name": "label", "num_rows": 9}]}, "label='label' is a feature, too"),
        ({"dense": [{"column": "number", "log1p": True}]}, "log1p needs lowest above -1, and it"),
        ({"dense": [{"column": "number", "mean": 1}]}, "mean and std are for scale='given', and"),
        (
            {"dense": [{"column": "number", "lowest": 2, "highest": 1}]},
            "lowest=2.0 is not below highest=1.0",
        ),
    ],
)
def test_sections_that_contradict_themselves(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table_config(Path("a.csv"), **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"held_out": {"by": "hash", "column": "page"}}, "held_out.column='page' is the column of"),
        (
            {"held_out": {"by": "hash", "column": "number"}},
            "'number' is a dense feature, a time or",
        ),
        (
            {"features": [{"name": "user", "encoding": "vocabulary"}], "prepared": ""},
            "prepared is empty, and 'user' needs a vocabulary",
        ),
        ({"prepared": "/proc/none"}, "prepared: /proc/none/logs/.*parquet can't be written"),
    ],
)
def test_logs_that_cannot_be_opened(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    file = write_log(tmp_path / "a.csv", ROWS)
    with pytest.raises(ConfigError, match=message):
        table_config(file, **keys).dataset()


def test_a_file_is_not_trained_on_and_held_out(tmp_path: Path) -> None:
    file = write_log(tmp_path / "a.csv", ROWS)
    with pytest.raises(ConfigError, match="is among files and among held_out"):
        table_config(file, held_out={"by": "files", "files": [str(file)]}).dataset()
