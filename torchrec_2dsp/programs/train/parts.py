"""A run's sharders, plan and optimizers."""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import KernelConfig, TopologyFactory, TrainerConfig
from torchrec.distributed.types import ModuleSharder
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.comms.agreement import agreeing
from torchrec_2dsp.comms.world_groups import world_group
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan import serialize
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.planner.planner2d import Planner2D
from torchrec_2dsp.programs.data.dataset import BatchShape, Dataset
from torchrec_2dsp.programs.models.kinds import build_any_model, layered_of
from torchrec_2dsp.programs.models.optimizer import (
    STATE_PER_WEIGHT,
    dense_optimizer,
    table_optimizer,
    with_meetings,
)
from torchrec_2dsp.programs.models.own_model import OwnModelConfig
from torchrec_2dsp.programs.models.planned import collective_plan, planner_arguments
from torchrec_2dsp.programs.models.planned_dense import DensePart, dense_part
from torchrec_2dsp.programs.models.splits import split_
from torchrec_2dsp.programs.models.tables import tables_of
from torchrec_2dsp.programs.train.config import RunConfig, TrainConfig
from torchrec_2dsp.programs.train.sections import LoopConfig
from torchrec_2dsp.programs.train.stock import stock_plan
from torchrec_2dsp.shard.sequence_sharder import EmbeddingCollectionSharder2D
from torchrec_2dsp.shard.sharders import EmbeddingBagCollectionSharder2D


def make_model(config: TrainConfig, run: RunConfig, shape: BatchShape) -> nn.Module:
    """The model of a run before it is sharded. Its tables have no weights, because no rank has to
    be able to hold them; those of a user's own model are as the factory leaves them."""
    model = build_any_model(shape, config.model, tables_device="meta")
    split_(model, run.splits, run.split_threshold)
    return model


def make_sharders(
    config: TrainConfig, run: RunConfig, shape: BatchShape
) -> list[ModuleSharder[Any]]:
    """The sharders of a run's bags and sequences.

    They draw initial tables that no mesh changes, or keep those of a user's own model.
    """
    optimizer = table_optimizer(
        config.optimizer,
        run,
        shape,
        num_groups=run.num_groups,
        global_batch_size=config.loop.global_batch_size,
    )
    is_own = isinstance(config.model, OwnModelConfig)
    init_seed = None if is_own else config.model.seed
    accumulates = config.loop.accumulate > 1
    bags = EmbeddingBagCollectionSharder2D(
        optimizer, keep_weights=is_own, accumulates=accumulates, init_seed=init_seed
    )
    # TorchRec keeps the weights of sequences by itself.
    sequences = EmbeddingCollectionSharder2D(
        optimizer, accumulates=accumulates, init_seed=init_seed
    )
    return cast(list[ModuleSharder[Any]], [bags, sequences])


@dataclass(frozen=True)
class PlannedRun:
    """The plan of a run."""

    plan: Plan2D
    """The plan, equal on all ranks."""

    explanation: str
    """Why the plan is as it is, in words, on the rank that searched it by cost; else empty."""

    tables: dict[str, tuple[int, int]]
    """The rows and the dimension of each table, by its name."""

    num_steps: int
    """How many steps the run has, unless it is out of patience before: those of the config, or as
    many as there are data for."""

    dense: str = ""
    """What runs the dense part, in words, if it was planned."""

    def with_dense(self, part: DensePart) -> "PlannedRun":
        """The plan with what was chosen for the dense part, if that was planned, too."""
        if part.choices is None:
            return self
        texts = [self.explanation, str(part.choices)] if self.explanation else []
        dense = str(part.choices.best.plan)
        return replace(self, explanation="\n\n".join(texts), dense=dense)


def plan_run(
    config: TrainConfig,
    name: str,
    shape: BatchShape,
    model: nn.Module,
    sharders: list[ModuleSharder[Any]],
    num_steps: int,
) -> PlannedRun:
    """The plan of a run: from a file, or what `Planner2D` finds, with what the run pins besides.

    Collectives:
        An agreement of all ranks on the files that are read, and one broadcast of a pickled object
        from rank 0 of the world.
    """
    run, world_size = config.runs[name], dist.get_world_size(world_group())
    with agreeing(world_group()):
        mesh = config.mesh(name, world_size)
        access = AccessStats.load(run.access) if run.access else None
        calibration = Calibration.load(run.calibration) if run.calibration else None
        if run.plan:
            plan = _plan_of_file(name, run, world_size)
            return PlannedRun(plan, "", _table_shapes(model), num_steps)
        arguments = _planner_arguments(config, shape, run, calibration)
        if run.is_planned_by_cost:
            arguments |= {"calibration": calibration, "access": access}
        planner = Planner2D(**arguments, mesh=mesh, sync=run.sync_config)
    pins = None if run.is_planned_by_cost else run
    plan = collective_plan(planner, model, sharders, pins=pins, data=shape, access=access)
    is_searched_here = run.is_planned_by_cost and dist.get_rank(world_group()) == 0
    explanation = str(planner.explain()) if is_searched_here else ""
    return PlannedRun(plan, explanation, _table_shapes(model), num_steps)


def plan_stock_run(
    config: TrainConfig,
    shape: BatchShape,
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    num_steps: int,
) -> PlannedRun:
    """The plan of a run by TorchRec alone.

    Collectives:
        One broadcast of a pickled object from rank 0 of the world.
    """
    arguments = _planner_arguments(config, shape, RunConfig(), None)
    plan = stock_plan(model, sharders, arguments)
    return PlannedRun(plan, "", _table_shapes(model), num_steps)


def _planner_arguments(
    config: TrainConfig, shape: BatchShape, run: RunConfig, calibration: Calibration | None
) -> dict[str, Any]:
    """The arguments that TorchRec's planner and this package's are given alike."""
    world_size = dist.get_world_size(world_group())
    local_size = get_local_size(world_size)
    if calibration is not None:
        topology = calibration.topology(world_size, local_size)
    else:
        topology = TopologyFactory.create_topology(
            TrainerConfig(world_size=world_size, local_world_size=local_size),
            kernel_config=KernelConfig(compute_device=config.loop.device),
        )
    return planner_arguments(
        shape,
        run.sharding_types or config.model.sharding_types,
        topology,
        batch_size=config.loop.batch_size // world_size,
    )


def num_steps_of(loop: LoopConfig, dataset: Dataset) -> int:
    """How many steps a run has: as many as its config says, or as there are data for."""
    num_batches = dataset.num_train_batches(loop.batch_size)
    return loop.steps if num_batches is None else min(loop.steps, num_batches // loop.accumulate)


def _table_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The rows and the dimension of each table of a model that isn't sharded."""
    return {table.name: (table.num_embeddings, table.embedding_dim) for table in tables_of(model)}


def _plan_of_file(name: str, run: RunConfig, world_size: int) -> Plan2D:
    plan = serialize.load(run.plan)
    plan.mesh.check_world(world_size)
    if plan.sync != run.sync_config:
        raise ConfigError(
            f"runs.{name} has {run.sync_config}, and the plan {run.plan} has {plan.sync}; let the "
            "run say what the plan says"
        )
    return plan


def make_dense_part(config: TrainConfig, run: RunConfig, model: nn.Module) -> DensePart:
    """What runs the dense part of a model that isn't sharded yet.

    Collectives:
        Those of `dense_part`.
    """
    loop = config.loop
    return dense_part(
        run.dense,
        layered_of(model),
        calibration=run.calibration,
        batch_size=loop.batch_size // dist.get_world_size(world_group()),
        state_per_weight=STATE_PER_WEIGHT[config.optimizer.dense_optimizer],
        # A DDP that is told that its graph is static learns it in its first backward, in which it
        # adds up the gradients of each batch. That would be other bits after a resume.
        static_graph=loop.accumulate == 1,
    )


@dataclass(frozen=True)
class RunOptimizers:
    """The optimizers of a run."""

    whole: CombinedOptimizer
    """The optimizer of all parameters."""

    tables: KeyedOptimizer
    """The fused optimizers of the tables."""

    dense: KeyedOptimizer
    """The optimizer of everything else, as each rank steps it."""

    def rates(self) -> tuple[float, float]:
        """The learning rates now, of the tables and of everything else."""
        return _rate(self.tables), _rate(self.dense)

    def set_rates(self, of_tables: float, of_dense: float) -> None:
        """Set the learning rates of the next step; kernels get theirs as its gradients are
        cleared."""
        for optimizer, rate in ((self.tables, of_tables), (self.dense, of_dense)):
            groups: Any = optimizer.param_groups
            for group in groups:
                group["lr"] = rate


def _rate(optimizer: KeyedOptimizer) -> float:
    groups: Any = optimizer.param_groups
    return float(groups[0]["lr"]) if groups else 0.0


def make_optimizers(
    model: DistributedModelParallel, config: TrainConfig, run: RunConfig
) -> RunOptimizers:
    """The tables' fused optimizers, and the optimizer of everything else."""
    params = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = dense_optimizer(config.optimizer, params, clip_norm=config.optimizer.dense_clip_norm)
    fused: Any = model.fused_optimizer
    whole = CombinedOptimizer([fused, with_meetings(dense, run.dense, model)])
    return RunOptimizers(whole, fused, dense)
