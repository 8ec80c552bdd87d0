"""Measured link speeds: on all ranks the same numbers, for the links that there are."""

import math
from dataclasses import asdict
from typing import cast

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.calibrate.collectives import LinkSpeeds, measure_link_speeds

INTRA = {"intra_host_all_to_all_bytes_per_s", "intra_host_all_reduce_bytes_per_s"}
CROSS = {"cross_host_all_to_all_bytes_per_s", "cross_host_all_reduce_bytes_per_s"}


def measure(rank: int, world_size: int, local_world_size: int) -> tuple[LinkSpeeds, int]:
    """The speeds, and the groups that are left."""
    world = dist.group.WORLD
    assert world is not None
    before = set(_world.pg_names.values())
    speeds = measure_link_speeds(
        world, local_world_size=local_world_size, num_bytes=2**18, repeats=3
    )
    return speeds, len(set(_world.pg_names.values()) - before)


@pytest.mark.parametrize(
    ("local_world_size", "measured"), [(1, CROSS), (2, INTRA | CROSS), (4, INTRA)]
)
def test_every_rank_gets_the_speeds_of_the_links_there_are(
    ranks4: RankPool, local_world_size: int, measured: set[str]
) -> None:
    (speeds, left), *others = ranks4.run(measure, local_world_size)
    assert others == [(speeds, left)] * 3
    assert left == 0
    assert speeds.local_world_size == local_world_size
    found = asdict(speeds)
    assert {name for name, value in found.items() if value is None} == (INTRA | CROSS) - measured
    assert all(math.isfinite(found[name]) and found[name] > 1e4 for name in measured)


def count(rank: int, world_size: int) -> dict[str, int]:
    assert dist.group.WORLD is not None
    with count_collectives() as seen:
        measure_link_speeds(dist.group.WORLD, local_world_size=2, num_bytes=400, repeats=2)
    assert all(one.num_bytes == 400 for one in seen.records if len(one.ranks) == 2)
    return seen.counts()


def test_the_collectives_are_those_of_the_docstring(ranks4: RankPool) -> None:
    # Two links, two collectives each, with two warm-up runs and two that count.
    each, times = 2 * (2 + 2), 2 * 2 * 2
    for counts in ranks4.run(count):
        assert counts["all_to_all_single"] == each
        assert counts["all_reduce"] == each + 2 * each + times


def refuse(rank: int, world_size: int, arguments: dict[str, int], text: str) -> None:
    assert dist.group.WORLD is not None
    with pytest.raises(ConfigError, match=text):
        measure_link_speeds(dist.group.WORLD, **arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"local_world_size": 3}, "local_world_size=3 does not divide world_size=4; pass"),
        ({"local_world_size": 0}, "local_world_size=0 is not positive; use 1 or more"),
        ({"local_world_size": 2, "repeats": 0}, "repeats=0 is not positive"),
        ({"local_world_size": 2, "num_bytes": -1}, "num_bytes=-1 is not positive"),
    ],
)
def test_bad_arguments(ranks4: RankPool, arguments: dict[str, int], text: str) -> None:
    ranks4.run(refuse, arguments, text)


def disagree(rank: int, world_size: int) -> None:
    assert dist.group.WORLD is not None
    with pytest.raises(ConfigError, match="local_world_size differs between ranks"):
        measure_link_speeds(dist.group.WORLD, local_world_size=2 if rank else 4)


def test_ranks_that_disagree_all_hear_of_it(ranks4: RankPool) -> None:
    ranks4.run(disagree)


def measure_a_part(rank: int, world_size: int) -> None:
    group = cast(dist.ProcessGroup, dist.new_subgroups(2)[0])
    with pytest.raises(ConfigError, match=r"all 4 ranks, and the group has 2; pass torch\.distr"):
        measure_link_speeds(group, local_world_size=2)
    dist.barrier()
    dist.destroy_process_group(group)


def test_a_part_of_the_world_is_refused(ranks4: RankPool) -> None:
    ranks4.run(measure_a_part)
