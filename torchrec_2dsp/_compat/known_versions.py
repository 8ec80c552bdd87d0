"""The versions of torch, torchrec and fbgemm that are tried together, and how to install them.

fbgemm is compiled against one series of torch, and torchrec is written against one of fbgemm; no
package metadata says so. `TRIED` does, and nothing else.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

PACKAGES = ("torch", "torchrec", "fbgemm")
"""The packages of a `VersionSet`; torch first, because the others are made for it."""

TORCHMETRICS = "1.0.3"
"""The version of torchmetrics that torchrec pins, in all tried sets."""


@dataclass(frozen=True, kw_only=True)
class VersionSet:
    """Versions that belong together: the locks install them, and the tests run with them."""

    torch: str
    torchrec: str
    """The newest release that was tried."""
    fbgemm: str
    also_tried: tuple[str, ...] = ()
    """Other releases of torchrec that were tried with the same torch and fbgemm."""
    tensordict: str = "0.15.3"
    pyre_extensions: str = "0.0.32"

    def version(self, package: str) -> str:
        """The set's version of ``package``, one of `PACKAGES`."""
        return {"torch": self.torch, "torchrec": self.torchrec, "fbgemm": self.fbgemm}[package]

    def series(self, package: str) -> str:
        """The versions of ``package`` that belong to the set, as people write them.

        >>> TRIED[0].series("torch")
        '2.13.x'
        """
        return self.version(package).rpartition(".")[0] + ".x"

    def has(self, package: str, version: str | None) -> bool:
        """Whether ``version`` has the set's major and minor number.

        Patch releases of a series are interchangeable. Nightly and local parts don't matter either.

        >>> TRIED[0].has("torch", "2.13.1.dev20261101+cu130")
        True
        >>> TRIED[0].has("torch", "2.12.0")
        False
        """
        numbers = re.match(r"(\d+)\.(\d+)(?!\d)", version or "")
        return (
            numbers is not None and list(numbers.groups()) == self.version(package).split(".")[:2]
        )

    def install_torch(self) -> tuple[str, ...]:
        """The commands that install torch."""
        return (f'pip install "torch=={self.torch}"',)

    def install_torchrec(self) -> tuple[str, ...]:
        """The commands that install torchrec.

        torchrec is installed without its dependencies, because they include fbgemm's CUDA package;
        the others are named.
        """
        return (
            f'pip install "torchmetrics=={TORCHMETRICS}" "tensordict=={self.tensordict}"'
            f' "pyre-extensions=={self.pyre_extensions}" tqdm',
            f'pip install --no-deps "torchrec=={self.torchrec}"',
        )

    def install_fbgemm(self, distribution: str) -> tuple[str, ...]:
        """The commands that install ``distribution``, one of fbgemm's two builds."""
        return (f'pip install --no-deps "{distribution}=={self.fbgemm}"',)

    def __str__(self) -> str:
        releases = ", ".join(sorted((*self.also_tried, self.torchrec)))
        return f"torch {self.torch} with torchrec {releases} and fbgemm {self.fbgemm}"


TRIED: tuple[VersionSet, ...] = (
    VersionSet(torch="2.13.0", torchrec="1.8.0", fbgemm="1.8.0"),
    VersionSet(torch="2.14.1", torchrec="1.9.2", fbgemm="1.9.0", also_tried=("1.9.0", "1.9.1")),
)
"""All sets that are tried. Users who have nothing installed are told to install the first."""


def tried_set(package: str, version: str | None) -> VersionSet | None:
    """The tried set that this version of a package belongs to; `None` for an untried version."""
    return next((tried for tried in TRIED if tried.has(package, version)), None)


def tried_series(package: str) -> str:
    """All versions of ``package`` that are tried, as people write them.

    >>> tried_series("torchrec")
    '1.8.x or 1.9.x'
    """
    return " or ".join(tried.series(package) for tried in TRIED)


def tried_text() -> str:
    """All sets that are tried, as a text of one line."""
    return "; ".join(str(tried) for tried in TRIED)


def nearest_set(versions: Mapping[str, str | None]) -> VersionSet:
    """The tried set that needs the fewest changes: most installed versions belong to it.

    Of sets that need equally many, the one with the installed torch is taken, because torch is the
    largest to install again. If no installed version is tried, it is the first set.

    Args:
        versions: the version of each of `PACKAGES`, `None` for what isn't installed.

    >>> nearest_set({"torch": "2.14.1", "torchrec": "1.8.0", "fbgemm": "1.9.0"}).torchrec
    '1.9.2'
    """

    def fitting(tried: VersionSet) -> list[bool]:
        return [tried.has(package, versions[package]) for package in PACKAGES]

    return max(TRIED, key=lambda tried: (sum(fitting(tried)), *fitting(tried)))
