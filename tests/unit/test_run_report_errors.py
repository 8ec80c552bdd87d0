"""Folders from which no page on a training run can be made, and what is said of them."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.run_folders import run_record, write_run
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.cli.app import app
from torchrec_2dsp.programs.run_report.contents import RunContents
from torchrec_2dsp.programs.run_report.page import run_page


def _without_config(folder: Path) -> None:
    (folder / "config.toml").unlink()


def _without_runs(folder: Path) -> None:
    (folder / "config.toml").write_text("[data]\n[model]\n[loop]\n")


def _of_another_format(folder: Path) -> None:
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps({**record, "format": 99}))


def _no_json(folder: Path) -> None:
    (folder / "record.json").write_text("{")


def _no_record(folder: Path) -> None:
    (folder / "record.json").write_text(json.dumps({"format": 3}))


def _no_plan(folder: Path) -> None:
    (folder / "main" / "plan.json").write_text("{}")


def _no_progress(folder: Path) -> None:
    (folder / "main" / "progress.jsonl").write_text('{"point": 3}\n')


def _gone(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_gone, r"there is no folder .*run; give the folder that train wrote to"),
        (_without_config, r"config\.toml can't be read: No such file"),
        (_without_runs, r"config\.toml is no config of train: it has no section runs"),
        (_of_another_format, r"record\.json has format=99, and this version reads 1 to 4; use"),
        (_no_json, r"record\.json is not JSON"),
        (_no_record, r"record\.json is not what train --output writes"),
        (_no_plan, r"plan\.json is not a plan file"),
        (_no_progress, r"progress\.jsonl is not the progress of a run"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, damage: Any, message: str) -> None:
    folder = write_run(tmp_path / "run", [run_record("main")])
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        RunContents.read(folder)
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 2


def test_without_plotly_the_command_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=r"pip install 'torchrec-2dsp\[report\]'"):
        run_page(RunContents.read(write_run(tmp_path / "run", [run_record("main")])))
