"""`OpenPlanner`: TorchRec's planner, with what it was made of and what it found."""

from torch import nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import Enumerator, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder


class OpenPlanner(EmbeddingShardingPlanner):
    """TorchRec's planner, whose parts and whose choice have public names."""

    @property
    def batch_size(self) -> int:
        """Samples per rank and step."""
        return self._batch_size

    @property
    def enumerator(self) -> Enumerator:
        """What lists the options of each table."""
        return self._enumerator

    @property
    def compute_device(self) -> str:
        """The kind of device that the topology has."""
        return self._topology.compute_device

    @property
    def best_options(self) -> list[ShardingOption]:
        """The options that became the last plan; none without one."""
        return self._best_plan or []

    def forget_plan(self) -> None:
        """Know of no plan, as before the first one."""
        self._best_plan = None

    def unreserved(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> Topology:
        """The machines with the memory that is left for tables."""
        return self._storage_reservation.reserve(
            topology=self._topology,
            batch_size=self._batch_size,
            module=module,
            sharders=sharders,
            constraints=self._constraints,
        )
