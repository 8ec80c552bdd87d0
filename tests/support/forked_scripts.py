"""Scripts on four ranks that have imported everything already: torchrun without the wait.

Run as ``python -m tests.support.forked_scripts SCRIPT...``. Prints what the scripts print, and
after each the exit codes of its ranks.
"""

import gc
import os
import runpy
import socket
import sys

import torch

import torchrec_2dsp as tdsp
from tests.support.forks import fork_ranks

NUM_RANKS = 4


def main(scripts: list[str]) -> None:
    # Public names are loaded when they are first used: these are, once for all ranks.
    assert issubclass(tdsp.ModelParallel2D, torch.nn.Module)
    assert tdsp.Planner2D.__module__ in sys.modules
    # The objects of the imports take seconds to collect at each exit and don't matter here.
    gc.freeze()
    for script in scripts:
        port = free_port()
        forked = fork_ranks(NUM_RANKS)
        if isinstance(forked, int):
            run(script, forked, port)
            return
        print(script, *forked)


def run(script: str, rank: int, port: int) -> None:
    """What torchrun sets, then the script."""
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


def free_port() -> int:
    """One that nobody listens to now."""
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


if __name__ == "__main__":
    main(sys.argv[1:])
