"""`Planner2D`: TorchRec's planner, for tables that are sharded in groups of ranks."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.constants import BATCH_SIZE
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
from torchrec_2dsp.errors import ConfigError, PlanError, TwoDError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.checks.fits_module import check_tables
from torchrec_2dsp.plan.checks.models import check_model
from torchrec_2dsp.plan.plan2d import Plan2D, with_transport
from torchrec_2dsp.plan.sync import EXACT_SYNC, SyncConfig
from torchrec_2dsp.planner.arguments import (
    NOT_MEASURED,
    checked_batch_size,
    checked_transports,
    refuse_parts_by_cost,
    refuse_stock_parts,
    stats_2d,
    whole_world,
)
from torchrec_2dsp.planner.collective import group_or_world, plan_on_rank_0
from torchrec_2dsp.planner.explanation.explain import explain
from torchrec_2dsp.planner.explanation.explanation import Explanation
from torchrec_2dsp.planner.infeasible import Shortfall, failure_text, shortfall
from torchrec_2dsp.planner.search.cost_search import CostSearch
from torchrec_2dsp.planner.search.result import SearchResult
from torchrec_2dsp.planner.topology import group_topology, world_topology
from torchrec_2dsp.planner.torchrec.enumerator import Enumerator2D
from torchrec_2dsp.planner.torchrec.partitioner import Partitioner2D
from torchrec_2dsp.planner.torchrec.planned_options import PlannedOptions
from torchrec_2dsp.planner.torchrec.sharding_types import base_constraints

logger = logging.getLogger(__name__)


class Planner2D(OpenPlanner):
    """Searches the plan that every sharding group runs, and how large the groups are.

    With a ``calibration`` it predicts steps, and chooses for each table how it is sharded and how
    its rows travel, and for all of them the mesh, unless one is given.

    With a ``mesh`` and no calibration it is TorchRec's search with four parts exchanged: the
    topology is that of one group, the enumerator gives 2D sharding types whose time includes their
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
        """Takes the arguments of TorchRec's planner, a mesh, and what is known of network and log.

        Args:
            topology: of the whole world; TorchRec's defaults without one.
            batch_size: samples per rank and step, as in TorchRec.
            enumerator: `Enumerator2D` by default. Another one must be made for one sharding
                group, and its estimates are taken as they are, without the replica sync.
            storage_reservation: as in TorchRec.
            proposer: as in TorchRec.
            partitioner: as in TorchRec; it sees TorchRec's own type names.
            performance_model: as in TorchRec.
            stats: as in TorchRec; `EmbeddingStats` see TorchRec's own type names.
            constraints: per table; types by TorchRec's name or by their 2D form. Those of
                `ParameterConstraints2D` are for the search by cost.
            debug: as in TorchRec.
            callbacks: as in TorchRec.
            timeout_seconds: as in TorchRec.
            plan_loader: as in TorchRec.
            mesh: which ranks repeat the plan; the best one by cost without it.
            sync: how the replicas stay equal: its cost is part of the search, and the plan
                carries it to the sharders.
            calibration: what the network and the machines take; without it, and without a mesh,
                it is made of the topology's figures.
            access: which rows are used how often, for the search by cost.
            workload: what a step does, in place of what model, constraints and ``access`` say.
            transports: how rows or pooled vectors, and their gradients, may travel; a search by
                cost chooses for each table, other searches take a single one for all tables. In
                fewer bits than fp32 training is no longer exact.
        """
        self.mesh = mesh
        """The mesh that repeats the plan; `None` where meshes are searched."""
        self.sync: SyncConfig = sync
        """How the replicas stay equal."""
        self._transports = checked_transports(transports)
        batch_size = BATCH_SIZE if batch_size is None else checked_batch_size(batch_size)
        if calibration is None and mesh is not None:
            refuse_parts_by_cost(access, workload, constraints, self._transports)
            topology = topology or world_topology(mesh)
            enumerator = enumerator or Enumerator2D(
                topology, batch_size, constraints, mesh=mesh, sync=sync
            )
        else:
            refuse_stock_parts(
                enumerator, proposer, partitioner, performance_model, callbacks, plan_loader
            )
            topology = topology or world_topology(mesh or whole_world())
            costs = calibration or Calibration.of_topology(topology)
            self._is_measured = calibration is not None
            of_user = (constraints, access, workload, self._transports)
            self._search = CostSearch(costs, mesh, sync, batch_size, *of_user)
            mesh = Mesh2D(1, topology.world_size)  # The memory is that of every rank.
        super().__init__(
            topology=group_topology(topology, mesh),
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            proposer=proposer,
            partitioner=Partitioner2D(partitioner),
            performance_model=performance_model,
            stats=stats_2d(stats, mesh, sync),
            constraints=base_constraints(constraints),
            debug=debug,
            callbacks=callbacks,
            timeout_seconds=timeout_seconds,
            plan_loader=plan_loader,
        )

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> Plan2D:
        """The plan of ``module``, made by this process alone.

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
                best = self.search(module, sharders).found[0]
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
        """The placements that a search by cost finds, and all that it has tried.

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
            result.found[0].where,
            1e3 * result.found[0].cost.total_s,
        )
        return result

    def get_selected_options(self) -> list[ShardingOption]:
        """The options that became the last plan, in the process that made it; else none.

        TorchRec's `PlannerExecutor` (since 1.9) reads them. Those of a search by cost have their
        mesh, exchange and hot rows in the sharding type.
        """
        return self._by_cost.selected() if self._by_cost else self.best_options

    def get_search_space(self) -> list[ShardingOption] | None:
        """All options that the last plan was chosen from; `None` where no plan was made.

        Those of a search by cost are the ones of its mesh.
        """
        return self._by_cost.search_space() if self._by_cost else self._search_space

    def explain(self) -> Explanation:
        """Why the last plan is as it is, on the rank that made it: ``print(planner.explain())``."""
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
        """`plan` on rank 0 of ``pg``; every rank gets the plan, or raises the same error.

        Collectives:
            One broadcast of a pickled object from rank 0 of ``pg``, the world by default.
        """
        pg = group_or_world(pg)
        if self.mesh is not None:
            self.mesh.check_world(dist.get_world_size(pg))
        known_sharders = get_default_sharders() if sharders is None else sharders
        return plan_on_rank_0(lambda: self.plan(module, known_sharders), pg)

    def _shortfall(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> Shortfall | None:
        """The memory that was missing, `None` where TorchRec can't compare sizes."""
        try:
            available = self.unreserved(module, sharders)
            options = self.enumerator.enumerate(module, sharders)
        except PlannerError:
            # No memory is left for tables, which the error that stopped the search says.
            return None
        return shortfall(options, [device.storage for device in available.devices])
