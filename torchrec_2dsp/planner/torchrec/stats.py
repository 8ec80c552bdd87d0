"""`Stats2D`: TorchRec's planner report, for plans of 2D sharding types."""

import copy
import inspect
import logging
from dataclasses import replace
from typing import Any

from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import ShardingOption, Stats
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)

from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import base_type
from torchrec_2dsp.plan.sync import EXACT_SYNC, SyncConfig
from torchrec_2dsp.planner.topology import group_topology
from torchrec_2dsp.planner.torchrec.sharding_types import proposed_type

logger = logging.getLogger(__name__)

_SIGNATURE = inspect.signature(Stats.log)


class Stats2D(Stats):
    """Reports a plan under TorchRec's own type names, then the mesh that repeats it."""

    def __init__(
        self,
        inner: Stats | None = None,
        *,
        mesh: Mesh2D | None = None,
        sync: SyncConfig = EXACT_SYNC,
    ) -> None:
        """
        Args:
            inner: writes the report: `EmbeddingStats`, TorchRec's default.
            mesh: which ranks repeat the plan; plans of this package's proposers know it.
            sync: how the replicas stay equal; they know it as well.
        """
        self.inner = EmbeddingStats() if inner is None else inner
        """The report behind this one."""
        self._mesh = mesh
        self._sync = sync

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Write the report of one sharding group and a line on what repeats it.

        Takes what `Stats.log` takes.
        """
        call = _SIGNATURE.bind(self, *args, **kwargs)
        arguments = call.arguments
        proposed = proposed_type(arguments["best_plan"])
        mesh, sync = (proposed.mesh, proposed.sync) if proposed else (self._mesh, self._sync)
        if mesh is not None:
            arguments["topology"] = group_topology(arguments["topology"], mesh)
        arguments["sharding_plan"] = _plan_of_base_types(arguments["sharding_plan"])
        arguments["best_plan"] = [_option_of_base_type(option) for option in arguments["best_plan"]]
        self.inner.log(*call.args[1:], **call.kwargs)
        if mesh is not None:
            logger.info(
                "the above is one of %d sharding groups of %s, kept equal by %s",
                mesh.num_groups,
                mesh,
                sync,
            )


def _option_of_base_type(option: ShardingOption) -> ShardingOption:
    renamed = copy.copy(option)
    renamed.sharding_type = base_type(option.sharding_type)
    return renamed


def _plan_of_base_types(plan: ShardingPlan) -> ShardingPlan:
    modules: dict[str, ModuleShardingPlan] = {}
    for path, module_plan in plan.plan.items():
        assert isinstance(module_plan, EmbeddingModuleShardingPlan)
        modules[path] = EmbeddingModuleShardingPlan(
            {name: _table_of_base_type(table) for name, table in module_plan.items()}
        )
    return ShardingPlan(modules)


def _table_of_base_type(table: ParameterSharding) -> ParameterSharding:
    return replace(table, sharding_type=base_type(table.sharding_type))
