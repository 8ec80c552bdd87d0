"""`calibrate`: measure a network and its machines, and find the constants behind the times."""

import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.alarm import agree
from torchrec_2dsp.cost.calibration import Calibration, CollectiveTimes, Hardware
from torchrec_2dsp.cost.kernels import Kernels
from torchrec_2dsp.errors import CalibrationError
from torchrec_2dsp.programs.calibrate.beside import Beside
from torchrec_2dsp.programs.calibrate.collectives import measure_collectives
from torchrec_2dsp.programs.calibrate.fit import fit_collective, fit_kernel
from torchrec_2dsp.programs.calibrate.kernels import measure_kernels
from torchrec_2dsp.programs.calibrate.timing import group_device


def calibrate(
    world: dist.ProcessGroup,
    *,
    local_world_size: int,
    name: str,
    progress: Callable[[str], object] = lambda what: None,
) -> Calibration:
    """Measure on all ranks of the world; equal on all of them.

    Args:
        world: all ranks, host by host, at least two.
        local_world_size: ranks per host.
        name: what people call this hardware.
        progress: called with what is being measured.

    Raises:
        CalibrationError: one rank is no network, hosts have different numbers of ranks, or no
            constants explain what was measured.

    CollectiveTimes:
        Those that are measured, process groups for them, and one all-gather of objects.
    """
    world_size = dist.get_world_size(world)
    agree(
        world,
        error=_world_error(world_size, local_world_size),
        facts={"local_world_size": str(local_world_size)},
    )
    collectives = {
        collective: fit_collective(collective, samples)
        for collective, samples in measure_collectives(
            world, local_world_size=local_world_size, progress=progress
        ).items()
    }
    kernels = {
        kernel: fit_kernel(kernel, samples)
        for kernel, samples in measure_kernels(world, progress=progress).items()
    }
    progress("collectives and computing together")
    beside = Beside(world)
    turn_s, hidden_share = beside.turn_s(), beside.hidden_share()
    device = group_device(world)
    return Calibration(
        hardware=Hardware(
            name=name,
            device="cpu" if device.type == "cpu" else "cuda",
            num_hosts=world_size // local_world_size,
            ranks_per_host=local_world_size,
            processor=_processor(device),
            measured=datetime.now(UTC).strftime("%Y-%m-%d"),
            memory_bytes=_memory_bytes(device, local_world_size),
        ),
        collectives=CollectiveTimes(**collectives),
        kernels=Kernels.model_validate(kernels),
        turn_s=turn_s,
        hidden_share=hidden_share,
    )


def _world_error(world_size: int, local_world_size: int) -> CalibrationError | None:
    if world_size < 2:
        return CalibrationError(
            "one rank has no network to measure; start at least two, best on two hosts"
        )
    if local_world_size < 1 or world_size % local_world_size:
        return CalibrationError(
            f"local_world_size={local_world_size} does not divide world_size={world_size}; start "
            "as many ranks on every host"
        )
    return None


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def _memory_bytes(device: torch.device, local_world_size: int) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_world_size
