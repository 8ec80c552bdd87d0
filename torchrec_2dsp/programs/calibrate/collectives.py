"""Time the collectives that training uses, inside hosts, across them, and over all ranks."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.cost import traffic
from torchrec_2dsp.cost.span import Span
from torchrec_2dsp.cost.traffic import Traffic
from torchrec_2dsp.programs.calibrate.fit import CollectiveSample, Timed
from torchrec_2dsp.programs.calibrate.groups import Groups, ranks_by_host, ranks_by_place, subgroup
from torchrec_2dsp.programs.calibrate.timing import group_device, repeated_seconds

_ELEMENT_BYTES = 4
_SMALLEST = 2**12
_STEP = 8
_LARGEST = 2**24
_LONG_S = 0.1
"""Larger messages than the first one that takes as long tell nothing new."""


@dataclass(frozen=True)
class TimedCollective:
    """A collective of torch, and what it moves if a rank's larger buffer has so many bytes."""

    run: Callable[[torch.Tensor, dist.ProcessGroup], object]
    traffic: Callable[[Span, float], Traffic]
    is_full_duplex: bool = False
    """Whether it is for the full-duplex backend."""


def _all_to_all(sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


def _all_gather(buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    part = buffer[: buffer.numel() // group.size()]
    dist.all_gather_single(torch.empty_like(buffer), part, group=group)


def _reduce_scatter(sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    part = sent.new_empty(sent.numel() // group.size())
    dist.reduce_scatter_single(part, sent, group=group)


def _even(span: Span, num_bytes: float) -> Traffic:
    return traffic.all_to_all(span, num_bytes / span.num_ranks)


COLLECTIVES = {
    "all_to_all": TimedCollective(_all_to_all, _even),
    "full_duplex_all_to_all": TimedCollective(_all_to_all, _even, is_full_duplex=True),
    "all_reduce": TimedCollective(
        lambda sent, group: dist.all_reduce(sent, group=group), traffic.all_reduce
    ),
    "all_gather": TimedCollective(
        _all_gather, lambda span, num_bytes: traffic.all_gather(span, num_bytes / span.num_ranks)
    ),
    "reduce_scatter": TimedCollective(_reduce_scatter, traffic.reduce_scatter),
}
"""The collectives by the names that a calibration has for them."""


def measure_collectives(
    world: dist.ProcessGroup,
    *,
    local_world_size: int,
    progress: Callable[[str], object],
) -> dict[str, list[CollectiveSample]]:
    """Samples of every collective, on gloo also of the full-duplex one; equal on all ranks.

    Args:
        world: all ranks, host by host.
        local_world_size: ranks per host.
        progress: called with what is being measured.

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
    """The ranks of each host; those with one place on their hosts; all."""
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
    """Messages eight times as long as the last one, until they take long or are long."""
    num_bytes = _SMALLEST
    while num_bytes <= _LARGEST:
        num_elements = math.ceil(num_bytes / (_ELEMENT_BYTES * span.num_ranks)) * span.num_ranks
        sent = torch.ones(num_elements, device=group_device(world))
        run = functools.partial(collective.run, sent, group)
        timed = Timed.of(repeated_seconds(run, world))
        moved = collective.traffic(span, float(num_elements * _ELEMENT_BYTES))
        yield CollectiveSample(span, moved, timed)
        if timed.seconds > _LONG_S:
            return
        num_bytes *= _STEP
