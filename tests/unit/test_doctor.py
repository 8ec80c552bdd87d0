"""The doctor's checks and output, and that it runs where the package doesn't."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner

from tests.support.programs import python
from tests.support.rank_worker import REPOSITORY
from tests.support.versions import OLD, UNKNOWN, on_cpu
from torchrec_2dsp._compat.versions import TRIED, CheckResult, Status, find_versions, nearest_set
from torchrec_2dsp.programs.cli import doctor as doctor_module
from torchrec_2dsp.programs.cli.app import app
from torchrec_2dsp.programs.doctor import (
    check_cuda,
    check_fbgemm_operators,
    check_gloo,
    check_launch_environment,
    check_torchrec,
    run_guarded,
    run_health_checks,
)

BROKEN = replace(on_cpu(OLD), fbgemm_gpu_cpu="1.7.0")
HERE = nearest_set(find_versions())
OTHER = next(tried for tried in TRIED if tried is not HERE)
"""The set that isn't installed here."""


@pytest.mark.parametrize("check", [check_fbgemm_operators, check_torchrec, check_gloo, check_cuda])
def test_runtime_checks_pass_here(check: Callable[[], CheckResult]) -> None:
    result = check()
    assert result.status is Status.OK, result
    assert not dist.is_initialized()


def test_an_exception_is_a_failed_check_with_its_remedy() -> None:
    def broken() -> CheckResult:
        raise OSError("undefined symbol: _ZN3c10\nmore lines")

    result = run_guarded("fbgemm operators", broken, ("reinstall it",))
    assert result == CheckResult(
        name="fbgemm operators",
        status=Status.FAILED,
        found="OSError: undefined symbol: _ZN3c10",
        remedy=("reinstall it",),
    )


def test_an_exception_without_text_is_reported_too() -> None:
    def broken() -> CheckResult:
        raise RuntimeError

    assert run_guarded("gloo", broken, ()).found == "RuntimeError: no message"


def test_nothing_heavy_runs_on_unsupported_versions() -> None:
    checks = {check.name: check for check in run_health_checks(BROKEN)}
    assert checks["fbgemm"].status is Status.FAILED
    for name in ("fbgemm operators", "torchrec import", "gloo", "cuda"):
        assert checks[name].status is Status.SKIPPED


@pytest.mark.parametrize(
    ("environ", "status", "actual"),
    [
        ({}, Status.OK, "not set"),
        ({"LOCAL_WORLD_SIZE": "4"}, Status.OK, "4"),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}, Status.OK, "4 of WORLD_SIZE=8"),
        ({"LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "8"}, Status.FAILED, "3 of WORLD_SIZE=8"),
        ({"LOCAL_WORLD_SIZE": "0", "WORLD_SIZE": "8"}, Status.FAILED, "0 of WORLD_SIZE=8"),
        ({"LOCAL_WORLD_SIZE": "four"}, Status.FAILED, "four"),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": ""}, Status.FAILED, "4 of WORLD_SIZE="),
    ],
)
def test_launch_environment(environ: dict[str, str], status: Status, actual: str) -> None:
    check = check_launch_environment(environ)
    assert check.status is status
    assert check.found.startswith(actual)
    assert bool(check.remedy) == (status is Status.FAILED)


def test_fixes_are_printed_whole_and_without_markup() -> None:
    command = "pip install --no-deps " + " ".join(f'"package-{i}[extra]==1.0"' for i in range(20))
    check = CheckResult(name="fbgemm", status=Status.FAILED, found="[1.0]", remedy=(command,))
    out = StringIO()
    doctor_module.show_checks([check], Console(file=out, width=60))
    assert f"  {command}\n" in out.getvalue()
    assert "[1.0]" in out.getvalue()


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [(Status.OK, 0), (Status.WARNING, 0), (Status.SKIPPED, 0), (Status.FAILED, 1)],
)
def test_exit_code_is_one_if_any_check_failed(
    monkeypatch: pytest.MonkeyPatch, status: Status, exit_code: int
) -> None:
    good = CheckResult(name="python", status=Status.OK, found="3.11")
    checks = (CheckResult(name="gloo", status=status, found="whatever"), good)
    monkeypatch.setattr(doctor_module, "run_health_checks", lambda *, run: checks)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == exit_code, result.output
    assert "gloo" in result.output


def run_python(*arguments: str, first_on_path: Path) -> subprocess.CompletedProcess[str]:
    environ = {"COLUMNS": "200", "PYTHONPATH": f"{first_on_path}{os.pathsep}{REPOSITORY}"}
    return python(*arguments, env=environ)


def pretend(folder: Path, torchrec: str) -> Path:
    """Return a folder that fakes another torchrec version when it is first on the path."""
    info = folder / f"torchrec-{torchrec}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchrec\nVersion: {torchrec}\n")
    return folder


def test_doctor_runs_where_the_package_refuses_to(tmp_path: Path) -> None:
    folder = pretend(tmp_path, OTHER.torchrec)
    refused = run_python("-c", "import torchrec_2dsp as tdsp; tdsp.Planner2D", first_on_path=folder)
    assert refused.returncode == 1
    assert "VersionError" in refused.stderr
    room = "from torchrec_2dsp.planner.planner2d import Planner2D"
    assert "VersionError" in run_python("-c", room, first_on_path=folder).stderr
    command = ("-m", "torchrec_2dsp", "plan", "--config", "configs/runs/plan.toml")
    ended = run_python(*command, first_on_path=folder)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: torchrec_2dsp needs a torch, torchrec and fbgemm that")
    row = f"torchrec  {OTHER.torchrec}: belongs to torch {OTHER.series('torch')}"
    assert row in refused.stderr
    assert f"(supported: {HERE.series('torchrec')})" in refused.stderr

    shown = run_python("-m", "torchrec_2dsp", "doctor", first_on_path=folder)
    assert shown.returncode == 1
    assert "Traceback" not in shown.stderr
    assert OTHER.torchrec in shown.stdout
    assert f'pip install --no-deps "torchrec=={HERE.torchrec}"' in shown.stdout


@pytest.mark.dealt_file
def test_an_untried_version_is_a_warning_and_works(tmp_path: Path) -> None:
    folder = pretend(tmp_path, UNKNOWN)
    shown = run_python("-m", "torchrec_2dsp", "doctor", first_on_path=folder)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert f"{UNKNOWN}: not tried" in shown.stdout

    loaded = run_python("-c", "import torchrec_2dsp as t; t.Planner2D", first_on_path=folder)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stderr.count("UntriedVersionWarning") == 1
    assert f"torchrec_2dsp is not tried with torchrec {UNKNOWN}. Tried are: " in loaded.stderr


@pytest.mark.dealt_file
def test_what_an_untried_version_lacks_is_named(tmp_path: Path) -> None:
    folder = pretend(tmp_path, UNKNOWN)
    lacking = "from torchrec.distributed import comm; del comm.get_local_size; "
    error = "cannot import name 'get_local_size' from 'torchrec.distributed.comm'"

    checks = "from torchrec_2dsp.programs.doctor import run_health_checks as run; print(*run())"
    checked = run_python("-c", lacking + checks, first_on_path=folder)
    assert f"ImportError: {error}" in checked.stdout, checked.stderr

    loaded = run_python("-c", lacking + "from torchrec_2dsp import Planner2D", first_on_path=folder)
    assert loaded.returncode == 1
    assert "UntriedVersionWarning" in loaded.stderr
    assert f"ImportError: {error}" in loaded.stderr


@pytest.mark.parametrize("options", [(), pytest.param(("--run",), marks=pytest.mark.dealt_suite)])
def test_doctor_is_content_here(options: tuple[str, ...], tmp_path: Path) -> None:
    result = run_python("-m", "torchrec_2dsp", "doctor", *options, first_on_path=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "failed" not in result.stdout
    assert ("fbgemm operators" in result.stdout) == bool(options)
    assert ("doctor --run" in result.stdout) != bool(options)
