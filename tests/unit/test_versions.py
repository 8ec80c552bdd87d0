"""The version gate: what is tried passes, what isn't tried warns, and what this machine has."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.versions import NEW, OLD, UNKNOWN, on_cpu, on_cuda
from torchrec_2dsp._compat.versions import (
    TRIED,
    FoundVersions,
    Status,
    VersionSet,
    _warn_once,
    check_python,
    check_versions,
    find_versions,
    is_cpu_build,
    nearest_set,
    require_supported_versions,
    untried_versions,
)
from torchrec_2dsp.errors import UntriedVersionWarning

ROOT = Path(__file__).parents[2]
LOCKS = {"1.8.x": "requirements/cpu.txt", "1.9.x": "requirements/torchrec-1.9/cpu.txt"}
"""The lock of each tried set, by torchrec's series."""


def test_the_table_has_both_sets() -> None:
    assert (OLD.torch, OLD.torchrec, OLD.fbgemm) == ("2.13.0", "1.8.0", "1.8.0")
    assert (NEW.torch, NEW.torchrec, NEW.fbgemm) == ("2.14.1", "1.9.2", "1.9.0")
    assert NEW.also_tried == ("1.9.0", "1.9.1")


def patched(tried: VersionSet) -> FoundVersions:
    """A machine with later patch releases of a set."""
    torch, torchrec, fbgemm = (
        tried.series(package).replace("x", "7") for package in ("torch", "torchrec", "fbgemm")
    )
    return replace(on_cpu(tried), torch=torch, torchrec=torchrec, fbgemm_gpu_cpu=fbgemm)


@pytest.mark.parametrize("tried", TRIED, ids=str)
def test_tried_sets_pass_without_a_word(tried: VersionSet) -> None:
    cpu, cuda = on_cpu(tried), on_cuda(tried)
    machines = {
        "cpu": cpu,
        "cuda": cuda,
        "no local part": replace(cuda, torch=tried.torch),
        "fbgemm for CPUs beside torch for CUDA": replace(cpu, torch=f"{tried.torch}+cu130"),
        "torch for CPUs on a machine with devices": replace(cpu, has_nvidia_driver=True),
        "nightly": replace(cpu, torch=f"{tried.torch}.dev20261101+cpu"),
        "patch releases": patched(tried),
    }
    for name, versions in machines.items():
        assert [check.status for check in check_versions(versions).checks] == [Status.OK] * 4, name
        require_supported_versions(versions)
        assert not untried_versions(versions)


@pytest.mark.parametrize("release", [*NEW.also_tried, NEW.torchrec])
def test_all_tried_releases_of_torchrec_pass(release: str) -> None:
    require_supported_versions(replace(on_cpu(NEW), torchrec=release))


@pytest.mark.parametrize(
    ("found", "untried"),
    [
        pytest.param(
            replace(on_cpu(OLD), torchrec=UNKNOWN), {"torchrec": UNKNOWN}, id="torchrec-of-no-set"
        ),
        pytest.param(
            replace(on_cpu(NEW), torch="99.0.0+cpu", fbgemm_gpu_cpu="99.0.0"),
            {"torch": "99.0.0+cpu", "fbgemm": "99.0.0"},
            id="another-torch-and-its-fbgemm",
        ),
        pytest.param(
            replace(on_cuda(OLD), torch=UNKNOWN, fbgemm_gpu=UNKNOWN, torchrec=UNKNOWN),
            {"torch": UNKNOWN, "torchrec": UNKNOWN, "fbgemm": UNKNOWN},
            id="all",
        ),
    ],
)
def test_untried_versions_warn_once(found: FoundVersions, untried: dict[str, str]) -> None:
    _warn_once.cache_clear()
    with pytest.warns(UntriedVersionWarning) as caught:
        require_supported_versions(found)
    (warning,) = caught
    require_supported_versions(found)  # A second warning would be an error here.
    for package, version in untried.items():
        assert f"{package} {version}" in str(warning.message)
    for tried in TRIED:
        assert str(tried) in str(warning.message)
    assert untried_versions(found) == untried
    statuses = {check.name: check.status for check in check_versions(found).checks}
    assert {name for name, status in statuses.items() if status is Status.WARNING} == set(untried)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.13.0", True),
        ("2.13", True),
        ("2.13.4+cu130", True),
        ("2.13.0a0+git1234567", True),
        ("2.130.0", False),
        ("2.1.3", False),
        ("12.13.0", False),
        ("unknown", False),
        ("", False),
        (None, False),
    ],
)
def test_series_are_compared_by_major_and_minor(version: str | None, expected: bool) -> None:
    assert OLD.has("torch", version) is expected


@pytest.mark.parametrize(
    ("torch", "torchrec", "fbgemm", "nearest"),
    [
        (None, None, None, OLD),
        (UNKNOWN, UNKNOWN, UNKNOWN, OLD),
        ("2.14.0", None, None, NEW),
        (None, "1.9.0", "1.8.0", NEW),
        ("2.13.0", "1.9.0", "1.9.0", NEW),
        ("2.13.0", "1.9.0", None, OLD),
        ("2.14.1", "1.8.0", "1.8.0", OLD),
    ],
)
def test_the_nearest_set_needs_the_fewest_changes(
    torch: str | None, torchrec: str | None, fbgemm: str | None, nearest: VersionSet
) -> None:
    assert nearest_set({"torch": torch, "torchrec": torchrec, "fbgemm": fbgemm}) is nearest


def test_only_the_local_part_tells_the_build() -> None:
    assert is_cpu_build("2.13.0+cpu")
    assert is_cpu_build("2.13.0+cpu.cxx11.abi")
    assert not is_cpu_build("2.13.0+cu130")
    assert not is_cpu_build("2.13.0")
    assert not is_cpu_build(None)


def test_python_is_checked() -> None:
    assert check_python((3, 11)).status is Status.OK
    assert check_python((3, 13)).status is Status.OK
    old = check_python((3, 10))
    assert old.status is Status.FAILED
    assert old.remedy


def test_this_environment_is_read_without_the_packages() -> None:
    found = find_versions()
    assert check_versions(found).is_supported
    assert found.torch is not None
    assert found.torchrec is not None


@pytest.mark.parametrize("tried", TRIED, ids=str)
def test_commands_install_what_the_lock_does(tried: VersionSet) -> None:
    lock = (ROOT / LOCKS[tried.series("torchrec")]).read_text().splitlines()
    commands = (*tried.install_torchrec(), *tried.install_fbgemm("fbgemm-gpu-cpu"))
    pins = {word.strip('"') for line in commands for word in line.split() if "==" in word}
    assert len(pins) == 5
    assert pins <= set(lock)
