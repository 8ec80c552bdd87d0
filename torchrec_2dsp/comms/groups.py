"""The process groups that this package creates, all of them here, and their release.

A group runs its collectives in order, a few at a time. Collectives that nobody waits for yet would
delay those that a step needs, and two threads could issue theirs in different orders on each rank.
Separate groups prevent both.
"""

import atexit
import gc
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchrec_2dsp._compat.c10d import end_process, exists, forget_meshes, set_timeout, timeout_of
from torchrec_2dsp._compat.torchrec import (
    NodeGroups,
    ShardingEnv2D,
    get_local_size,
    swap_node_groups,
)
from torchrec_2dsp.comms.alarm import Alarm
from torchrec_2dsp.comms.failure_detection import NoticeBoard, name_of
from torchrec_2dsp.comms.full_duplex import full_duplex_backend, wait_for_exchanges
from torchrec_2dsp.errors import MeshError, UnsupportedError
from torchrec_2dsp.mesh import Mesh2D, RankLayout


def world_group() -> dist.ProcessGroup:
    """Return the group of all ranks, or raise an error that tells how to create it."""
    if not dist.is_initialized():
        raise MeshError(
            "torch.distributed is not initialised; call "
            "torch.distributed.init_process_group(...) first"
        )
    world = dist.group.WORLD
    assert world is not None
    return world


def check_whole(group: dist.ProcessGroup | None) -> None:
    """Refuse a process group that lacks some of the world's ranks.

    The missing ranks may not make this call, so it waits for nobody.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < world_group().size():
        raise UnsupportedError(
            f"a process group has {name_of(*ranks)} of {world_group().size()} alone, but tables "
            "are sharded over all ranks of the world, not over subgroups; give the group of all "
            "ranks, or start a job for each group"
        )


class WorldGroups:
    """The process groups that this package has created in one world, oldest first.

    The functions below create groups and add them here, so that one call can release them all.
    Neither the world nor a user's group is ever added.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world = world
        """The group of all ranks."""
        self.shared: dict[Hashable, Any] = {}
        """Objects created once per world and shared, such as a mesh's groups."""
        self._groups: dict[dist.ProcessGroup, bool] = {}
        """Groups, with True if a thread other than the training thread issues their collectives."""

    @classmethod
    def current(cls) -> "WorldGroups":
        """Return the current world's groups."""
        world = world_group()
        _leave_in_order_at_exit()
        # A destroyed world's groups were destroyed with it.
        if not _CURRENT or _CURRENT[0].world is not world:
            _CURRENT[:] = [cls(world)]
        return _CURRENT[0]

    def add(self, group: dist.ProcessGroup, *, is_beside: bool = False) -> None:
        """Take over a new group, unless it is the world or here already.

        ``is_beside`` if a thread other than the training thread issues its collectives.
        """
        if group is not self.world and group not in self:
            self._groups[group] = is_beside

    def settle(self) -> None:
        """Wait for all gloo collectives that all ranks' training threads have begun.

        A profiler needs this before it stops: a collective that ends later writes into memory that
        the profiler has freed (torch 2.13).

        Collectives:
            A barrier on the world and on each training-thread group: gloo's waits for everything
            that its group has begun before.
        """
        entries = self._groups.items()
        groups = [group for group, is_beside in entries if exists(group) and not is_beside]
        for group in (self.world, *groups):
            if dist.get_backend(group) != dist.Backend.NCCL:
                dist.barrier(group)
        wait_for_exchanges()

    def __contains__(self, group: dist.ProcessGroup) -> bool:
        """Return whether a group was added and hasn't been destroyed since, here or by the user."""
        return exists(group) and group in self._groups

    def forget(self) -> None:
        """Destroy all groups and forget shared objects, without waiting for other ranks."""
        self.shared.clear()
        for group in reversed(self._groups):
            if exists(group):
                dist.destroy_process_group(group)
        self._groups.clear()


_CURRENT: list[WorldGroups] = []
"""The current world's groups, if any."""


def release_groups() -> None:
    """Destroy all process groups that this package has created, on all ranks together.

    A program that trains one model after another calls this in between, once the first model's
    pipelines, batches and asynchronous saves are over. Models in this
    world can't be used afterwards. A group's threads end when nothing refers to it any more, so
    delete the model first.

    Example::

        for plan in plans:
            model = tdsp.ModelParallel2D(make_model(), plan=plan, sharders=sharders)
            train(model)
            del model
            tdsp.release_groups()

    Collectives:
        One barrier on the world. Ranks that leave while peers still use a gloo group abort at
        interpreter exit.
    """
    dist.barrier(world_group())
    WorldGroups.current().forget()
    forget_meshes()
    # Traced modules and saved states refer to each other. Until they are collected, they keep
    # tables, and groups' threads and files alive. What a backward has kept goes in a second pass.
    gc.collect()
    gc.collect()


def leave_world() -> None:
    """Destroy the current world's groups, and their threads.

    A gloo thread that still runs during interpreter shutdown may abort the process. It runs
    as long as anything refers to its group.

    Collectives:
        One barrier on the world.
    """
    dist.barrier(world_group())
    NoticeBoard.close_all()
    dist.destroy_process_group()
    _CURRENT.clear()
    forget_meshes()
    gc.collect()


@cache
def _leave_in_order_at_exit() -> None:
    """Register, once, a clean-up for programs that don't destroy their process group."""
    atexit.register(_forget_groups)


def _forget_groups() -> None:
    """Destroy this package's groups, but not the user's."""
    if NoticeBoard.close_all():
        # NCCL's clean-up may wait for kernels that will never run, and crash while others end.
        end_process(1)
    for groups in _CURRENT:
        groups.forget()
    _CURRENT.clear()


def own_group(
    group: dist.ProcessGroup, device: torch.device, name: str, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a group with the same ranks and timeout, for collectives independent of all others.

    Collectives:
        The group's creation.
    """
    ranks = dist.get_process_group_ranks(group)
    created = dist.new_group(
        ranks,
        timeout=timeout_of(group, device.type),
        backend=backend,
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        group_desc=name,
    )
    # Other threads use gloo, whatever the training thread uses.
    WorldGroups.current().add(cast(dist.ProcessGroup, created), is_beside=backend is not None)
    return cast(dist.ProcessGroup, created)


def own_subgroup(
    sets: Sequence[Sequence[int]], device_type: str, name: str, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a group for each set of ranks, with the world's timeout, and return this rank's.

    Each rank of the world is in exactly one set.

    Collectives:
        The groups' creation, which all ranks of the world call.
    """
    timeout = timeout_of(WorldGroups.current().world, device_type)
    group, _ = dist.new_subgroups_by_enumeration(
        [list(ranks) for ranks in sets], timeout=timeout, backend=backend, group_desc=name
    )
    return _added(cast(dist.ProcessGroup, group))


def own_mesh(
    ranks: torch.Tensor,
    device_type: str,
    axes: tuple[str, ...],
    backends: Mapping[str, str | None] | None = None,
) -> DeviceMesh:
    """Create a mesh of world ranks for torch and TorchRec, whose groups have the world's timeout.

    ``backends`` lists the axes whose backend isn't the world's. Any other axis's group is the
    world's if it has all of its ranks.

    Collectives:
        The groups' creation, which all ranks of the world call.
    """
    overrides = tuple(((backends or {}).get(axis), None) for axis in axes)
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=axes, backend_override=overrides)
    timeout = timeout_of(WorldGroups.current().world, device_type)
    for group in mesh.get_all_groups():
        set_timeout(group, timeout)
        _added(group)
    return mesh


def _added(group: dist.ProcessGroup) -> dist.ProcessGroup:
    WorldGroups.current().add(group)
    return group


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
        """True if rows can be summed inside hosts before they leave them."""
        return self.in_host is not None


def by_host(ranks: Sequence[int], ranks_per_host: int) -> list[list[int]] | None:
    """Group ranks by host; `None` unless several hosts have equally many ranks, more than one.

    Example:
        >>> from torchrec_2dsp.comms.groups import by_host
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


def _is_gloo(world: dist.ProcessGroup) -> bool:
    return dist.get_backend(world) == dist.Backend.GLOO


class MeshGroups:
    """One mesh's process groups on this rank.

    With ``full_duplex``, in a gloo world the sharding groups' all-to-alls are those of
    `torchrec_2dsp.comms.full_duplex`; their other collectives are gloo's.

    Collectives:
        Building it creates process groups, so all ranks of the world must build it, in the same
        order relative to other group creations. `for_mesh` reuses an equal mesh's groups.
    """

    def __init__(self, mesh: Mesh2D, device_type: str, *, full_duplex: bool = False) -> None:
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
        # NCCL is full duplex by itself, and so are all groups in a full-duplex world.
        self._row_backend = full_duplex_backend() if _is_gloo(world) else None
        self.device_mesh = own_mesh(
            torch.tensor(mesh.rank_matrix()),
            device_type,
            AXIS_NAMES,
            {"shard": self._row_backend if full_duplex else None},
        )
        """TorchRec's view of the mesh, with the axes "replicate" and "shard"."""
        self.sharding_group = self.device_mesh.get_group("shard")
        """The ranks that share this rank's copy of the tables."""
        self.replica_peers = self.device_mesh.get_group("replicate")
        """The ranks that hold this rank's shard."""
        self.local_world_size = get_local_size(mesh.world_size)
        """The number of ranks on this host (LOCAL_WORLD_SIZE)."""
        # Rows travel while the training thread goes on to other collectives. Separate groups
        # keep the two from interleaving differently on two ranks.
        self.hot_rows = self._new_peers("hot_rows", [list(range(mesh.world_size))])
        """All ranks, in groups only for hot rows."""
        self.replica_rows = Peers(self.replica_peers)
        """The replica peers, in groups only for the exchange of row gradients or weights."""
        if mesh.num_groups > 1:
            holders = [list(ranks) for ranks in zip(*mesh.rank_matrix(), strict=True)]
            self.replica_rows = self._new_peers("replica_rows", holders)
        everyone = own_subgroup([list(range(mesh.world_size))], device_type, "alarm", None)
        self.alarm = Alarm(everyone, torch.device(device_type), self.board)
        """The alarm that raises one rank's error on all ranks."""
        self._node_groups: NodeGroups = (None, None, None)

    def _new_peers(self, name: str, sets: list[list[int]]) -> Peers:
        """Create groups for the exchange of rows."""
        backend = self._row_backend
        device_type = self.device_mesh.device_type
        everyone = own_subgroup(sets, device_type, name, backend)
        set_hosts = [by_host(ranks, self.local_world_size) for ranks in sets]
        layered = [hosts for hosts in set_hosts if hosts is not None]
        if len(layered) < len(set_hosts):
            return Peers(everyone)
        in_host = [ranks for hosts in layered for ranks in hosts]
        across = [list(ranks) for hosts in layered for ranks in zip(*hosts, strict=True)]
        return Peers(
            everyone,
            own_subgroup(in_host, device_type, f"{name}_in_host", backend),
            own_subgroup(across, device_type, f"{name}_across", backend),
        )

    @classmethod
    def for_mesh(cls, mesh: Mesh2D, device_type: str, *, full_duplex: bool = False) -> "MeshGroups":
        """Return the groups of ``mesh`` in the current world, created on first use and shared."""
        key = (mesh, device_type, full_duplex and _is_gloo(world_group()))
        shared = WorldGroups.current().shared
        if key not in shared:
            shared[key] = cls(mesh, device_type, full_duplex=full_duplex)
        groups: MeshGroups = shared[key]
        return groups

    def sharding_env(self) -> ShardingEnv2D:
        """Return the environment for TorchRec's sharded modules."""
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
        """Make this mesh's node groups TorchRec's module-level ones, inside the context."""
        others = swap_node_groups(self._node_groups)
        try:
            yield
        finally:
            self._node_groups = swap_node_groups(others)
        timeout = timeout_of(self.world, self._device_type)
        for group in filter(None, self._node_groups[:2]):
            # TorchRec creates them without it.
            set_timeout(group, timeout)
            self._created.add(group)
