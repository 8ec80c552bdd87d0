"""Read facts from the operating system: load, bytes on interfaces, memory, versions."""

import ctypes
import gc
import os
import platform
import resource
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import torch.distributed as dist

from torchrec_2dsp.programs.bench.config import BenchConfig
from torchrec_2dsp.programs.bench.process import Place
from torchrec_2dsp.programs.bench.results import BenchSetting
from torchrec_2dsp.programs.launch import recorded_versions
from torchrec_2dsp.programs.link_speeds import LinkSpeeds

_PROC = Path("/proc")


@dataclass(frozen=True)
class MachineLoad:
    """Processor seconds so far."""

    machine: str
    """Equal for ranks on one machine, also in containers and namespaces."""

    busy_s: float
    """Processor seconds for all processes here, and those that a virtual machine's host took."""

    own_s: float


def load(pids: Sequence[int]) -> MachineLoad:
    """Read the load now; zeros if the system doesn't report it. ``pids`` are our own processes."""
    try:
        ticks = [int(ticks) for ticks in (_PROC / "stat").read_text().splitlines()[0].split()[1:]]
        own = sum(_process_ticks(pid) for pid in pids)
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return MachineLoad(platform.node(), 0.0, 0.0)
    per_s = os.sysconf("SC_CLK_TCK")
    user, nice, system, stolen = (*ticks[:3], ticks[7])
    return MachineLoad(boot, (user + nice + system + stolen) / per_s, own / per_s)


def foreign_load(
    before: Sequence[MachineLoad], after: Sequence[MachineLoad], seconds: float
) -> float:
    """Return the number of cores that others kept busy, on the machine with the most.

    The loads are every rank's, ``seconds`` apart.
    """
    loads = {}
    for machine in {load.machine for load in before}:
        here = [pair for pair in zip(before, after, strict=True) if pair[0].machine == machine]
        busy = max(end.busy_s - start.busy_s for start, end in here)
        own = sum(end.own_s - start.own_s for start, end in here)
        loads[machine] = max(0.0, busy - own) / seconds
    return max(loads.values())


def foreign_load_now(world: dist.ProcessGroup, seconds: float = 0.5) -> float:
    """Return the number of cores that other programs keep busy while the ranks sleep.

    Collectives:
        Two all-gathers of objects.
    """
    dist.barrier(world)
    loads = []
    for pause in (0.0, seconds):
        time.sleep(pause)
        loads.append([MachineLoad("", 0.0, 0.0)] * world.size())
        dist.all_gather_object(loads[-1], load([os.getpid()]), group=world)
    before, after = loads
    return foreign_load(before, after, seconds)


def _process_ticks(pid: int) -> int:
    # The name, which may contain any character, ends with the last parenthesis.
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def sent_bytes() -> dict[str, int]:
    """Read the bytes that this network namespace has sent so far, by interface."""
    counters = {}
    for line in (_PROC / "net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        counters[name.strip()] = int(numbers.split()[8])
    return counters


def resident_bytes() -> int:
    """Read this process's memory."""
    num_pages = int((_PROC / "self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """Read this process's peak memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def give_back_memory() -> None:
    """Return freed memory to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in glibc
    if trim is not None:
        trim(0)


def keep_libraries_in_memory() -> bool:
    """Pin loaded libraries' code for all processes; return whether that worked.

    Some kernels drop pages that weren't used for a while, and a contestant that has waited would
    read its code from disk. Needs the permission to lock memory.
    """
    try:
        mappings = (_PROC / "self/maps").read_text().splitlines()
        lock = ctypes.CDLL(None, use_errno=True).mlock
    except (OSError, AttributeError):
        return False
    lock.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
    locked = []
    for mapping in mappings:
        addresses, rights, _, _, _, *path = mapping.split(maxsplit=5)
        # Writable pages are private, and the kernel has nowhere else to keep them.
        if path and ".so" in path[0] and rights.startswith("r-"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            locked.append(lock(start, end - start) == 0)
    return bool(locked) and all(locked)


def describe_machine() -> dict[str, str]:
    """Return processor, cores, memory and kernel."""
    lines = (_PROC / "cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "memory": f"{pages / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
    }


_NUM_ROWS = 100_000
_DIM = 64
_NUM_LOOKUPS = 20_000
_NUM_PASSES = 20


class ComputeProbe:
    """Looks up rows, adds them and sorts their ids in one thread, as training does.

    The speed of a virtual machine changes with its neighbours, and a laptop's with its temperature,
    without any load that the operating system sees. Only time on a core counts: waiting for one is
    somebody's load.
    """

    def __init__(self) -> None:
        draws = np.random.default_rng(0)
        self._rows = draws.random((_NUM_ROWS, _DIM), dtype=np.float32)
        self._ids = draws.integers(_NUM_ROWS, size=_NUM_LOOKUPS)
        self._found = np.empty((_NUM_LOOKUPS, _DIM), dtype=np.float32)

    def run(self) -> float:
        """Return a pass's mean processor time, after one that warms the caches."""
        self._pass()
        start = time.thread_time()
        for _ in range(_NUM_PASSES):
            self._pass()
        return (time.thread_time() - start) / _NUM_PASSES

    def _pass(self) -> None:
        np.sort(self._ids)
        np.take(self._rows, self._ids, axis=0, out=self._found, mode="clip")
        self._found *= self._found
        self._found.sum(axis=1)


def describe_setting(
    config: BenchConfig, place: Place, speeds: LinkSpeeds, started: datetime
) -> BenchSetting:
    """Describe a benchmark's place and circumstances."""
    return BenchSetting(
        title=config.title,
        when=started.strftime("%Y-%m-%d %H:%M"),
        command=_command(place),
        hosts=place.world_size // place.local_world_size,
        ranks_per_host=place.local_world_size,
        network=config.network.description or "network as it is",
        cluster=os.environ.get("EMULATED_CLUSTER", ""),
        machine=describe_machine(),
        versions=recorded_versions(),
        link_speeds={
            **{f"in a host, {name}": speed for name, speed in speeds.in_host.items()},
            **{f"to other hosts, {name}": speed for name, speed in speeds.across_hosts.items()},
        },
        config=config.model_dump(mode="json"),
    )


def _command(place: Place) -> str:
    hosts = place.world_size // place.local_world_size
    launcher = os.environ.get(
        "EMULATED_CLUSTER_LAUNCHER",
        f"torchrun --nnodes {hosts} --nproc-per-node {place.local_world_size}",
    )
    return f"{launcher} -m torchrec_2dsp {shlex.join(sys.argv[1:])}"
