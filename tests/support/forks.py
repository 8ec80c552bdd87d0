"""Programs on four ranks, forked from a process with all imports: torchrun without the wait.

``python -m tests.support.forks scripts SCRIPT...`` runs scripts, ``... ways FOLDER WAY...`` ranks
that leave their process groups in a given way. Each rank ends as a whole interpreter does, and
runs gloo's destructors. After each program it prints the name and the ranks' exit codes.
"""

import gc
import os
import runpy
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

import torchrec_2dsp as tdsp
from torchrec_2dsp.comms.groups import MeshGroups

NUM_RANKS = 4


def main(kind: str, *arguments: str) -> None:
    # Public names are loaded when they are first used: these are, once for all ranks.
    assert issubclass(tdsp.ModelParallel2D, torch.nn.Module)
    assert tdsp.Planner2D.__module__ in sys.modules
    # Objects from the imports take seconds to collect at each exit and don't matter here.
    gc.freeze()
    programs: dict[str, Callable[[int], None]]
    if kind == "scripts":
        programs = {script: script_program(script) for script in arguments}
    else:
        folder, *ways = arguments
        programs = {way: way_program(way, f"{folder}/{way}") for way in ways}
    for name, program in programs.items():
        sys.stdout.flush()
        children = []
        for rank in range(NUM_RANKS):
            child = os.fork()
            if child == 0:
                program(rank)
                return
            children.append(child)
        print(name, *(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


def script_program(script: str) -> Callable[[int], None]:
    """Return a rank's program that sets what torchrun sets, then runs the script."""
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port = listening.getsockname()[1]

    def run(rank: int) -> None:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(NUM_RANKS),
            "LOCAL_WORLD_SIZE": str(NUM_RANKS),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")

    return run


def way_program(way: str, store: str) -> Callable[[int], None]:
    """Return a rank's program that uses all process groups, then leaves them."""

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        os.environ["LOCAL_WORLD_SIZE"] = str(NUM_RANKS)
        file = dist.FileStore(store, NUM_RANKS)
        dist.init_process_group("gloo", store=file, rank=rank, world_size=NUM_RANKS)
        groups = MeshGroups.for_mesh(tdsp.Mesh2D(2, 2), "cpu")
        for group in (
            groups.sharding_group,
            groups.replica_peers,
            groups.hot_rows.everyone,
            groups.world,
        ):
            dist.all_reduce(torch.ones(1000), group=group)
        WAYS[way](groups)

    return run


def destroy(groups: MeshGroups) -> None:
    dist.destroy_process_group()


def just_end(groups: MeshGroups) -> None:
    pass


def forget_and_end(groups: MeshGroups) -> None:
    """End while a collective is unfinished on one axis."""
    dist.all_reduce(torch.ones(1000), group=groups.replica_peers, async_op=True)


WAYS: dict[str, Callable[[MeshGroups], None]] = {
    way.__name__: way for way in (destroy, just_end, forget_and_end)
}


def count_threads(word: str) -> int:
    """Count the threads with `word` in their kernel name."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        # A thread may end between being listed and being asked for its name.
        with suppress(FileNotFoundError, ProcessLookupError):
            count += word in task.joinpath("comm").read_text()
    return count


if __name__ == "__main__":
    main(*sys.argv[1:])
