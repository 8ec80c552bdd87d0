"""The speed of links: bytes per second inside hosts and across them, for benchmarks."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.cost.measuring.clock import Clock
from torchrec_2dsp.cost.measuring.collectives import (
    ELEMENT_BYTES,
    Groups,
    subgroup,
)
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import Mesh2D, RankLayout

MAX_BYTES = 64 * 2**20
"""The default for the largest payload."""

SECONDS_PER_REPEAT = 0.2
"""The approximate length of a repeat, if the link is slow enough."""

_PROBE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class LinkSpeeds:
    """Bytes that one rank sends per second while all others do the same.

    The bytes are those on the wire: of N ranks, each sends (N-1)/N of its payload in an all-to-all
    and 2 (N-1)/N in a ring all-reduce. ``None`` means no such link: one rank per host has no
    neighbours, and one host no other hosts.
    """

    in_host: Mapping[str, float | None]
    """The speeds of "all-to-all" and "all-reduce" between a host's ranks."""

    across_hosts: Mapping[str, float | None]
    """Their speeds between hosts."""


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
    num_hosts = world_size // local_world_size
    by_host = Mesh2D(num_hosts, local_world_size, RankLayout.CONTIGUOUS).rank_matrix()
    by_place = Mesh2D(local_world_size, num_hosts, RankLayout.STRIDED).rank_matrix()
    return LinkSpeeds(
        in_host=_measure(world, by_host, num_bytes, repeats),
        across_hosts=_measure(world, by_place, num_bytes, repeats),
    )


def _measure(
    world: dist.ProcessGroup, ranks_of_groups: Groups, num_bytes: int, repeats: int
) -> dict[str, float | None]:
    """Measure the bytes per second of each collective, in all the groups at once."""
    if len(ranks_of_groups[0]) == 1:
        return dict.fromkeys(COLLECTIVES)
    # Gloo's own all-to-all may take twice the time that the link needs.
    is_gloo = dist.get_backend(world) == "gloo"
    with subgroup(ranks_of_groups, is_full_duplex=is_gloo) as group:
        return {
            name: _bytes_per_s(run, Clock(world), group, num_bytes, repeats) * num_passes
            for name, (run, num_passes) in COLLECTIVES.items()
        }


_Run = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]
COLLECTIVES: dict[str, tuple[_Run, int]] = {
    "all-to-all": (
        lambda received, sent, group: dist.all_to_all_single(received, sent, group=group),
        1,
    ),
    "all-reduce": (lambda received, sent, group: dist.all_reduce(sent, group=group), 2),
}
"""Each collective, and how many times a ring sends the other ranks' share of its payload."""


def _bytes_per_s(
    run: _Run, clock: Clock, group: dist.ProcessGroup, max_bytes: int, repeats: int
) -> float:
    """Return the bytes per second that a rank sends to the others, if they are sent once."""

    def timed(num_bytes: int, repeats: int) -> tuple[int, list[float]]:
        """Return the payload, in whole elements, and the slowest rank's time per repeat."""
        num_elements = math.ceil(num_bytes / (ELEMENT_BYTES * group.size())) * group.size()
        sent = torch.ones(num_elements, device=clock.device)
        received = torch.ones_like(sent)
        return sent.nbytes, clock.seconds(lambda: run(received, sent, group), repeats)

    # The first run makes the connections.
    num_bytes, (_, probe_s) = timed(min(_PROBE_BYTES, max_bytes), 2)
    payload = min(max_bytes, math.ceil(num_bytes * SECONDS_PER_REPEAT / probe_s))
    num_bytes, seconds = timed(payload, repeats)
    return (group.size() - 1) / group.size() * num_bytes / statistics.median(seconds)
