"""The version gate: every mismatch is found, named, and answered with the command that fixes it."""

from dataclasses import replace
from pathlib import Path

import pytest

from torchrec_2dsp._compat.versions import (
    SUPPORTED,
    SUPPORTED_TORCHMETRICS,
    TORCHREC_COMMANDS,
    FoundVersions,
    Status,
    check_python,
    check_versions,
    find_versions,
    in_supported_series,
    is_cpu_build,
    require_supported_versions,
)
from torchrec_2dsp.errors import TwoDError, VersionError

CPU = FoundVersions(
    torch="2.13.0+cpu",
    torchrec="1.8.0",
    fbgemm_gpu=None,
    fbgemm_gpu_cpu="1.8.0",
    torchmetrics="1.0.3",
    has_nvidia_driver=False,
)
CUDA = replace(
    CPU, torch="2.13.0+cu130", fbgemm_gpu="1.8.0", fbgemm_gpu_cpu=None, has_nvidia_driver=True
)
INSTALL_CPU = 'pip install --no-deps "fbgemm-gpu-cpu==1.8.0"'
INSTALL_CUDA = 'pip install --no-deps "fbgemm-gpu==1.8.0"'
BOTH_AWAY = "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu"


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(CPU, id="cpu"),
        pytest.param(CUDA, id="cuda"),
        pytest.param(replace(CUDA, torch="2.13.0"), id="no-local-part"),
        pytest.param(replace(CPU, torch="2.13.0+cu130"), id="cpu-fbgemm-beside-cuda-torch"),
        pytest.param(replace(CPU, has_nvidia_driver=True), id="cpu-torch-on-a-gpu-machine"),
        pytest.param(replace(CPU, torch="2.13.1.dev20261101+cpu"), id="nightly"),
        pytest.param(replace(CPU, torchrec="1.8.2", fbgemm_gpu_cpu="1.8.1"), id="patch-releases"),
    ],
)
def test_supported_sets_pass_without_a_word(found: FoundVersions) -> None:
    assert [check.status for check in check_versions(found).checks] == [Status.OK] * 4
    require_supported_versions(found)


@pytest.mark.parametrize(
    ("found", "named", "commands"),
    [
        pytest.param(
            replace(CPU, torch="2.12.1+cpu"),
            "torch     2.12.1+cpu (supported: 2.13.x)",
            ['pip install "torch==2.13.0"'],
            id="old-torch",
        ),
        pytest.param(
            replace(CPU, torch=None),
            "torch     not installed (supported: 2.13.x)",
            ['pip install "torch==2.13.0"'],
            id="no-torch",
        ),
        pytest.param(
            replace(CPU, torchrec="1.9.0"),
            "torchrec  1.9.0 (supported: 1.8.x)",
            list(TORCHREC_COMMANDS),
            id="new-torchrec",
        ),
        pytest.param(
            replace(CPU, torchrec=None),
            "torchrec  not installed (supported: 1.8.x)",
            list(TORCHREC_COMMANDS),
            id="no-torchrec",
        ),
        pytest.param(
            replace(CPU, fbgemm_gpu_cpu=None),
            "fbgemm    not installed (supported: 1.8.x)",
            [INSTALL_CPU],
            id="no-fbgemm-on-cpu",
        ),
        pytest.param(
            replace(CUDA, fbgemm_gpu=None),
            "fbgemm    not installed (supported: 1.8.x)",
            [INSTALL_CUDA],
            id="no-fbgemm-on-cuda",
        ),
        pytest.param(
            replace(CPU, fbgemm_gpu_cpu="1.7.0"),
            "fbgemm    fbgemm-gpu-cpu 1.7.0 (supported: 1.8.x)",
            [INSTALL_CPU],
            id="old-fbgemm",
        ),
        pytest.param(
            replace(CPU, fbgemm_gpu="1.8.0"),
            "fbgemm-gpu 1.8.0 and fbgemm-gpu-cpu 1.8.0: both own the same import package",
            [BOTH_AWAY, INSTALL_CPU],
            id="both-on-cpu",
        ),
        pytest.param(
            replace(CUDA, fbgemm_gpu_cpu="1.8.0"),
            "fbgemm-gpu 1.8.0 and fbgemm-gpu-cpu 1.8.0: both own the same import package",
            [BOTH_AWAY, INSTALL_CUDA],
            id="both-on-cuda",
        ),
        pytest.param(
            replace(CUDA, torch="2.13.0+cpu"),
            "fbgemm-gpu 1.8.0: the CUDA build can't be loaded beside the CPU build 2.13.0+cpu",
            ["pip uninstall -y fbgemm-gpu", INSTALL_CPU],
            id="cuda-fbgemm-beside-cpu-torch",
        ),
        pytest.param(
            replace(CUDA, has_nvidia_driver=False),
            "fbgemm-gpu 1.8.0: the CUDA build can't be loaded without an NVIDIA driver",
            ["pip uninstall -y fbgemm-gpu", INSTALL_CPU],
            id="cuda-fbgemm-without-driver",
        ),
    ],
)
def test_each_mismatch_is_named_with_its_fix(
    found: FoundVersions, named: str, commands: list[str]
) -> None:
    with pytest.raises(VersionError) as raised:
        require_supported_versions(found)
    message = str(raised.value)
    assert named in message
    # Nothing but the fix, in order: a supported package gets no command.
    assert [line.strip() for line in message.splitlines() if "  pip " in line] == commands


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


@pytest.mark.parametrize(
    ("found", "named", "remedy"),
    [
        pytest.param(
            replace(CPU, torchmetrics="1.4.0"),
            "1.4.0",
            ('pip install --no-deps "torchmetrics==1.0.3"',),
            id="torchmetrics",
        ),
        pytest.param(
            replace(CUDA, fbgemm_gpu=None, fbgemm_gpu_cpu="1.8.0"),
            "does not use the NVIDIA devices",
            ("pip uninstall -y fbgemm-gpu-cpu", INSTALL_CUDA),
            id="cpu-fbgemm-on-a-gpu-machine",
        ),
    ],
)
def test_what_still_works_is_only_a_warning(
    found: FoundVersions, named: str, remedy: tuple[str, ...]
) -> None:
    require_supported_versions(found)
    (warning,) = [c for c in check_versions(found).checks if c.status is not Status.OK]
    assert warning.status is Status.WARNING
    assert named in warning.found
    assert warning.remedy == remedy


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
    ],
)
def test_series_are_compared_by_major_and_minor(version: str, expected: bool) -> None:
    assert in_supported_series("torch", version) is expected


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


def test_commands_install_what_the_lock_does() -> None:
    lock = (Path(__file__).parents[2] / "requirements" / "cpu.txt").read_text().splitlines()
    named = [word.strip('"') for line in TORCHREC_COMMANDS for word in line.split() if "==" in word]
    assert len(named) == 4
    pins = {
        *named,
        f"fbgemm-gpu-cpu=={SUPPORTED['fbgemm']}",
        f"torchmetrics=={SUPPORTED_TORCHMETRICS}",
    }
    assert pins <= set(lock)
