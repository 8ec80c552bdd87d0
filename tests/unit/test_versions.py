"""The version gate: tested versions pass, untested ones warn; and this machine's versions."""

from collections.abc import Sequence
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
from torchrec_2dsp.errors import TwoDError, UntriedVersionWarning, VersionError

ROOT = Path(__file__).parents[2]
LOCKS = {"1.8.x": "requirements/cpu.txt", "1.9.x": "requirements/torchrec-1.9/cpu.txt"}
"""Each tried set's lock, by torchrec's series."""


def patched(tried: VersionSet) -> FoundVersions:
    """Return a machine with a set's later patch releases."""
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
        assert [check.status for check in check_versions(versions)] == [Status.OK] * 4, name
        require_supported_versions(versions)
        assert not untried_versions(versions)


@pytest.mark.parametrize("release", [*NEW.also_tried, NEW.torchrec])
def test_all_tried_releases_of_torchrec_pass(release: str) -> None:
    require_supported_versions(replace(on_cpu(NEW), torchrec=release))


UNTRIED_MACHINES = {
    "torchrec of no set": (replace(on_cpu(OLD), torchrec=UNKNOWN), {"torchrec": UNKNOWN}),
    "another torch and its fbgemm": (
        replace(on_cpu(NEW), torch="99.0.0+cpu", fbgemm_gpu_cpu="99.0.0"),
        {"torch": "99.0.0+cpu", "fbgemm": "99.0.0"},
    ),
    "all": (
        replace(on_cuda(OLD), torch=UNKNOWN, fbgemm_gpu=UNKNOWN, torchrec=UNKNOWN),
        {"torch": UNKNOWN, "torchrec": UNKNOWN, "fbgemm": UNKNOWN},
    ),
}


@pytest.mark.parametrize(
    ("actual", "untried"), UNTRIED_MACHINES.values(), ids=UNTRIED_MACHINES.keys()
)
def test_untried_versions_warn_once(actual: FoundVersions, untried: dict[str, str]) -> None:
    _warn_once.cache_clear()
    with pytest.warns(UntriedVersionWarning) as caught:
        require_supported_versions(actual)
    (warning,) = caught
    require_supported_versions(actual)  # A second warning would be an error here.
    for package, version in untried.items():
        assert f"{package} {version}" in str(warning.message)
    for tried in TRIED:
        assert str(tried) in str(warning.message)
    assert untried_versions(actual) == untried
    statuses = {check.name: check.status for check in check_versions(actual)}
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
    machine = replace(CPU, torch=torch, torchrec=torchrec, fbgemm_gpu_cpu=fbgemm)
    assert nearest_set(machine) is nearest


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
    actual = find_versions()
    assert not any(check.status is Status.FAILED for check in check_versions(actual))
    assert actual.torch is not None
    assert actual.torchrec is not None


@pytest.mark.parametrize("tried", TRIED, ids=str)
def test_commands_install_what_the_lock_does(tried: VersionSet) -> None:
    lock = (ROOT / LOCKS[tried.series("torchrec")]).read_text().splitlines()
    commands = (*tried.install_torchrec(), *tried.install_fbgemm("fbgemm-gpu-cpu"))
    pins = {word.strip('"') for line in commands for word in line.split() if "==" in word}
    assert len(pins) == 5
    assert pins <= set(lock)


CPU, CUDA = on_cpu(OLD), on_cuda(OLD)
BOTH_AWAY = "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu"
INSTALL_CPU = OLD.install_fbgemm("fbgemm-gpu-cpu")
INSTALL_CUDA = OLD.install_fbgemm("fbgemm-gpu")


MISMATCHES = {
    "old torch": (
        replace(CPU, torch="2.12.1+cpu"),
        "torch     2.12.1+cpu (supported: 2.13.x)",
        OLD.install_torch(),
    ),
    "no torch": (
        replace(CPU, torch=None),
        "torch     not installed (supported: 2.13.x)",
        OLD.install_torch(),
    ),
    "new torchrec": (
        replace(CPU, torchrec="1.9.0"),
        "torchrec  1.9.0: belongs to torch 2.14.x and fbgemm 1.9.x (supported: 1.8.x)",
        OLD.install_torchrec(),
    ),
    "old torchrec": (
        replace(on_cpu(NEW), torchrec="1.8.0"),
        "torchrec  1.8.0: belongs to torch 2.13.x and fbgemm 1.8.x (supported: 1.9.x)",
        NEW.install_torchrec(),
    ),
    "new fbgemm": (
        replace(CPU, fbgemm_gpu_cpu="1.9.0"),
        "fbgemm    fbgemm-gpu-cpu 1.9.0: belongs to torch 2.14.x and torchrec 1.9.x"
        " (supported: 1.8.x)",
        INSTALL_CPU,
    ),
    "torch decides between two": (
        replace(on_cpu(NEW), fbgemm_gpu_cpu=None, torchrec="1.8.0"),
        "torchrec  1.8.0: belongs to torch 2.13.x",
        [*NEW.install_torchrec(), *NEW.install_fbgemm("fbgemm-gpu-cpu")],
    ),
    "no torchrec": (
        replace(CPU, torchrec=None),
        "torchrec  not installed (supported: 1.8.x)",
        OLD.install_torchrec(),
    ),
    "no fbgemm on cpu": (
        replace(CPU, fbgemm_gpu_cpu=None),
        "fbgemm    not installed (supported: 1.8.x)",
        INSTALL_CPU,
    ),
    "no fbgemm on cuda": (
        replace(CUDA, fbgemm_gpu=None),
        "fbgemm    not installed (supported: 1.8.x)",
        INSTALL_CUDA,
    ),
    "old fbgemm": (
        replace(CPU, fbgemm_gpu_cpu="1.7.0"),
        "fbgemm    fbgemm-gpu-cpu 1.7.0 (supported: 1.8.x)",
        INSTALL_CPU,
    ),
    "untried torch beside a tried fbgemm": (
        replace(on_cpu(NEW), torch=UNKNOWN),
        f"torch     {UNKNOWN} (supported: 2.14.x)",
        NEW.install_torch(),
    ),
    "both on cpu": (
        replace(CPU, fbgemm_gpu="1.8.0"),
        "fbgemm-gpu 1.8.0 and fbgemm-gpu-cpu 1.8.0: both own the same import package",
        [BOTH_AWAY, *INSTALL_CPU],
    ),
    "both on cuda": (
        replace(CUDA, fbgemm_gpu_cpu="1.8.0"),
        "fbgemm-gpu 1.8.0 and fbgemm-gpu-cpu 1.8.0: both own the same import package",
        [BOTH_AWAY, *INSTALL_CUDA],
    ),
    "cuda fbgemm beside cpu torch": (
        replace(CUDA, torch="2.13.0+cpu"),
        "fbgemm-gpu 1.8.0: the CUDA build can't be loaded beside the CPU build 2.13.0+cpu",
        ["pip uninstall -y fbgemm-gpu", *INSTALL_CPU],
    ),
    "cuda fbgemm without driver": (
        replace(CUDA, has_nvidia_driver=False),
        "fbgemm-gpu 1.8.0: the CUDA build can't be loaded without an NVIDIA driver",
        ["pip uninstall -y fbgemm-gpu", *INSTALL_CPU],
    ),
}


@pytest.mark.parametrize(
    ("actual", "named", "commands"), MISMATCHES.values(), ids=MISMATCHES.keys()
)
def test_each_mismatch_is_named_with_its_fix(
    actual: FoundVersions, named: str, commands: Sequence[str]
) -> None:
    with pytest.raises(VersionError) as raised:
        require_supported_versions(actual)
    message = str(raised.value)
    assert named in message
    for tried in TRIED:
        assert str(tried) in message
    # Nothing but the fix, in order: a supported package gets no command.
    assert [line.strip() for line in message.splitlines() if "  pip " in line] == list(commands)


def test_one_error_names_all_that_is_wrong() -> None:
    nothing = FoundVersions(
        torch=None,
        torchrec=None,
        fbgemm_gpu=None,
        fbgemm_gpu_cpu=None,
        torchmetrics=None,
        has_nvidia_driver=False,
    )
    with pytest.raises(VersionError, match=r"(?s)torch .*torchrec .*fbgemm ") as raised:
        require_supported_versions(nothing)
    assert isinstance(raised.value, TwoDError)
    assert isinstance(raised.value, ImportError)
    assert str(raised.value).count("not installed") == 3


WARNINGS = {
    "torchmetrics": (
        replace(CPU, torchmetrics="1.4.0"),
        "1.4.0",
        ('pip install --no-deps "torchmetrics==1.0.3"',),
    ),
    "cpu fbgemm on a gpu machine": (
        replace(CUDA, fbgemm_gpu=None, fbgemm_gpu_cpu="1.8.0"),
        "does not use the NVIDIA devices",
        ("pip uninstall -y fbgemm-gpu-cpu", *INSTALL_CUDA),
    ),
}


@pytest.mark.parametrize(("actual", "named", "remedy"), WARNINGS.values(), ids=WARNINGS.keys())
def test_what_still_works_is_only_a_warning(
    actual: FoundVersions, named: str, remedy: tuple[str, ...]
) -> None:
    require_supported_versions(actual)
    (warning,) = [c for c in check_versions(actual) if c.status is not Status.OK]
    assert warning.status is Status.WARNING
    assert named in warning.found
    assert warning.remedy == remedy
