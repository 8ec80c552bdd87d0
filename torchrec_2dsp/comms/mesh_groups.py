"""A mesh's process groups, created and closed in one order on all ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp._compat.c10d import set_timeout, timeout_of
from torchrec_2dsp._compat.torchrec import (
    NodeGroupCache,
    ShardingEnv2D,
    get_local_size,
    node_group_cache,
)
from torchrec_2dsp.comms.alarm import Alarm
from torchrec_2dsp.comms.full_duplex import full_duplex_backend
from torchrec_2dsp.comms.groups import WorldGroups, own_mesh, own_subgroup, world_group
from torchrec_2dsp.comms.notice_board import NoticeBoard
from torchrec_2dsp.mesh import Mesh2D, RankLayout


@dataclass(frozen=True)
class Peers:
    """Groups of ranks that exchange rows: replica peers, or row owners and askers."""

    everyone: dist.ProcessGroup
    """All ranks that exchange rows."""

    in_host: dist.ProcessGroup | None = None
    """The ranks on this host, if several hosts have several ranks each."""

    across: dist.ProcessGroup | None = None
    """One rank per host, at this rank's place in the host; set together with ``in_host``."""

    @property
    def is_layered(self) -> bool:
        """Whether rows can be summed inside hosts before they leave them."""
        return self.in_host is not None


def by_host(ranks: Sequence[int], ranks_per_host: int) -> list[list[int]] | None:
    """Group ranks by host; `None` unless several hosts have equally many, more than one.

    Example:
        >>> from torchrec_2dsp.comms.mesh_groups import by_host
        >>> by_host([0, 2, 4, 6], ranks_per_host=4)
        [[0, 2], [4, 6]]
        >>> by_host([0, 2, 4, 6], ranks_per_host=2) is None
        True
    """
    hosts: dict[int, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(rank // ranks_per_host, []).append(rank)
    sizes = {len(peers) for peers in hosts.values()}
    return list(hosts.values()) if len(hosts) > 1 and len(sizes) == 1 and sizes != {1} else None


AXIS_NAMES = ("replicate", "shard")


class MeshGroups:
    """One mesh's process groups on this rank.

    Collectives:
        Building it creates process groups, so all ranks of the world must do it, in the same
        order relative to other group creations. `for_mesh` reuses the groups of an equal mesh.
    """

    def __init__(self, mesh: Mesh2D, device_type: str) -> None:
        world = world_group()
        mesh.check_world(dist.get_world_size(world))
        self.mesh = mesh
        """The rank arithmetic."""
        self.world = world
        """All ranks, for dense gradients and data-parallel tables."""
        self.board = NoticeBoard.of(world)
        """The board on which ranks post failures."""
        self.rank = dist.get_rank(world)
        """This rank in the world."""
        self._created = WorldGroups.current()
        self._device_type = device_type
        self.device_mesh = own_mesh(torch.tensor(mesh.rank_matrix()), device_type, AXIS_NAMES)
        """TorchRec's view of the mesh, with the axes "replicate" and "shard"."""
        self.sharding_group = self.device_mesh.get_group("shard")
        """The ranks that share this rank's copy of the tables."""
        self.replica_peers = self.device_mesh.get_group("replicate")
        """The ranks that hold this rank's shard."""
        self.local_world_size = get_local_size(mesh.world_size)
        """This host's number of ranks (LOCAL_WORLD_SIZE)."""
        # Rows travel while the training thread goes on to other collectives. Groups of their own
        # keep the two from interleaving differently on two ranks.
        self._own_groups = [self.sharding_group, self.replica_peers]
        self.hot_rows = self._new_peers("hot_rows", [list(range(mesh.world_size))])
        """All ranks, in groups for hot rows alone."""
        self.replica_rows = Peers(self.replica_peers)
        """The replica peers, in groups for the exchange of row gradients or weights alone."""
        if mesh.num_groups > 1:
            holders = [list(ranks) for ranks in zip(*mesh.rank_matrix(), strict=True)]
            self.replica_rows = self._new_peers("replica_rows", holders)
        everyone = self._new_group("alarm", [list(range(mesh.world_size))], backend=None)
        self.alarm = Alarm(everyone, torch.device(device_type), self.board)
        """Raises an error of one rank on all ranks."""
        self._node_groups = NodeGroupCache()

    def _new_peers(self, name: str, sets: list[list[int]]) -> Peers:
        """Create groups for the exchange of rows, in full duplex on gloo."""
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
        """Create a group for each set, and return this rank's."""
        timeout = timeout_of(self.world, self._device_type)
        self._own_groups.append(own_subgroup(sets, timeout, name, backend))
        return self._own_groups[-1]

    @classmethod
    def for_mesh(cls, mesh: Mesh2D, device_type: str) -> "MeshGroups":
        """Return the groups of ``mesh`` in the current world, created on first use and shared."""
        mesh.check_world(dist.get_world_size(world_group()))
        shared = WorldGroups.current().shared
        if (mesh, device_type) not in shared:
            shared[mesh, device_type] = cls(mesh, device_type)
        groups: MeshGroups = shared[mesh, device_type]
        return groups

    def sharding_env(self) -> ShardingEnv2D:
        """Return the environment that TorchRec's sharded modules take."""
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
        """Make TorchRec's module-level node groups this mesh's, inside the context."""
        with node_group_cache(self._node_groups):
            yield
        timeout = timeout_of(self.world, self._device_type)
        for group in reversed(self._node_groups.groups()):
            # TorchRec creates them without it.
            set_timeout(group, timeout)
            self._created.add(group)

    def close(self) -> None:
        """Destroy the groups, newest first, on all ranks together.

        Collectives:
            One barrier on the world. Ranks that leave while peers still use a gloo group abort
            at interpreter exit.
        """
        if self.alarm.group not in self._created:
            # They were destroyed before, maybe with their world.
            return
        dist.barrier(self.world)
        self._created.destroy([*self._own_groups, *self._node_groups.groups()])
        self._node_groups.clear()
        key = (self.mesh, self._device_type)
        if self._created.shared.get(key) is self:
            del self._created.shared[key]
