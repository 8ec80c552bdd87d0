"""Time collectives: those that training uses, for a calibration, and the speed of links.

All ranks of the world measure together, in groups inside hosts, across them, and over all ranks.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.alarm import agree
from torchrec_2dsp.comms.full_duplex import full_duplex_backend
from torchrec_2dsp.cost.collectives import (
    Span,
    Traffic,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.calibrate.fit import CollectiveSample, Timed


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


_ELEMENT_BYTES = 4
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
        num_elements = math.ceil(num_bytes / (_ELEMENT_BYTES * span.num_ranks)) * span.num_ranks
        sent = torch.ones(num_elements, device=group_device(world))
        run = functools.partial(collective.run, sent, group)
        timed = Timed.of(repeated_seconds(run, world))
        moved = collective.traffic(span, float(num_elements * _ELEMENT_BYTES))
        yield CollectiveSample(span, moved, timed)
        if timed.seconds > _LONG_S:
            return
        num_bytes *= _STEP


MAX_BYTES = 64 * 2**20
"""No payload is larger than this by default."""

SECONDS_PER_REPEAT = 0.2
"""The approximate length of a repeat, where the link is slow enough."""

_PROBE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class LinkSpeeds:
    """Bytes that one rank sends per second while all others do the same.

    The bytes are those on the wire: of N ranks, each sends (N-1)/N of its payload in an all-to-all
    and 2 (N-1)/N in a ring all-reduce. ``None`` means no such link: one rank per host has no
    neighbours, and one host no other hosts.

    Example:
        >>> from torchrec_2dsp.programs.calibrate.collectives import LinkSpeeds
        >>> speeds = LinkSpeeds(
        ...     local_world_size=2,
        ...     intra_host_all_to_all_bytes_per_s=3e9,
        ...     intra_host_all_reduce_bytes_per_s=2e9,
        ...     cross_host_all_to_all_bytes_per_s=60e6,
        ...     cross_host_all_reduce_bytes_per_s=55e6,
        ... )
        >>> speeds.host_all_to_all_bytes_per_s
        120000000.0
    """

    local_world_size: int
    """Ranks per host, which share its link."""

    intra_host_all_to_all_bytes_per_s: float | None
    intra_host_all_reduce_bytes_per_s: float | None
    cross_host_all_to_all_bytes_per_s: float | None
    cross_host_all_reduce_bytes_per_s: float | None

    @property
    def host_all_to_all_bytes_per_s(self) -> float | None:
        """The speed of a host's link, for all its ranks together, in an all-to-all."""
        return _times(self.local_world_size, self.cross_host_all_to_all_bytes_per_s)

    @property
    def host_all_reduce_bytes_per_s(self) -> float | None:
        """The same in an all-reduce."""
        return _times(self.local_world_size, self.cross_host_all_reduce_bytes_per_s)


def measure_link_speeds(
    group: dist.ProcessGroup,
    *,
    local_world_size: int,
    num_bytes: int = MAX_BYTES,
    repeats: int = 5,
) -> LinkSpeeds:
    """Time all-to-alls and all-reduces inside the hosts, then across them; equal on all ranks.

    Across hosts, the ranks with the same place in their hosts form a group, and all these groups
    are busy at once, as they are in training. A repeat takes as long as its slowest rank, and the
    median repeat counts. On gloo, all-to-alls are those of `comms.full_duplex`.

    Args:
        group: all ranks of the world, host by host.
        local_world_size: ranks per host.
        num_bytes: the largest payload per rank. A slow link gets less, about 0.2 seconds' worth.
        repeats: how often each collective is timed.

    Collectives:
        One all-gather of objects, the creation of two process groups per rank (destroyed at the
        end), and per collective and kind of link: ``repeats + 2`` times the collective, as many
        all-reduces of one element, and two all-reduces of the times.
    """
    facts = {"local_world_size": local_world_size, "num_bytes": num_bytes, "repeats": repeats}
    world_size = dist.get_world_size(group)
    agree(
        group,
        error=_argument_error(world_size, **facts),
        facts={name: str(value) for name, value in facts.items()},
    )
    hosts = ranks_by_host(world_size, local_world_size)
    in_host = _measure(group, hosts, num_bytes, repeats)
    across = ranks_by_place(world_size, local_world_size)
    cross_host = _measure(group, across, num_bytes, repeats)
    return LinkSpeeds(
        local_world_size=local_world_size,
        intra_host_all_to_all_bytes_per_s=in_host["all_to_all"],
        intra_host_all_reduce_bytes_per_s=in_host["all_reduce"],
        cross_host_all_to_all_bytes_per_s=cross_host["all_to_all"],
        cross_host_all_reduce_bytes_per_s=cross_host["all_reduce"],
    )


def bytes_per_s(
    seconds: Sequence[float], *, num_bytes: int, num_ranks: int, num_passes: int
) -> float:
    """Return the bytes that each rank sends per second, if a payload takes the median time.

    Example:
        >>> from torchrec_2dsp.programs.calibrate.collectives import bytes_per_s
        >>> bytes_per_s([0.5, 9.0, 0.5], num_bytes=4000, num_ranks=4, num_passes=1)
        6000.0
    """
    return num_passes * (num_ranks - 1) / num_ranks * num_bytes / statistics.median(seconds)


def payload_bytes(probe_bytes: int, probe_seconds: float, max_bytes: int) -> int:
    """Return the payload that takes about 0.2 seconds, if ``probe_bytes`` took ``probe_seconds``.

    Example:
        >>> from torchrec_2dsp.programs.calibrate.collectives import payload_bytes
        >>> payload_bytes(1_000_000, 0.1, max_bytes=10_000_000)
        2000000
    """
    return min(max_bytes, math.ceil(probe_bytes * SECONDS_PER_REPEAT / probe_seconds))


def _measure(
    world: dist.ProcessGroup, ranks_of_groups: Groups, num_bytes: int, repeats: int
) -> dict[str, float | None]:
    """Measure the bytes per second of each collective, in all the groups at once."""
    if len(ranks_of_groups[0]) == 1:
        return dict.fromkeys(_COLLECTIVES)
    # Gloo's own all-to-all may take twice the time that the link needs.
    is_gloo = dist.get_backend(world) == "gloo"
    with subgroup(ranks_of_groups, is_full_duplex=is_gloo) as group:
        return {
            name: collective.bytes_per_s(world, group, num_bytes, repeats)
            for name, collective in _COLLECTIVES.items()
        }


@dataclass(frozen=True)
class _Collective:
    """A collective to be timed."""

    run: Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]
    num_passes: int

    def bytes_per_s(
        self, world: dist.ProcessGroup, group: dist.ProcessGroup, max_bytes: int, repeats: int
    ) -> float:
        # The first run makes the connections.
        probe_bytes = min(_PROBE_BYTES, max_bytes)
        num_bytes, (_, probe_seconds) = self._time(world, group, probe_bytes, 2)
        payload = payload_bytes(num_bytes, probe_seconds, max_bytes)
        num_bytes, seconds = self._time(world, group, payload, repeats)
        return bytes_per_s(
            seconds, num_bytes=num_bytes, num_ranks=group.size(), num_passes=self.num_passes
        )

    def _time(
        self, world: dist.ProcessGroup, group: dist.ProcessGroup, num_bytes: int, repeats: int
    ) -> tuple[int, list[float]]:
        """Return the payload, in whole elements, and the slowest rank's time per repeat."""
        device = group_device(world)
        num_elements = math.ceil(num_bytes / (_ELEMENT_BYTES * group.size())) * group.size()
        sent = torch.ones(num_elements, device=device)
        received = torch.ones_like(sent)
        seconds = slowest_rank_seconds(lambda: self.run(received, sent, group), world, repeats)
        return num_elements * _ELEMENT_BYTES, seconds


_COLLECTIVES = {
    "all_to_all": _Collective(
        lambda received, sent, group: dist.all_to_all_single(received, sent, group=group), 1
    ),
    "all_reduce": _Collective(lambda received, sent, group: dist.all_reduce(sent, group=group), 2),
}


def _argument_error(
    world_size: int, local_world_size: int, num_bytes: int, repeats: int
) -> ConfigError | None:
    if world_size != dist.get_world_size():
        return ConfigError(
            f"link speeds are those of all {dist.get_world_size()} ranks, and the group has "
            f"{world_size}; pass torch.distributed.group.WORLD"
        )
    for name, value in (
        ("local_world_size", local_world_size),
        ("num_bytes", num_bytes),
        ("repeats", repeats),
    ):
        if value < 1:
            return ConfigError(f"{name}={value} is not positive; use 1 or more")
    if world_size % local_world_size:
        return ConfigError(
            f"local_world_size={local_world_size} does not divide world_size={world_size}; "
            "pass the number of ranks that every host has"
        )
    return None


def _times(factor: int, value: float | None) -> float | None:
    return None if value is None else factor * value
