"""Rank programs for the cluster tests: ``python -m tests.cluster.programs NAME ARGS``."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torchrec_2dsp.programs.cluster.network import read_interface_bytes

RANK = int(os.environ.get("RANK", "0"))


def report(folder: str) -> None:
    """Write this rank's identity to a file."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
    facts = {name: os.environ[name] for name in names}
    facts["hostname"] = socket.gethostname()
    facts["address"] = socket.gethostbyname(socket.gethostname())
    peer = (f"::ffff:{facts['address']}", 0, 0, 0)
    facts["name_of_peer"] = socket.getnameinfo(peer, socket.NI_NAMEREQD)[0]
    (Path(folder) / f"rank{RANK}.json").write_text(json.dumps(facts))
    print(f"rank {RANK} was here: ü")


def crash(rank: str, folder: str) -> None:
    """Raise on one rank, while the others wait."""
    Path(folder, f"rank{RANK}").touch()
    print(f"hello from {RANK}")
    while len(os.listdir(folder)) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if int(rank) == RANK:
        raise ValueError(f"rank {RANK} has a reason")
    wait_for_ever()


def hang(folder: str) -> None:
    """Mark that this rank started, and never end."""
    (Path(folder) / f"rank{RANK}").touch()
    wait_for_ever()


def leave(exit_code: str) -> None:
    """End with an exit code."""
    raise SystemExit(int(exit_code))


def exchange(file: str, num_bytes: str) -> None:
    """Exchange data with the rank at the same place on the other host, then with one on this host.

    Both directions run at once; rank 0 writes the seconds and the interfaces' byte counts.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    size, local_size = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    payload = torch.ones(int(num_bytes), dtype=torch.uint8)
    results = {}
    for name, peer in (("across", (RANK + local_size) % size), ("inside", RANK ^ 1)):
        trials = []
        for data in (payload[:1000], *[payload] * 4):  # The first makes the connections.
            received = torch.zeros_like(data)
            before = read_interface_bytes(Path("/proc/net/dev").read_text())
            dist.barrier()
            start = time.perf_counter()
            works = [dist.irecv(received, peer), dist.isend(data, peer)]
            for work in works:
                assert work is not None
                work.wait()
            dist.barrier()
            seconds = time.perf_counter() - start
            counted = read_interface_bytes(Path("/proc/net/dev").read_text()).since(before)
            assert torch.equal(data, received)
            trials.append({"seconds": seconds, "sent": counted.sent, "inside": counted.inside})
        # Other programs can only make it slower.
        results[name] = min(trials[1:], key=lambda trial: trial["seconds"])
    if RANK == 0:
        Path(file).write_text(json.dumps(results))
    dist.destroy_process_group()


def compute(file: str) -> None:
    """Compute alone, unevenly before all-reduces, and in a pipeline; rank 0 writes the seconds."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    size = dist.get_world_size()
    small = torch.zeros(1)

    def work(seconds: float) -> None:
        end_s = time.thread_time() + seconds
        while time.thread_time() < end_s:
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))

    def pipeline(num_batches: int) -> None:
        for _ in range(num_batches):
            if RANK > 0:
                dist.recv(small, RANK - 1)
            work(0.1)
            if size - 1 > RANK:
                dist.send(small, RANK + 1)

    def timed(run: Callable[[], None]) -> list[float]:
        """Return the elapsed cluster seconds and real seconds, over all ranks."""
        dist.barrier()
        start_s, real_start_s = time.perf_counter(), time.monotonic()
        run()
        dist.barrier()
        return [time.perf_counter() - start_s, time.monotonic() - real_start_s]

    def steps(of_rank_0: float) -> None:
        for _ in range(10):
            work(0.1 * (of_rank_0 if RANK == 0 else 1.0))
            dist.all_reduce(small)

    pipeline(1)  # Makes the connections.
    results = {
        "alone": timed(lambda: work(0.5)),
        "even": timed(lambda: steps(1.0)),
        "uneven": timed(lambda: steps(1.3)),
        "pipeline": timed(lambda: pipeline(16)),
    }
    if RANK == 0:
        Path(file).write_text(json.dumps(results))
    dist.destroy_process_group()


def wait_for_ever() -> None:
    """Wait forever; stack traces should point here."""
    while True:
        time.sleep(1)


PROGRAMS = {
    program.__name__: program for program in (report, crash, hang, leave, exchange, compute)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
