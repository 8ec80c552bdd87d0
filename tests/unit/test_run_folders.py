"""The folder that training programs share: which of its runs and figures are a config's."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest

import torchrec_2dsp as tdsp
from tests.support.run_folders import run_record, write_progress
from tests.support.train_runs import config_with
from torchrec_2dsp.plan import serialize
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.programs.config.config_file import load_config
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.record import TrainRecord
from torchrec_2dsp.programs.train.results import RunFolder
from torchrec_2dsp.programs.train.sharded import PlannedRun

PLAN = Plan2D({}, mesh=tdsp.Mesh2D(2, 2), sync=tdsp.GradientSync())
PLANNED = PlannedRun(PLAN, tables={}, num_steps=30)


def begin(folder: Path, config: TrainConfig, name: str) -> RunFolder:
    """Begin a run, as a program does that is killed then."""
    output = RunFolder(folder, config)
    with patch.object(serialize, "save"):
        output.run_planned(name, PLANNED, config)
    return output


@pytest.fixture
def finished(tmp_path: Path) -> TrainConfig:
    """Leave what a config's two runs leave when they are over; return the config."""
    config = config_with(runs={"first": {}, "second": {}})
    for name in config.runs:
        begin(tmp_path, config, name)
        write_progress(tmp_path / name, is_over=True)
    runs = tuple(run_record(name) for name in config.runs)
    record = TrainRecord(config=config.model_dump(mode="json"), world_size=4, runs=runs)
    record.save(tmp_path / "record.json")
    return config


def test_a_folder_with_relative_paths_goes_on(
    finished: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions wrote paths of output as they were given."""
    path = tmp_path / "config.toml"
    monkeypatch.chdir(tmp_path)
    path.write_text(path.read_text().replace('[output]\nfolder = ""', '[output]\nfolder = "out"'))
    config = finished.model_copy(
        update={"output": finished.output.model_copy(update={"folder": "out"})}
    )
    begin(tmp_path, config.only(["first"]), "first")
    written = load_config(TrainConfig, path)
    assert written.output.folder == os.path.abspath("out")
    assert [*written.runs] == ["second", "first"]
