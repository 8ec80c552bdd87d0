"""Whether the installed torch, torchrec and fbgemm belong together, and how to repair it.

The three are compiled or written against each other, and no package metadata says so: torchrec
asks for `fbgemm-gpu` whatever the machine has, the CPU build is another distribution that owns
the same import package, and neither names its torch. So the versions are compared here, from
package metadata alone, because importing a mismatched fbgemm ends in an undefined symbol.
"""

import warnings
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from torchrec_2dsp._compat.installed_versions import FoundVersions, find_versions, is_cpu_build
from torchrec_2dsp._compat.known_versions import (
    PACKAGES,
    TORCHMETRICS,
    VersionSet,
    nearest_set,
    tried_series,
    tried_set,
    tried_text,
)
from torchrec_2dsp.errors import UntriedVersionWarning, VersionError

MIN_PYTHON = (3, 11)


class Status(StrEnum):
    """The outcome of one check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of one check, which is a line of the doctor's table."""

    name: str
    status: Status
    found: str
    expected: str = ""
    remedy: tuple[str, ...] = ()
    """Commands or sentences that repair what was checked, in order."""


@dataclass(frozen=True, kw_only=True)
class VersionReport:
    """The results of all checks of one `FoundVersions`."""

    checks: tuple[CheckResult, ...]

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        return tuple(check for check in self.checks if check.status is Status.FAILED)

    @property
    def is_supported(self) -> bool:
        return not self.failures


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


def check_versions(versions: FoundVersions) -> VersionReport:
    """Compare versions with the sets that are tried.

    A version of another set than the others is a failure. A version of no set is a warning; for
    torch and fbgemm only if both are untried, because fbgemm is compiled for one torch.
    """
    nearest = set_for(versions)
    torch, fbgemm = versions.torch, versions.fbgemm
    is_new_pair = bool(torch and fbgemm) and not (
        tried_set("torch", torch) or tried_set("fbgemm", fbgemm)
    )
    torchrec_commands = nearest.install_torchrec()
    return VersionReport(
        checks=(
            _check_package("torch", torch, nearest, is_new_pair, nearest.install_torch()),
            _check_package("torchrec", versions.torchrec, nearest, True, torchrec_commands),
            _check_fbgemm(versions, nearest, is_new_pair),
            _check_torchmetrics(versions.torchmetrics),
        )
    )


def set_for(versions: FoundVersions) -> VersionSet:
    """The tried set that is nearest to these versions."""
    return nearest_set(_by_package(versions))


def untried_versions(versions: FoundVersions) -> dict[str, str]:
    """The installed versions that belong to no tried set, by package."""
    return {
        package: version
        for package, version in _by_package(versions).items()
        if version is not None and tried_set(package, version) is None
    }


def _by_package(versions: FoundVersions) -> dict[str, str | None]:
    return {"torch": versions.torch, "torchrec": versions.torchrec, "fbgemm": versions.fbgemm}


def require_supported_versions(versions: FoundVersions | None = None) -> None:
    """Raise one `VersionError` that names every mismatch and the commands that fix it.

    Untried versions that may belong together cause one `UntriedVersionWarning` in a process;
    `require_upstream_names` checks whether they have all names that are needed.

    Args:
        versions: the versions to judge; the installed ones unless given.
    """
    versions = find_versions() if versions is None else versions
    report = check_versions(versions)
    if not report.is_supported:
        raise VersionError(_mismatch_text(report))
    untried = untried_versions(versions)
    if untried:
        names = ", ".join(f"{package} {version}" for package, version in untried.items())
        _warn_once(f"torchrec_2dsp is not tried with {names}. Tried are: {tried_text()}.")


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, UntriedVersionWarning, stacklevel=3)


def _mismatch_text(report: VersionReport) -> str:
    rows = (
        f"  {check.name:<9} {check.found} (supported: {check.expected})"
        for check in report.checks
        if check.name in PACKAGES
    )
    commands = (f"  {line}" for check in report.failures for line in check.remedy)
    return (
        "torchrec_2dsp needs a torch, torchrec and fbgemm that belong together. Found:\n"
        + "\n".join(rows)
        + "\nTo fix it, run in this order:\n"
        + "\n".join(commands)
        + f"\nThese belong together: {tried_text()}."
        + "\nThen `python -m torchrec_2dsp doctor --run` checks the rest."
    )


_NOT_TRIED = "not tried"


def _check_package(
    package: str,
    version: str | None,
    nearest: VersionSet,
    may_be_untried: bool,
    commands: tuple[str, ...],
) -> CheckResult:
    """Judge whether a version is of the nearest set, of another or no set, or not installed."""
    status, problem = _judge_version(package, version, nearest, may_be_untried)
    return _check(package, status, version or "", problem, nearest, commands)


def _check(
    package: str,
    status: Status,
    installed: str,
    problem: str,
    nearest: VersionSet,
    commands: tuple[str, ...],
) -> CheckResult:
    """The result for a package, with the commands that repair it."""
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
    status, problem = _judge_fbgemm(versions, nearest, is_new_pair)
    # Both distributions own the same files: uninstalling one removes files of the other, too.
    surplus = tuple(builds) if len(builds) > 1 or right_build not in builds else ()
    uninstall = (f"pip uninstall -y {' '.join(surplus)}",) if surplus else ()
    names = " and ".join(f"{name} {version}" for name, version in builds.items())
    commands = (*uninstall, *nearest.install_fbgemm(right_build))
    return _check("fbgemm", status, names, problem, nearest, commands)


def _judge_fbgemm(
    versions: FoundVersions, nearest: VersionSet, is_new_pair: bool
) -> tuple[Status, str]:
    torch, builds = versions.torch, versions.fbgemm_builds
    if len(builds) > 1:
        return Status.FAILED, "both own the same import package, only one may be installed"
    status, problem = _judge_version("fbgemm", versions.fbgemm, nearest, is_new_pair)
    if status is Status.FAILED:
        return status, problem
    if versions.fbgemm_gpu is not None and is_cpu_build(torch):
        return Status.FAILED, f"the CUDA build can't be loaded beside the CPU build {torch}"
    if versions.fbgemm_gpu is not None and not versions.has_nvidia_driver:
        return Status.FAILED, "the CUDA build can't be loaded without an NVIDIA driver"
    if status is Status.OK and versions.wanted_fbgemm not in builds:
        return Status.WARNING, "the CPU build does not use the NVIDIA devices of this machine"
    return status, problem


def _check_torchmetrics(version: str | None) -> CheckResult:
    good = version == TORCHMETRICS
    return CheckResult(
        name="torchmetrics",
        status=Status.OK if good else Status.WARNING,
        found=version or "not installed",
        expected=TORCHMETRICS,
        remedy=() if good else (f'pip install --no-deps "torchmetrics=={TORCHMETRICS}"',),
    )
