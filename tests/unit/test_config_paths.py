"""Paths in config files are relative to the file."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from torchrec_2dsp.programs.config.config_file import (
    OutputPath,
    PathBesideConfig,
    PathsBesideConfig,
    load_config,
)


class Inner(BaseModel):
    """A section with a path."""

    calibration: PathBesideConfig = ""
    name: str = ""


class Outer(BaseModel):
    """A config with a section."""

    access: PathBesideConfig = ""
    files: PathsBesideConfig = ()
    inner: Inner = Inner()


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "base.toml").write_text('access = "stats"\n[inner]\nname = "stats"')
    path = tmp_path / "below" / "config.toml"
    path.write_text('include = "../base.toml"\n[inner]\ncalibration = "../x.toml"')

    config = load_config(Outer, path)
    assert config.access == str(tmp_path / "stats")
    assert config.inner.calibration == str(tmp_path / "x.toml")
    assert config.inner.name == "stats"
    assert load_config(Outer, path, ["access=here"]).access == "here"
    path.write_text('access = "/stats"')
    assert load_config(Outer, path).access == "/stats"
    path.write_text('access = ""')
    assert load_config(Outer, path).access == ""


def test_one_path_is_a_text_and_may_begin_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "config.toml"
    path.write_text('files = "day_*.gz"\naccess = "~/stats"')
    config = load_config(Outer, path)
    assert config.files == (str(tmp_path / "day_*.gz"),)
    assert config.access == "/home/me/stats"
    path.write_text('files = ["~/a.csv", "b.csv"]')
    assert load_config(Outer, path).files == ("/home/me/a.csv", str(tmp_path / "b.csv"))
    overrides = ["files=~/day_*.gz", "access=~/here"]
    config = load_config(Outer, path, overrides)
    assert (config.files, config.access) == (("/home/me/day_*.gz",), "/home/me/here")


def test_what_is_written_may_begin_at_home_and_stays_beside_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Written(BaseModel):
        folder: OutputPath = ""

    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "config.toml"
    path.write_text('folder = "runs"')
    assert load_config(Written, path).folder == "runs"
    assert load_config(Written, path, ["folder=~/runs"]).folder == "/home/me/runs"
    assert load_config(Written, path, ["folder="]).folder == ""
