"""The `torchrec-2dsp doctor` program: checks an installation, and suggests fixes."""

import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module

from torchrec_2dsp._compat.versions import (
    CheckResult,
    FoundVersions,
    Status,
    check_python,
    check_versions,
    find_versions,
    nearest_set,
)

_GROUP_TIMEOUT = timedelta(seconds=20)


def run_health_checks(
    versions: FoundVersions | None = None, *, run: bool = True
) -> tuple[CheckResult, ...]:
    """Run the checks, the cheap ones first.

    If versions don't match, checks that need them are skipped: they could only fail in ways that
    hide the cause, down to an interpreter crash.

    Args:
        versions: the versions to judge; by default the installed ones.
        run: also load torch, fbgemm and TorchRec, compute with them and open a process group.
    """
    versions = find_versions() if versions is None else versions
    checked = check_versions(versions)
    install_torchrec = nearest_set(versions).install_torchrec()
    python = check_python((sys.version_info.major, sys.version_info.minor))
    launch = check_launch_environment(os.environ)
    if not run:
        return (python, *checked, launch)
    runtime: tuple[tuple[str, Callable[[], CheckResult], tuple[str, ...]], ...] = (
        ("fbgemm operators", check_fbgemm_operators, _FBGEMM_REMEDY),
        ("torchrec import", check_torchrec, install_torchrec),
        ("gloo", check_gloo, _GLOO_REMEDY),
        ("cuda", check_cuda, _CUDA_REMEDY),
    )
    if any(check.status is Status.FAILED for check in checked):
        skipped = (
            CheckResult(name=name, status=Status.SKIPPED, found="not run: fix the versions first")
            for name, _, _ in runtime
        )
        return (python, *checked, *skipped, launch)
    ran = (run_guarded(name, check, remedy) for name, check, remedy in runtime)
    return (python, *checked, *ran, launch)


def run_guarded(
    name: str, check: Callable[[], CheckResult], remedy: tuple[str, ...]
) -> CheckResult:
    """Run one check; any exception is a failure."""
    try:
        return check()
    except Exception as error:
        text = str(error).strip() or "no message"
        return CheckResult(
            name=name,
            status=Status.FAILED,
            found=f"{type(error).__name__}: {text.splitlines()[0]}",
            remedy=remedy,
        )


def _judged(
    name: str, is_good: bool, result: str, expected: str, remedy: tuple[str, ...]
) -> CheckResult:
    return CheckResult(
        name=name,
        status=Status.OK if is_good else Status.FAILED,
        found=result,
        expected=expected,
        remedy=() if is_good else remedy,
    )


_FBGEMM_REMEDY = (
    "Reinstall fbgemm beside its torch: remove .venv and run `make test`, or repeat the pip"
    " commands of the Makefile in a new environment.",
)


def check_fbgemm_operators() -> CheckResult:
    """Look up rows in a tiny table, train it one step on the CPU and compare the numbers."""
    import torch

    from torchrec_2dsp._compat.fbgemm import ComputeDevice, EmbeddingLocation, EmbOptimType, Tbe

    table = Tbe(
        [(3, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=0.5,
    )
    weights = table.split_embedding_weights()[0]
    with torch.no_grad():
        weights.fill_(1.0)
    pooled = table(indices=torch.tensor([0, 1, 1]), offsets=torch.tensor([0, 1, 3]))
    pooled.sum().backward()
    # One sample takes row 0 once, the other takes row 1 twice; row 2 is untouched.
    computed = [pooled[:, 0].tolist(), table.split_embedding_weights()[0][:, 0].tolist()]
    expected = [[1.0, 2.0], [0.5, 0.0, 1.0]]
    good = computed == expected
    result = "forward and backward on the CPU" if good else f"computed {computed}"
    needed = "exact result" if good else f"{expected}"
    return _judged("fbgemm operators", good, result, needed, _FBGEMM_REMEDY)


def check_torchrec() -> CheckResult:
    """Import TorchRec with all its dependencies, and this library with all its rooms."""
    import torchrec.distributed

    library = import_module("torchrec_2dsp")
    for name in library.__all__:
        getattr(library, name)
    result = f"{torchrec.distributed.__name__} and {library.__name__} import"
    return _judged("torchrec import", True, result, "imports", ())


_GLOO_REMEDY = (
    "gloo could not bind to this host's network name. For ranks on this host alone:"
    " export GLOO_SOCKET_IFNAME=lo",
)


def check_gloo() -> CheckResult:
    """All-reduce in a single-rank process group.

    Collectives:
        all-reduce: gloo, one rank, float32, 4 bytes.
    """
    import torch
    from torch import distributed as dist

    if not dist.is_gloo_available():
        remedy = "Install a torch build that has gloo; those of the default index do."
        return _judged("gloo", False, "not built into this torch", "available", (remedy,))
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=_GROUP_TIMEOUT
    )
    try:
        value = torch.tensor([3.0])
        dist.all_reduce(value)
    finally:
        dist.destroy_process_group()
    good = value.item() == 3.0
    result = "all-reduce in a group of one" if good else f"all-reduce of 3.0 gave {value.item()}"
    return _judged("gloo", good, result, "available", _GLOO_REMEDY)


_CUDA_REMEDY = ("Check the driver with nvidia-smi; CUDA_VISIBLE_DEVICES='' runs without devices.",)


def check_cuda() -> CheckResult:
    """List the CUDA devices; if there are any, require NCCL too."""
    import torch
    from torch import distributed as dist

    if not torch.cuda.is_available():
        build = f"torch built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU torch"
        return _judged("cuda", True, f"no device ({build}): CPU and gloo are used", "optional", ())
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    good = dist.is_nccl_available()
    nccl = "available" if good else "missing"
    result = f"{len(names)} x {', '.join(sorted(set(names)))}, nccl {nccl}"
    remedy = "Install a CUDA build of torch that has NCCL."
    return _judged("cuda", good, result, "nccl beside the devices", (remedy,))


def check_launch_environment(environ: Mapping[str, str]) -> CheckResult:
    """Check LOCAL_WORLD_SIZE, from which TorchRec derives the ranks per host.

    Without it TorchRec assumes 8 ranks per host if 8 divides the world size, and one host
    otherwise. If LOCAL_WORLD_SIZE doesn't divide the world size, TorchRec ignores it.
    """
    local, world = environ.get("LOCAL_WORLD_SIZE"), environ.get("WORLD_SIZE")
    name, expected = "LOCAL_WORLD_SIZE", "ranks per host"
    if local is None:
        text = "not set; torchrun sets it, without it TorchRec takes 8 ranks per host"
        return _judged(name, True, text, expected, ())
    fits = local.isdecimal() and int(local) > 0
    if fits and world is not None:
        fits = world.isdecimal() and int(world) % int(local) == 0
    of_world = "" if world is None else f" of WORLD_SIZE={world}"
    remedy = "Start with torchrun, or export LOCAL_WORLD_SIZE as a divisor of WORLD_SIZE."
    return _judged(name, fits, f"{local}{of_world}", expected, (remedy,))
