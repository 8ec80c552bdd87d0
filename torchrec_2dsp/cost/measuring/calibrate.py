"""Measure a network and its machines, and fit the constants behind the times."""

import os
import platform
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.alarm import agree
from torchrec_2dsp.cost.calibration import Calibration, CollectiveTimes, Hardware, Kernels
from torchrec_2dsp.cost.measuring.collectives import (
    group_device,
    measure_collectives,
    repeated_seconds,
    slowest_rank_seconds,
)
from torchrec_2dsp.cost.measuring.fit import fit_collective, fit_kernel
from torchrec_2dsp.cost.measuring.kernels import measure_kernels
from torchrec_2dsp.errors import CalibrationError

_TURNS = 4
_COMPUTED_S = 0.01
_SIZES = {"cpu": 384, "cuda": 4096}
_REPEATS = 9
_SMALLEST = 2**14
"""The smallest message's elements per rank."""
_LARGEST = 2**26
"""Elements for all ranks together."""


class Beside:
    """Times collectives beside computing; the same on all ranks.

    Collectives:
        All-to-alls, in all that it does, and those of `slowest_rank_seconds`.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._world = world
        self._device = group_device(world)
        size = _SIZES[self._device.type]
        self._matrix = torch.rand(size, size, device=self._device)
        self._product_s = statistics.median(repeated_seconds(self._multiply, world))

    def turn_s(self) -> float:
        """Return the extra seconds of a short all-to-all between two computations."""
        compute, exchange = self._computing(_COMPUTED_S), self._exchanging(1)
        alone = self._seconds(compute) + self._seconds(exchange)
        return max(0.0, self._seconds(compute, exchange) - alone)

    def hidden_share(self) -> float:
        """Return a long all-to-all's share that computing hides."""
        num_elements = _SMALLEST
        exchange = self._exchanging(num_elements)
        most = _LARGEST // self._world.size()
        while self._seconds(exchange) < _COMPUTED_S and 2 * num_elements <= most:
            num_elements *= 2
            exchange = self._exchanging(num_elements)
        exchange_s = self._seconds(exchange)
        compute = self._computing(exchange_s)
        compute_s = self._seconds(compute)
        both_s = self._seconds(self._exchanging(num_elements, compute))
        saved_s = (exchange_s + compute_s - both_s) / min(exchange_s, compute_s)
        return min(max(saved_s, 0.0), 1.0)

    def _multiply(self) -> None:
        torch.mm(self._matrix, self._matrix)

    def _computing(self, seconds: float) -> Callable[[], None]:
        num_products = max(1, round(seconds / self._product_s))

        def compute() -> None:
            for _ in range(num_products):
                self._multiply()

        return compute

    def _exchanging(
        self, num_elements: int, meanwhile: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        sent = torch.ones(self._world.size() * num_elements, device=self._device)
        received = torch.empty_like(sent)

        def exchange() -> None:
            work = dist.all_to_all_single(received, sent, group=self._world, async_op=True)
            assert work is not None
            meanwhile()
            work.wait()

        return exchange

    def _seconds(self, *parts: Callable[[], None]) -> float:
        def turns() -> None:
            for _ in range(_TURNS):
                for part in parts:
                    part()

        return statistics.median(slowest_rank_seconds(turns, self._world, _REPEATS)) / _TURNS


def calibrate(
    world: dist.ProcessGroup,
    *,
    local_world_size: int,
    name: str,
    progress: Callable[[str], object] = lambda what: None,
) -> Calibration:
    """Measure on all ranks of the world; the result is equal on all of them.

    ``world`` has at least two ranks, host by host, ``name`` is the hardware's, and ``progress`` is
    called with what is being measured.

    Raises `CalibrationError` where one rank is no network, hosts have different numbers of ranks,
    or no constants explain the times.
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
