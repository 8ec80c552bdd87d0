"""Which torch, torchrec and fbgemm belong together, and how to install them.

The three are compiled or written against each other, and no package metadata says so: torchrec
asks for `fbgemm-gpu` whatever the machine has, the CPU build is another distribution that owns
the same import package, and neither names its torch. So the versions are compared here, from
package metadata alone: a heavy import of a mismatched fbgemm ends in an undefined symbol.
"""

import ctypes
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from torchrec_2dsp.errors import VersionError

SUPPORTED: Mapping[str, str] = MappingProxyType(
    {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm": "1.8.0"}
)
"""The version that we install of each; every patch release of its minor series is supported."""

SUPPORTED_TORCHMETRICS = "1.0.3"
"""torchrec's exact pin. Only its metrics depend on it, so another version is a warning."""

MIN_PYTHON = (3, 11)

# torchrec goes in without its dependencies (they name the CUDA fbgemm), so its others are named.
TORCHREC_COMMANDS = (
    f'pip install "torchmetrics=={SUPPORTED_TORCHMETRICS}" "tensordict==0.15.3"'
    ' "pyre-extensions==0.0.32" tqdm',
    f'pip install --no-deps "torchrec=={SUPPORTED["torchrec"]}"',
)


class Status(StrEnum):
    """Outcome of one check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of what the doctor says."""

    name: str
    status: Status
    found: str
    expected: str = ""
    remedy: tuple[str, ...] = ()
    """Commands or sentences that put it right, in order."""


@dataclass(frozen=True, kw_only=True)
class FoundVersions:
    """What this machine has; `None` is "not installed"."""

    torch: str | None
    torchrec: str | None
    fbgemm_gpu: str | None
    """The CUDA distribution."""
    fbgemm_gpu_cpu: str | None
    torchmetrics: str | None
    has_nvidia_driver: bool

    @property
    def wanted_fbgemm(self) -> str:
        """The fbgemm distribution that can be loaded here."""
        with_cuda = self.has_nvidia_driver and not is_cpu_build(self.torch)
        return "fbgemm-gpu" if with_cuda else "fbgemm-gpu-cpu"


@dataclass(frozen=True, kw_only=True)
class VersionReport:
    """The checks of one `FoundVersions`."""

    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status is Status.FAILED)

    @property
    def is_supported(self) -> bool:
        return not self.failures


def is_cpu_build(torch_version: str | None) -> bool:
    """Whether this torch says that it was built without CUDA."""
    return torch_version is not None and torch_version.partition("+")[2].startswith("cpu")


def in_supported_series(package: str, version: str) -> bool:
    """Whether `version` has the supported major and minor number.

    Patch, nightly and local parts don't matter.

    >>> in_supported_series("torch", "2.13.1.dev20261101+cu130")
    True
    >>> in_supported_series("torch", "2.12.0")
    False
    """
    found = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    return found is not None and list(found.groups()) == SUPPORTED[package].split(".")[:2]


def supported_series(package: str) -> str:
    """The supported versions of `package`, as people write them.

    >>> supported_series("torch")
    '2.13.x'
    """
    return SUPPORTED[package].rpartition(".")[0] + ".x"


def check_python(version: tuple[int, int]) -> Check:
    """Check the running interpreter's (major, minor) version."""
    oldest = ".".join(map(str, MIN_PYTHON))
    good = version >= MIN_PYTHON
    return Check(
        name="python",
        status=Status.OK if good else Status.FAILED,
        found=".".join(map(str, version)),
        expected=f">= {oldest}",
        remedy=() if good else (f"make clean && make test PYTHON=python{oldest}",),
    )


def check_versions(found: FoundVersions) -> VersionReport:
    """Compare what was found with what is supported."""
    torch_command = f'pip install "torch=={SUPPORTED["torch"]}"'
    return VersionReport(
        checks=(
            _check_series("torch", found.torch, (torch_command,)),
            _check_series("torchrec", found.torchrec, TORCHREC_COMMANDS),
            _check_fbgemm(found),
            _check_torchmetrics(found.torchmetrics),
        )
    )


def find_versions() -> FoundVersions:
    """Read the installed versions without importing any of the packages."""
    return FoundVersions(
        torch=_find_torch(),
        torchrec=_find("torchrec"),
        fbgemm_gpu=_find("fbgemm-gpu"),
        fbgemm_gpu_cpu=_find("fbgemm-gpu-cpu"),
        torchmetrics=_find("torchmetrics"),
        has_nvidia_driver=_has_nvidia_driver(),
    )


def require_supported_versions(found: FoundVersions | None = None) -> None:
    """Raise one `VersionError` that names every mismatch and the commands that fix it.

    Args:
        found: what to judge; what is installed here unless given.
    """
    report = check_versions(find_versions() if found is None else found)
    if report.is_supported:
        return
    rows = (
        f"  {check.name:<9} {check.found} (supported: {check.expected})"
        for check in report.checks
        if check.name in SUPPORTED
    )
    commands = (f"  {line}" for check in report.failures for line in check.remedy)
    raise VersionError(
        "torchrec_2dsp needs a torch, torchrec and fbgemm that belong together. Found:\n"
        + "\n".join(rows)
        + "\nTo fix it, run in this order:\n"
        + "\n".join(commands)
        + "\nThen `python -m torchrec_2dsp doctor --run` checks the rest."
    )


def _check_series(package: str, version: str | None, remedy: tuple[str, ...]) -> Check:
    good = version is not None and in_supported_series(package, version)
    return Check(
        name=package,
        status=Status.OK if good else Status.FAILED,
        found=version or "not installed",
        expected=supported_series(package),
        remedy=() if good else remedy,
    )


def _check_fbgemm(found: FoundVersions) -> Check:
    installed = {
        name: version
        for name, version in (
            ("fbgemm-gpu", found.fbgemm_gpu),
            ("fbgemm-gpu-cpu", found.fbgemm_gpu_cpu),
        )
        if version is not None
    }
    status, problem = _judge_fbgemm(found, installed)
    names = " and ".join(f"{name} {version}" for name, version in installed.items())
    # Both distributions own the same files: whichever goes takes files of the other along.
    leaving = tuple(installed) if len(installed) > 1 or found.wanted_fbgemm not in installed else ()
    uninstall = (f"pip uninstall -y {' '.join(leaving)}",) if leaving else ()
    install = f'pip install --no-deps "{found.wanted_fbgemm}=={SUPPORTED["fbgemm"]}"'
    return Check(
        name="fbgemm",
        status=status,
        found=(names or "not installed") + (f": {problem}" if problem else ""),
        expected=supported_series("fbgemm"),
        remedy=() if status is Status.OK else (*uninstall, install),
    )


def _judge_fbgemm(found: FoundVersions, installed: Mapping[str, str]) -> tuple[Status, str]:
    if not installed:
        return Status.FAILED, ""
    if len(installed) > 1:
        return Status.FAILED, "both own the same import package, only one may be installed"
    if not all(in_supported_series("fbgemm", version) for version in installed.values()):
        return Status.FAILED, ""
    if found.fbgemm_gpu is not None and is_cpu_build(found.torch):
        return Status.FAILED, f"the CUDA build can't be loaded beside the CPU build {found.torch}"
    if found.fbgemm_gpu is not None and not found.has_nvidia_driver:
        return Status.FAILED, "the CUDA build can't be loaded without an NVIDIA driver"
    if found.wanted_fbgemm not in installed:
        return Status.WARNING, "the CPU build does not use the NVIDIA devices of this machine"
    return Status.OK, ""


def _check_torchmetrics(version: str | None) -> Check:
    good = version == SUPPORTED_TORCHMETRICS
    return Check(
        name="torchmetrics",
        status=Status.OK if good else Status.WARNING,
        found=version or "not installed",
        expected=SUPPORTED_TORCHMETRICS,
        remedy=() if good else (f'pip install --no-deps "torchmetrics=={SUPPORTED_TORCHMETRICS}"',),
    )


def _find(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _find_torch() -> str | None:
    """The torch version with its local part, which the metadata of some wheels leaves out."""
    try:
        distribution = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    source = Path(str(distribution.locate_file("torch/version.py")))
    if source.is_file():
        written = re.search(r"^__version__ = '([^']+)'", source.read_text(), re.MULTILINE)
        if written is not None:
            return written.group(1)
    return distribution.version


def _has_nvidia_driver() -> bool:
    """Whether the driver library that the CUDA build of fbgemm links to can be loaded."""
    if sys.platform != "linux":
        return False
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True
