"""Four plain ranks that end their program in a given way; prints their exit codes.

Run as ``python -m tests.support.exits FOLDER WAY...``. The ranks are forks, which saves the
imports, but each ends as a whole interpreter does, destructors of gloo's objects included.
"""

import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.forks import fork_ranks
from torchrec_2dsp import Mesh2D
from torchrec_2dsp.comms.mesh_groups import MeshGroups

NUM_RANKS = 4


def main(folder: str, ways: list[str]) -> None:
    # The objects of the imports take seconds to collect at each exit and don't matter here.
    gc.freeze()
    for number, way in enumerate(ways):
        store = f"{folder}/{number}-{way}"
        forked = fork_ranks(NUM_RANKS)
        if isinstance(forked, int):
            use_groups(forked, store, WAYS[way])
            return
        print(way, *forked)


def use_groups(rank: int, store: str, leave: Callable[[MeshGroups], None]) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(NUM_RANKS)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, NUM_RANKS), rank=rank, world_size=NUM_RANKS
    )
    groups = MeshGroups.for_mesh(Mesh2D(2, 2), "cpu")
    for group in (
        groups.sharding_group,
        groups.replica_peers,
        groups.hot_rows.everyone,
        groups.world,
    ):
        dist.all_reduce(torch.ones(1000), group=group)
    leave(groups)


def close(groups: MeshGroups) -> None:
    groups.close()


def destroy(groups: MeshGroups) -> None:
    dist.destroy_process_group()


def just_end(groups: MeshGroups) -> None:
    pass


def forget_and_end(groups: MeshGroups) -> None:
    """End while a collective is unfinished on one axis."""
    dist.all_reduce(torch.ones(1000), group=groups.replica_peers, async_op=True)


WAYS: dict[str, Callable[[MeshGroups], None]] = {
    way.__name__: way for way in (close, destroy, just_end, forget_and_end)
}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])


def count_threads(word: str) -> int:
    """Count the threads that have `word` in the name that the kernel knows them by."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        # A thread may end between being listed and being asked for its name.
        with suppress(FileNotFoundError, ProcessLookupError):
            count += word in task.joinpath("comm").read_text()
    return count
