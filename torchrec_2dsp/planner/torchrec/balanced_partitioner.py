"""`BalancedPartitioner`: shards on ranks, by largest differencing and exchanges."""

from dataclasses import dataclass
from typing import cast

import numpy as np
from torchrec.distributed.planner.types import (
    Partitioner,
    Perf,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)

from torchrec_2dsp.planner.balance import (
    Assignment,
    Bins,
    Floats,
    Items,
    dealt,
)
from torchrec_2dsp.planner.torchrec.partitioner import Partitioner2D, partitioned_topology

_BY_DEVICE = "device"
_KEY_VALUE = "key_value"


class BalancedPartitioner(Partitioner):
    """Places shards that may lie on any rank more evenly than TorchRec's greedy partitioner.

    Greedy takes shards by size and gives each to the rank with least to do. Largest differencing
    (Karmarkar and Karp) decides late which rank gets what, and is nearer to even. Both are then
    improved by exchanges with the busiest rank, within memory, and the better one is taken; so a
    plan is never less even than the greedy one. Shards that share a host, or are on all ranks, stay
    where greedy puts them.

    Example:
        >>> from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        >>> import torchrec_2dsp as tdsp
        >>> planner = EmbeddingShardingPlanner(
        ...     topology=Topology(world_size=4, compute_device="cuda"),
        ...     partitioner=tdsp.BalancedPartitioner(),
        ... )
    """

    def __init__(self, inner: Partitioner | None = None) -> None:
        """``inner`` places the shards first: TorchRec's `GreedyPerfPartitioner`."""
        self.inner = Partitioner2D() if inner is None else inner
        """The partitioner that is improved upon."""

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """Assign a rank to every shard, in place where ``inner`` does so.

        Raises:
            PlannerError: ``inner`` finds no place for a shard.
        """
        there = partitioned_topology(proposal, storage_constraint)
        placed = self.inner.partition(proposal, there)
        free = [shard for option in placed if _is_free(option) for shard in option.shards]
        if not free:
            return placed
        fixed = [shard for option in placed if not _is_free(option) for shard in option.shards]
        problem = _Problem.of(free, fixed, there)
        for shard, place in zip(free, problem.solved(), strict=True):
            shard.rank = int(place)
        return placed


@dataclass(frozen=True)
class _Problem:
    """Shards that may be moved, as numbers."""

    items: Items
    bins: Bins
    start: Assignment

    @classmethod
    def of(cls, free: list[Shard], fixed: list[Shard], topology: Topology) -> "_Problem":
        items = Items(np.array([_seconds(shard) for shard in free]), _memory(free))
        fixed_ranks = np.array([_rank(shard) for shard in fixed], dtype=np.int64)
        times = np.array([device.perf.total for device in topology.devices], dtype=np.float64)
        np.add.at(times, fixed_ranks, [_seconds(shard) for shard in fixed])
        room = np.array([_kinds(device.storage) for device in topology.devices], dtype=np.float64)
        np.subtract.at(room, fixed_ranks, _memory(fixed))
        start = np.array([_rank(shard) for shard in free], dtype=np.int64)
        return cls(items, Bins(times, room), start)

    def solved(self) -> Assignment:
        """The most even assignment that was found."""
        assignment = dealt(self.items, self.bins, self.start)
        assert assignment is not None
        return assignment


def _is_free(option: ShardingOption) -> bool:
    """Whether its shards may lie on any rank, several on one."""
    return option.partition_by == _BY_DEVICE and option.compute_kernel != _KEY_VALUE


def _rank(shard: Shard) -> int:
    return cast(int, shard.rank)


def _seconds(shard: Shard) -> float:
    return cast(Perf, shard.perf).total


def _memory(shards: list[Shard]) -> Floats:
    rows = [_kinds(cast(Storage, shard.storage)) for shard in shards]
    return np.array(rows, dtype=np.float64).reshape(len(shards), 3)


def _kinds(storage: Storage) -> tuple[int, int, int]:
    return storage.hbm, storage.ddr, storage.ssd
