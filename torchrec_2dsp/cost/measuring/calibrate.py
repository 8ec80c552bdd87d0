"""Measure a network and its machines, and fit the constants behind the times."""

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.cost.calibration import (
    Calibration,
    CollectiveTimes,
    Hardware,
    Kernels,
    processor_name,
)
from torchrec_2dsp.cost.collectives import CollectiveCost
from torchrec_2dsp.cost.measuring.clock import CAREFUL, Clock, Sampling
from torchrec_2dsp.cost.measuring.collectives import measure_collectives
from torchrec_2dsp.cost.measuring.fit import fit_collective, fit_kernel
from torchrec_2dsp.cost.measuring.kernels import measure_kernels
from torchrec_2dsp.errors import CalibrationError

_TURNS = 4
_COMPUTED_S = 0.01
_SIZES = {"cpu": 384, "cuda": 4096}
_SMALLEST = 2**14
"""The smallest exchange's elements per rank."""
_NETWORK_SHARE, _KERNELS_SHARE = 0.5, 0.85
"""The shares of the time after which larger messages, and then more kernels, are left out."""
_NO_NETWORK = dict.fromkeys(
    ("all_to_all", "all_reduce", "all_gather", "reduce_scatter"),
    CollectiveCost(base_s=0.0, per_peer_s=0.0),
)
"""A single rank waits for nobody."""


class Beside:
    """Times collectives that overlap with computation; results are the same on all ranks.

    Collectives:
        All-to-alls in each method, and the clock's.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._world, self._device = clock.world, clock.device
        size = _SIZES[self._device.type]
        self._matrix = torch.rand(size, size, device=self._device)
        self._product_s = statistics.median(clock.repeated_seconds(self._multiply))

    def turn_s(self) -> float:
        """Return the extra seconds of a short all-to-all between two computations."""
        compute, exchange = self._computing(_COMPUTED_S), self._exchanging(1)

        def both() -> None:
            compute()
            exchange()

        rounds = self._rounds(compute, exchange, both)
        return max(0.0, statistics.median(both_s - sum(alone) for *alone, both_s in rounds))

    def hidden_share(self) -> float:
        """Return the share of a long all-to-all that computing hides."""
        num_elements = _SMALLEST
        exchange = self._exchanging(num_elements)
        most = self._clock.sampling.most_elements // self._world.size()
        while self._seconds(exchange) < _COMPUTED_S and 2 * num_elements <= most:
            num_elements *= 2
            exchange = self._exchanging(num_elements)
        compute = self._computing(self._seconds(exchange))
        rounds = self._rounds(exchange, compute, self._exchanging(num_elements, compute))
        saved = statistics.median((sum(alone) - both_s) / min(alone) for *alone, both_s in rounds)
        return min(max(saved, 0.0), 1.0)

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

    def _seconds(self, run: Callable[[], None]) -> float:
        return statistics.median(seconds for (seconds,) in self._rounds(run))

    def _rounds(self, *runs: Callable[[], None]) -> list[list[float]]:
        """Return each run's seconds, in rounds, so that a temporary slowdown affects all runs."""

        def seconds(run: Callable[[], None]) -> float:
            def turns() -> None:
                for _ in range(_TURNS):
                    run()

            return self._clock.seconds(turns, 1)[0] / _TURNS

        repeats = 1 if self._clock.is_late(1.0) else self._clock.sampling.beside_repeats
        return [[seconds(run) for run in runs] for _ in range(repeats)]


def calibrate(
    world: dist.ProcessGroup,
    *,
    local_world_size: int,
    name: str,
    device: torch.device | None = None,
    sampling: Sampling = CAREFUL,
    progress: Callable[[str], object] = lambda what: None,
) -> Calibration:
    """Measure on all ranks of the world; the result is equal on all of them.

    ``world`` is ordered host by host; a single rank has no network, and measures its own work.

    Tables are on ``device``, by default the device that the backend serves. ``progress`` is called
    with a description of each measurement.

    Raises:
        CalibrationError: on all ranks, if hosts have different numbers of ranks, or a
            measurement fails on a rank.
    """
    with agreeing(world) as agreed:
        check_world(world, local_world_size)
        agreed["local_world_size"] = str(local_world_size)
    clock = Clock(world, sampling, device)
    collectives = {
        collective: fit_collective(samples)
        for collective, samples in measure_collectives(
            clock, local_world_size=local_world_size, share=_NETWORK_SHARE, progress=progress
        ).items()
    }
    kernels = {
        kernel: fit_kernel(samples)
        for kernel, samples in measure_kernels(
            clock, share=_KERNELS_SHARE, progress=progress
        ).items()
    }
    turn_s, hidden_share = 0.0, 1.0
    if world.size() > 1:
        progress("collectives and computing together")
        beside = Beside(clock)
        turn_s, hidden_share = beside.turn_s(), beside.hidden_share()
    return Calibration(
        hardware=_hardware(world, clock.device, name, local_world_size),
        collectives=CollectiveTimes(**(collectives or _NO_NETWORK)),
        kernels=Kernels.model_validate(kernels),
        turn_s=turn_s,
        hidden_share=hidden_share,
    )


def check_world(world: dist.ProcessGroup, local_world_size: int) -> None:
    """Raise `CalibrationError` if hosts can't have ``local_world_size`` ranks each."""
    if local_world_size < 1 or world.size() % local_world_size:
        raise CalibrationError(
            f"local_world_size={local_world_size} does not divide world_size={world.size()}; "
            "start as many ranks on every host"
        )


def _hardware(
    world: dist.ProcessGroup, device: torch.device, name: str, local_world_size: int
) -> Hardware:
    """Describe the machines, by all ranks' processors and the smallest memory of any rank.

    Collectives:
        An all-gather of objects.
    """
    num_sharing = 1 if device.type == "cuda" else local_world_size
    # TorchRec's kernels pin what they read from host memory; half of it stays the system's.
    in_host = memory_bytes(torch.device("cpu")) // 2 // local_world_size
    own = (
        processor_name(device),
        memory_bytes(device) // num_sharing,
        in_host if device.type == "cuda" else 0,
    )
    gathered: list[tuple[str, int, int]] = [own] * world.size()
    dist.all_gather_object(gathered, own, group=world)
    return Hardware(
        name=name,
        device="cpu" if device.type == "cpu" else "cuda",
        num_hosts=world.size() // local_world_size,
        ranks_per_host=local_world_size,
        processor=" and ".join(dict.fromkeys(text for text, *_ in gathered)),
        measured=datetime.now(UTC).strftime("%Y-%m-%d"),
        memory_bytes=min(num_bytes for _, num_bytes, _ in gathered),
        host_memory_bytes=min(num_bytes for *_, num_bytes in gathered),
    )


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a rank's GPU, or the memory that all ranks of its host share."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *memory_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def memory_limits(own_groups: Path, root: Path) -> Iterator[int]:
    """Yield the limits in bytes that a container, or a job scheduler, sets on this process.

    ``own_groups`` is the kernel's list of the process's control groups, of version 1 or 2.
    """
    with suppress(OSError):
        for line in own_groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                name = "memory.limit_in_bytes" if controllers else "memory.max"
                group = Path(path.lstrip("/"))
                # In a container the root may be the group itself; outer groups' limits count, too.
                for folder in (group, *group.parents):
                    # A group without a limit says "max", or doesn't exist.
                    with suppress(OSError, ValueError):
                        yield int((root / controllers / folder / name).read_text())
