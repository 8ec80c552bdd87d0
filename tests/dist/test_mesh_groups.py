"""`MeshGroups`: correct ranks on each axis, reuse, several meshes, and an orderly exit."""

import time
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.support.forks import NUM_RANKS, WAYS, count_threads
from tests.support.programs import python
from tests.support.rank_worker import GLOO_TIMEOUT
from tests.support.ranks import RankPool, error_text
from torchrec_2dsp import Mesh2D, RankLayout
from torchrec_2dsp._compat.c10d import timeout_of
from torchrec_2dsp._compat.torchrec import intra_and_cross_node_pg_2D
from torchrec_2dsp.comms.full_duplex import full_duplex_backend
from torchrec_2dsp.comms.groups import (
    MeshGroups,
    Peers,
    WorldGroups,
    leave_world,
    own_group,
    release_groups,
    world_group,
)
from torchrec_2dsp.errors import MeshError

pytestmark = pytest.mark.dealt_file

MESHES = [*(Mesh2D(2, 2, layout) for layout in RankLayout), Mesh2D(1, 4), Mesh2D(4, 1)]
AXES = ("sharding_group", "replica_peers", "hot_rows", "world")


def ranks_and_sums(rank: int, groups: MeshGroups) -> dict[str, tuple[list[int], int]]:
    """Return each group's ranks and the sum of ``2 ** rank`` over them."""
    actual = {}
    for axis in AXES:
        group = getattr(groups, axis)
        group = group.everyone if isinstance(group, Peers) else group
        total = torch.tensor(2**rank)
        dist.all_reduce(total, group=group)
        actual[axis] = (dist.get_process_group_ranks(group), int(total))
    return actual


def expected_ranks_and_sums(rank: int, mesh: Mesh2D) -> dict[str, tuple[list[int], int]]:
    world = list(range(mesh.world_size))
    ranks = {
        "sharding_group": list(mesh.sharding_group(rank)),
        "replica_peers": list(mesh.replica_peers(rank)),
        "hot_rows": world,
        "world": world,
    }
    return {axis: (members, sum(2**rank for rank in members)) for axis, members in ranks.items()}


def use_meshes(rank: int, world_size: int, meshes: list[Mesh2D]) -> list[dict[str, Any]]:
    """Use several meshes in turn, open at the same time."""
    ways = [(mesh, full_duplex) for mesh in meshes for full_duplex in (False, True)]
    opened = [MeshGroups.for_mesh(mesh, "cpu", full_duplex=way) for mesh, way in ways]
    actual = [ranks_and_sums(rank, groups) for groups in opened]
    backends = [dist.get_backend(groups.sharding_group) for groups in opened]
    assert backends == ["gloo", full_duplex_backend()] * len(meshes)
    release_groups()
    return actual


def test_groups_have_the_ranks_of_the_mesh(ranks4: RankPool) -> None:
    for rank, actual in enumerate(ranks4.run(use_meshes, MESHES)):
        expected = [expected_ranks_and_sums(rank, mesh) for mesh in MESHES]
        assert (actual[::2], actual[1::2]) == (expected, expected)


def open_twice(rank: int, world_size: int) -> tuple[bool, bool]:
    first = MeshGroups.for_mesh(Mesh2D(2, 2), "cpu")
    again = MeshGroups.for_mesh(Mesh2D(2, 2), "cpu")
    other = MeshGroups.for_mesh(MESHES[1], "cpu")
    duplex = MeshGroups.for_mesh(Mesh2D(2, 2), "cpu", full_duplex=True)
    release_groups()
    return first is again, first in (other, duplex)


def test_equal_meshes_share_groups(ranks4: RankPool) -> None:
    assert ranks4.run(open_twice) == [(True, False)] * 4


def environments(rank: int, world_size: int) -> list[tuple[object, ...]]:
    actual: list[tuple[object, ...]] = []
    for mesh in MESHES[:2]:
        groups = MeshGroups.for_mesh(mesh, "cpu")
        env = groups.sharding_env()
        assert (env.sharding_pg, env.replica_pg) == (groups.sharding_group, groups.replica_peers)
        actual.append(
            (
                env.global_rank,
                env.rank,
                env.world_size,
                env.num_sharding_groups(),
                env.node_group_size,
                env.use_inter_host_allreduce,
                groups.device_mesh.mesh.tolist(),
                groups.device_mesh.mesh_dim_names,
            )
        )
    release_groups()
    return actual


def settle(rank: int, world_size: int) -> list[bool]:
    """Begin collectives on two groups, later on rank 1; settle; return which are completed.

    The second group's collectives belong to another thread; rank 0 begins one more of them.
    """
    own, beside = (
        own_group(world_group(), torch.device("cpu"), "settled", backend)
        for backend in (None, "gloo")
    )
    time.sleep(0.2 * rank)
    work = dist.all_reduce(torch.ones(100_000), group=own, async_op=True)
    others = [dist.all_reduce(torch.ones(2), group=beside, async_op=True)] if rank == 0 else []
    WorldGroups.current().settle()
    is_over = [each is not None and each.is_completed() for each in (work, *others)]
    # Rank 0 has looked.
    dist.barrier()
    if rank:
        dist.all_reduce(torch.ones(2), group=beside)
    release_groups()
    return is_over


def test_settling_waits_for_the_training_threads_collectives_alone(ranks2: RankPool) -> None:
    assert ranks2.run(settle) == [[True, False], [True]]


def test_torchrec_gets_the_environment_of_the_mesh(ranks4: RankPool) -> None:
    for rank, actual in enumerate(ranks4.run(environments)):
        for mesh, values in zip(MESHES[:2], actual, strict=True):
            is_contiguous = mesh.layout is RankLayout.CONTIGUOUS
            assert values == (
                rank,
                mesh.shard_index(rank),
                mesh.group_size,
                mesh.num_groups,
                2,
                is_contiguous,
                mesh.rank_matrix(),
                ("replicate", "shard"),
            )


def node_group_sizes(rank: int, world_size: int) -> list[int]:
    sizes = []
    for layout in RankLayout:
        groups = MeshGroups.for_mesh(Mesh2D(2, 4, layout), "cpu")
        sizes.append(groups.sharding_env().node_group_size)
    release_groups()
    return sizes


def test_node_groups_follow_the_hosts(ranks8: RankPool) -> None:
    """On two-rank hosts, strided groups have one rank per host, contiguous groups both."""
    assert ranks8.run(node_group_sizes) == [[1, 2]] * 8


def peers_by_host(rank: int, world_size: int, mesh: Mesh2D) -> list[list[list[int]]]:
    """Return the ranks of replica peers and of hot rows: all, in this host, and one per host."""
    groups = MeshGroups.for_mesh(mesh, "cpu")
    members = [
        [
            dist.get_process_group_ranks(group)
            for group in (peers.everyone, peers.in_host, peers.across)
            if group is not None
        ]
        for peers in (groups.replica_rows, groups.hot_rows)
    ]
    release_groups()
    return members


def test_peers_that_share_hosts_have_groups_for_that(ranks8: RankPool, ranks4: RankPool) -> None:
    everyone = list(range(8))
    hot = [everyone, [2, 3], [1, 3, 5, 7]]
    for mesh, holders in (
        (Mesh2D(4, 2), [[0, 1, 2, 3], [2, 3], [1, 3]]),
        (Mesh2D(8, 1), hot),
        # One on each host, or all on one.
        (Mesh2D(4, 2, RankLayout.CONTIGUOUS), [[1, 3, 5, 7]]),
        (Mesh2D(2, 4), [[2, 3]]),
        (Mesh2D(1, 8), [[3]]),
    ):
        assert ranks8.run(peers_by_host, mesh)[3] == [holders, hot], mesh
    assert ranks4.run(peers_by_host, Mesh2D(4, 1))[3] == [[[0, 1, 2, 3]]] * 2


def timeouts(rank: int, world_size: int, meshes: list[Mesh2D]) -> list[dict[str, timedelta]]:
    """Return each group's timeout by mesh and all-to-all, TorchRec's node groups included."""
    of_meshes = []
    for mesh, full_duplex in product(meshes, (False, True)):
        groups = MeshGroups.for_mesh(mesh, "cpu", full_duplex=full_duplex)
        with groups.node_groups():
            nodes = intra_and_cross_node_pg_2D(groups.sharding_env(), torch.device("cpu"))
        named = {
            "shard": groups.sharding_group,
            "replicate": groups.replica_peers,
            "intra": nodes[0],
            "cross": nodes[1],
            "hot_rows": groups.hot_rows.everyone,
            "replica_rows": groups.replica_rows.everyone,
            "alarm": groups.alarm.group,
        }
        of_meshes.append(
            {
                name: timeout_of(cast(dist.ProcessGroup, group), "cpu")
                for name, group in named.items()
            }
        )
    release_groups()
    return of_meshes


def test_all_groups_have_the_timeout_of_the_world(two_hosts: RankPool) -> None:
    for of_meshes in two_hosts.run(timeouts, MESHES):
        for named in of_meshes:
            assert named == dict.fromkeys(named, GLOO_TIMEOUT)


def wrong_world(rank: int, world_size: int) -> list[str]:
    makers: list[Any] = [MeshGroups, MeshGroups.for_mesh]
    return [error_text(partial(make, Mesh2D(2, 4), "cpu"), MeshError) for make in makers]


def test_a_wrong_world_size_is_an_error_on_every_rank(ranks4: RankPool) -> None:
    for texts in ranks4.run(wrong_world):
        for text in texts:
            assert text == (
                "Mesh2D(2x4, strided) has 8 ranks but the world has 4; build it with "
                "Mesh2D.for_world(4, group_size=...)"
            )


def remake_the_world(rank: int, world_size: int, folder: Path) -> dict[str, tuple[list[int], int]]:
    MeshGroups.for_mesh(Mesh2D(2, 1), "cpu")
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    new = MeshGroups.for_mesh(Mesh2D(2, 1), "cpu")
    return ranks_and_sums(rank, new)


def test_a_new_world_gets_new_groups(tmp_path: Path) -> None:
    """An ended world's groups end with it."""
    with RankPool(2) as pool:
        for rank, actual in enumerate(pool.run(remake_the_world, tmp_path)):
            assert actual == expected_ranks_and_sums(rank, Mesh2D(2, 1))


def leave(rank: int, world_size: int) -> list[int]:
    """Count gloo's threads before and after leaving the world, though groups are referenced."""
    groups = MeshGroups.for_mesh(Mesh2D(1, 2), "cpu", full_duplex=True)
    actual = ranks_and_sums(rank, groups)
    assert len(actual) == len(AXES)
    before = count_threads("gloo")
    del groups
    leave_world()
    return [before, count_threads("gloo")]


def test_no_thread_of_a_group_outlives_the_world() -> None:
    """Such a thread might abort the process when the interpreter ends."""
    with RankPool(2) as pool:
        for before, after in pool.run(leave):
            assert before > 0
            assert after == 0


def test_programs_exit_with_code_0(tmp_path: Path) -> None:
    ways = list(WAYS)
    arguments = ("-m", "tests.support.forks", "ways", str(tmp_path), *ways)
    finished = python(*arguments, env={"GLOO_SOCKET_IFNAME": "lo"})
    assert finished.stdout.splitlines() == [f"{way}{' 0' * NUM_RANKS}" for way in ways], finished
