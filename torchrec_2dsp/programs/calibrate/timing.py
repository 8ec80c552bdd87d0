"""Time work that all ranks do at once."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def group_device(group: dist.ProcessGroup) -> torch.device:
    """The device of the tensors that a group's collectives take."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


_REPEATED_S = 0.05
_MIN_REPEATS, _MAX_REPEATS = 4, 30


def repeated_seconds(run: Callable[[], object], world: dist.ProcessGroup) -> list[float]:
    """`slowest_rank_seconds` of as many repeats as tell something: the more, the shorter.

    Collectives:
        Those of `slowest_rank_seconds`.
    """
    # The first run makes connections and gets memory.
    _, once = slowest_rank_seconds(run, world, 2)
    repeats = round(_REPEATED_S / once)
    return slowest_rank_seconds(run, world, min(max(repeats, _MIN_REPEATS), _MAX_REPEATS))


def slowest_rank_seconds(
    run: Callable[[], object], world: dist.ProcessGroup, repeats: int
) -> list[float]:
    """How long the slowest rank takes, for each repeat; equal on all ranks.

    Args:
        run: what every rank does, beginning together.
        world: the ranks.
        repeats: how often.

    Collectives:
        Per repeat an all-reduce of one element, besides what ``run`` does; at the end an all-reduce
        of the times.
    """
    device = group_device(world)
    seconds = torch.zeros(repeats, dtype=torch.float64, device=device)
    for repeat in range(repeats):
        dist.all_reduce(torch.zeros(1, device=device), group=world)
        _wait_for(device)
        start = time.perf_counter()
        run()
        _wait_for(device)
        seconds[repeat] = time.perf_counter() - start
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=world)
    return seconds.tolist()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
