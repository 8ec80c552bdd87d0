"""Check that torch, torchrec and fbgemm belong together, from package metadata alone.

fbgemm is compiled against one series of torch, and torchrec is written for one of fbgemm, but no
package metadata says so. `TRIED` does. This module imports none of them: a mismatched fbgemm
ends in an undefined symbol.
"""

import ctypes
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import metadata
from pathlib import Path

from torchrec_2dsp.errors import UntriedVersionWarning, VersionError


@dataclass(frozen=True, kw_only=True)
class FoundVersions:
    """This machine's versions; `None` is "not installed"."""

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

    @property
    def fbgemm_builds(self) -> Mapping[str, str]:
        """The installed fbgemm distributions' versions, by name."""
        versions = {"fbgemm-gpu": self.fbgemm_gpu, "fbgemm-gpu-cpu": self.fbgemm_gpu_cpu}
        return {name: version for name, version in versions.items() if version is not None}

    @property
    def fbgemm(self) -> str | None:
        """The fbgemm version, whichever build is installed."""
        return next(iter(self.fbgemm_builds.values()), None)

    @property
    def by_package(self) -> dict[str, str | None]:
        """The versions by name in `PACKAGES`."""
        return {"torch": self.torch, "torchrec": self.torchrec, "fbgemm": self.fbgemm}


def is_cpu_build(torch_version: str | None) -> bool:
    """Return whether this torch version was built without CUDA."""
    return torch_version is not None and torch_version.partition("+")[2].startswith("cpu")


def find_versions() -> FoundVersions:
    """Read the installed versions without importing the packages."""
    return FoundVersions(
        torch=_find_torch(),
        torchrec=_find("torchrec"),
        fbgemm_gpu=_find("fbgemm-gpu"),
        fbgemm_gpu_cpu=_find("fbgemm-gpu-cpu"),
        torchmetrics=_find("torchmetrics"),
        has_nvidia_driver=_has_nvidia_driver(),
    )


def _find(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _find_torch() -> str | None:
    """Return the torch version with its local part, which some wheels' metadata omits."""
    try:
        distribution = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    source = Path(str(distribution.locate_file("torch/version.py")))
    if source.is_file():
        version = re.search(r"^__version__ = '([^']+)'", source.read_text(), re.MULTILINE)
        if version is not None:
            return version.group(1)
    return distribution.version


def _has_nvidia_driver() -> bool:
    """Return whether the driver library that fbgemm's CUDA build links to can be loaded."""
    if sys.platform != "linux":
        return False
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


PACKAGES = ("torch", "torchrec", "fbgemm")
"""The packages in a `VersionSet`; torch first, because the others are built for it."""

TORCHMETRICS = "1.0.3"
"""The torchmetrics version that torchrec pins, in all tried sets."""


@dataclass(frozen=True, kw_only=True)
class VersionSet:
    """Versions that belong together: the locks install them, and the tests run with them."""

    torch: str
    torchrec: str
    """The newest tested release."""
    fbgemm: str
    also_tried: tuple[str, ...] = ()
    """Other torchrec releases that were tested with the same torch and fbgemm."""
    tensordict: str = "0.15.3"
    pyre_extensions: str = "0.0.32"

    def series(self, package: str) -> str:
        """Return the set's versions of one of `PACKAGES`, as people write them.

        >>> TRIED[0].series("torch")
        '2.13.x'
        """
        return getattr(self, package).rpartition(".")[0] + ".x"

    def has(self, package: str, version: str | None) -> bool:
        """Return whether ``version`` has the set's major and minor number.

        Patch releases of a series are interchangeable. Nightly and local parts are ignored.

        >>> TRIED[0].has("torch", "2.13.1.dev20261101+cu130")
        True
        >>> TRIED[0].has("torch", "2.12.0")
        False
        """
        numbers = re.match(r"\d+\.\d+(?!\d)", version or "")
        return numbers is not None and f"{numbers.group()}.x" == self.series(package)

    def install_torch(self) -> tuple[str, ...]:
        """Return the commands that install torch."""
        return (f'pip install "torch=={self.torch}"',)

    def install_torchrec(self) -> tuple[str, ...]:
        """Return the commands that install torchrec.

        torchrec is installed without its dependencies, because they include fbgemm's CUDA package;
        the other dependencies are named.
        """
        return (
            f'pip install "torchmetrics=={TORCHMETRICS}" "tensordict=={self.tensordict}"'
            f' "pyre-extensions=={self.pyre_extensions}" tqdm',
            f'pip install --no-deps "torchrec=={self.torchrec}"',
        )

    def install_fbgemm(self, distribution: str) -> tuple[str, ...]:
        """Return the commands that install an fbgemm build."""
        return (f'pip install --no-deps "{distribution}=={self.fbgemm}"',)

    def __str__(self) -> str:
        releases = ", ".join(sorted((*self.also_tried, self.torchrec)))
        return f"torch {self.torch} with torchrec {releases} and fbgemm {self.fbgemm}"


TRIED: tuple[VersionSet, ...] = (
    VersionSet(torch="2.13.0", torchrec="1.8.0", fbgemm="1.8.0"),
    VersionSet(torch="2.14.1", torchrec="1.9.2", fbgemm="1.9.0", also_tried=("1.9.0", "1.9.1")),
)
"""All tested sets. Users with nothing installed are told to install the first one."""


def tried_set(package: str, version: str | None) -> VersionSet | None:
    """Return the tested set with this version of a package; `None` for an untested version."""
    return next((tried for tried in TRIED if tried.has(package, version)), None)


def tried_series(package: str) -> str:
    """Return all tested versions of ``package``, as people write them.

    >>> tried_series("torchrec")
    '1.8.x or 1.9.x'
    """
    return " or ".join(tried.series(package) for tried in TRIED)


def tried_text() -> str:
    """Return all tested sets in one line."""
    return "; ".join(str(tried) for tried in TRIED)


def nearest_set(versions: FoundVersions) -> VersionSet:
    """Return the tested set that needs the fewest changes: most installed versions belong to it.

    Among sets that need equally many, the one with the installed torch is taken: torch is the
    largest to reinstall. If no installed version is tested, it is the first set.
    """

    def fitting(tried: VersionSet) -> list[bool]:
        return [tried.has(*entry) for entry in versions.by_package.items()]

    return max(TRIED, key=lambda tried: (sum(fitting(tried)), *fitting(tried)))


MIN_PYTHON = (3, 11)


class Status(StrEnum):
    """A check's outcome."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """A check's result, one line in the doctor's table."""

    name: str
    status: Status
    found: str
    expected: str = ""
    remedy: tuple[str, ...] = ()
    """Commands or sentences that repair the failure, in order."""


def check_python(version: tuple[int, int]) -> CheckResult:
    """Check the running interpreter's (major, minor) version."""
    oldest = ".".join(map(str, MIN_PYTHON))
    good = version >= MIN_PYTHON
    return CheckResult(
        name="python",
        status=Status.OK if good else Status.FAILED,
        found=".".join(map(str, version)),
        expected=f">= {oldest}",
        remedy=() if good else (f"make clean && make test PYTHON=python{oldest}",),
    )


def check_versions(versions: FoundVersions) -> tuple[CheckResult, ...]:
    """Compare versions with the tested sets.

    A version from another set than the others is a failure. A version from no set is a warning; for
    torch and fbgemm only if both are untested, because fbgemm is compiled for one torch.
    """
    nearest = nearest_set(versions)
    torch, fbgemm = versions.torch, versions.fbgemm
    is_new_pair = bool(torch and fbgemm) and not (
        tried_set("torch", torch) or tried_set("fbgemm", fbgemm)
    )
    torch_judged = _judge_version("torch", torch, nearest, is_new_pair)
    torchrec_judged = _judge_version("torchrec", versions.torchrec, nearest, True)
    return (
        _check("torch", torch, torch_judged, nearest, nearest.install_torch()),
        _check("torchrec", versions.torchrec, torchrec_judged, nearest, nearest.install_torchrec()),
        _check_fbgemm(versions, nearest, is_new_pair),
        _check_torchmetrics(versions.torchmetrics),
    )


def untried_versions(versions: FoundVersions) -> dict[str, str]:
    """Return the installed versions that belong to no tested set, by package."""
    return {
        package: version
        for package, version in versions.by_package.items()
        if version is not None and tried_set(package, version) is None
    }


@cache
def require_upstream() -> None:
    """Call `require_supported_versions` once for the installed versions.

    Every room that needs TorchRec or FBGEMM calls this before importing anything in the room: a
    mismatched fbgemm ends in an undefined symbol, and a mismatched torchrec in other numbers.
    """
    require_supported_versions()


def require_supported_versions(versions: FoundVersions | None = None) -> None:
    """Raise one `VersionError` that names every mismatch and the commands that fix it.

    Untested versions that may belong together cause one `UntriedVersionWarning` per process.
    """
    versions = find_versions() if versions is None else versions
    checks = check_versions(versions)
    if any(check.status is Status.FAILED for check in checks):
        raise VersionError(_mismatch_text(checks))
    untried = untried_versions(versions)
    if untried:
        names = ", ".join(f"{package} {version}" for package, version in untried.items())
        _warn_once(f"torchrec_2dsp is not tried with {names}. Tried are: {tried_text()}.")


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, UntriedVersionWarning, stacklevel=3)


def _mismatch_text(checks: Sequence[CheckResult]) -> str:
    rows = (
        f"  {check.name:<9} {check.found} (supported: {check.expected})"
        for check in checks
        if check.name in PACKAGES
    )
    failures = [check for check in checks if check.status is Status.FAILED]
    commands = (f"  {line}" for check in failures for line in check.remedy)
    return (
        "torchrec_2dsp needs a torch, torchrec and fbgemm that belong together. Found:\n"
        + "\n".join(rows)
        + "\nTo fix it, run in this order:\n"
        + "\n".join(commands)
        + f"\nThese belong together: {tried_text()}."
        + "\nThen `python -m torchrec_2dsp doctor --run` checks the rest."
    )


_NOT_TRIED = "not tried"


def _check(
    package: str,
    installed: str | None,
    judged: tuple[Status, str],
    nearest: VersionSet,
    commands: tuple[str, ...],
) -> CheckResult:
    """Return a package's result, with the commands that repair it."""
    status, problem = judged
    remedy = () if status is Status.OK else commands
    expected = nearest.series(package)
    if problem == _NOT_TRIED:
        remedy = (f"Nothing, if all else is well. Tried are: {tried_text()}.",)
        expected = tried_series(package)
    return CheckResult(
        name=package,
        status=status,
        found=(installed or "not installed") + (f": {problem}" if problem else ""),
        expected=expected,
        remedy=remedy,
    )


def _judge_version(
    package: str, version: str | None, nearest: VersionSet, may_be_untried: bool
) -> tuple[Status, str]:
    if version is None:
        return Status.FAILED, ""
    if nearest.has(package, version):
        return Status.OK, ""
    other_set = tried_set(package, version)
    if other_set is not None:
        partners = (f"{name} {other_set.series(name)}" for name in PACKAGES if name != package)
        return Status.FAILED, f"belongs to {' and '.join(partners)}"
    return (Status.WARNING, _NOT_TRIED) if may_be_untried else (Status.FAILED, "")


def _check_fbgemm(versions: FoundVersions, nearest: VersionSet, is_new_pair: bool) -> CheckResult:
    builds, right_build = versions.fbgemm_builds, versions.wanted_fbgemm
    # Both distributions own the same files: uninstalling one removes files of the other, too.
    surplus = tuple(builds) if len(builds) > 1 or right_build not in builds else ()
    uninstall = (f"pip uninstall -y {' '.join(surplus)}",) if surplus else ()
    names = " and ".join(f"{name} {version}" for name, version in builds.items())
    commands = (*uninstall, *nearest.install_fbgemm(right_build))
    judged = _judge_fbgemm(versions, nearest, is_new_pair)
    return _check("fbgemm", names, judged, nearest, commands)


def _judge_fbgemm(
    versions: FoundVersions, nearest: VersionSet, is_new_pair: bool
) -> tuple[Status, str]:
    torch, builds = versions.torch, versions.fbgemm_builds
    if len(builds) > 1:
        return Status.FAILED, "both own the same import package, only one may be installed"
    judged = _judge_version("fbgemm", versions.fbgemm, nearest, is_new_pair)
    if judged[0] is Status.FAILED:
        return judged
    if versions.fbgemm_gpu is not None and is_cpu_build(torch):
        return Status.FAILED, f"the CUDA build can't be loaded beside the CPU build {torch}"
    if versions.fbgemm_gpu is not None and not versions.has_nvidia_driver:
        return Status.FAILED, "the CUDA build can't be loaded without an NVIDIA driver"
    if judged[0] is Status.OK and versions.wanted_fbgemm not in builds:
        return Status.WARNING, "the CPU build does not use the NVIDIA devices of this machine"
    return judged


def _check_torchmetrics(version: str | None) -> CheckResult:
    good = version == TORCHMETRICS
    return CheckResult(
        name="torchmetrics",
        status=Status.OK if good else Status.WARNING,
        found=version or "not installed",
        expected=TORCHMETRICS,
        remedy=() if good else (f'pip install --no-deps "torchmetrics=={TORCHMETRICS}"',),
    )
