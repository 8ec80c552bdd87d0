"""The speed of links: bytes per second inside hosts and across them, for benchmarks."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.cost.measuring.clock import Clock
from torchrec_2dsp.cost.measuring.collectives import (
    ELEMENT_BYTES,
    Groups,
    ranks_by_host,
    ranks_by_place,
    subgroup,
)
from torchrec_2dsp.errors import ConfigError

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
        >>> from torchrec_2dsp.programs.link_speeds import LinkSpeeds
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
    *, local_world_size: int, num_bytes: int = MAX_BYTES, repeats: int = 5
) -> LinkSpeeds:
    """Time all-to-alls and all-reduces inside the hosts, then across them; equal on all ranks.

    The ranks of a host are neighbours. Across hosts, those with the same place in their hosts form
    a group, and all these groups are busy at once, as they are in training. A repeat takes as long
    as its slowest rank, and the median repeat counts. On gloo, all-to-alls are those of
    `comms.full_duplex`.

    Args:
        local_world_size: ranks per host.
        num_bytes: the largest payload per rank. A slow link gets less, about 0.2 seconds' worth.
        repeats: how often each collective is timed.

    Collectives:
        One all-gather of objects, the creation of two process groups per rank (destroyed at the
        end), and per collective and kind of link: ``repeats + 2`` times the collective, as many
        all-reduces of one element, and two all-reduces of the times.
    """
    world = world_group()
    world_size = dist.get_world_size(world)
    with agreeing(world) as facts:
        facts["local_world_size"] = str(local_world_size)
        if local_world_size < 1 or world_size % local_world_size:
            raise ConfigError(
                f"local_world_size={local_world_size} does not divide world_size={world_size}; "
                "pass the number of ranks that every host has"
            )
    in_host = _measure(world, ranks_by_host(world_size, local_world_size), num_bytes, repeats)
    cross_host = _measure(world, ranks_by_place(world_size, local_world_size), num_bytes, repeats)
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
        >>> from torchrec_2dsp.programs.link_speeds import bytes_per_s
        >>> bytes_per_s([0.5, 9.0, 0.5], num_bytes=4000, num_ranks=4, num_passes=1)
        6000.0
    """
    return num_passes * (num_ranks - 1) / num_ranks * num_bytes / statistics.median(seconds)


def payload_bytes(probe_bytes: int, probe_seconds: float, max_bytes: int) -> int:
    """Return the payload that takes about 0.2 seconds, if ``probe_bytes`` took ``probe_seconds``.

    Example:
        >>> from torchrec_2dsp.programs.link_speeds import payload_bytes
        >>> payload_bytes(1_000_000, 0.1, max_bytes=10_000_000)
        2000000
        >>> [payload_bytes(1, seconds, max_bytes=8) for seconds in (0.01, 10.0)]
        [8, 1]
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
        clock = Clock(world)
        num_elements = math.ceil(num_bytes / (ELEMENT_BYTES * group.size())) * group.size()
        sent = torch.ones(num_elements, device=clock.device)
        received = torch.ones_like(sent)
        seconds = clock.seconds(lambda: self.run(received, sent, group), repeats)
        return num_elements * ELEMENT_BYTES, seconds


_COLLECTIVES = {
    "all_to_all": _Collective(
        lambda received, sent, group: dist.all_to_all_single(received, sent, group=group), 1
    ),
    "all_reduce": _Collective(lambda received, sent, group: dist.all_reduce(sent, group=group), 2),
}


def _times(factor: int, value: float | None) -> float | None:
    return None if value is None else factor * value
