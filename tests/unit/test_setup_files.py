"""The project itself: exact locks, make targets, optional extras, and slices of slow tests."""

import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import torchrec_2dsp
from tests.support.programs import python
from tests.support.slices import (
    NUM_HANDS,
    NUM_LANES,
    Deal,
    even_hands,
    hand_number,
    hand_of,
    parse_slice,
    patient,
    seed_of_commit,
    slice_of,
)
from torchrec_2dsp._compat.versions import TRIED, VersionSet

ROOT = Path(__file__).parents[2]
FOLDERS = {"1.8": "", "1.9": "torchrec-1.9/"}
"""Each TorchRec's folder of locks."""
CPU_AND_CUDA = (folder + kind for folder in FOLDERS.values() for kind in ("cpu", "cuda"))
LOCKS = (*CPU_AND_CUDA, "dev", "recipes")
PIN = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*==[0-9]+(\.[0-9]+)*((b|\.post)[0-9]+)?")
# torch's own dependencies come with torch, in the versions that fit it.
BROUGHT_BY_TORCH = {
    "torch", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools",
    "sympy",
}  # fmt: skip


def read_pins(lock: str) -> list[str]:
    lines = (ROOT / "requirements" / f"{lock}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def series(tried: VersionSet) -> str:
    """Return the Makefile's name for a set."""
    return tried.series("torchrec").removesuffix(".x")


def names(pins: list[str]) -> list[str]:
    return [pin.partition("==")[0] for pin in pins]


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_are_exact_sorted_and_without_repeats(lock: str) -> None:
    pins = read_pins(lock)
    assert len(pins) > 5
    assert [pin for pin in pins if not PIN.fullmatch(pin)] == []
    assert names(pins) == sorted(set(names(pins)))
    assert BROUGHT_BY_TORCH.isdisjoint(names(pins))


@pytest.mark.parametrize("tried", TRIED, ids=series)
def test_cpu_and_cuda_differ_only_in_fbgemm(tried: VersionSet) -> None:
    folder = FOLDERS[series(tried)]
    cpu, cuda = set(read_pins(f"{folder}cpu")), set(read_pins(f"{folder}cuda"))
    assert cpu - cuda == {f"fbgemm-gpu-cpu=={tried.fbgemm}"}
    assert cuda - cpu == {f"fbgemm-gpu=={tried.fbgemm}"}
    assert f"torchrec=={tried.torchrec}" in cpu


def test_locks_differ_only_in_torchrec_and_fbgemm() -> None:
    old, new = (set(read_pins(f"{folder}cpu")) for folder in FOLDERS.values())
    assert set(names(list(old ^ new))) == {"torchrec", "fbgemm-gpu-cpu"}


@pytest.mark.parametrize("folder", FOLDERS.values())
def test_other_locks_add_and_never_repeat(folder: str) -> None:
    locked = [names(read_pins(lock)) for lock in (f"{folder}cpu", "dev", "recipes")]
    assert len(set().union(*locked)) == sum(map(len, locked))


def test_runtime_dependencies_are_locked() -> None:
    extras = dict(PROJECT["optional-dependencies"])
    together = extras.pop("all")
    assert together == [f"{PROJECT['name']}[{','.join(sorted(extras))}]"]
    lines = [*PROJECT["dependencies"], *(line for lines in extras.values() for line in lines)]
    wanted = {re.split(r"[<>=]", line)[0] for line in lines}
    assert wanted <= set(names(read_pins("cpu")))
    # Their metadata can't express a CPU installation, so they must stay out.
    assert wanted.isdisjoint({"torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"})


@pytest.mark.parametrize("tried", TRIED, ids=series)
def test_makefile_installs_each_set_in_an_environment_of_its_own(tried: VersionSet) -> None:
    name = series(tried)
    result = run_make(f"TORCHREC={name}", "--dry-run", "--always-make", "test")
    assert result.returncode == 0, result.stderr
    folder = ".venv" if name == "1.8" else f".venv-{name}"
    assert f"-m venv --clear {folder}\n" in result.stdout
    assert f"torch=={tried.torch}\n" in result.stdout
    assert f"-r requirements/{FOLDERS[name]}cpu.txt -r requirements/dev.txt\n" in result.stdout


def run_make(*words: str) -> subprocess.CompletedProcess[str]:
    # Variables from a make that runs these tests must not leak in.
    leaking = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "TORCHREC", "VARIANT")
    environ = {name: value for name, value in os.environ.items() if name not in leaking}
    return subprocess.run(
        ["make", *words], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["VARIANT=tpu", "help"], "VARIANT=tpu is unknown; use VARIANT=cpu or VARIANT=cuda"),
        (["TORCHREC=1.7", "help"], "TORCHREC=1.7 is unknown; use TORCHREC=1.8 or TORCHREC=1.9"),
        (["PYTHON=false", "VENV={tmp}", "test"], "Python 3.11 or newer is needed"),
    ],
)
def test_makefile_refuses_clearly(arguments: list[str], message: str, tmp_path: Path) -> None:
    words = [word.format(tmp=tmp_path / "venv") for word in arguments]
    result = run_make(*words)
    assert result.returncode != 0
    assert message in result.stderr


@pytest.mark.parametrize(("variable", "target"), [("VENV", "test"), ("DOCS_VENV", "docs")])
def test_makefile_never_empties_an_environment_through_a_link(
    variable: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    link, kept = tmp_path / "venv", tmp_path / "elsewhere" / "kept"
    kept.parent.mkdir()
    kept.touch()
    link.symlink_to(kept.parent)
    result = run_make(f"{variable}={link}", target)
    assert result.returncode != 0
    assert f"error: {link} is a link to another folder's environment" in result.stderr
    assert [*kept.parent.iterdir()] == [kept]


def test_ci_runs_what_every_change_has_to_pass() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert "make --jobs=2 --output-sync=target lint package docs smoke-newer" in lines
    assert "make test" in lines
    assert "$(MAKE) smoke TORCHREC=1.9" in (ROOT / "Makefile").read_text()
    named = set(re.findall(r"tests/\S+\.py", (ROOT / "Makefile").read_text()))
    assert all((ROOT / name).is_file() for name in named)
    assert len(named) > 5


def test_no_file_names_a_package_registry() -> None:
    # The user's pip chooses the registry: an index in a file would override it.
    registry = re.compile(r"https?://[^\s\"']*/(simple|whl|registry|npm)\b")
    option = re.compile(r"--(extra-)?index-url[ =]+\S*//|--find-links[ =]+\S*/")
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # All files that are, or would be, tracked.
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]
    assert len(files) > 10
    for path in files:
        text = path.read_text(errors="replace")
        assert not registry.search(text), path
        assert not option.search(text), path


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    """pytest skips some folders by name unless configured otherwise."""
    files = list((ROOT / "tests").rglob("test_*.py"))
    folders = {folder.name for file in files for folder in file.relative_to(ROOT).parents}
    assert {"tests", "unit", "dist"} <= folders
    left_out = pytestconfig.getini("norecursedirs")
    assert not [(name, entry) for name in folders for entry in left_out if fnmatch(name, entry)]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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
    return python("-c", ABSENT.format(absent=absent) + code)


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


@pytest.mark.parametrize("count", [1, 3, 24, 100])
def test_each_test_is_in_one_slice(count: int) -> None:
    names = [f"test_{number}" for number in range(47)]
    slices = [slice_of(names, number, count) for number in range(count)]
    assert sorted(name for part in slices for name in part) == sorted(names)
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 36])
def test_each_cell_is_in_a_hand(count: int) -> None:
    cells = list(range(count))
    hands = [hand_of(cells, number) for number in range(NUM_HANDS)]
    assert all(hands), "no test runs without a cell"
    assert {cell for hand in hands for cell in hand} == set(cells)
    if count >= NUM_HANDS:
        assert sorted(cell for hand in hands for cell in hand) == cells
        assert hand_of(cells, NUM_HANDS) == hands[0], "the seventh slice has the first hand again"
    hands = [hand_of(cells, number, 12) for number in range(12)]
    assert all(hands)
    assert {cell for hand in hands for cell in hand} == set(cells)


def test_a_hand_has_some_of_every_factor() -> None:
    """Each sixth of the parity matrix has every mesh, bag kind and method."""
    cells = [(mesh, bags, method) for mesh in range(4) for bags in range(3) for method in range(3)]
    for number in range(NUM_HANDS):
        assert [len({cell[place] for cell in hand_of(cells, number)}) for place in range(3)] == [
            4,
            3,
            3,
        ]


@given(st.dictionaries(st.text(), st.floats(1, 100)), st.integers(1, 6))
def test_hands_take_about_as_long(seconds: dict[str, float], num_hands: int) -> None:
    hands = even_hands(seconds, num_hands)
    assert sorted(name for hand in hands for name in hand) == sorted(seconds)
    totals = [sum(seconds[name] for name in hand) for hand in hands]
    assert max(totals) - min(totals) <= max(seconds.values(), default=0) + 1e-6


def test_the_commit_chooses_a_slice() -> None:
    assert parse_slice("3/24") == (3, 24)
    assert parse_slice("commit/24") == (seed_of_commit() % 24, 24)
    assert (hand_number("3/24"), hand_number("commit/24")) == (3, seed_of_commit() // 24)


@pytest.mark.parametrize("text", ["3", "24/24", "-1/24", "x/24", "1/0", "1/x"])
def test_what_is_no_slice_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"--slow-slice={text}"):
        parse_slice(text)


def test_only_long_deadlines_grow_with_the_lanes() -> None:
    assert patient(3) == 3
    assert patient(60) == 60 * NUM_LANES


_STEPS = """
import resource, sys
import torch

def step():
    return [torch.ones(2**21) for _ in range(6)]

if sys.argv[1] == "keep":
    from torchrec_2dsp.programs.launch import keep_freed_memory

    keep_freed_memory()
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""


@pytest.mark.dealt_suite
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_memory_that_a_step_frees_is_there_for_the_next() -> None:
    # As small as they are before glibc has seen larger ones.
    thresholds = {f"MALLOC_{name}_THRESHOLD_": str(2**17) for name in ("MMAP", "TRIM")}
    faults = {
        what: int(python("-c", _STEPS, what, env=thresholds).stdout) for what in ("leave", "keep")
    }

    # 48 MiB have 12,288 pages.
    assert faults["leave"] > 1_000
    assert faults["keep"] < 100
