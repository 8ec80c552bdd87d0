"""Whether the installed torch, torchrec and fbgemm belong together, and how to repair it.

The three are compiled or written against each other, and no package metadata says so: torchrec
asks for `fbgemm-gpu` whatever the machine has, the CPU build is another distribution that owns
the same import package, and neither names its torch. So the versions are compared here, from
package metadata alone: a heavy import of a mismatched fbgemm ends in an undefined symbol.
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
class VersionReport:
    """The checks of one `FoundVersions`."""

    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status is Status.FAILED)

    @property
    def is_supported(self) -> bool:
        return not self.failures


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
    """Compare what was found with the sets that are tried.

    A version of another set than the others is a failure. A version of no set is a warning, but
    for torch or fbgemm beside a tried version of the other: fbgemm is compiled for one torch.
    """
    near = set_for(found)
    is_new_pair = bool(found.torch and found.fbgemm) and not (
        tried_set("torch", found.torch) or tried_set("fbgemm", found.fbgemm)
    )
    return VersionReport(
        checks=(
            _check_package("torch", found.torch, near, is_new_pair, near.install_torch()),
            _check_package("torchrec", found.torchrec, near, True, near.install_torchrec()),
            _check_fbgemm(found, near, is_new_pair),
            _check_torchmetrics(found.torchmetrics),
        )
    )


def set_for(found: FoundVersions) -> VersionSet:
    """The tried set that is nearest to what was found."""
    return nearest_set({"torch": found.torch, "torchrec": found.torchrec, "fbgemm": found.fbgemm})


def untried_versions(found: FoundVersions) -> dict[str, str]:
    """The packages of which another version was found than those that are tried."""
    versions = {"torch": found.torch, "torchrec": found.torchrec, "fbgemm": found.fbgemm}
    return {
        package: version
        for package, version in versions.items()
        if version is not None and tried_set(package, version) is None
    }


def require_supported_versions(found: FoundVersions | None = None) -> None:
    """Raise one `VersionError` that names every mismatch and the commands that fix it.

    Versions that are not tried, but may belong together, are an `UntriedVersionWarning`, once in a
    process; `require_upstream_names` tells whether they have what is needed of them.

    Args:
        found: what to judge; what is installed here unless given.
    """
    found = find_versions() if found is None else found
    report = check_versions(found)
    if not report.is_supported:
        raise VersionError(_mismatch_text(report))
    untried = untried_versions(found)
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
    near: VersionSet,
    may_be_untried: bool,
    commands: tuple[str, ...],
) -> Check:
    """Judge one version: of the nearest set, of another one, of none, or not installed."""
    status, problem = _judge_version(package, version, near, may_be_untried)
    return _check(package, status, version or "", problem, near, commands)


def _check(
    package: str,
    status: Status,
    installed: str,
    problem: str,
    near: VersionSet,
    commands: tuple[str, ...],
) -> Check:
    """What was found of a package, and what repairs it."""
    remedy = () if status is Status.OK else commands
    expected = near.series(package)
    if problem == _NOT_TRIED:
        remedy = (f"Nothing, if all else is well. Tried are: {tried_text()}.",)
        expected = tried_series(package)
    return Check(
        name=package,
        status=status,
        found=(installed or "not installed") + (f": {problem}" if problem else ""),
        expected=expected,
        remedy=remedy,
    )


def _judge_version(
    package: str, version: str | None, near: VersionSet, may_be_untried: bool
) -> tuple[Status, str]:
    if version is None:
        return Status.FAILED, ""
    if near.has(package, version):
        return Status.OK, ""
    other = tried_set(package, version)
    if other is not None:
        partners = (f"{name} {other.series(name)}" for name in PACKAGES if name != package)
        return Status.FAILED, f"belongs to {' and '.join(partners)}"
    return (Status.WARNING, _NOT_TRIED) if may_be_untried else (Status.FAILED, "")


def _check_fbgemm(found: FoundVersions, near: VersionSet, is_new_pair: bool) -> Check:
    builds = found.fbgemm_builds
    status, problem = _judge_fbgemm(found, near, is_new_pair)
    # Both distributions own the same files: whichever goes takes files of the other along.
    leaving = tuple(builds) if len(builds) > 1 or found.wanted_fbgemm not in builds else ()
    uninstall = (f"pip uninstall -y {' '.join(leaving)}",) if leaving else ()
    names = " and ".join(f"{name} {version}" for name, version in builds.items())
    commands = (*uninstall, *near.install_fbgemm(found.wanted_fbgemm))
    return _check("fbgemm", status, names, problem, near, commands)


def _judge_fbgemm(found: FoundVersions, near: VersionSet, is_new_pair: bool) -> tuple[Status, str]:
    if len(found.fbgemm_builds) > 1:
        return Status.FAILED, "both own the same import package, only one may be installed"
    status, problem = _judge_version("fbgemm", found.fbgemm, near, is_new_pair)
    if status is Status.FAILED:
        return status, problem
    if found.fbgemm_gpu is not None and is_cpu_build(found.torch):
        return Status.FAILED, f"the CUDA build can't be loaded beside the CPU build {found.torch}"
    if found.fbgemm_gpu is not None and not found.has_nvidia_driver:
        return Status.FAILED, "the CUDA build can't be loaded without an NVIDIA driver"
    if status is Status.OK and found.wanted_fbgemm not in found.fbgemm_builds:
        return Status.WARNING, "the CPU build does not use the NVIDIA devices of this machine"
    return status, problem


def _check_torchmetrics(version: str | None) -> Check:
    good = version == TORCHMETRICS
    return Check(
        name="torchmetrics",
        status=Status.OK if good else Status.WARNING,
        found=version or "not installed",
        expected=TORCHMETRICS,
        remedy=() if good else (f'pip install --no-deps "torchmetrics=={TORCHMETRICS}"',),
    )
