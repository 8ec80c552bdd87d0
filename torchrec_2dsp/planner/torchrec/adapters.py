"""Parts for TorchRec's planner that know 2D types: names, partitioners and stats."""

import copy
import inspect
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import numpy as np
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Partitioner,
    Perf,
    Shard,
    ShardingOption,
    Stats,
    Storage,
    Topology,
)
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleShardingPlan,
    ShardingPlan,
    ShardingType,
)

from torchrec_2dsp.cost.loads import Floats
from torchrec_2dsp.errors import ConfigError, PlanError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import ProposedType, base_type, type_2d
from torchrec_2dsp.plan.sync import EXACT_SYNC, SyncConfig
from torchrec_2dsp.planner.search.place import Bins, Items, dealt
from torchrec_2dsp.planner.topology import group_topology

logger = logging.getLogger(__name__)

TYPE_ORDER = {member.value: index for index, member in enumerate(ShardingType)}
"""TorchRec's order of its types for breaking ties, simplest placement first."""

_BY_DEVICE = "device"
_KEY_VALUE = "key_value"
_SIGNATURE = inspect.signature(Stats.log)


def searched_type(sharding_type: str) -> str:
    """Return the name under which a planner searches a type: its 2D form.

    Data parallel keeps its name. It means the same in both cases, a replica on every rank of
    the world, and TorchRec's planner accepts its dense kernel only under this name. `Plan2D`
    gives it the 2D form.
    """
    if base_type(sharding_type) == ShardingType.DATA_PARALLEL.value:
        return ShardingType.DATA_PARALLEL.value
    return type_2d(sharding_type)


@contextmanager
def base_types(options: Sequence[ShardingOption]) -> Iterator[None]:
    """Show TorchRec's components its own type names on ``options``, in place, in the context."""
    before = [option.sharding_type for option in options]
    try:
        for option in options:
            option.sharding_type = base_type(option.sharding_type)
        yield
    finally:
        for option, sharding_type in zip(options, before, strict=True):
            option.sharding_type = sharding_type


def _proposed_type(options: Iterable[ShardingOption]) -> ProposedType | None:
    """Return the type that carries a proposal's mesh and sync; `None` for stock proposals."""
    kinds = (option.sharding_type for option in options)
    return next((kind for kind in kinds if isinstance(kind, ProposedType)), None)


def base_constraints(
    constraints: Mapping[str, ParameterConstraints] | None,
) -> dict[str, ParameterConstraints]:
    """Copy constraints with TorchRec's own type names; refuse other types and factors."""
    for name, constraint in (constraints or {}).items():
        for argument in ("pooling_factors", "num_poolings", "batch_sizes"):
            numbers = getattr(constraint, argument)
            if not all(0 <= number < math.inf for number in numbers or ()):
                raise ConfigError(
                    f"constraints of table {name!r}: {argument}={numbers} has a number below 0 or "
                    "without end; give means, one for each feature"
                )
    return {
        name: replace(constraint, sharding_types=_base_names(name, constraint.sharding_types))
        for name, constraint in (constraints or {}).items()
    }


def _base_names(table: str, sharding_types: Iterable[str] | None) -> list[str] | None:
    if sharding_types is None:
        return None
    try:
        # Some users name types by TorchRec's enum.
        names = (getattr(kind, "value", kind) for kind in sharding_types)
        return [base_type(name) for name in names]
    except PlanError as error:
        raise PlanError(f"constraints of table {table!r}: {error}") from error


class Partitioner2D(Partitioner):
    """Runs a partitioner on TorchRec's own type names, for one sharding group.

    TorchRec's partitioners place table-row-wise, table-column-wise and grid shards by these
    names, and find no rank for any other. `GroupSizeProposer` proposes ranks in one group,
    whatever the topology.
    """

    def __init__(self, inner: Partitioner | None = None) -> None:
        """Wrap ``inner``: `GreedyPerfPartitioner`, TorchRec's default."""
        self.inner = GreedyPerfPartitioner() if inner is None else inner
        """The wrapped partitioner."""

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """Assign a rank to every shard, in place if ``inner`` does so."""
        names = {option.fqn: option.sharding_type for option in proposal}
        topology = _partitioned_topology(proposal, storage_constraint)
        with base_types(proposal):
            placed = self.inner.partition(proposal, topology)
        for option in placed:
            option.sharding_type = names[option.fqn]
        return placed


def _partitioned_topology(proposal: list[ShardingOption], topology: Topology) -> Topology:
    """Return the ranks that a proposal's shards may have: its group's, or all."""
    proposed = _proposed_type(proposal)
    return topology if proposed is None else group_topology(topology, proposed.mesh)


class BalancedPartitioner(Partitioner):
    """Places shards that may be on any rank more evenly than TorchRec's greedy partitioner.

    Greedy takes shards by size and gives each to the least busy rank. Largest differencing
    (Karmarkar and Karp) decides late which rank gets what, and is more even. Both are then
    improved by exchanges with the busiest rank, within memory, and the better result is taken, so a
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
        """Improve on ``inner``: TorchRec's `GreedyPerfPartitioner` by default."""
        self.inner = Partitioner2D() if inner is None else inner
        """The partitioner to improve on."""

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """Assign a rank to every shard, in place if ``inner`` does so.

        Raises:
            PlannerError: ``inner`` finds no place for a shard.
        """
        topology = _partitioned_topology(proposal, storage_constraint)
        placed = self.inner.partition(proposal, topology)
        free = [shard for option in placed if _is_free(option) for shard in option.shards]
        if not free:
            return placed
        fixed = [shard for option in placed if not _is_free(option) for shard in option.shards]
        fixed_ranks = np.array([_rank(shard) for shard in fixed], dtype=np.int64)
        times = np.array([device.perf.total for device in topology.devices], dtype=np.float64)
        np.add.at(times, fixed_ranks, [_seconds(shard) for shard in fixed])
        room = np.array([_kinds(device.storage) for device in topology.devices], dtype=np.float64)
        np.subtract.at(room, fixed_ranks, _memory(fixed))
        items = Items(np.array([_seconds(shard) for shard in free]), _memory(free))
        start = np.array([_rank(shard) for shard in free], dtype=np.int64)
        assignment = dealt(items, Bins(times, room), start)
        assert assignment is not None
        for shard, rank in zip(free, assignment, strict=True):
            shard.rank = int(rank)
        return placed


def _is_free(option: ShardingOption) -> bool:
    """Tell whether shards may be on any rank, several on one."""
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


class Stats2D(Stats):
    """Reports a plan under TorchRec's own type names, then the mesh that repeats it."""

    def __init__(
        self,
        inner: Stats | None = None,
        *,
        mesh: Mesh2D | None = None,
        sync: SyncConfig = EXACT_SYNC,
    ) -> None:
        """Wrap a report.

        Args:
            inner: the report's writer: `EmbeddingStats`, TorchRec's default.
            mesh: the ranks that repeat the plan; plans of this package's proposers carry it.
            sync: how replicas stay equal; these plans carry it, too.
        """
        self.inner = EmbeddingStats() if inner is None else inner
        """The wrapped report."""
        self._mesh = mesh
        self._sync = sync

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Write one group's report and a line on its mesh; takes the arguments of `Stats.log`."""
        call = _SIGNATURE.bind(self, *args, **kwargs)
        arguments = call.arguments
        proposed = _proposed_type(arguments["best_plan"])
        mesh, sync = (proposed.mesh, proposed.sync) if proposed else (self._mesh, self._sync)
        options = [copy.copy(option) for option in arguments["best_plan"]]
        for option in options:
            option.sharding_type = base_type(option.sharding_type)
        ranks = {option.fqn: [_rank(shard) for shard in option.shards] for option in options}
        if mesh is not None and max(chain((0,), *ranks.values())) >= mesh.group_size:
            mesh = None  # With single-copy tables, options have world ranks.
        if mesh is not None:
            arguments["topology"] = group_topology(arguments["topology"], mesh)
        arguments["sharding_plan"] = _with_base_types(arguments["sharding_plan"], ranks)
        arguments["best_plan"] = options
        self.inner.log(*call.args[1:], **call.kwargs)
        if mesh is not None:
            logger.info(
                "the above is one of %d sharding groups of %s, synced by %s",
                mesh.num_groups,
                mesh,
                sync,
            )


def _with_base_types(plan: ShardingPlan, ranks: Mapping[str, list[int]]) -> ShardingPlan:
    modules: dict[str, ModuleShardingPlan] = {}
    for path, module_plan in plan.plan.items():
        assert isinstance(module_plan, EmbeddingModuleShardingPlan)
        modules[path] = EmbeddingModuleShardingPlan(
            {
                name: replace(
                    table,
                    sharding_type=base_type(table.sharding_type),
                    ranks=ranks.get(f"{path}.{name}", table.ranks),
                )
                for name, table in module_plan.items()
            }
        )
    return ShardingPlan(modules)
