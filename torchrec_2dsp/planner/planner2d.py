"""`Planner2D`: a drop-in for TorchRec's planner that plans for sharding groups."""

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    PlanLoader,
    PlannerError,
    Proposer,
    ShardingOption,
    Stats,
    StorageReservation,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_2dsp._compat.torchrec import OpenPlanner
from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.errors import ConfigError, MeshError, PlanError, TwoDError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.fits_module import check_model, check_tables
from torchrec_2dsp.plan.parameter_sharding import Exchange
from torchrec_2dsp.plan.plan2d import Plan2D, with_transport
from torchrec_2dsp.plan.sync import EXACT_SYNC, SyncConfig
from torchrec_2dsp.planner.explanation import Explanation, explain
from torchrec_2dsp.planner.search.cost_search import CostSearch
from torchrec_2dsp.planner.search.placement import SearchResult
from torchrec_2dsp.planner.topology import (
    Shortfall,
    failure_text,
    group_topology,
    shortfall,
    world_topology,
)
from torchrec_2dsp.planner.torchrec.adapters import Partitioner2D, Stats2D, base_constraints
from torchrec_2dsp.planner.torchrec.enumerator import Enumerator2D
from torchrec_2dsp.planner.torchrec.options import PlannedOptions

logger = logging.getLogger(__name__)

_NOT_BY_COST = "a search by cost takes no {}: leave it out, or give a mesh and no calibration"

_Member = TypeVar("_Member", Exchange, Transport)

NOT_MEASURED = (
    "planning without a calibration: bandwidths are the topology's, and latency and compute cost "
    "nothing, so the plan may be slower than TorchRec's; measure this cluster by the calibrate "
    "command and give Planner2D(calibration=...), or a mesh for TorchRec's own search"
)


def _members(
    kind: type[_Member], name: str, values: "Sequence[_Member | str] | _Member | str | None"
) -> list[_Member] | None:
    """Return the enum members that a user names in argument ``name``; `None` stays `None`."""
    if values is None:
        return None
    named = [values] if isinstance(values, kind | str) else values
    try:
        return [kind(value) for value in named]
    except ValueError as error:
        choices = ", ".join(repr(member.value) for member in kind)
        raise ConfigError(f"{name}={values!r}: use some of {choices}") from error


@dataclass
class ParameterConstraints2D(ParameterConstraints):
    """A `ParameterConstraints` that also constrains exchange, transport, hot rows and copies.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> constraint = tdsp.ParameterConstraints2D(
        ...     sharding_types=["row_wise"], exchange=["row", "row_per_host"], hot_rows=0
        ... )
        >>> constraint.exchange
        [<Exchange.ROW: 'row'>, <Exchange.ROW_PER_HOST: 'row_per_host'>]
    """

    exchange: Sequence[Exchange | str] | None = None
    """The exchanges allowed for the table; `None` for all that its sharding types have."""

    transport: Sequence[Transport | str] | None = None
    """The wire formats allowed for its rows or vectors; `None` for those of the planner."""

    hot_rows: int | None = None
    """The number of its hottest rows on every rank; `None` for as many as pay."""

    num_groups: int | Literal["each"] | None = None
    """The number of copies: 1 copy whose shards lie on all ranks of the world, or one in each of so
    many groups, which the mesh then has; "each" for one in each group of any mesh, `None` for as
    many as are best."""

    def __post_init__(self) -> None:
        self.exchange = _members(Exchange, "exchange", self.exchange)
        self.transport = _members(Transport, "transport", self.transport)
        is_count = isinstance(self.num_groups, int) and self.num_groups >= 1
        if not is_count and self.num_groups not in (None, "each"):
            raise ConfigError(
                f"num_groups={self.num_groups!r} is no number of copies; use 1 or more, or 'each'"
            )
        if self.hot_rows is not None and self.hot_rows < 0:
            raise ConfigError(f"hot_rows={self.hot_rows} is no number of rows; use 0 or more")


class Planner2D(OpenPlanner):
    """Searches the plan that every sharding group runs, and the group size.

    With a ``calibration`` it predicts steps, and chooses a sharding type and an exchange for each
    table, and the mesh unless one is given.

    With a ``mesh`` and no calibration it runs TorchRec's search with four parts exchanged: the
    topology is one group's, the enumerator lists 2D sharding types whose time includes their
    replica sync, and partitioner and stats know those types. Every rank holds one group's shards
    and no more, so the memory that the search counts is what a rank of the world needs.

    Example:
        >>> import torch
        >>> import torchrec_2dsp as tdsp
        >>> from torchrec.distributed.planner import Topology
        >>> from torchrec.distributed.planner.storage_reservations import (
        ...     FixedPercentageStorageReservation,
        ... )
        >>> from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.modules.embedding_modules import EmbeddingBagCollection
        >>> config = EmbeddingBagConfig(
        ...     name="t_user", num_embeddings=1_000, embedding_dim=64, feature_names=["user"]
        ... )
        >>> model = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        >>> planner = tdsp.Planner2D(
        ...     topology=Topology(world_size=4, compute_device="cpu"),
        ...     storage_reservation=FixedPercentageStorageReservation(0.15),
        ...     mesh=tdsp.Mesh2D(num_groups=2, group_size=2),
        ... )
        >>> plan = planner.plan(model, [EmbeddingBagCollectionSharder()])
        >>> plan.plan[""]["t_user"].sharding_type
        '2d_table_wise'
    """

    _search: CostSearch | None = None
    _result: SearchResult | None = None
    _by_cost: PlannedOptions | None = None
    _search_space: list[ShardingOption] | None = None
    _is_measured = True

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: PlanLoader | None = None,
        *,
        mesh: Mesh2D | None = None,
        sync: SyncConfig = EXACT_SYNC,
        calibration: Calibration | None = None,
        access: AccessStats | None = None,
        workload: Workload | None = None,
        transports: Sequence[Transport | str] = (Transport.FP32,),
    ) -> None:
        """Take the arguments of TorchRec's planner, and what is known of mesh, network and log.

        Arguments that aren't listed mean what they mean in TorchRec; partitioners and
        `EmbeddingStats` see TorchRec's own type names. A search by cost takes no enumerator,
        proposer, partitioner, performance model, callbacks or plan loader.

        Args:
            topology: the whole world's; TorchRec's defaults without one.
            batch_size: samples per rank and step.
            enumerator: `Enumerator2D` by default. Another one must be made for one sharding
                group, and its estimates are taken as they are, without the replica sync.
            constraints: per table; types by TorchRec's name or by their 2D form. The fields of
                `ParameterConstraints2D` are for the search by cost.
            mesh: the ranks that repeat the plan; the best mesh by cost without it.
            sync: keeps replicas equal: its cost is part of the search, and the plan carries it to
                the sharders.
            calibration: the constants of network and machines; without it, and without a mesh,
                it is made from the topology's figures.
            access: row frequencies, for the search by cost.
            workload: a step's work, in place of what model, constraints and ``access`` say.
            transports: wire formats for rows or pooled vectors, and their gradients; a search by
                cost chooses for each table, other searches take a single one for all tables. In
                fewer bits than fp32 training is no longer exact.
        """
        self.mesh, self.sync = mesh, sync
        self._transports = _checked_transports(transports)
        batch_size = _checked_batch_size(batch_size)
        stock: dict[str, Any] = {
            "enumerator": enumerator,
            "proposer": proposer,
            "partitioner": partitioner,
            "performance_model": performance_model,
            "callbacks": callbacks,
            "plan_loader": plan_loader,
        }
        if calibration is None and mesh is not None:
            _refuse_parts_by_cost(access, workload, constraints, self._transports)
            topology = topology or world_topology(mesh)
            stock["enumerator"] = enumerator or Enumerator2D(
                topology, batch_size, constraints, mesh=mesh, sync=sync
            )
        else:
            _refuse(_NOT_BY_COST, **stock)
            topology = topology or world_topology(mesh or _whole_world())
            self._is_measured = calibration is not None
            calibration = calibration or Calibration.of_topology(topology)
            of_user = (constraints, access, workload, self._transports)
            self._search = CostSearch(calibration, mesh, sync, batch_size, *of_user)
            mesh = Mesh2D(1, topology.world_size)  # The memory is that of every rank.
        stock["partitioner"] = Partitioner2D(partitioner)
        super().__init__(
            topology=group_topology(topology, mesh),
            batch_size=batch_size,
            storage_reservation=storage_reservation,
            stats=_stats_2d(stats, mesh, sync),
            constraints=base_constraints(constraints),
            debug=debug,
            timeout_seconds=timeout_seconds,
            **stock,
        )

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> Plan2D:
        """Plan ``module`` in this process alone.

        Raises:
            PlanError: nothing fits, or the search failed; TorchRec's error is its cause.
        """
        self._by_cost = self._search_space = None
        self.forget_plan()
        check_model(module)
        check_tables(module)
        device = self.compute_device
        try:
            if self._search is not None:
                best = self.search(module, sharders).placements[0]
                plan = best.plan(device)
                self._by_cost = PlannedOptions(best, module, self.batch_size, device)
                return plan
            stock = self._stock_plan(module, sharders)
        except TwoDError:
            raise
        except Exception as error:
            missing = partial(self._shortfall, module, sharders)
            raise PlanError(failure_text(self.mesh or "any mesh", error, missing)) from error
        assert self.mesh is not None
        return with_transport(Plan2D.from_stock(stock, self.mesh, self.sync), self._transports[0])

    def _stock_plan(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> ShardingPlan:
        try:
            return super().plan(module, sharders)
        finally:
            if self._search_space is None:  # TorchRec's planner keeps it since 1.9.
                self._search_space = getattr(self.enumerator, "last_stored_search_space", None)

    def search(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> SearchResult:
        """Search by cost, and return the placements and all attempts.

        Raises:
            PlanError: nothing fits.
        """
        if self._search is None:
            raise ConfigError(f"{self.mesh} without a calibration is searched as TorchRec does it")
        available = self.unreserved(module, sharders)
        if not self._is_measured:
            logger.warning(NOT_MEASURED)
        self._result = result = self._search.result(module, sharders, available)
        logger.info(
            "%s: %.1f ms per step predicted; planner.explain() says why",
            result.placements[0].where,
            1e3 * result.placements[0].cost.total_s,
        )
        return result

    def get_selected_options(self) -> list[ShardingOption]:
        """Return the options that became the last plan, in the process that made it; else none.

        TorchRec's `PlannerExecutor` (since 1.9) reads them. After a search by cost the sharding
        type carries mesh, exchange and hot rows.
        """
        return self._by_cost.selected() if self._by_cost else self.best_options

    def get_search_space(self) -> list[ShardingOption] | None:
        """Return all options for the last plan; `None` where no plan was made.

        After a search by cost these are the options on its mesh.
        """
        return self._by_cost.search_space() if self._by_cost else self._search_space

    def explain(self) -> Explanation:
        """Explain the last plan, on the rank that made it: ``print(planner.explain())``."""
        if self._result is None:
            raise ConfigError(
                "there is nothing to explain here: make a plan by cost first; collective_plan "
                "makes it on rank 0 alone"
            )
        return explain(self._result)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> Plan2D:
        """Run `plan` on rank 0 of ``pg``; every rank gets the plan, or raises the same error.

        Collectives:
            One broadcast of a pickled object from rank 0 of ``pg``, the world by default.
        """
        pg = dist.group.WORLD if pg is None else pg
        if pg is None:
            raise MeshError(
                "torch.distributed is not initialised; call "
                "torch.distributed.init_process_group(...) first, or use plan(...)"
            )
        if self.mesh is not None:
            self.mesh.check_world(dist.get_world_size(pg))
        known_sharders = get_default_sharders() if sharders is None else sharders
        return plan_on_rank_0(lambda: self.plan(module, known_sharders), pg)

    def _shortfall(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> Shortfall | None:
        """Compute the missing memory; `None` where TorchRec can't compare sizes."""
        try:
            available = self.unreserved(module, sharders)
            options = self.enumerator.enumerate(module, sharders)
        except PlannerError:
            return None  # No memory is left for tables, as the error that ended the search says.
        return shortfall(options, [device.storage for device in available.devices])


def plan_on_rank_0(make_plan: Callable[[], Plan2D], pg: dist.ProcessGroup) -> Plan2D:
    """Return the plan of ``make_plan`` on rank 0 of ``pg``, or raise its error, on every rank.

    An error from elsewhere becomes a `PlanError` that names its type. The other ranks raise an
    error with the same type and text.

    Collectives:
        One broadcast of a pickled object from rank 0 of ``pg``.
    """
    plan: Plan2D | None = None
    raised: TwoDError | None = None
    message: list[Any] = [None]
    if dist.get_rank(pg) == 0:
        try:
            plan = make_plan()
            message = [pickle.dumps(plan)]
        except TwoDError as error:
            raised = error
        except Exception as error:
            raised = PlanError(f"planning failed on rank 0: {type(error).__name__}: {error}")
            raised.__cause__ = error
        if raised is not None:
            message = [(type(raised), str(raised))]
    dist.broadcast_object_list(message, group=pg, group_src=0)
    if raised is not None:
        raise raised
    if plan is not None:
        return plan
    if isinstance(message[0], tuple):
        kind, text = message[0]
        raise kind(text)
    return pickle.loads(message[0])


def _checked_batch_size(batch_size: int | None) -> int:
    batch_size = BATCH_SIZE if batch_size is None else batch_size
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} leaves nothing to do; use 1 or more")
    return batch_size


def _checked_transports(transports: Sequence[Transport | str] | str) -> tuple[Transport, ...]:
    allowed = _members(Transport, "transports", transports)
    if not allowed:
        raise ConfigError(f"transports={transports!r} allows nothing; use ['fp32'] for no rounding")
    return tuple(dict.fromkeys(allowed))


def _refuse(text: str, **parts: Any) -> None:
    """Raise `ConfigError` for the first given part, which ``text`` has a place for."""
    given = [name for name, part in parts.items() if part is not None]
    if given:
        raise ConfigError(text.format(given[0]))


def _refuse_parts_by_cost(
    access: Any,
    workload: Any,
    constraints: Mapping[str, ParameterConstraints] | None,
    transports: Sequence[Transport],
) -> None:
    """Raise `ConfigError` for arguments that only a search by cost can use or fulfil."""
    text = "{} is for a search by cost: give a calibration"
    _refuse(text, access=access, workload=workload)
    if len(transports) > 1:
        allowed = [transport.value for transport in transports]
        raise ConfigError(text.format(f"transports={allowed}") + ", or allow a single one")
    for table, constraint in (constraints or {}).items():
        if isinstance(constraint, ParameterConstraints2D):
            demands = {
                "exchange": constraint.exchange,
                "transport": constraint.transport,
                "hot_rows": constraint.hot_rows or None,
                "num_groups": None if constraint.num_groups == "each" else constraint.num_groups,
            }
            _refuse(
                text,
                **{f"{name}={value} for table {table!r}": value for name, value in demands.items()},
            )


def _whole_world() -> Mesh2D:
    """Return all ranks as one group; `ConfigError` before process groups exist."""
    if not dist.is_initialized():
        raise ConfigError(
            "nothing says how many ranks there are: give a topology or a mesh, or call "
            "torch.distributed.init_process_group(...) first"
        )
    return Mesh2D(1, dist.get_world_size())


def _stats_2d(stats: Stats | list[Stats] | None, mesh: Mesh2D, sync: SyncConfig) -> list[Stats]:
    """Wrap TorchRec's stats, which stop at unknown type names."""
    if stats is None:
        return [Stats2D(mesh=mesh, sync=sync)]
    return [
        Stats2D(part, mesh=mesh, sync=sync) if isinstance(part, EmbeddingStats) else part
        for part in (stats if isinstance(stats, list) else [stats])
    ]
