"""The topologies of one sharding group and of its replica peers, from that of the world."""

from collections.abc import Iterable

from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    Storage,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.utils import get_device_type

from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.errors import ConfigError, UnsupportedError
from torchrec_2dsp.mesh import Mesh2D


def world_topology(mesh: Mesh2D, device_type: str | None = None) -> Topology:
    """The topology that TorchRec assumes of the world when it is given none.

    Args:
        mesh: of all its ranks.
        device_type: where tables lie; by default on GPUs if there are some.
    """
    return TopologyFactory.create_topology(
        TrainerConfig(world_size=mesh.world_size, local_world_size=get_local_size(mesh.world_size)),
        kernel_config=KernelConfig(compute_device=device_type or get_device_type()),
    )


def group_topology(topology: Topology, mesh: Mesh2D) -> Topology:
    """The topology that a planner of one sharding group needs.

    Bandwidths stay those of ``topology``; which of them a collective of the group gets follows
    from how many of the group's ranks share a host. A shard is held by one rank of every group,
    so a rank of the group has the memory of the smallest of its replica peers.

    Args:
        topology: of the whole world, left as it is; or already of one sharding group, which is
            given back.
        mesh: the mesh that deals the world's ranks to sharding groups.

    Example:
        >>> from torchrec.distributed.planner import Topology
        >>> from torchrec_2dsp import Mesh2D
        >>> from torchrec_2dsp.planner.topology import group_topology
        >>> world = Topology(world_size=8, local_world_size=4, compute_device="cuda")
        >>> group = group_topology(world, Mesh2D(num_groups=2, group_size=4))
        >>> group.world_size, group.local_world_size
        (4, 2)
    """
    if not _is_of_world(topology, mesh):
        return topology
    smallest = [
        _smallest(topology.devices[rank].storage for rank in mesh.replica_peers(first))
        for first in mesh.sharding_group(0)
    ]
    group = TopologyFactory.create_topology(
        TrainerConfig(
            world_size=mesh.group_size,
            local_world_size=mesh.node_group_size(topology.local_world_size),
        ),
        HardwareConfig(
            hbm_mem_bw=topology.hbm_mem_bw,
            ddr_mem_bw=topology.ddr_mem_bw,
            ssd_mem_bw=topology.ssd_mem_bw,
            hbm_to_ddr_mem_bw=topology.hbm_to_ddr_mem_bw,
        ),
        KernelConfig(
            compute_device=topology.compute_device,
            bwd_compute_multiplier=topology.bwd_compute_multiplier,
            weighted_feature_bwd_compute_multiplier=(
                topology.weighted_feature_bwd_compute_multiplier
            ),
            uneven_sharding_perf_multiplier=topology.uneven_sharding_perf_multiplier,
            use_hardware_based_bandwidth=True,
            generalized_comms_bandwidths=topology.comms_bandwidths,
        ),
    )
    # Not through TorchRec's custom topology data: with it row-wise shards become uneven, which
    # can't be trained.
    for device, storage in zip(group.devices, smallest, strict=True):
        device.storage = storage
    return group


def peer_bandwidth_bytes_per_ms(topology: Topology, mesh: Mesh2D) -> float:
    """The network's share for the replica sync: the bandwidth between replica peers.

    Args:
        topology: of the whole world. One of a sharding group will do where only one host size
            explains it.
        mesh: the mesh that deals the world's ranks to sharding groups.

    Example:
        >>> from torchrec.distributed.planner import Topology
        >>> from torchrec_2dsp import Mesh2D
        >>> from torchrec_2dsp.planner.topology import peer_bandwidth_bytes_per_ms
        >>> world = Topology(
        ...     world_size=8, local_world_size=4, compute_device="cuda",
        ...     intra_host_bw=900.0, inter_host_bw=30.0,
        ... )
        >>> peer_bandwidth_bytes_per_ms(world, Mesh2D(num_groups=4, group_size=2))
        900.0
        >>> peer_bandwidth_bytes_per_ms(world, Mesh2D(num_groups=8, group_size=1))
        30.0
    """
    if _is_of_world(topology, mesh):
        host_sizes = [topology.local_world_size]
    else:
        host_sizes = [
            size
            for size in range(1, mesh.world_size + 1)
            if mesh.world_size % size == 0
            and mesh.node_group_size(size) == topology.local_world_size
        ]
    within_host = {_peers_share_hosts(mesh, size) for size in host_sizes}
    if len(within_host) != 1:
        raise ConfigError(
            f"a topology of world_size={topology.world_size} and "
            f"local_world_size={topology.local_world_size} is that of one sharding group of "
            f"{mesh}; it doesn't tell whether replica peers share a host. Pass the topology of "
            f"the whole world: world_size={mesh.world_size}, local_world_size=ranks per host"
        )
    return topology.intra_host_bw if within_host.pop() else topology.inter_host_bw


def _is_of_world(topology: Topology, mesh: Mesh2D) -> bool:
    if topology.intra_group_size != topology.local_world_size:
        raise UnsupportedError(
            f"the topology has pods of {topology.intra_group_size} ranks on hosts of "
            f"{topology.local_world_size}; a mesh knows hosts only. Leave pod_size out"
        )
    if topology.world_size not in (mesh.world_size, mesh.group_size):
        raise ConfigError(
            f"the topology has world_size={topology.world_size}, but {mesh} has "
            f"{mesh.world_size} ranks; pass the topology of the whole world, "
            f"world_size={mesh.world_size}"
        )
    return topology.world_size == mesh.world_size


def _peers_share_hosts(mesh: Mesh2D, local_world_size: int) -> bool:
    return all(
        len({rank // local_world_size for rank in mesh.replica_peers(first)}) == 1
        for first in mesh.sharding_group(0)
    )


def _smallest(storages: Iterable[Storage]) -> Storage:
    storage_list = list(storages)
    return Storage(
        hbm=min(storage.hbm for storage in storage_list),
        ddr=min(storage.ddr for storage in storage_list),
        ssd=min(storage.ssd for storage in storage_list),
    )
