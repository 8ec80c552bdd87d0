"""`Planner2D`: replaces TorchRec's planner by a search for sharding groups by predicted cost."""

import gc
import logging
import math
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, TypeGuard, TypeVar

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    ShardingOption,
    Stats,
    StorageReservation,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlanner

from torchrec_2dsp._compat.wrapped_collections import collection_inside
from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.codecs.rows import Transport, transports_of
from torchrec_2dsp.comms.groups import check_whole
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.errors import (
    ConfigError,
    MeshError,
    PlanError,
    TwoDError,
    UnsupportedError,
    check_choice,
)
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.fits_module import check_model, check_tables, sharded_parts
from torchrec_2dsp.plan.parameter_sharding import Exchange, RowStorage
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.plan.sync import EXACT_SYNC, SyncConfig
from torchrec_2dsp.planner.explanation import Explanation, explain
from torchrec_2dsp.planner.search.cost_search import CostSearch
from torchrec_2dsp.planner.search.placement import SearchResult
from torchrec_2dsp.planner.topology import group_topology, no_plan_text, world_topology
from torchrec_2dsp.planner.torchrec.adapters import Stats2D, base_constraints
from torchrec_2dsp.planner.torchrec.options import PlannedOptions

logger = logging.getLogger(__name__)

_Member = TypeVar("_Member", Exchange, Transport)

NOT_MEASURED = (
    "planning without a calibration: bandwidths are the topology's, and latency and compute cost "
    "nothing, so the plan may be slower than TorchRec's; measure this cluster by the calibrate "
    "command and give Planner2D(calibration=...)"
)

_PARTS_OF_TORCHREC = (
    *("enumerator", "proposer", "partitioner", "performance_model"),
    *("callbacks", "plan_loader", "debug", "timeout_seconds"),
)
"""Arguments of TorchRec's planner that a search by cost doesn't use."""


def _members(
    kind: type[_Member], name: str, values: "Sequence[_Member | str] | _Member | str | None"
) -> list[_Member] | None:
    """Return the enum members that a user named in argument ``name``; `None` stays `None`."""
    if values is None:
        return None
    named = [values] if isinstance(values, kind | str) else values
    for value in named:
        check_choice(name, value, kind)
    return [kind(value) for value in named]


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass
class ParameterConstraints2D(ParameterConstraints):
    """A `ParameterConstraints` that also has exchange, formats, hot rows, copies and skew.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> constraint = tdsp.ParameterConstraints2D(
        ...     sharding_types=["row_wise"], exchange=["row", "row_per_host"], hot_rows=0
        ... )
        >>> constraint.exchange
        [<Exchange.ROW: 'row'>, <Exchange.ROW_PER_HOST: 'row_per_host'>]
    """

    exchange: Sequence[Exchange | str] | None = None
    """The exchanges allowed for the table; `None` for all that its sharding types support."""

    transport: Sequence[Transport | str] | None = None
    """The wire formats allowed for its rows or vectors; `None` for the planner's."""

    stored_as: RowStorage | str = RowStorage.PLAIN
    """The format of its rows in memory."""

    hot_rows: int | None = None
    """The number of its hottest rows on every rank, at most those with counted lookups in `access`;
    `None` for as many as pay off."""

    num_groups: int | Literal["each"] | None = None
    """The number of copies: 1 copy whose shards are on all ranks, or one in each of this
    many groups, which the mesh then has; "each" for one in each group of any mesh, `None` for the
    best number."""

    skew: float | None = None
    """The exponent of Zipf's law for the use of rows, 0 for equal use; `None` if unknown.
    `sampled_constraints` estimates it, and the pooling factors, from a batch."""

    def __post_init__(self) -> None:
        self.exchange = _members(Exchange, "exchange", self.exchange)
        self.transport = _members(Transport, "transport", self.transport)
        check_choice("stored_as", self.stored_as, RowStorage)
        self.stored_as = RowStorage(self.stored_as)
        is_count = _is_number(self.num_groups) and self.num_groups >= 1
        if not is_count and self.num_groups not in (None, "each"):
            raise ConfigError(
                f"num_groups={self.num_groups!r} is no number of copies; use 1 or more, or 'each'"
            )
        is_count = _is_number(self.hot_rows) and self.hot_rows >= 0
        if self.hot_rows is not None and not is_count:
            raise ConfigError(f"hot_rows={self.hot_rows} is no number of rows; use 0 or more")
        if self.skew is not None and not 0 <= self.skew < math.inf:
            raise ConfigError(f"skew={self.skew} is no exponent; use 0 or more")


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector, which otherwise walks a million small objects many times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Planner2D(ShardingPlanner):
    """Searches the plan that every sharding group runs, and the mesh, by predicted cost.

    It chooses a sharding type, an exchange, hot rows and the number of copies for each table, one
    wire format, and the mesh unless one is given. Without measurements, it predicts by the
    topology's bandwidths.

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
        ...     name="t_user", num_embeddings=1_000_000, embedding_dim=64, feature_names=["user"]
        ... )
        >>> model = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        >>> planner = tdsp.Planner2D(
        ...     topology=Topology(world_size=4, compute_device="cuda"),
        ...     storage_reservation=FixedPercentageStorageReservation(0.15),
        ...     mesh=tdsp.Mesh2D(num_groups=2, group_size=2),
        ...     exchange="row",
        ... )
        >>> plan = planner.plan(model, [EmbeddingBagCollectionSharder()])
        >>> plan.plan[""]["t_user"].sharding_type, plan.plan[""]["t_user"].exchange
        ('2d_row_wise', <Exchange.ROW: 'row'>)
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        *,
        storage_reservation: StorageReservation | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        mesh: Mesh2D | None = None,
        sync: SyncConfig = EXACT_SYNC,
        calibration: Calibration | None = None,
        access: AccessStats | None = None,
        workload: Workload | None = None,
        precision: Transport | str | Sequence[Transport | str] = "exact",
        exchange: Exchange | str | Sequence[Exchange | str] | None = None,
        **parts_of_torchrec: Any,
    ) -> None:
        """Take the arguments of TorchRec's planner, and what is known of mesh, network and log.

        Args:
            topology: the whole world's topology; TorchRec's default by default.
            batch_size: samples per rank and step.
            storage_reservation: the memory that isn't available for tables, as in TorchRec.
            stats: loggers of the plan, as in TorchRec; none by default, as `explain` tells more.
            constraints: per table, with types by TorchRec's name or by their 2D form.
            mesh: the ranks that repeat the plan; by default the best mesh by cost.
            sync: how replicas stay equal: its cost is part of the search, and the plan passes it to
                the sharders.
            calibration: the constants of network and machines; by default derived from the
                topology's figures.
            access: row frequencies.
            workload: a step's work, instead of that of model, constraints and ``access``.
            precision: "exact" for fp32 on the wire, "any" for all wire formats, or the allowed
                ones, where the constraints don't name any. In fewer bits than fp32 training is
                no longer exact.
            exchange: the exchanges allowed for tables whose constraints don't name any. Tables
                that support none of them may have any.
            parts_of_torchrec: refused: parts of TorchRec's own search.
        """
        _refuse_parts_of_torchrec(parts_of_torchrec)
        self.mesh, self.sync = mesh, sync
        self.batch_size = BATCH_SIZE if batch_size is None else batch_size
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ConfigError(f"batch_size={batch_size!r} is no number of samples; use 1 or more")
        topology = topology or world_topology(mesh or _whole_world())
        if mesh is not None:
            mesh.check_world(topology.world_size)
        # The memory is that of every rank.
        self.topology = group_topology(topology, Mesh2D(1, topology.world_size))
        self._storage_reservation = storage_reservation or _DefaultReservation()
        self._stats = stats if isinstance(stats, list) else [] if stats is None else [stats]
        self._is_measured = calibration is not None
        calibration = calibration or Calibration.of_topology(topology)
        _refuse_other_devices(constraints or {}, topology.compute_device)
        self._search = CostSearch(
            calibration,
            mesh,
            sync,
            self.batch_size,
            base_constraints(constraints),
            access,
            workload,
            transports_of(precision),
            _members(Exchange, "exchange", exchange) or (),
        )
        self._result: SearchResult | None = None
        self._options: PlannedOptions | None = None

    def expect_small_buckets(self) -> None:
        """Expect that dense gradients are summed in several buckets, as in `parallelize`."""
        self._search = replace(self._search, has_small_buckets=True)

    @_without_garbage_collection()
    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> Plan2D:
        """Plan ``module`` in this process only.

        Raises:
            PlanError: nothing fits.
            UnsupportedError: the sharders can't run the demanded plan.
        """
        self._options = None
        by_type = {sharder.module_type: sharder for sharder in sharders}
        parts = list(sharded_parts(module, by_type))
        check_model(module, [path for path, *_ in parts])
        check_tables(module)
        started_s = time.perf_counter()
        result = self.search(module, sharders)
        best, device = result.placements[0], self.topology.compute_device
        plan = best.plan(device)
        for path, part, sharder in parts:
            of_tables: Any = getattr(sharder, "tables", sharder)
            if path in plan.plan and hasattr(of_tables, "checked_plan"):
                where = path, device, self.topology.local_world_size
                of_tables.checked_plan(collection_inside(part), plan.plan[path], *where)
        self._options = PlannedOptions(best, module, self.batch_size, device)
        run_time_s = time.perf_counter() - started_s
        for stats in self._stats:
            log = Stats2D(stats).log if isinstance(stats, EmbeddingStats) else stats.log
            log(
                sharding_plan=plan,
                topology=self.topology,
                batch_size=self.batch_size,
                storage_reservation=self._storage_reservation,
                num_proposals=len(result.tried),
                num_plans=len(result.placements),
                run_time=run_time_s,
                best_plan=self.get_selected_options(),
                sharders=sharders,
                debug=True,
            )
        return plan

    @_without_garbage_collection()
    def search(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> SearchResult:
        """Search by cost, and return the placements and all attempts.

        Raises:
            PlanError: nothing fits.
        """
        try:
            available = self._storage_reservation.reserve(
                topology=self.topology,
                batch_size=self.batch_size,
                module=module,
                sharders=sharders,
                constraints=dict(self._search.constraints or {}),
            )
        except PlannerError as error:
            raise PlanError(no_plan_text(self.mesh or "any mesh", "", str(error))) from error
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

        TorchRec's `PlannerExecutor` (since 1.9) reads them. The sharding type carries mesh,
        exchange and hot rows.
        """
        return self._options.selected() if self._options else []

    def get_search_space(self) -> list[ShardingOption] | None:
        """Return all options on the last plan's mesh; `None` if no plan was made."""
        return self._options.search_space() if self._options else None

    def explain(self) -> Explanation:
        """Explain the last plan, on the rank that made it: ``print(planner.explain())``."""
        if self._result is None:
            raise ConfigError(
                "there is nothing to explain here: make a plan first; collective_plan makes it on "
                "rank 0 alone"
            )
        return explain(self._result)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> Plan2D:
        """Run `plan` on rank 0 of ``pg``; give every rank the plan, or raise the same error on all.

        Collectives:
            One broadcast of a pickled object from rank 0 of ``pg``, the world by default.
        """
        pg = dist.group.WORLD if pg is None else pg
        if pg is None:
            raise MeshError(
                "torch.distributed is not initialised; call "
                "torch.distributed.init_process_group(...) first, or use plan(...)"
            )
        check_whole(pg)
        if self.mesh is not None:
            self.mesh.check_world(dist.get_world_size(pg))
        known_sharders = get_default_sharders() if sharders is None else sharders
        return plan_on_rank_0(lambda: self.plan(module, known_sharders), pg)


def plan_on_rank_0(make_plan: Callable[[], Plan2D], pg: dist.ProcessGroup) -> Plan2D:
    """Return ``make_plan``'s result on rank 0 of ``pg`` on every rank, or raise its error there.

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


def _refuse_parts_of_torchrec(parts: Mapping[str, Any]) -> None:
    for name, part in parts.items():
        if name not in _PARTS_OF_TORCHREC:
            raise TypeError(f"Planner2D() got an unexpected keyword argument {name!r}")
        if part is not None:
            raise ConfigError(
                f"Planner2D searches by cost, which takes no {name}: leave it out, or use "
                "TorchRec's EmbeddingShardingPlanner, which takes this package's proposers, "
                "Enumerator2D, and BalancedPartitioner or Partitioner2D"
            )


def _refuse_other_devices(constraints: Mapping[str, ParameterConstraints], device: str) -> None:
    """Refuse tables for another device, and virtual tables, which no plan here has."""
    for name, constraint in constraints.items():
        if constraint.device_group not in (None, device) or constraint.use_virtual_table:
            raise UnsupportedError(
                f"constraints of table {name!r} have device_group={constraint.device_group!r} and "
                f"use_virtual_table={constraint.use_virtual_table}, and Planner2D plans stored "
                f"tables on {device!r} alone: leave both out"
            )


class _DefaultReservation(HeuristicalStorageReservation):
    """TorchRec's default, without its warnings that another one, or an estimate, may be better."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(percentage=0.15)

    def reserve(self, *args: Any, **kwargs: Any) -> Topology:
        log = logging.getLogger(HeuristicalStorageReservation.__module__)
        was_disabled, log.disabled = log.disabled, True
        try:
            return super().reserve(*args, **kwargs)
        finally:
            log.disabled = was_disabled


def _whole_world() -> Mesh2D:
    """Return all ranks as one group; raise `ConfigError` before process groups exist."""
    if not dist.is_initialized():
        raise ConfigError(
            "nothing says how many ranks there are: give a topology or a mesh, or call "
            "torch.distributed.init_process_group(...) first"
        )
    return Mesh2D(1, dist.get_world_size())
