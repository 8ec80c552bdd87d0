"""Spans and traffic, against every message counted one by one."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given, strategies as st

from torchrec_2dsp import Mesh2D, RankLayout
from torchrec_2dsp.cost.collectives import (
    Span,
    Traffic,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_from,
    places_to_all,
    reduce_scatter,
)

Messages = list[tuple[int, int, float]]
"""From which world rank to which, and how many bytes."""

SIZES = st.sampled_from([1, 2, 4])
BYTES = st.floats(0, 1e6)
LAYOUTS = st.sampled_from(list(RankLayout))


def counted(messages: Messages, local_world_size: int) -> Traffic:
    """The busiest rank's bytes inside its host, and the busiest host's, by direction."""
    local: defaultdict[tuple[str, int], float] = defaultdict(float)
    link: defaultdict[tuple[str, int], float] = defaultdict(float)
    for source, target, num_bytes in messages:
        hosts = source // local_world_size, target // local_world_size
        if hosts[0] == hosts[1]:
            local["out", source] += num_bytes
            local["in", target] += num_bytes
        else:
            link["out", hosts[0]] += num_bytes
            link["in", hosts[1]] += num_bytes
    return Traffic(max(local.values(), default=0.0), max(link.values(), default=0.0))


def close(one: Traffic, other: Traffic) -> bool:
    return tuple(one) == pytest.approx(tuple(other), rel=1e-9, abs=1e-6)


@given(SIZES, SIZES, SIZES, LAYOUTS, st.data())
def test_all_to_alls_move_what_their_messages_do(
    num_groups: int, group_size: int, local: int, layout: RankLayout, data: st.DataObject
) -> None:
    mesh = Mesh2D(num_groups, group_size, layout)
    local_world_size = min(local, mesh.world_size)
    span = Span.of_sharding_groups(mesh, local_world_size)
    to_each = data.draw(st.lists(BYTES, min_size=group_size, max_size=group_size))
    groups = mesh.rank_matrix()
    messages = [
        (group[source], group[target], to_each[source])
        for group in groups
        for source, target in itertools.permutations(range(group_size), 2)
    ]
    assert close(all_to_all_from(span, to_each), counted(messages, local_world_size))
    back = [(target, source, num_bytes) for source, target, num_bytes in messages]
    assert close(all_to_all_from(span, to_each), counted(back, local_world_size))
    even = all_to_all_from(span, [7.0] * group_size)
    assert close(all_to_all(span, 7.0), even)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_places_move_what_their_messages_do(
    num_hosts: int, local: int, data: st.DataObject
) -> None:
    world = num_hosts * local
    to_each = data.draw(st.lists(BYTES, min_size=world, max_size=world))
    messages = [
        (rank, other * local + rank % local, to_each[rank])
        for rank in range(world)
        for other in range(num_hosts)
        if other != rank // local
    ]
    found = places_to_all(Span.of_world(world, local), to_each)
    assert close(found, counted(messages, local))


@given(SIZES, SIZES, SIZES, BYTES)
def test_rings_move_what_their_messages_do(
    num_groups: int, group_size: int, local: int, num_bytes: float
) -> None:
    # Contiguous groups, so that a ring leaves each host once.
    mesh = Mesh2D(num_groups, group_size, RankLayout.CONTIGUOUS)
    local_world_size = min(local, mesh.world_size)
    span = Span.of_sharding_groups(mesh, local_world_size)

    def ring(rounds: int, part: float) -> Traffic:
        messages = [
            (group[place], group[(place + 1) % group_size], rounds * part)
            for group in mesh.rank_matrix()
            for place in range(group_size)
            if group_size > 1
        ]
        return counted(messages, local_world_size)

    steps = group_size - 1
    assert close(all_reduce(span, num_bytes), ring(2 * steps, num_bytes / group_size))
    assert close(reduce_scatter(span, num_bytes), ring(steps, num_bytes / group_size))
    assert close(all_gather(span, num_bytes), ring(steps, num_bytes))


@pytest.mark.parametrize(
    ("mesh", "shards", "peers"),
    [
        (Mesh2D(2, 4), Span(4, 2, 2), Span(2, 2, 2)),
        (Mesh2D(2, 4, RankLayout.CONTIGUOUS), Span(4, 4, 1), Span(2, 1, 4)),
        (Mesh2D(1, 8), Span(8, 4, 1), Span(1, 1, 4)),
        (Mesh2D(8, 1), Span(1, 1, 4), Span(8, 4, 1)),
    ],
    ids=str,
)
def test_spans_of_meshes_on_hosts_of_four(mesh: Mesh2D, shards: Span, peers: Span) -> None:
    assert Span.of_sharding_groups(mesh, 4) == shards
    assert Span.of_replica_peers(mesh, 4) == peers


def test_parts_of_a_span() -> None:
    span = Span(8, 4, 1)
    assert (span.num_hosts, span.crosses_hosts) == (2, True)
    assert span.inside_hosts() == Span(4, 4, 1)
    assert span.across_hosts() == Span(2, 1, 4)
    assert not span.inside_hosts().crosses_hosts
