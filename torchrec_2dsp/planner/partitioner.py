"""`Partitioner2D`: TorchRec's partitioners, for options of 2D sharding types."""

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import Partitioner, ShardingOption, Topology

from torchrec_2dsp.planner.sharding_types import base_types


class Partitioner2D(Partitioner):
    """Runs a partitioner on TorchRec's own type names.

    TorchRec's partitioners place table-row-wise, table-column-wise and grid shards by those
    names, and find no rank for any other.
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
        with base_types(proposal):
            placed = self.inner.partition(proposal, storage_constraint)
        for option in placed:
            option.sharding_type = names[option.fqn]
        return placed
