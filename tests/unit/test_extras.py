"""Extras are optional: the library loads without them, and the command line says so."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import torchrec_2dsp
from tests.support.programs import python
from tests.support.slices import Deal

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = ("matplotlib", "plotly", "rich", "tensorboard", "typer")
ABSENT = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None

sys.meta_path.insert(0, Absent())
"""


def run_without(absent: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in an interpreter that lacks some libraries."""
    program = ABSENT.format(absent=absent) + code
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


def test_the_extras_are_these() -> None:
    extras = PROJECT["optional-dependencies"]
    named = [line for name, lines in extras.items() if name != "all" for line in lines]
    assert sorted(line.partition(">=")[0] for line in named) == list(EXTRAS)


@pytest.mark.dealt_suite
def test_every_public_name_loads_without_extras() -> None:
    done = run_without(
        EXTRAS,
        "import torchrec_2dsp as tdsp\n"
        "for name in tdsp.__all__:\n"
        "    getattr(tdsp, name)\n"
        "print(*tdsp.__all__)",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == torchrec_2dsp.__all__


@pytest.mark.dealt_file
def test_a_library_that_is_needed_is_missed() -> None:
    done = run_without(("pydantic",), "from torchrec_2dsp import Calibration")
    assert done.returncode == 1
    assert "No module named 'pydantic'" in done.stderr


@pytest.mark.parametrize("absent", ["rich", "typer"])
def test_without_its_extra_the_command_line_says_what_to_install(absent: str) -> None:
    done = run_without((absent,), "from torchrec_2dsp.__main__ import main; main()")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"error: the command line needs {absent}, which is not installed; "
        "pip install 'torchrec-2dsp[cli]'\n"
    )


@pytest.mark.dealt_file
def test_without_tensorboard_the_training_program_says_what_to_install() -> None:
    done = run_without(
        ("tensorboard",),
        "from torchrec_2dsp.programs.cli.train import _writers\n"
        "from torchrec_2dsp.programs.config.config_file import load_config\n"
        "from torchrec_2dsp.programs.train.config import TrainConfig\n"
        'print(_writers(load_config(TrainConfig, "demo"), None))\n'
        '_writers(load_config(TrainConfig, "demo", ["loop.tensorboard_dir=logs"]), None)\n',
    )
    assert done.stdout == "[]\n"
    assert done.stderr.splitlines()[-1].endswith(
        "loop.tensorboard_dir='logs' needs tensorboard, which is not installed; "
        "pip install 'torchrec-2dsp[tensorboard]', or leave it empty"
    )


def test_what_else_is_missing_is_named_as_it_is() -> None:
    module = "torchrec_2dsp.programs.cli.bench"
    done = run_without(
        (), f"sys.modules[{module!r}] = None; import torchrec_2dsp.__main__ as m; m.main()"
    )
    assert "pip install" not in done.stderr
    assert f"ModuleNotFoundError: import of {module} halted" in done.stderr


def test_the_console_script_is_the_module() -> None:
    assert PROJECT["scripts"] == {PROJECT["name"]: "torchrec_2dsp.__main__:main"}


ROOT = Path(__file__).parents[2]
PROGRAM = """
import os
import sys

import torchrec

import torchrec_2dsp

for name in sys.argv[1:]:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        getattr(torchrec_2dsp, name)
        print(name, "is there", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_every_public_name_can_be_used_first(dealt: Deal) -> None:
    names = dealt(torchrec_2dsp.__all__)
    done = python("-c", PROGRAM, *names)
    assert done.stdout.splitlines() == [f"{name} is there" for name in names], done.stderr
