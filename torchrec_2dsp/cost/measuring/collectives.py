"""Time the collectives that training uses.

All ranks of the world measure together, in groups inside hosts, across them, and over all ranks.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.full_duplex import full_duplex_backend
from torchrec_2dsp.cost.collectives import (
    Span,
    Traffic,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from torchrec_2dsp.cost.measuring.fit import CollectiveSample, Timed


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device for a group's tensors."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


_REPEATED_S = 0.05
_MIN_REPEATS, _MAX_REPEATS = 4, 30


def repeated_seconds(run: Callable[[], object], world: dist.ProcessGroup) -> list[float]:
    """Run `slowest_rank_seconds` as often as it helps: shorter runs repeat more."""
    # The first run opens connections and allocates memory.
    _, once = slowest_rank_seconds(run, world, 2)
    repeats = round(_REPEATED_S / once)
    return slowest_rank_seconds(run, world, min(max(repeats, _MIN_REPEATS), _MAX_REPEATS))


def slowest_rank_seconds(
    run: Callable[[], object], world: dist.ProcessGroup, repeats: int
) -> list[float]:
    """Time the slowest rank, for each repeat; equal on all ranks.

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


Groups = list[list[int]]
"""World ranks, group by group."""


def ranks_by_host(world_size: int, local_world_size: int) -> Groups:
    """Group the ranks by host."""
    return [
        list(range(first, first + local_world_size))
        for first in range(0, world_size, local_world_size)
    ]


def ranks_by_place(world_size: int, local_world_size: int) -> Groups:
    """Group the ranks with the same place on their hosts."""
    hosts = ranks_by_host(world_size, local_world_size)
    return [list(ranks) for ranks in zip(*hosts, strict=True)]


@contextmanager
def subgroup(
    groups: Sequence[Sequence[int]], *, is_full_duplex: bool
) -> Iterator[dist.ProcessGroup]:
    """Make all these groups, yield this rank's, and destroy them at the end.

    Collectives:
        Makes the process groups.
    """
    own_group, all_groups = dist.new_subgroups_by_enumeration(
        [list(ranks) for ranks in groups],
        backend=full_duplex_backend() if is_full_duplex else None,
        group_desc="measured",
    )
    assert isinstance(own_group, dist.ProcessGroup)
    try:
        yield own_group
    finally:
        for group in reversed(all_groups):
            dist.destroy_process_group(group)


ELEMENT_BYTES = 4
_SMALLEST = 2**12
_STEP = 8
_LARGEST = 2**24
_LONG_S = 0.1
"""Larger messages than the first one that takes as long tell nothing new."""


@dataclass(frozen=True)
class TimedCollective:
    """A torch collective, and its traffic if a rank's larger buffer has so many bytes."""

    run: Callable[[torch.Tensor, dist.ProcessGroup], object]
    traffic: Callable[[Span, float], Traffic]
    is_full_duplex: bool = False
    """True for the full-duplex backend."""


def _all_to_all(sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


def _all_gather(buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    part = buffer[: buffer.numel() // group.size()]
    dist.all_gather_single(torch.empty_like(buffer), part, group=group)


def _reduce_scatter(sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    part = sent.new_empty(sent.numel() // group.size())
    dist.reduce_scatter_single(part, sent, group=group)


def _even(span: Span, num_bytes: float) -> Traffic:
    return all_to_all(span, num_bytes / span.num_ranks)


COLLECTIVES = {
    "all_to_all": TimedCollective(_all_to_all, _even),
    "full_duplex_all_to_all": TimedCollective(_all_to_all, _even, is_full_duplex=True),
    "all_reduce": TimedCollective(
        lambda sent, group: dist.all_reduce(sent, group=group), all_reduce
    ),
    "all_gather": TimedCollective(
        _all_gather, lambda span, num_bytes: all_gather(span, num_bytes / span.num_ranks)
    ),
    "reduce_scatter": TimedCollective(_reduce_scatter, reduce_scatter),
}
"""The collectives, by their names in a calibration."""


def measure_collectives(
    world: dist.ProcessGroup,
    *,
    local_world_size: int,
    progress: Callable[[str], object],
) -> dict[str, list[CollectiveSample]]:
    """Time every collective, on gloo also the full-duplex one; equal on all ranks.

    Collectives:
        Those that are measured; and the creation of process groups, which are destroyed at the
        end.
    """
    world_size = dist.get_world_size(world)
    samples: dict[str, list[CollectiveSample]] = {}
    for ranks_of_groups in _places(world_size, local_world_size):
        span = Span.of(ranks_of_groups, local_world_size)
        for is_full_duplex in (False, True) if dist.get_backend(world) == "gloo" else (False,):
            with subgroup(ranks_of_groups, is_full_duplex=is_full_duplex) as group:
                for name, collective in COLLECTIVES.items():
                    if collective.is_full_duplex != is_full_duplex:
                        continue
                    progress(f"{name}, {_where(span)}")
                    timed = _timed(collective, span, world, group)
                    samples.setdefault(name, []).extend(timed)
    return samples


def _places(world_size: int, local_world_size: int) -> list[Groups]:
    """Return the groups by host, by place on the hosts, and all ranks."""
    places = [
        ranks_by_host(world_size, local_world_size),
        ranks_by_place(world_size, local_world_size),
        [list(range(world_size))],
    ]
    distinct = [grouping for index, grouping in enumerate(places) if grouping not in places[:index]]
    return [grouping for grouping in distinct if len(grouping[0]) > 1]


def _where(span: Span) -> str:
    if not span.crosses_hosts:
        return "in hosts"
    return "across hosts" if span.ranks_per_host == 1 else "all ranks"


def _timed(
    collective: TimedCollective, span: Span, world: dist.ProcessGroup, group: dist.ProcessGroup
) -> Iterator[CollectiveSample]:
    """Time messages, each eight times as long as the last, until they take long or are long."""
    num_bytes = _SMALLEST
    while num_bytes <= _LARGEST:
        num_elements = math.ceil(num_bytes / (ELEMENT_BYTES * span.num_ranks)) * span.num_ranks
        sent = torch.ones(num_elements, device=group_device(world))
        run = functools.partial(collective.run, sent, group)
        timed = Timed.of(repeated_seconds(run, world))
        moved = collective.traffic(span, float(num_elements * ELEMENT_BYTES))
        yield CollectiveSample(span, moved, timed)
        if timed.seconds > _LONG_S:
            return
        num_bytes *= _STEP
