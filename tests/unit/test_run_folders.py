"""The folder that training programs share: the runs and figures that belong to a config."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import tomli_w

import torchrec_2dsp as tdsp
from tests.support.run_folders import run_record, write_progress
from tests.support.train_runs import config_with
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan import serialize
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.programs.config.config_file import load_config, with_absolute_paths
from torchrec_2dsp.programs.run_report.contents import RunContents
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.record import TrainRecord
from torchrec_2dsp.programs.train.results import RunFolder, RunResult
from torchrec_2dsp.programs.train.sharded import PlannedRun

PLAN = Plan2D({}, mesh=tdsp.Mesh2D(2, 2), sync=tdsp.GradientSync())
PLANNED = PlannedRun(PLAN, tables={}, num_steps=30)


def begin(folder: Path, config: TrainConfig, name: str) -> RunFolder:
    """Begin a run, as a program that is then killed does."""
    output = RunFolder(folder, config)
    with patch.object(serialize, "save"):
        output.run_planned(name, PLANNED, config)
    return output


@pytest.fixture
def finished(tmp_path: Path) -> TrainConfig:
    """Write the files of a config's two finished runs; return the config."""
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
    """Earlier versions wrote output paths as they were given."""
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


def with_more_steps(config: TrainConfig) -> TrainConfig:
    return config.model_copy(update={"loop": config.loop.model_copy(update={"steps": 99})})


def finish(output: RunFolder, name: str) -> None:
    figures = run_record(name).model_dump()
    output.run_finished(RunResult(**figures, plan2d=PLAN, losses=(), train_loss=0.0))


def test_another_config_takes_no_figures_of_an_earlier_one(
    finished: TrainConfig, tmp_path: Path
) -> None:
    """Both runs start again with more steps, and stop twice in the first; then each finishes."""
    more = with_more_steps(finished)
    for _ in range(2):
        begin(tmp_path, more, "first")
        assert [*load_config(TrainConfig, tmp_path / "config.toml").runs] == ["first"]
        with pytest.raises(ConfigError, match="no finished run, and no run has reported yet"):
            RunContents.read(tmp_path)
    write_progress(tmp_path / "first")
    contents = RunContents.read(tmp_path)
    assert [(run.name, run.record) for run in contents.runs] == [("first", None)]
    assert contents.record is None

    second = begin(tmp_path, more.only(["second"]), "second")
    assert load_config(TrainConfig, tmp_path / "config.toml").runs.keys() == more.runs.keys()
    finish(second, "second")
    record = TrainRecord.load(tmp_path / "record.json")
    assert [run.name for run in record.runs] == ["second"]
    finish(begin(tmp_path, more.only(["first"]), "first"), "first")
    record = TrainRecord.load(tmp_path / "record.json")
    assert [run.name for run in record.runs] == ["second", "first"]
    assert record.config["loop"]["steps"] == 99


def test_a_folder_in_which_earlier_versions_mixed_configs_is_refused(
    finished: TrainConfig, tmp_path: Path
) -> None:
    more = with_more_steps(finished)
    (tmp_path / "config.toml").write_text(tomli_w.dumps(with_absolute_paths(more)))
    with pytest.raises(ConfigError, match="has the run 'second', which another config"):
        RunFolder(tmp_path, more.only(["first"]))
