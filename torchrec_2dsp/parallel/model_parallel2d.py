"""`ModelParallel2D`: TorchRec's `DMPCollection` for a `Plan2D`, on CPU as well."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DistributedModelParallel,
    DMPCollection,
)
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_2dsp._compat.ddp import let_compile, refuse_unreduced
from torchrec_2dsp._compat.shardings import renew_optimizer
from torchrec_2dsp._compat.torchrec import DMPCollectionContext, get_local_size
from torchrec_2dsp.access.table_access import HotSet
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.failure_detection import NoticeBoard, naming_faults
from torchrec_2dsp.comms.groups import MeshGroups, check_whole, world_group
from torchrec_2dsp.dense.dense_parts import check_clipping, fitting_wrapper
from torchrec_2dsp.errors import ConfigError, PlanError, UnsupportedError
from torchrec_2dsp.mesh import Mesh2D, RankLayout
from torchrec_2dsp.parallel.pipelines import PIPELINES, AnyPipeline
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.plan.serialize import to_json
from torchrec_2dsp.replicas.sync_action import SyncReason, SyncReport
from torchrec_2dsp.shard.default_sharders import (
    checked_model_plan,
    described,
    get_default_sharders,
)
from torchrec_2dsp.shard.parted import (
    check_can_start,
    check_tracked,
    prepared_unfreeze,
    sharded_tables,
)
from torchrec_2dsp.shard.tables import Tables2D

if TYPE_CHECKING:
    from torchrec_2dsp.planner.explanation import Explanation

logger = logging.getLogger(__name__)


@contextmanager
def calling_together(groups: MeshGroups | None, name: str) -> Iterator[None]:
    """Run a call that all ranks must make; raise on all of them if some train on instead.

    Nothing is checked without ``groups``.

    Collectives:
        An all-reduce of 8 bytes, waited for.
    """
    if groups is None:
        yield
        return
    with naming_faults(groups.board, name):
        groups.alarm.step_outside()
        yield


class ModelParallel2D(DMPCollection):
    """Runs a model by a `Plan2D`: sharded inside each group, replicated over the groups.

    It is a `DMPCollection`, so TorchRec's train pipelines call its `sync`. An unmodified
    `DistributedModelParallel` with the same plan and sharders trains the same; this wrapper adds
    explicit syncs, reports, and errors that are raised on every rank.

    Example::

        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
        model = tdsp.ModelParallel2D(model, device=device, plan=plan, sharders=sharders)
        for batch in batches:
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            optimizer.step()
            model.sync()
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        *,
        env: ShardingEnv | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        **unsupported: Any,
    ) -> None:
        """Shard a model as the plan says.

        Args:
            module: the model; embedding modules may be on the meta device.
            device: this rank's device, CPU by default.
            plan: from `Planner2D`, from TorchRec's planner with this package's proposers, or from
                `Plan2D.from_stock`. Without one, it is searched as in `parallelize`.
            sharders: this package's sharders, by default `get_default_sharders()`.
            env: as in `DistributedModelParallel`, with all ranks.
            init_data_parallel: as in `DistributedModelParallel`.
            init_parameters: as in `DistributedModelParallel`.
            data_parallel_wrapper: as in `DistributedModelParallel`.

        Collectives:
            An agreement of all ranks on the arguments, then process groups and broadcasts; without
            a plan, first a broadcast of the plan that rank 0 found.
        """
        if env is not None:
            check_whole(env.process_group)
        # Ranks that have agreed have equal counts.
        NoticeBoard.start_anew(world_group())
        with agreeing(world_group()) as facts:
            _check_arguments(device, plan, unsupported)
            sharders = get_default_sharders() if sharders is None else list(sharders)
            device = torch.device(device or "cpu")
            check_can_start(module)
            facts["whether there is a plan"] = str(plan is not None)
        explanation: Explanation | None = None
        if plan is None:
            # Loaded only here: a model with a plan doesn't need the planner's modules.
            from torchrec_2dsp.parallel.planning import find_plan

            plan, explanation = find_plan(module, sharders, device)
        with agreeing(world_group()) as facts:
            plan = checked_model_plan(module, plan, sharders)
            facts["the plan"] = to_json(plan)
            facts["the device type"] = device.type
            facts["LOCAL_WORLD_SIZE"] = str(get_local_size(world_group().size()))
            facts["the sharders"] = repr([described(sharder) for sharder in sharders])
        groups = MeshGroups.for_mesh(plan.mesh, device.type, full_duplex=plan.full_duplex)
        self._device = device
        self._stand_in(plan, groups)
        DistributedModelParallel.__init__(
            self,
            module,
            groups.sharding_env(),
            device,
            plan,
            list(sharders),
            init_data_parallel,
            init_parameters,
            data_parallel_wrapper,
        )
        self._groups = groups
        # In a large model, finding them takes as long as their step.
        self._tables = sharded_tables(self)
        self.unfrozen: list[list[str]] = []
        """The tables of each `unfreeze` call so far."""
        self._num_steps = 0
        self.explanation = explanation
        """The reasons for a plan that this call searched, on rank 0."""

    def _stand_in(self, plan: Plan2D, groups: MeshGroups) -> None:
        """Set what `DMPCollection`'s methods read; its constructor needs GPUs and edits plans."""
        self._pg, self._global_rank = groups.world, groups.rank
        self._custom_all_reduce = self._sharded_relay_state = None
        self._use_sharded_relay = False
        self._submodule_ctxs: list[Any] = []
        self._default_ctx = DMPCollectionContext(
            module=None,  # type: ignore[arg-type]
            plan=plan,
            sharding_group_size=plan.mesh.group_size,
            node_group_size=plan.mesh.node_group_size(groups.local_world_size),
            use_inter_host_allreduce=plan.mesh.layout is RankLayout.CONTIGUOUS,
            device_mesh=groups.device_mesh,
            sharding_pg=groups.sharding_group,
            replica_pg=groups.replica_peers,
        )
        self._ctxs = [self._default_ctx]

    def explain(self) -> "Explanation":
        """Return the reasons for the plan, on rank 0: ``print(model.explain())``."""
        if self.explanation is None:
            raise ConfigError(
                "nothing is known here of the reasons for the plan: it was given, or this isn't "
                "rank 0, which searched it"
            )
        return self.explanation

    @property
    def mesh(self) -> Mesh2D:
        """The mesh, which determines the ranks that repeat the plan."""
        return self._groups.mesh

    def init_data_parallel(self) -> None:
        """Wrap the unsharded part, as TorchRec does, and check that DDP reduces all gradients.

        Collectives:
            `fitting_wrapper`'s, then TorchRec's.
        """
        wrapper = fitting_wrapper(self._data_parallel_wrapper, self, world_group())
        self._data_parallel_wrapper = wrapper
        super().init_data_parallel()
        refuse_unreduced(self)
        let_compile(self)

    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model as TorchRec does; if a collective fails, a `RankError` says why."""
        if torch.is_inference_mode_enabled():
            # FBGEMM's CPU kernels refuse this mode, and the stages' state would be unusable after.
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(*args, **kwargs)
        board, phase = self._groups.board, "an evaluation"
        if self.training and torch.is_grad_enabled():
            board.activity.step = self._num_steps = self._num_steps + 1
            board.activity.num_forwards += 1
            phase = "the forward"
        with naming_faults(board, phase):
            return super().forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelParallel2D":
        """Raise an error: process groups can't be copied."""
        raise UnsupportedError(
            "a sharded model can't be copied, because it holds process groups; copy it before you "
            "shard it, or save a checkpoint and load it into another model"
        )

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the tables' optimizer doesn't train, in the model's order.

        Example::

            dense_optimizer = torch.optim.Adam(model.dense_parameters(), lr=1e-3)
        """
        return [param for _, param in in_backward_optimizer_filter(self.named_parameters())]

    def combined_optimizer(self, dense_optimizer: torch.optim.Optimizer) -> KeyedOptimizer:
        """Join the tables' optimizer and the dense part's.

        Example::

            optimizer = model.combined_optimizer(torch.optim.Adam(model.dense_parameters()))
            pipeline = model.pipeline(optimizer)
            ...
            tdsp.save_checkpoint(folder, model, optimizer)

        Args:
            dense_optimizer: an optimizer of all or some dense parameters. One that contains the
                tables' optimizer already is returned as it is.

        Raises:
            ConfigError: the optimizer has other parameters, or wouldn't clip their gradients.

        Collectives:
            An agreement of all ranks.
        """
        fused = self.fused_optimizer
        dense = dict(in_backward_optimizer_filter(self.named_parameters()))
        is_keyed = isinstance(dense_optimizer, KeyedOptimizer)
        given = {id(param) for group in dense_optimizer.param_groups for param in group["params"]}
        tables = set(map(id, fused.params.values()))
        has_tables = is_keyed and not given.isdisjoint(tables)
        with agreeing(world_group()):
            check_clipping(self, dense_optimizer)
            if has_tables and not tables <= given:
                raise ConfigError(
                    "the optimizer lacks tables that unfreeze() has added since it was made; "
                    "combine the model's optimizer and the dense part's anew"
                )
            others = given - {id(param) for param in dense.values()}
            if others and not has_tables:
                raise ConfigError(
                    f"{len(others)} of the optimizer's {len(given)} parameters belong to tables, "
                    "or to the model before it was sharded: build it of model.dense_parameters(), "
                    "a keyed one of dict(in_backward_optimizer_filter(model.named_parameters()))"
                )
        if is_keyed:
            return dense_optimizer if has_tables else CombinedOptimizer([fused, dense_optimizer])
        named = {name: param for name, param in dense.items() if id(param) in given}
        return CombinedOptimizer([fused, KeyedOptimizerWrapper(named, lambda _: dense_optimizer)])

    def pipeline(self, dense_optimizer: torch.optim.Optimizer, **options: Any) -> AnyPipeline:
        """Build the plan's train pipeline, which trains tables and dense part.

        Example::

            pipeline = model.pipeline(torch.optim.Adam(model.dense_parameters(), lr=1e-3))
            for _ in range(num_steps):
                output = pipeline.progress(batches)

        Args:
            dense_optimizer: built from `dense_parameters`, or by `combined_optimizer` for all.
            options: of the pipeline's class: `TrainPipelineBase`, `TrainPipelineSparseDist` or
                `TrainPipelineRowPrefetch`.

        Its ``progress`` raises a `RankError` on all ranks if only some of them have a batch.

        Collectives:
            An agreement of all ranks; its ``progress`` all-reduces 8 bytes for each batch.
        """
        optimizer = self.combined_optimizer(dense_optimizer)
        kind = cast(Plan2D, self.plan).pipeline
        pipeline: AnyPipeline = PIPELINES[kind](self, optimizer, self._device, **options)
        return pipeline

    def sharded_tables(self) -> list[Tables2D]:
        """Return the sharded tables in model order, one per embedding module and mesh."""
        return list(self._tables)

    def sync(  # type: ignore[override]  # upstream returns nothing
        self, include_optimizer_state: bool = True
    ) -> SyncReport:
        """Run the sync that is due after a backward by the plan's policy, if any.

        A `GradientSync`'s row gradients aren't waited for here: they are in flight until the next
        lookup needs the rows.

        Args:
            include_optimizer_state: must be true; weights and state are synced together.

        Collectives:
            `LookupsInStep.end_step`'s and the plan's sync config's, for each module.
        """
        if not include_optimizer_state:
            raise UnsupportedError(
                "sync(include_optimizer_state=False) would let the optimizer states of replicas "
                "drift apart; call sync()"
            )
        with naming_faults(self._groups.board, "sync()"):
            for tables in self._tables:
                tables.in_step.end_step()
            return self._reach(SyncReason.BACKWARD_OVER)

    def sync_now(self) -> SyncReport:
        """Make the replicas equal and the tables complete, regardless of the policy.

        Call it on all ranks before you read tables directly instead of through state dicts.

        Collectives:
            The plan's sync config's and `Tables2D.complete_state`'s, for each
            sharded module; none if there is nothing to do.
        """
        with calling_together(self._groups, "sync_now()"):
            report = self._reach(SyncReason.READ)
            for tables in self.sharded_tables():
                tables.complete_state()
            return report

    @property
    def sync_step(self) -> int:
        """The step count of the `WeightSync` policies; 0 without one."""
        points = [tables.sync_point for tables in self.sharded_tables()]
        return max((point.policy_step for point in points), default=0)

    def set_sync_step(self, step: int) -> None:
        """Continue a `WeightSync` policy as after ``step`` steps; call it on all ranks.

        Loading a `TrainState` does this. Call it between two steps.

        Example:
            A run resumed at step 10 under ``every(3)`` syncs at step 12, not at 13::

                tdsp.load_checkpoint("checkpoints/10", model, optimizer)
                model.set_sync_step(10)
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"step={step!r} is no number of steps; give 0 or more")
        for tables in self.sharded_tables():
            tables.sync_point.count_from(step)

    def _reach(self, reason: SyncReason) -> SyncReport:
        return sum(
            (tables.sync_point.reach(reason) for tables in self.sharded_tables()), SyncReport()
        )

    @property
    def sync_total(self) -> SyncReport:
        """The sum of all sync reports since construction."""
        return sum((tables.sync_point.total for tables in self.sharded_tables()), SyncReport())

    @property
    def hot_sets(self) -> dict[str, HotSet]:
        """The current hot rows by table."""
        return {
            name: hot_set
            for tables in self.sharded_tables()
            for name, hot_set in tables.hot_sets.by_table.items()
        }

    def refresh_hot_sets(
        self, hot_sets: "Mapping[str, Iterable[int] | torch.Tensor | HotSet]"
    ) -> None:
        """Make other rows hot, between two steps; nothing is lost, and losses stay the same.

        Call it on all ranks. A batch that a pipeline has already distributed still trains with
        the old hot rows; the replicas move at the lookup of the first batch after it.

        Args:
            hot_sets: for each table, row ids in any order, or a `HotSet`; behind an id map, the ids
                that it maps. A table needs a hot set in the plan, whose size limits it; tables
                left out keep their hot rows.

        Collectives:
            An agreement of all ranks. When the replicas move, `complete_state`'s, and for
            each hot table an all-reduce of its rows on the "shard" axis.
        """
        with calling_together(self._groups, "refresh_hot_sets()"), agreeing(world_group()) as facts:
            hot_tables = sorted(self.hot_sets)
            unknown = sorted(hot_sets.keys() - set(hot_tables))
            if unknown:
                raise PlanError(
                    f"table {unknown[0]!r} has no hot rows to refresh: pin some when you plan; "
                    + (f"{', '.join(hot_tables)} have them" if hot_tables else "no table has them")
                )
            renewed = {name: HotSet.of(rows) for name, rows in hot_sets.items()}
            for tables in self.sharded_tables():
                tables.hot_sets.check(renewed)
            facts["the hot sets"] = "\n".join(
                f"{name}: {hot_set.row_ids}" for name, hot_set in sorted(renewed.items())
            )
        for tables in self.sharded_tables():
            tables.hot_sets.renew(renewed)

    def unfreeze(self, *tables: str) -> None:
        """Train, from now on, tables that were frozen when the model was sharded.

        They start with an optimizer state of zeros, as tables that join now. Call it on all ranks
        between two steps, and rebuild optimizers, schedulers, pipelines and `TrainState`.

        Example::

            model.unfreeze("t_user", "t_item")
            pipeline = model.pipeline(torch.optim.Adam(model.dense_parameters(), lr=1e-3))

        Collectives:
            An agreement of all ranks, `sync`'s, then a sharder's for each module
            with such tables.
        """
        with calling_together(self._groups, "unfreeze()"):
            with agreeing(world_group()) as facts:
                facts["the tables of unfreeze()"] = ", ".join(sorted(tables))
                swaps = prepared_unfreeze(self, tables)
            # Policies count a step when its sync is due.
            self._reach(SyncReason.BACKWARD_OVER)
            policy_step = self.sync_step
            for swap in swaps:
                swap(policy_step)
            renew_optimizer(self)
            self._tables = sharded_tables(self)
            self.unfrozen.append(sorted(tables))

    def broadcast_replicas(self) -> None:
        """Copy the first group's tables to every group, after weights were written by hand.

        Collectives:
            `Tables2D.broadcast_replicas`', for each sharded module.
        """
        with naming_faults(self._groups.board, "broadcast_replicas()"):
            for tables in self.sharded_tables():
                tables.broadcast_replicas()

    def init_torchrec_delta_tracker(self, delta_tracker_config: DeltaTrackerConfig) -> Any:
        """Start TorchRec's tracker of looked up ids, if it would see all of them."""
        check_tracked(self.module, delta_tracker_config.fqns_to_skip)
        return super().init_torchrec_delta_tracker(delta_tracker_config)

    def set_all_reduce_hook(self, reduce_hook: Any) -> None:
        """Raise an error: the plan's sync config decides what replicas send each other."""
        raise UnsupportedError(
            "an all-reduce hook can't see which rows changed; choose the sync by the plan's "
            "GradientSync or WeightSync"
        )


def _check_arguments(device: object, plan: object, unsupported: Mapping[str, Any]) -> None:
    """Refuse arguments of TorchRec's wrappers that this one doesn't take, or in their order."""
    if isinstance(device, ShardingEnv) or isinstance(plan, torch.device):
        raise ConfigError(
            "give ModelParallel2D its arguments by keyword: only module, device, plan and sharders "
            "have a place, in this order, and DistributedModelParallel's env isn't among them"
        )
    if "model_tracker_configs" in unsupported:
        raise UnsupportedError(
            "ModelParallel2D doesn't take model_tracker_configs: they track raw ids in TorchRec's "
            "own managed collisions; for looked up ids call init_torchrec_delta_tracker()"
        )
    if unsupported:
        raise UnsupportedError(
            f"ModelParallel2D doesn't take {', '.join(sorted(unsupported))}: mesh and sync come "
            "from the plan, submodule configs and FULLY_SHARDED aren't supported"
        )
