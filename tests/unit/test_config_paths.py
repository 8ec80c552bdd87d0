"""Paths in config files are relative to the file."""

from pathlib import Path

from pydantic import BaseModel

from torchrec_2dsp.programs.config.config_file import PathBesideConfig, load_config


class Inner(BaseModel):
    """A section with a path."""

    calibration: PathBesideConfig = ""
    name: str = ""


class Outer(BaseModel):
    """A config with a section."""

    access: PathBesideConfig = ""
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
