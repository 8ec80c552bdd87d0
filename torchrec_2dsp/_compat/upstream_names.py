"""Check that the installed torch, torchrec and fbgemm have the names that this package imports.

For tried versions, the tests check that. For others, the names are looked up when the library is
first loaded, so that missing names are one clear error.
"""

import ast
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path

from torchrec_2dsp._compat.versions import (
    CheckResult,
    FoundVersions,
    Status,
    find_versions,
    nearest_set,
    require_supported_versions,
    tried_text,
    untried_versions,
)
from torchrec_2dsp.errors import VersionError

PACKAGE = Path(__file__).parents[1]
_ADAPTERS = "_compat"
_LIBRARIES = ("torchrec", "fbgemm_gpu")
_CHECK_NAME = "upstream names"


def needed_names(package: Path = PACKAGE) -> list[tuple[str, str]]:
    """Return all ``(module, name)`` that the package imports from upstream.

    From torch, these are the adapters' imports, because nothing else uses what torch doesn't
    document. All are read from the source files, so that no list can go stale.
    """
    names: set[tuple[str, str]] = set()
    for path in package.rglob("*.py"):
        libraries = (*_LIBRARIES, "torch") if path.parent.name == _ADAPTERS else _LIBRARIES
        for node in ast.walk(ast.parse(path.read_text())):
            # Relative imports have a level.
            if not isinstance(node, ast.ImportFrom) or node.level:
                continue
            if str(node.module).split(".")[0] in libraries:
                names |= {(str(node.module), alias.name) for alias in node.names}
    return sorted(names)


def missing_names(names: Iterable[tuple[str, str]]) -> list[str]:
    """Return which ``(module, name)`` can't be imported; for a whole module, with the reason."""
    missing: list[str] = []
    broken: set[str] = set()
    for module, name in names:
        if module in broken:
            continue
        try:
            upstream = import_module(module)
        except Exception as error:
            broken.add(module)
            reason = (str(error).strip() or "no message").splitlines()[0]
            missing.append(f"{module} can't be imported: {type(error).__name__}: {reason}")
            continue
        if not hasattr(upstream, name) and not _is_module(f"{module}.{name}"):
            missing.append(f"{module}.{name}")
    return missing


@cache
def require_upstream() -> None:
    """Raise a `VersionError` if the installed versions can't work; good ones are checked once.

    Every room that needs TorchRec or FBGEMM calls it before anything of the room is imported: a
    mismatched fbgemm ends in an undefined symbol, and a mismatched torchrec in other numbers.
    """
    require_supported_versions()
    require_upstream_names()


def require_upstream_names(versions: FoundVersions | None = None) -> None:
    """Raise a `VersionError` that lists the names that untried versions lack, if any.

    Call it before the first part of the library is loaded that imports torch. It returns at once
    if all versions are tried; otherwise it imports torch, torchrec and fbgemm.
    """
    versions = find_versions() if versions is None else versions
    untried = untried_versions(versions)
    if not untried:
        return
    missing = _missing_here()
    if missing:
        raise VersionError(
            f"{', '.join(f'{name} {version}' for name, version in untried.items())}: torchrec_2dsp"
            " is not tried with that, and needs what is missing there:\n"
            + "\n".join(f"  {name}" for name in missing)
            + f"\nTried are: {tried_text()}."
        )


def check_upstream_names() -> CheckResult:
    """Look up every name that the package imports from torchrec and fbgemm."""
    missing = _missing_here()
    return CheckResult(
        name=_CHECK_NAME,
        status=Status.FAILED if missing else Status.OK,
        found=f"missing: {'; '.join(missing)}" if missing else f"all {len(needed_names())}",
        expected="all that are imported",
        remedy=nearest_set(find_versions()).install_torchrec() if missing else (),
    )


@cache
def _missing_here() -> tuple[str, ...]:
    return tuple(missing_names(needed_names()))


def _is_module(name: str) -> bool:
    try:
        import_module(name)
    except ImportError:
        return False
    return True
