"""The running ranks' calibration: kept in the user's cache folder, or measured in seconds.

```text
facts of each rank --gather--> fingerprint --rank 0--> file? --broadcast--> Calibration
                                                        | no
                                                        v
                                            all ranks measure, rank 0 writes
```
"""

import hashlib
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from torchrec_2dsp._compat.versions import find_versions
from torchrec_2dsp._version import __version__
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.cost.calibration import CALIBRATION_FORMAT, Calibration, processor_name
from torchrec_2dsp.cost.measuring.calibrate import calibrate, check_world, memory_bytes
from torchrec_2dsp.cost.measuring.clock import QUICK
from torchrec_2dsp.cost.measuring.fit import unexplained
from torchrec_2dsp.errors import CalibrationError

logger = logging.getLogger(__name__)

T = TypeVar("T")


def calibration_of_world(
    world: dist.ProcessGroup, *, local_world_size: int, device: torch.device
) -> Calibration:
    """Return these ranks' calibration, the same on all: a kept one, or one measured now.

    Measuring takes 20 s at most, with a line on rank 0's stderr, and the result is kept under a
    fingerprint of all ranks' machines. A damaged file is measured again, and an unwritable folder
    keeps nothing, both with a warning. Random generators stay unchanged.

    Args:
        world: all ranks, host by host; a single rank has no network, and measures its own work.
        local_world_size: ranks per host.
        device: the tables' device.

    Raises:
        CalibrationError: on all ranks, if measuring fails on one of them.

    Collectives:
        Three exchanges of objects. Without a kept calibration also the measured ones, another
        exchange of objects, and the creation of process groups, which are destroyed.
    """
    with agreeing(world) as agreed:
        check_world(world, local_world_size)
        agreed["local_world_size"] = str(local_world_size)
        facts = facts_of_rank(device, dist.get_backend(world))
    gathered = [facts] * world.size()
    dist.all_gather_object(gathered, facts, group=world)
    name = (
        f"{world.size() // local_world_size}x{local_world_size}_{device.type}_"
        f"{fingerprint(gathered, local_world_size)}"
    )
    is_first = dist.get_rank(world) == 0
    path = _path(name) if is_first else None
    with agreeing(world):
        of_file = None if path is None else _read(path)
    of_file = _from_first(world, of_file)
    if of_file is not None:
        return of_file
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _progress(path, is_shown=is_first) as progress:
        measured = calibrate(
            world,
            local_world_size=local_world_size,
            name=name,
            device=device,
            sampling=QUICK,
            progress=progress,
        )
    # Processors may differ in the last digits of a fit.
    measured = _from_first(world, measured)
    if path is not None:
        _keep(measured, path)
    return measured


def facts_of_rank(device: torch.device, backend: str) -> dict[str, str]:
    """Return the facts that times on a rank depend on, apart from its neighbours."""
    versions = find_versions()
    return {
        "processor": processor_name(device),
        # Rounded to three digits: a kernel reserves some megabytes more or less for itself.
        "memory": f"{memory_bytes(device):.2e}",
        "threads": str(torch.get_num_threads()),
        "device": device.type,
        "backend": backend,
        "interface": _interface(backend),
        "torch": str(torch.__version__),
        "fbgemm": str(versions.fbgemm),
        "torchrec_2dsp": __version__,
        "format": str(CALIBRATION_FORMAT),
        "sampling": str(QUICK),
    }


def fingerprint(facts: Sequence[Mapping[str, str]], local_world_size: int) -> str:
    """Return a short text that differs if any rank's facts or the number of ranks differ.

    Example:
        It doesn't matter which rank has which of two processors.

        >>> from torchrec_2dsp.cost.measuring.cache import fingerprint
        >>> old, new = {"processor": "old"}, {"processor": "new"}
        >>> fingerprint([old, new], 1) == fingerprint([new, old], 1)
        True
        >>> fingerprint([old, new], 1) == fingerprint([new, new], 1)
        False
    """
    num_alike = Counter(json.dumps(dict(of_rank), sort_keys=True) for of_rank in facts)
    text = json.dumps([local_world_size, sorted(num_alike.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _interface(backend: str) -> str:
    """Describe the network interface that the backend uses, as far as Linux tells."""
    prefix = "NCCL" if "nccl" in backend else "GLOO"
    name = os.environ.get(f"{prefix}_SOCKET_IFNAME", "") or _default_interface()
    details = [name]
    for detail in ("speed", "mtu", "ifalias"):
        # Interfaces without a speed, such as a loopback, answer with an error.
        with suppress(OSError):
            details.append(Path("/sys/class/net", name, detail).read_text().strip())
    return " ".join(details)


def _default_interface() -> str:
    with suppress(OSError):
        for line in Path("/proc/net/route").read_text().splitlines()[1:]:
            name, destination, *_ = line.split()
            if not int(destination, 16):
                return name
    return ""


def _path(name: str) -> Path | None:
    """Return a calibration's file in the user's cache folder, if the user has one."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        try:
            folder = Path.home() / ".cache"
        except RuntimeError as error:
            logger.warning("no calibration is kept: %s; set XDG_CACHE_HOME", error)
            return None
    return folder / "torchrec_2dsp" / "calibrations" / f"{name}.toml"


def _read(path: Path) -> Calibration | None:
    try:
        return Calibration.load(path)
    except CalibrationError as error:
        if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            logger.warning("measuring again what was kept: %s", error)
        return None


def _keep(calibration: Calibration, path: Path) -> None:
    """Write a calibration completely or not at all."""
    if doubt := unexplained(calibration, QUICK.tolerance):
        logger.warning("the planner goes by rough times, which aren't kept: %s", doubt)
        return
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        calibration.save(beside)
        beside.replace(path)
    except OSError as error:
        logger.warning("this calibration isn't kept, the next start measures again: %s", error)
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def _from_first(world: dist.ProcessGroup, own: T) -> T:
    """Return the first rank's object."""
    objects = [own]
    dist.broadcast_object_list(objects, src=dist.get_global_rank(world, 0), group=world)
    return objects[0]


@contextmanager
def _progress(path: Path | None, *, is_shown: bool) -> Iterator[Callable[[str], None]]:
    """Report on stderr that ranks measure; on a terminal also what, in a changing line."""
    stream, start = sys.stderr, time.perf_counter()
    is_terminal = is_shown and stream.isatty()
    if is_shown:
        place = "not kept" if path is None else f"kept in {path}"
        print(
            f"measuring this cluster for the planner, 20 s at most; {place}",
            file=stream,
            flush=True,
        )

    def show(what: str) -> None:
        if is_terminal:
            seconds = time.perf_counter() - start
            print(f"\r\033[K{seconds:3.0f} s: {what}", end="", file=stream, flush=True)

    try:
        yield show
    finally:
        if is_terminal:
            print("\r\033[K", end="", file=stream, flush=True)
