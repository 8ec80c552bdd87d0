"""`environment`: the versions that a run was trained with."""

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec-2dsp", "numpy")


def environment() -> dict[str, str]:
    """The versions of Python and of the packages that matter, and the kind of the processor.

    Example:
        >>> from torchrec_2dsp.programs.train.environment import environment
        >>> "torch" in environment()
        True
    """
    versions = {"python": platform.python_version(), "processor": platform.machine()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue  # Of the two packages of FBGEMM only one is installed.
    return versions
