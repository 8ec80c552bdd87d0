"""The topology of a sharding group, and the bandwidth between replica peers."""

import pytest
from hypothesis import given, strategies as st
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import (
    BasicCommsBandwidths,
    CustomTopologyData,
    Storage,
)

import torchrec_2dsp as tdsp
from tests.unit.test_planner import AnyTypeSharder, bags, constrained, planner_for, world
from torchrec_2dsp.planner.topology import group_topology, peer_bandwidth_bytes_per_ms

INTRA, INTER = 1_000.0, 10.0
STRIDED, CONTIGUOUS = tdsp.RankLayout.STRIDED, tdsp.RankLayout.CONTIGUOUS


@given(
    num_groups=st.sampled_from([1, 2, 4]),
    group_size=st.sampled_from([1, 2, 4]),
    local_world_size=st.sampled_from([1, 2, 4, 8, 16]),
    layout=st.sampled_from(tdsp.RankLayout),
)
def test_a_groups_topology_is_the_worlds_but_for_the_ranks(
    num_groups: int, group_size: int, local_world_size: int, layout: tdsp.RankLayout
) -> None:
    mesh = tdsp.Mesh2D(num_groups, group_size, layout)
    topology = Topology(
        world_size=mesh.world_size,
        local_world_size=min(local_world_size, mesh.world_size),
        compute_device="cuda",
        hbm_cap=11,
        ddr_cap=12,
        ssd_cap=13,
        hbm_mem_bw=21.0,
        ddr_mem_bw=22.0,
        ssd_mem_bw=23.0,
        hbm_to_ddr_mem_bw=24.0,
        bwd_compute_multiplier=31.0,
        weighted_feature_bwd_compute_multiplier=32.0,
        uneven_sharding_perf_multiplier=33.0,
        generalized_comms_bandwidths=BasicCommsBandwidths(inter_host_bw=41.0, intra_host_bw=42.0),
    )

    group = group_topology(topology, mesh)

    assert group.world_size == len(group.devices) == group_size
    assert group.local_world_size == mesh.node_group_size(topology.local_world_size)
    assert all(device.storage == Storage(hbm=11, ddr=12, ssd=13) for device in group.devices)
    assert [device.rank for device in group.devices] == list(range(group_size))
    for name in (
        "compute_device",
        "hbm_mem_bw",
        "ddr_mem_bw",
        "ssd_mem_bw",
        "hbm_to_ddr_mem_bw",
        "bwd_compute_multiplier",
        "weighted_feature_bwd_compute_multiplier",
        "uneven_sharding_perf_multiplier",
        "comms_bandwidths",
    ):
        assert getattr(group, name) == getattr(topology, name), name


def test_a_rank_of_a_group_has_the_memory_of_the_smallest_peer() -> None:
    topology = Topology(
        world_size=4,
        compute_device="cpu",
        custom_topology_data=CustomTopologyData({"ddr_cap": [40, 30, 20, 50]}, world_size=4),
    )

    strided = group_topology(topology, tdsp.Mesh2D(2, 2, STRIDED))
    contiguous = group_topology(topology, tdsp.Mesh2D(2, 2, CONTIGUOUS))

    assert [device.storage.ddr for device in strided.devices] == [30, 20]
    assert [device.storage.ddr for device in contiguous.devices] == [20, 30]


@pytest.mark.parametrize(
    ("mesh", "local_world_size", "expected"),
    [
        (tdsp.Mesh2D(2, 4, STRIDED), 4, INTRA),
        (tdsp.Mesh2D(2, 4, CONTIGUOUS), 4, INTER),
        (tdsp.Mesh2D(2, 4, CONTIGUOUS), 8, INTRA),
        (tdsp.Mesh2D(4, 2, STRIDED), 2, INTER),
        (tdsp.Mesh2D(3, 2, STRIDED), 2, INTER),  # some peers share a host, not all
        (tdsp.Mesh2D(2, 1), 1, INTER),
    ],
)
def test_the_bandwidth_between_peers(
    mesh: tdsp.Mesh2D, local_world_size: int, expected: float
) -> None:
    topology = world(mesh.world_size, local_world_size, intra_host_bw=INTRA, inter_host_bw=INTER)

    assert peer_bandwidth_bytes_per_ms(topology, mesh) == expected


def test_a_topology_of_a_group_is_taken_where_it_tells_enough() -> None:
    mesh = tdsp.Mesh2D(2, 2, STRIDED)
    of_group = world(2, 2)
    constraints = constrained("table_row_wise")

    # Two ranks of a group on one host leave only one host size, that of the world.
    assert group_topology(of_group, mesh) is of_group
    by_group = planner_for(mesh, of_group, constraints=constraints)
    by_world = planner_for(mesh, world(4, 4), constraints=constraints)
    sharders = [AnyTypeSharder()]
    assert by_group.plan(bags(), sharders) == by_world.plan(bags(), sharders)  # pyright: ignore

    with pytest.raises(
        tdsp.errors.ConfigError, match="Pass the topology of the whole world: world_size=4"
    ):
        planner_for(mesh, world(2, 1))


def test_a_topology_of_another_size_is_refused() -> None:
    with pytest.raises(
        tdsp.errors.ConfigError, match=r"world_size=8, but Mesh2D\(2x2, strided\) has 4 ranks; pass"
    ):
        planner_for(tdsp.Mesh2D(2, 2), world(8))


def test_pods_are_refused() -> None:
    topology = Topology(world_size=8, local_world_size=2, pod_size=2, compute_device="cpu")

    with pytest.raises(tdsp.errors.UnsupportedError, match="pods of 4 ranks on hosts of 2"):
        planner_for(tdsp.Mesh2D(2, 4), topology)
