"""Machines with torch, torchrec and fbgemm, as the version checks see them."""

from dataclasses import replace

from torchrec_2dsp._compat.versions import TORCHMETRICS, TRIED, FoundVersions, VersionSet

OLD, NEW = TRIED
UNKNOWN = "99.1.0"
"""A version of no set."""


def on_cpu(tried: VersionSet) -> FoundVersions:
    """Return a machine without devices and with a tried set."""
    return FoundVersions(
        torch=f"{tried.torch}+cpu",
        torchrec=tried.torchrec,
        fbgemm_gpu=None,
        fbgemm_gpu_cpu=tried.fbgemm,
        torchmetrics=TORCHMETRICS,
        has_nvidia_driver=False,
    )


def on_cuda(tried: VersionSet) -> FoundVersions:
    """Return a machine with devices and a tried set."""
    return replace(
        on_cpu(tried),
        torch=f"{tried.torch}+cu130",
        fbgemm_gpu=tried.fbgemm,
        fbgemm_gpu_cpu=None,
        has_nvidia_driver=True,
    )
