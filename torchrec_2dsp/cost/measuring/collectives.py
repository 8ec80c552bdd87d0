"""Time the collectives that training uses.

All ranks of the world measure together, in groups inside hosts, across them, and over all ranks.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

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
from torchrec_2dsp.cost.measuring.clock import Clock, Sampling
from torchrec_2dsp.cost.measuring.fit import CollectiveSample, Timed
from torchrec_2dsp.mesh import Mesh2D, RankLayout

Groups = list[list[int]]
"""World ranks, group by group."""


@contextmanager
def subgroup(
    groups: Sequence[Sequence[int]], *, is_full_duplex: bool
) -> Iterator[dist.ProcessGroup]:
    """Create these groups, yield this rank's, and destroy all of them at the end.

    Collectives:
        The process groups' creation.
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
_SMALLEST_BYTES = 2**12
_FEWEST = 2
"""The number of differently sized messages that a fit needs."""


@dataclass(frozen=True)
class TimedCollective:
    """A torch collective, and its traffic for the larger of a rank's two buffers."""

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


@dataclass
class _Series:
    """A collective's messages in one place, each larger than the last."""

    name: str
    collective: TimedCollective
    span: Span
    group: dist.ProcessGroup
    num_bytes: float = _SMALLEST_BYTES
    """The next message's bytes; 0 after the last message."""
    expected_s: float = 0.0
    """An upper bound for the next message's seconds; 0 if unknown."""
    samples: list[CollectiveSample] = field(default_factory=list)

    def message(self, device: torch.device) -> torch.Tensor:
        num_ranks = self.span.num_ranks
        return torch.ones(
            math.ceil(self.num_bytes / (ELEMENT_BYTES * num_ranks)) * num_ranks, device=device
        )

    def time(self, message: torch.Tensor, clock: Clock) -> None:
        run = functools.partial(self.collective.run, message, self.group)
        if not self.samples:
            clock.seconds(run, 1)  # It opens connections.
        timed = Timed.of(clock.repeated_seconds(run, self.expected_s))
        moved = self.collective.traffic(self.span, float(message.nbytes))
        self.samples.append(CollectiveSample(self.span, moved, timed))
        growth = _growth(message.nbytes, timed.seconds, clock.sampling)
        self.num_bytes, self.expected_s = growth * message.nbytes, growth * timed.seconds


def _growth(num_bytes: int, seconds: float, sampling: Sampling) -> float:
    """Return the factor to the next message's size after one that took ``seconds``; 0 for none."""
    if seconds > sampling.long_s or 2 * num_bytes > sampling.largest_bytes:
        return 0
    longest = sampling.longest_s / seconds
    return min(sampling.step, sampling.largest_bytes / num_bytes, max(longest, 2))


def measure_collectives(
    clock: Clock, *, local_world_size: int, share: float, progress: Callable[[str], object]
) -> dict[str, list[CollectiveSample]]:
    """Time every collective, on gloo also the full-duplex one; equal on all ranks.

    All small messages come before the larger ones, which are left out once ``share`` of the time
    has passed.

    Collectives:
        The measured ones; and the creation of process groups, which are destroyed at the
        end.
    """
    world_size = dist.get_world_size(clock.world)
    is_gloo = dist.get_backend(clock.world) == "gloo"
    samples: dict[str, list[CollectiveSample]] = {}
    with ExitStack() as groups:
        series = []
        for ranks_of_groups in _places(world_size, local_world_size):
            span = Span.of(ranks_of_groups, local_world_size)
            for is_full_duplex in (False, True) if is_gloo else (False,):
                group = groups.enter_context(
                    subgroup(ranks_of_groups, is_full_duplex=is_full_duplex)
                )
                series += [
                    _Series(name, collective, span, group)
                    for name, collective in COLLECTIVES.items()
                    if collective.is_full_duplex == is_full_duplex
                ]
        for each, message in clock.guarded(_messages(series, clock, share)):
            progress(f"{each.name}, {_where(each.span)}")
            each.time(message, clock)
    for each in series:
        samples.setdefault(each.name, []).extend(each.samples)
    return samples


def _messages(
    series: Sequence[_Series], clock: Clock, share: float
) -> Iterator[tuple[_Series, torch.Tensor]]:
    """Yield the smallest message of each series, then the next one of each, until none is left."""
    for num_before in itertools.count():
        growing = [each for each in series if each.num_bytes]
        if not growing:
            return
        for each in growing:
            if num_before >= _FEWEST and clock.is_late(share):
                return
            yield each, each.message(clock.device)


def _places(world_size: int, local_world_size: int) -> list[Groups]:
    """Return the groups by host, by place on the hosts, and all ranks."""
    num_hosts = world_size // local_world_size
    places = [
        Mesh2D(num_hosts, local_world_size, RankLayout.CONTIGUOUS).rank_matrix(),
        Mesh2D(local_world_size, num_hosts, RankLayout.STRIDED).rank_matrix(),
        [list(range(world_size))],
    ]
    distinct = [grouping for index, grouping in enumerate(places) if grouping not in places[:index]]
    return [grouping for grouping in distinct if len(grouping[0]) > 1]


def _where(span: Span) -> str:
    if not span.crosses_hosts:
        return "in hosts"
    return "across hosts" if span.ranks_per_host == 1 else "all ranks"
