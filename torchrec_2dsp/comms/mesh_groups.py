"""`MeshGroups`: the process groups of a `Mesh2D`, created and closed in one order on all ranks."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchrec_2dsp._compat.c10d import set_timeout, timeout_of
from torchrec_2dsp._compat.torchrec import (
    NodeGroupCache,
    ShardingEnv2D,
    get_local_size,
    node_group_cache,
)
from torchrec_2dsp.comms.alarm import Alarm
from torchrec_2dsp.comms.full_duplex import full_duplex_backend
from torchrec_2dsp.comms.notice_board import NoticeBoard
from torchrec_2dsp.comms.peers import Peers, by_host
from torchrec_2dsp.errors import MeshError
from torchrec_2dsp.mesh.mesh2d import Mesh2D, RankLayout

AXIS_NAMES = ("replicate", "shard")


def world_group() -> dist.ProcessGroup:
    """The group of all ranks; without one, an error says how to create it."""
    if not dist.is_initialized():
        raise MeshError(
            "torch.distributed is not initialised; call "
            "torch.distributed.init_process_group(...) first"
        )
    world = dist.group.WORLD
    assert world is not None
    return world


class MeshGroups:
    """The process groups of one mesh on this rank.

    Collectives:
        Building it creates process groups, so all ranks of the world must do it, in the same
        order relative to other group creations. `for_mesh` reuses the groups of an equal mesh.
    """

    def __init__(self, mesh: Mesh2D, device_type: str) -> None:
        world = world_group()
        mesh.check_world(dist.get_world_size(world))
        self.mesh = mesh
        """The arithmetic behind the groups."""
        self.world = world
        """All ranks, for dense gradients and data-parallel tables."""
        self.board = NoticeBoard.of(world)
        """Where ranks post that they failed."""
        self.rank = dist.get_rank(world)
        """This rank in the world."""
        self.device_mesh = DeviceMesh(device_type, mesh.rank_matrix(), mesh_dim_names=AXIS_NAMES)
        """TorchRec's view of the mesh, with the axes "replicate" and "shard"."""
        self.sharding_group = self.device_mesh.get_group("shard")
        """The ranks that share this rank's copy of the tables."""
        self.replica_peers = self.device_mesh.get_group("replicate")
        """The ranks that hold this rank's shard."""
        self._inherit_timeout(self.sharding_group, self.replica_peers)
        self.local_world_size = get_local_size(mesh.world_size)
        """How many ranks this host has (LOCAL_WORLD_SIZE)."""
        # Rows travel while the training thread goes on to other collectives. Groups of their own
        # keep the two from interleaving differently on two ranks.
        self._own_groups: list[dist.ProcessGroup] = []
        self.hot_rows = self._new_peers("hot_rows", [list(range(mesh.world_size))])
        """All ranks, in groups that are used by nothing but the hot rows."""
        self.replica_rows = Peers(self.replica_peers)
        """The replica peers, in groups that are used by nothing but the exchange of their rows'
        gradients or weights."""
        if mesh.num_groups > 1:
            holders = [list(ranks) for ranks in zip(*mesh.rank_matrix(), strict=True)]
            self.replica_rows = self._new_peers("replica_rows", holders)
        everyone = self._new_group("alarm", [list(range(mesh.world_size))], backend=None)
        self.alarm = Alarm(everyone, torch.device(device_type), self.board)
        """Raises an error of one rank on all ranks."""
        self._node_groups = NodeGroupCache()
        self._closed = False

    def _new_peers(self, name: str, sets: list[list[int]]) -> Peers:
        """Create groups for the exchange of rows, in full duplex where the backend is gloo.

        Args:
            name: the groups' name.
            sets: sets of ranks, of which this rank belongs to one.
        """
        is_gloo = dist.get_backend(self.world) == dist.Backend.GLOO
        backend = full_duplex_backend() if is_gloo else None
        everyone = self._new_group(name, sets, backend)
        set_hosts = [by_host(ranks, self.local_world_size) for ranks in sets]
        layered = [hosts for hosts in set_hosts if hosts is not None]
        if len(layered) < len(set_hosts):
            return Peers(everyone)
        in_host = [ranks for hosts in layered for ranks in hosts]
        across = [list(ranks) for hosts in layered for ranks in zip(*hosts, strict=True)]
        return Peers(
            everyone,
            self._new_group(f"{name}_in_host", in_host, backend),
            self._new_group(f"{name}_across", across, backend),
        )

    def _new_group(
        self, name: str, sets: list[list[int]], backend: str | None
    ) -> dist.ProcessGroup:
        """Create a group for each set, and return that of this rank's set."""
        timeout = timeout_of(self.world, self.device_mesh.device_type)
        group, _ = dist.new_subgroups_by_enumeration(
            sets, timeout=timeout, backend=backend, group_desc=name
        )
        self._own_groups.append(cast(dist.ProcessGroup, group))
        return self._own_groups[-1]

    @classmethod
    def for_mesh(cls, mesh: Mesh2D, device_type: str) -> "MeshGroups":
        """The groups of ``mesh`` in the current world, created on first use and then shared."""
        world = world_group()
        mesh.check_world(dist.get_world_size(world))
        _leave_in_order_at_exit()
        # The groups of a destroyed world were destroyed with it.
        for key, groups in list(_GROUPS.items()):
            if groups.world is not world or groups._closed:
                del _GROUPS[key]
        if (mesh, device_type) not in _GROUPS:
            _GROUPS[mesh, device_type] = cls(mesh, device_type)
        return _GROUPS[mesh, device_type]

    def sharding_env(self) -> ShardingEnv2D:
        """The environment that TorchRec's sharded modules take."""
        return ShardingEnv2D(
            sharding_pg=self.sharding_group,
            replica_pg=self.replica_peers,
            global_pg=self.world,
            device_mesh=self.device_mesh,
            node_group_size=self.mesh.node_group_size(self.local_world_size),
            use_inter_host_allreduce=self.mesh.layout is RankLayout.CONTIGUOUS,
        )

    @contextmanager
    def node_groups(self) -> Iterator[None]:
        """A context in which TorchRec's module-level node groups are those of this mesh."""
        with node_group_cache(self._node_groups):
            yield
        self._inherit_timeout(*self._node_groups.groups())

    def _inherit_timeout(self, *groups: dist.ProcessGroup) -> None:
        """Set the world's timeout on groups that torch and TorchRec create without it."""
        timeout = timeout_of(self.world, self.device_mesh.device_type)
        for group in groups:
            set_timeout(group, timeout)

    def close(self) -> None:
        """Destroy the groups, newest first, on all ranks together.

        Collectives:
            One barrier on the world. Ranks that leave while peers still use a gloo group abort
            at interpreter exit.
        """
        if self._closed:
            return
        self._closed = True
        if self.world is not dist.group.WORLD:
            # The world was destroyed, and these groups with it.
            return
        dist.barrier(self.world)
        self._destroy()

    def forget(self) -> None:
        """Destroy the groups at the program's end, without waiting for other ranks."""
        if not self._closed and dist.is_initialized() and self.world is dist.group.WORLD:
            self._closed = True
            self._destroy()

    def _destroy(self) -> None:
        # The node groups are the newest; the group of an axis may be that of the world.
        groups = [self.replica_peers, self.sharding_group, *self._own_groups]
        groups += reversed(self._node_groups.groups())
        for group in reversed(groups):
            if group is not self.world:
                dist.destroy_process_group(group)
        self._node_groups.clear()


_GROUPS: dict[tuple[Mesh2D, str], MeshGroups] = {}
"""The groups of the current world, by mesh and device type."""


def leave_world() -> None:
    """Destroy all groups of the current world, and the threads behind them.

    A gloo thread that still runs while the interpreter is torn down may abort the process. It runs
    as long as anything refers to its group.

    Collectives:
        One barrier on the world.
    """
    dist.barrier(world_group())
    NoticeBoard.close_all()
    dist.destroy_process_group()
    _GROUPS.clear()
    gc.collect()


@cache
def _leave_in_order_at_exit() -> None:
    """Prepare, once, for programs that end without `destroy_process_group`."""
    atexit.register(_forget_groups)


def _forget_groups() -> None:
    """Destroy the groups that this package created, and none of the user's."""
    NoticeBoard.close_all()
    for groups in list(_GROUPS.values()):
        groups.forget()
    _GROUPS.clear()
