"""The files that set the project up: exact locks, no registry in them, the promised targets."""

import os
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    together = extras.pop("all")
    assert together == [f"{project['name']}[{','.join(sorted(extras))}]"]
    lines = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
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
    # The variables of a make that runs these tests must not leak in.
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


def project_files() -> list[Path]:
    """Return all files that are, or would be, tracked."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listing.split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_file_names_a_package_registry() -> None:
    # Which registry to use is the business of the user's pip: an index in a file overrides it.
    registry = re.compile(r"https?://[^\s\"']*/(simple|whl|registry|npm)\b")
    option = re.compile(r"--(extra-)?index-url[ =]+\S*//|--find-links[ =]+\S*/")
    files = project_files()
    assert len(files) > 10
    for path in files:
        text = path.read_text(errors="replace")
        assert not registry.search(text), path
        assert not option.search(text), path


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    """pytest leaves out folders by name unless it is told not to."""
    files = list((ROOT / "tests").rglob("test_*.py"))
    folders = {folder.name for file in files for folder in file.relative_to(ROOT).parents}
    assert {"tests", "unit", "dist"} <= folders
    left_out = pytestconfig.getini("norecursedirs")
    assert not [(name, entry) for name in folders for entry in left_out if fnmatch(name, entry)]
