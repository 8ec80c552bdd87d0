"""`Partitioner2D`: TorchRec's partitioners, for options of 2D sharding types."""

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import Partitioner, ShardingOption, Topology

from torchrec_2dsp.planner.topology import group_topology
from torchrec_2dsp.planner.torchrec.sharding_types import base_types, proposed_type


class Partitioner2D(Partitioner):
    """Runs a partitioner on TorchRec's own type names, for one sharding group.

    TorchRec's partitioners place table-row-wise, table-column-wise and grid shards by those
    names, and find no rank for any other. What `GroupSizeProposer` proposes has ranks of a group
    alone, whatever the topology.
    """

    def __init__(self, inner: Partitioner | None = None) -> None:
        """``inner`` does the work: `GreedyPerfPartitioner`, TorchRec's default."""
        self.inner = GreedyPerfPartitioner() if inner is None else inner
        """The partitioner behind this one."""

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """Assign a rank to every shard, in place where ``inner`` does so."""
        names = {option.fqn: option.sharding_type for option in proposal}
        there = partitioned_topology(proposal, storage_constraint)
        with base_types(proposal):
            placed = self.inner.partition(proposal, there)
        for option in placed:
            option.sharding_type = names[option.fqn]
        return placed


def partitioned_topology(proposal: list[ShardingOption], topology: Topology) -> Topology:
    """The ranks that the shards of a proposal may have: those of its group, or all."""
    proposed = proposed_type(proposal)
    return topology if proposed is None else group_topology(topology, proposed.mesh)
