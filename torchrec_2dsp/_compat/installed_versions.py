"""Which versions of torch, torchrec and fbgemm this machine has, from package metadata alone.

Nothing is imported: a heavy import of a mismatched fbgemm ends in an undefined symbol.
"""

import ctypes
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class FoundVersions:
    """The versions that this machine has; `None` is "not installed"."""

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
        """The version of each installed fbgemm distribution."""
        versions = {"fbgemm-gpu": self.fbgemm_gpu, "fbgemm-gpu-cpu": self.fbgemm_gpu_cpu}
        return {name: version for name, version in versions.items() if version is not None}

    @property
    def fbgemm(self) -> str | None:
        """The version of fbgemm, whichever build of it is installed."""
        return next(iter(self.fbgemm_builds.values()), None)


def is_cpu_build(torch_version: str | None) -> bool:
    """Whether this torch says that it was built without CUDA."""
    return torch_version is not None and torch_version.partition("+")[2].startswith("cpu")


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
        version = re.search(r"^__version__ = '([^']+)'", source.read_text(), re.MULTILINE)
        if version is not None:
            return version.group(1)
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
