"""Behaviour common to all commands: errors, torchrun, the version."""

import errno
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from pydantic import BaseModel
from rich.console import Console
from typer.testing import CliRunner

import torchrec_2dsp as tdsp
from tests.support.programs import python
from torchrec_2dsp.errors import ConfigError, OutputError, RankError
from torchrec_2dsp.programs.cli.app import app
from torchrec_2dsp.programs.cli.console import show_written, shown_errors
from torchrec_2dsp.programs.cli.export import show_export
from torchrec_2dsp.programs.cli.train import saying_how_to_go_on
from torchrec_2dsp.programs.cluster.emulated_cluster import rank_environment
from torchrec_2dsp.programs.config.config_file import (
    OutputPath,
    PathBesideConfig,
    PathsBesideConfig,
    load_config,
    with_absolute_paths,
)
from torchrec_2dsp.programs.export.export import ExportRecord
from torchrec_2dsp.programs.launch import take_gpu

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "runs" / "demo.toml"


@pytest.mark.parametrize(
    ("rank", "message"),
    [("0", "error: nowhere.toml can't be"), ("3", "error on rank 3: nowhere.toml")],
)
def test_the_command_shows_the_error_and_fails(
    monkeypatch: pytest.MonkeyPatch, rank: str, message: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("torchrec_2dsp.programs.cli.console._LET_RANK_0_SPEAK_S", 0.0)

    result = CliRunner().invoke(app, ["train", "--config", "nowhere.toml"])

    assert result.exit_code == 2
    assert message in result.stderr


def test_a_full_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "[a]" / "page.md"
    with pytest.raises(typer.Exit) as stop, shown_errors():
        raise OSError(errno.ENOSPC, "No space left on device", str(page))
    assert stop.value.exit_code == 2
    assert capsys.readouterr().err == f"error: [Errno 28] No space left on device: '{page}'\n"
    with pytest.raises(typer.Exit), shown_errors():
        raise OutputError("page.md can't be written: No space left on device; make room there")
    assert capsys.readouterr().err.startswith("error: page.md can't be written: No space")
    with pytest.raises(OSError, match="Connection reset"), shown_errors():
        raise OSError(errno.ECONNRESET, "Connection reset by peer")
    show_written(Console(), page, None, "")
    assert capsys.readouterr().out == f"wrote {page}\n"


def test_torchrun_is_told_what_to_say_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("RANK", "0")

    CliRunner().invoke(app, ["train", "--config", "nowhere.toml"])

    message = json.loads(path.read_text())["message"]
    assert message["message"].startswith("error: nowhere.toml can't be read")
    assert int(message["extraInfo"]["timestamp"]) > 0
    # Nobody listens any more.
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    assert CliRunner().invoke(app, ["train", "--config", "nowhere.toml"]).exit_code == 2


def test_the_version_is_told() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"torchrec-2dsp {tdsp.__version__}\n"


def test_the_command_asks_for_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)

    result = CliRunner().invoke(app, ["train", "--config", str(DEMO)])

    assert result.exit_code == 2
    assert "RANK is not set, so torchrun didn't start this process" in result.stderr
    assert "torchrun --standalone" in result.stderr


def test_a_rank_without_a_gpu_of_its_own_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="device='cuda' needs a GPU for each of a host's ranks"):
        take_gpu(1)


@pytest.mark.parametrize("seconds", ["-5", "0", "nan"])
def test_a_cluster_needs_time(seconds: str) -> None:
    options = ["cluster", "--timeout", seconds, "--if-permitted", "--", "no_such_script.py"]
    result = CliRunner().invoke(app, options)
    text = f"error: --timeout={seconds} leaves no time; give seconds above 0\n"
    assert (result.exit_code, result.stderr) == (2, text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--link", "3foo", "--check", "--processor-per-rank"), "--link='3foo' is not a rate"),
        (("--hosts", "0", "--check"), "--hosts=0 is not a positive integer"),
        ((), "nothing to do"),
    ],
)
def test_a_cluster_checks_its_options_before_it_loads_torch(
    options: Sequence[str], text: str
) -> None:
    program = (
        "import sys; from torchrec_2dsp.programs.cli.app import app\n"
        "try: app(['cluster', *sys.argv[1:]])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = python("-c", program, *options)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {text}"), done.stderr


def test_a_cluster_that_cannot_be_is_left_out_if_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "torchrec_2dsp.programs.cluster.kernel.available", lambda: "network namespaces need root"
    )
    options = ["cluster", "--if-permitted", "--", "no_such_script.py"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0
    assert result.stderr == (
        "skipped, because no cluster can be emulated here: network namespaces need root\n"
    )


def test_ranks_of_a_cluster_find_this_package_and_no_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "theirs")
    paths = rank_environment("emulated", "")["PYTHONPATH"].split(os.pathsep)
    assert paths[-1] == "theirs"
    assert all((Path(path) / "torchrec_2dsp").is_dir() for path in paths[:-1])


@pytest.mark.parametrize(
    ("worse_by", "text"),
    [(-1.21e-5, "ne is better by 1.21e-05;"), (1.21e-5, "ne is worse by 1.21e-05;")],
)
def test_an_export_that_serves_better_is_called_better(
    worse_by: float, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = ExportRecord(
        run="main",
        checkpoint="last/10",
        num_samples=40,
        largest_difference=0.01,
        trained={"ne": 0.9},
        served={"ne": 0.9 + worse_by},
        metric="ne",
        worse_by=worse_by,
        max_loss=0.001,
        table_bytes=4,
        served_table_bytes=1,
        environment={},
    )
    show_export(record, Console(width=500))
    assert text in capsys.readouterr().out


def test_the_help_of_access_names_the_section() -> None:
    result = CliRunner().invoke(app, ["access", "-h"], env={"COLUMNS": "200"})
    assert "A config with a section [data], such as one for train" in result.output


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


def test_a_rank_that_hears_of_another_ones_stop_stops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(typer.Exit) as stopped, saying_how_to_go_on("saved"):
        raise RankError("rank 1 failed at step 3, in the forward: KeyboardInterrupt", (1,))
    assert stopped.value.exit_code == 130
    assert "go on from the newest checkpoint in saved" in capsys.readouterr().err
    with pytest.raises(RankError), saying_how_to_go_on("saved"):
        raise RankError("rank 1 failed at step 3, in the loader: OSError: no such file", (1,))


def test_a_second_signal_does_not_cut_off_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After Ctrl-C, torchrun sends its ranks one more signal."""
    monkeypatch.setenv("RANK", "0")
    show = Console.print

    def interrupted(*args: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        show(*args, **options)

    monkeypatch.setattr(Console, "print", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(typer.Exit), saying_how_to_go_on("saved"):
        raise KeyboardInterrupt
    assert "go on from the newest checkpoint in saved" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


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
    # A config that is written itself names the same folder, wherever it is read.
    monkeypatch.chdir(tmp_path)
    for folder, absolute in (("runs", f"{tmp_path}/runs"), ("s3://a/b", "s3://a/b"), ("", "")):
        assert with_absolute_paths(Written(folder=folder)) == {"folder": absolute}
