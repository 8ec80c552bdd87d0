"""Rank arithmetic: its laws, and that it is TorchRec's."""

from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
from hypothesis import given, strategies as st
from torchrec.distributed.model_parallel import DMPCollection

from tests.support.plans import layouts, meshes
from torchrec_2dsp import Mesh2D, RankLayout, TwoDError
from torchrec_2dsp.errors import MeshError

STRIDED, CONTIGUOUS = RankLayout.STRIDED, RankLayout.CONTIGUOUS


@given(meshes)
def test_position_and_rank_are_inverses(mesh: Mesh2D) -> None:
    positions = [(mesh.group_of(rank), mesh.shard_index(rank)) for rank in range(mesh.world_size)]
    assert [mesh.rank_at(*position) for position in positions] == list(range(mesh.world_size))
    assert len(set(positions)) == mesh.world_size


@given(meshes)
def test_groups_and_peers_partition_the_world(mesh: Mesh2D) -> None:
    world = list(range(mesh.world_size))
    groups = {mesh.sharding_group(rank) for rank in world}
    peers = {mesh.replica_peers(rank) for rank in world}
    assert sorted(rank for group in groups for rank in group) == world
    assert sorted(rank for group in peers for rank in group) == world
    assert {len(group) for group in groups} == {mesh.group_size}
    assert {len(group) for group in peers} == {mesh.num_groups}
    # A group and the peers of one rank share that rank and no other.
    for rank in world:
        assert set(mesh.sharding_group(rank)) & set(mesh.replica_peers(rank)) == {rank}


@given(meshes)
def test_positions_index_groups_and_peers(mesh: Mesh2D) -> None:
    for rank in range(mesh.world_size):
        assert mesh.sharding_group(rank)[mesh.shard_index(rank)] == rank
        assert mesh.replica_peers(rank)[mesh.group_of(rank)] == rank
        assert tuple(mesh.rank_matrix()[mesh.group_of(rank)]) == mesh.sharding_group(rank)


@given(meshes)
def test_the_groups_are_those_of_torchrec(mesh: Mesh2D) -> None:
    wrapper = SimpleNamespace(_device=torch.device("cpu"))
    with patch("torchrec.distributed.model_parallel.DeviceMesh", MagicMock()) as made:
        DMPCollection._create_process_groups(
            wrapper,  # type: ignore[arg-type]
            global_rank=0,
            world_size=mesh.world_size,
            local_size=mesh.group_size,
            use_inter_host_allreduce=mesh.layout is CONTIGUOUS,
        )
    assert made.call_args.kwargs["mesh"] == mesh.rank_matrix()
    assert made.call_args.kwargs["mesh_dim_names"] == ("replicate", "shard")


def test_layouts_by_example() -> None:
    strided, contiguous = Mesh2D(2, 4), Mesh2D(2, 4, CONTIGUOUS)
    assert strided.layout is STRIDED
    assert (strided.sharding_group(3), strided.replica_peers(3)) == ((1, 3, 5, 7), (2, 3))
    assert (contiguous.sharding_group(3), contiguous.replica_peers(3)) == ((0, 1, 2, 3), (3, 7))


@given(st.integers(1, 48), st.integers(1, 48), layouts)
def test_for_world_takes_divisors_only(
    world_size: int, group_size: int, layout: RankLayout
) -> None:
    if world_size % group_size == 0:
        mesh = Mesh2D.for_world(world_size, group_size=group_size, layout=layout)
        assert mesh == Mesh2D(world_size // group_size, group_size, layout)
        mesh.check_world(world_size)
    else:
        with pytest.raises(MeshError, match=f"group_size={group_size} does not divide"):
            Mesh2D.for_world(world_size, group_size=group_size, layout=layout)


def test_errors_list_what_is_valid() -> None:
    with pytest.raises(
        MeshError,
        match=r"^group_size=6 does not divide world_size=64; use one of 1, 2, 4, 8, 16, 32, 64$",
    ):
        Mesh2D.for_world(64, group_size=6)
    with pytest.raises(MeshError, match=r"group_size=0 .* use one of 1, 2, 4$"):
        Mesh2D.for_world(4, group_size=0)
    with pytest.raises(MeshError, match=r"world_size=0 is not a positive integer"):
        Mesh2D.for_world(0, group_size=1)
    with pytest.raises(
        MeshError,
        match=r"^Mesh2D\(2x2, strided\) has 4 ranks but the world has 8; build it with "
        r"Mesh2D\.for_world\(8, group_size=\.\.\.\)$",
    ):
        Mesh2D(2, 2).check_world(8)
    with pytest.raises(MeshError, match=r"rank=4 is not in 0\.\.3 of Mesh2D\(2x2, strided\)"):
        Mesh2D(2, 2).group_of(4)
    with pytest.raises(MeshError, match=r"groups are 0\.\.1, shard indices 0\.\.2"):
        Mesh2D(2, 3).rank_at(0, 3)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", None])
@pytest.mark.parametrize("field", ["num_groups", "group_size"])
def test_sizes_are_positive_integers(field: str, size: object) -> None:
    sizes: dict[str, object] = {"num_groups": 2, "group_size": 2, field: size}
    with pytest.raises(MeshError, match=f"{field}={size!r} is not a positive integer"):
        Mesh2D(**sizes)  # type: ignore[arg-type]


def test_a_layout_is_a_rank_layout() -> None:
    with pytest.raises(MeshError, match=r"layout='strided' is not a RankLayout; use one of Rank"):
        Mesh2D(2, 2, "strided")  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [Mesh2D(2, 2).group_of, Mesh2D(2, 2).shard_index])
@pytest.mark.parametrize("rank", [-1, 4])
def test_ranks_outside_the_world_are_refused(call: object, rank: int) -> None:
    with pytest.raises(MeshError, match=f"rank={rank}"):
        call(rank)  # type: ignore[operator]


def test_errors_are_also_the_builtin_ones() -> None:
    assert issubclass(MeshError, TwoDError)
    assert issubclass(MeshError, ValueError)


@pytest.mark.parametrize(
    ("mesh", "local_world_size", "expected"),
    [
        (Mesh2D(2, 4, STRIDED), 4, 2),
        (Mesh2D(2, 4, CONTIGUOUS), 4, 4),
        (Mesh2D(2, 4, CONTIGUOUS), 2, 2),
        (Mesh2D(4, 2, STRIDED), 4, 1),
        (Mesh2D(1, 8), 4, 4),
        (Mesh2D(8, 1), 4, 1),
        (Mesh2D(1, 4), 8, 4),
        # Group 0 of 3 + 3 ranks has two ranks on the first host and one on the second.
        (Mesh2D(2, 3, CONTIGUOUS), 2, 1),
    ],
)
def test_node_group_size(mesh: Mesh2D, local_world_size: int, expected: int) -> None:
    assert mesh.node_group_size(local_world_size) == expected


@given(meshes, st.integers(1, 12))
def test_node_groups_tile_a_sharding_group(mesh: Mesh2D, local_world_size: int) -> None:
    size = mesh.node_group_size(local_world_size)
    assert mesh.group_size % size == 0
    if size > 1:
        for group in mesh.rank_matrix():
            hosts = [rank // local_world_size for rank in group]
            assert {hosts.count(host) for host in hosts} == {size}


def test_node_group_size_needs_a_host() -> None:
    with pytest.raises(MeshError, match="local_world_size=0 is not a positive integer"):
        Mesh2D(2, 2).node_group_size(0)
