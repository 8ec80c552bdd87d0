"""`Enumerator2D`: the 2D sharding types as options of TorchRec's planner."""

from collections.abc import Mapping

from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from torchrec_2dsp._compat.torchrec import sharder_data_of
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import base_type
from torchrec_2dsp.plan.sync import EXACT_SYNC, SyncConfig
from torchrec_2dsp.planner.topology import group_topology
from torchrec_2dsp.planner.torchrec.estimators import ReplicaSyncEstimator
from torchrec_2dsp.planner.torchrec.sharding_types import (
    TYPE_ORDER,
    base_constraints,
    base_types,
    searched_type,
)


class Enumerator2D(EmbeddingEnumerator):
    """Every option is the 2D form of a type that the sharder allows, priced with its sync.

    Any estimator runs on TorchRec's own type names; what replicas cost is added last. Options
    come in one order in every process, so that equal ratings give equal plans.

    Example:
        >>> from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        >>> from torchrec_2dsp import Mesh2D
        >>> from torchrec_2dsp.planner.torchrec.enumerator import Enumerator2D
        >>> from torchrec_2dsp.planner.torchrec.partitioner import Partitioner2D
        >>> from torchrec_2dsp.planner.torchrec.stats import Stats2D
        >>> from torchrec_2dsp.planner.topology import group_topology
        >>> world = Topology(world_size=4, local_world_size=4, compute_device="cuda")
        >>> mesh = Mesh2D(num_groups=2, group_size=2)
        >>> planner = EmbeddingShardingPlanner(
        ...     topology=group_topology(world, mesh),
        ...     enumerator=Enumerator2D(world, batch_size=512, mesh=mesh),
        ...     partitioner=Partitioner2D(),
        ...     stats=Stats2D(mesh=mesh),
        ... )
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool = False,
        *,
        mesh: Mesh2D,
        sync: SyncConfig = EXACT_SYNC,
    ) -> None:
        """Options for one sharding group.

        Args:
            topology: of the whole world, or of one sharding group where that is enough.
            batch_size: samples per rank and step.
            constraints: per table; types by TorchRec's name or by their 2D form.
            estimator: TorchRec's own by default.
            use_exact_enumerate_order: as in TorchRec.
            mesh: which ranks repeat the plan.
            sync: how the replicas stay equal.
        """
        stock_constraints = base_constraints(constraints)
        super().__init__(
            topology=group_topology(topology, mesh),
            batch_size=batch_size,
            constraints=stock_constraints,
            estimator=estimator,
            use_exact_enumerate_order=use_exact_enumerate_order,
        )
        self._sync_estimator = ReplicaSyncEstimator(
            topology, stock_constraints, mesh=mesh, sync=sync
        )

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        """All options of all tables, under the names of their 2D forms."""
        return _named_and_ordered(super().enumerate(module, sharders))

    @property
    def last_stored_search_space(self) -> list[ShardingOption] | None:
        """The options that `enumerate` last gave, with which TorchRec compares a loaded plan."""
        stored = super().last_stored_search_space
        return None if stored is None else _named_and_ordered(stored)

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Storage and time of each shard, its replica sync included, in place."""
        with base_types(sharding_options):
            super().populate_estimates(sharding_options)
            self._sync_estimator.estimate(sharding_options, sharder_data_of(self))


def _named_and_ordered(options: list[ShardingOption]) -> list[ShardingOption]:
    tables: dict[str, int] = {}
    for option in options:
        option.sharding_type = searched_type(option.sharding_type)
        tables.setdefault(option.fqn, len(tables))
    options.sort(
        key=lambda option: (
            tables[option.fqn],
            TYPE_ORDER[base_type(option.sharding_type)],
            option.compute_kernel,
        )
    )
    return options
