"""The topologies of a sharding group and its replica peers, and the memory that one lacks."""

from collections.abc import Sequence

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

REMEDY = (
    "use a larger group_size, reserve a smaller share of the memory (storage_reservation), or "
    "allow more sharding types and kernels (constraints)"
)

_MEMORY_KINDS = ("hbm", "ddr", "ssd")


def world_topology(mesh: Mesh2D) -> Topology:
    """Return the topology that TorchRec assumes of a mesh's world, on GPUs if there are any."""
    return TopologyFactory.create_topology(
        TrainerConfig(world_size=mesh.world_size, local_world_size=get_local_size(mesh.world_size)),
        kernel_config=KernelConfig(compute_device=get_device_type()),
    )


def group_topology(topology: Topology, mesh: Mesh2D) -> Topology:
    """Return the topology for a planner of one sharding group.

    Bandwidths stay those of ``topology``; which one a group's collective gets depends
    on how many of the group's ranks share a host. A shard is held by one rank of every group,
    so a rank of the group has the smallest memory of its replica peers.

    Args:
        topology: the whole world's, which isn't changed; or already one sharding group's, which is
            returned.
        mesh: the assignment of the world's ranks to sharding groups.

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
        _smallest([topology.devices[rank].storage for rank in mesh.replica_peers(first)])
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
    # Not through TorchRec's custom topology data, with which row-wise shards become uneven and
    # can't be trained.
    for device, storage in zip(group.devices, smallest, strict=True):
        device.storage = storage
    return group


def peer_bandwidth_bytes_per_ms(topology: Topology, mesh: Mesh2D) -> float:
    """Return the bandwidth between replica peers, over which they sync."""
    if not _is_of_world(topology, mesh):
        raise ConfigError(
            f"a topology of world_size={topology.world_size} is that of one sharding group of "
            f"{mesh}; it doesn't tell whether replica peers share a host. Pass the topology of "
            f"the whole world: world_size={mesh.world_size}, local_world_size=ranks per host"
        )
    share_hosts = all(
        len({rank // topology.local_world_size for rank in mesh.replica_peers(first)}) == 1
        for first in mesh.sharding_group(0)
    )
    return topology.intra_host_bw if share_hosts else topology.inter_host_bw


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


def _smallest(storages: Sequence[Storage]) -> Storage:
    return Storage(
        **{kind: min(getattr(storage, kind) for storage in storages) for kind in _MEMORY_KINDS}
    )


def shortfall_text(
    table: str,
    table_bytes: int,
    rank_bytes: int,
    all_tables_bytes: int,
    group_bytes: int,
    buffer_bytes: int = 0,
) -> str:
    """Describe the missing memory; return nothing if the sums alone don't explain it.

    Args:
        table: the table that needs most on one rank.
        table_bytes: the bytes that it needs there, with its smallest option.
        rank_bytes: the bytes for tables on the group's rank with most of them.
        all_tables_bytes: all tables' bytes on a group's ranks, each with its smallest option.
        group_bytes: the bytes for tables on all ranks of the group together.
        buffer_bytes: batches and vectors for all tables on a group, each with its smallest option.
    """
    largest = f"table {table!r} needs {table_bytes:,} bytes on one rank"
    if table_bytes > rank_bytes:
        return f"{largest}, {table_bytes - rank_bytes:,} more than the {rank_bytes:,} there are"
    if all_tables_bytes > group_bytes:
        return (
            f"the tables need {all_tables_bytes:,} bytes on a group, "
            f"{all_tables_bytes - group_bytes:,} more than the {group_bytes:,} there are; "
            f"{largest}, the most of all tables"
        )
    missing = all_tables_bytes + buffer_bytes - group_bytes
    if buffer_bytes and missing > 0:
        return (
            f"the tables need {all_tables_bytes:,} bytes on a group, and a step's batches "
            f"and vectors {buffer_bytes:,}, {missing:,} more than the {group_bytes:,} there are, "
            "which a smaller batch_size changes"
        )
    return ""


def no_plan_text(mesh: Mesh2D | str, missing: str, stock_text: str) -> str:
    """Describe a search that found nothing, followed by TorchRec's own text."""
    reason = f": {missing}" if missing else ""
    below = f"\n{stock_text}" if stock_text else ""
    return f"no plan fits a sharding group of {mesh}{reason}; {REMEDY}.{below}"
