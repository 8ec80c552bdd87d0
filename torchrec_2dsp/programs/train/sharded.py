"""Plan and shard a run's model: by this package, or by TorchRec alone.

```text
config --make_model--> unsharded model --plan_run--> plan --ModelParallel2D--> sharded model
         make_sharders                   stock_plan         DistributedModelParallel
```
"""

from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import (
    KernelConfig,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_2dsp._compat.ddp import data_parallel_wrapper
from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.access.counter import RowCounter
from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.workload import DenseWork, Workload
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
from torchrec_2dsp.plan import serialize
from torchrec_2dsp.plan.parameter_sharding import Exchange, RowStorage
from torchrec_2dsp.plan.plan2d import Plan2D, plan_for_rank
from torchrec_2dsp.planner.planner2d import ParameterConstraints2D, Planner2D, plan_on_rank_0
from torchrec_2dsp.programs.config.dense import LocalConfig
from torchrec_2dsp.programs.config.sections import ModelConfig
from torchrec_2dsp.programs.data.dataset import Dataset, Progress, Split
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig
from torchrec_2dsp.programs.models.dense import autocast_, dense_part
from torchrec_2dsp.programs.models.kinds import build_any_model, layered_of, transformer_of
from torchrec_2dsp.programs.models.model import rank_device, split_, tables_of
from torchrec_2dsp.programs.models.optimizer import (
    STATE_PER_WEIGHT,
    dense_optimizer,
    table_optimizer,
    with_meetings,
)
from torchrec_2dsp.programs.models.own_model import OwnModelConfig
from torchrec_2dsp.programs.models.planned import (
    RESERVED,
    ReservedShare,
    draw_sharded_tables_,
    pinned_plan,
    planner_arguments,
    stock_sharders,
    table_configs,
    true_access,
)
from torchrec_2dsp.programs.train.config import RunConfig, TrainConfig
from torchrec_2dsp.shard.sharders import (
    EmbeddingBagCollectionSharder2D,
    EmbeddingCollectionSharder2D,
)

_COUNTED_IDS, _COUNTED_BATCHES = 2**21, 8
"""The lowest numbers of lookups, or samples, and of batches to count."""
_EXACT_ROWS = 2**22
"""The largest table whose rows are all counted; for larger ones, only the most used are."""

_Sharders = list[ModuleSharder[Any]]


@dataclass(frozen=True)
class PlannedRun:
    """A run's plan."""

    plan: Plan2D
    """The plan, equal on all ranks."""

    tables: dict[str, tuple[int, int]]
    """Each table's rows and dimension, by table name."""

    num_steps: int
    """The run's steps, unless its patience ends first: the config's, or as many as the data has."""

    explanation: str = ""
    """The reason for the plan, in words, on the rank that searched it by cost; else empty."""

    dense: str = ""
    """The dense part, in words, if it was planned."""


def sharded_model(
    config: TrainConfig, name: str, dataset: Dataset
) -> tuple[DistributedModelParallel, PlannedRun]:
    """Plan a run and shard its model, for the data that the config names.

    Collectives:
        Same as planning and sharding.
    """
    run, device = config.runs[name], rank_device(config.loop.device)
    model = make_model(config, run, dataset)
    tables = {table.name: (table.num_embeddings, table.embedding_dim) for table in tables_of(model)}
    num_steps = _num_steps(config, dataset)
    if run.stock:
        parallel_model, plan = _stock_run(config, model, dataset, device)
        return parallel_model, PlannedRun(plan, tables, num_steps)
    types = {table.data_type for table in tables_of(model)}
    is_fp32 = types <= {DataType.FP32} and run.stored_as is not RowStorage.INT8
    if config.optimizer.stochastic_rounding and is_fp32:
        raise ConfigError(
            "optimizer.stochastic_rounding is for tables in 16 or 8 bits, of which the model has "
            "none; leave it out"
        )
    if isinstance(run.dense, LocalConfig) and num_steps % run.dense.local_steps:
        last_meeting = num_steps - num_steps % run.dense.local_steps
        fewer_steps = f"loop.steps={last_meeting}, or " if last_meeting else ""
        raise ConfigError(
            f"the data of runs.{name} ends after {num_steps} steps, and its ranks meet after every "
            f"{run.dense.local_steps}; set {fewer_steps}other dense.local_steps"
        )
    sharders = make_sharders(config, run)
    plan, explanation = _plan_run(config, name, dataset, model, sharders)
    part = dense_part(
        run.dense,
        layered_of(model),
        calibration=run.calibration,
        batch_size=config.loop.batch_size // dist.get_world_size(world_group()),
        state_per_weight=STATE_PER_WEIGHT[config.optimizer.dense_optimizer],
        # With a static graph, DDP learns the graph in its first backward, where it adds up the
        # gradients of each batch. After a resume, that would give other bits.
        static_graph=config.loop.accumulate == 1,
    )
    autocast_(model, run.dense, device)
    parallel_model = ModelParallel2D(
        model,
        device=device,
        plan=plan,
        sharders=sharders,
        data_parallel_wrapper=part.wrapper,
    )
    dense = ""
    if part.choices is not None:
        dense = str(part.choices.best.plan)
        explanation = explanation and f"{explanation}\n\n{part.choices}"
    return parallel_model, PlannedRun(plan, tables, num_steps, explanation, dense)


def make_model(config: TrainConfig, run: RunConfig, dataset: Dataset) -> nn.Module:
    """Build a run's unsharded model.

    Its tables are on the meta device, since a whole table may not fit on any rank; a user's own
    model keeps what its factory built.
    """
    model = build_any_model(dataset, config.model, tables_device="meta")
    split_(model, run.splits, run.split_threshold)
    return model


def make_sharders(config: TrainConfig, run: RunConfig) -> _Sharders:
    """Build a run's sharders for bags and sequences.

    They draw initial tables that don't depend on the mesh, or keep a user's own model's weights.
    """
    optimizer = table_optimizer(config.optimizer, run)
    is_own = isinstance(config.model, OwnModelConfig)
    init_seed = None if is_own else config.model.seed
    accumulates = config.loop.accumulate > 1
    rounding: dict[str, Any] = {"stochastic_rounding": config.optimizer.stochastic_rounding}
    if config.optimizer.stochastic_rounding:
        rounding["rounding_seed"] = config.optimizer.rounding_seed
    bags = EmbeddingBagCollectionSharder2D(
        optimizer,
        fused_params=rounding,
        keep_weights=is_own,
        accumulates=accumulates,
        init_seed=init_seed,
    )
    # TorchRec keeps the weights for sequences by itself.
    sequences = EmbeddingCollectionSharder2D(
        optimizer, fused_params=rounding, accumulates=accumulates, init_seed=init_seed
    )
    return cast(_Sharders, [bags, sequences])


def _num_steps(config: TrainConfig, dataset: Dataset) -> int:
    loop = config.loop
    num_batches = dataset.num_train_batches(loop.global_batch_size)
    return loop.steps if num_batches is None else min(loop.steps, num_batches)


def _plan_run(
    config: TrainConfig, name: str, dataset: Dataset, model: nn.Module, sharders: _Sharders
) -> tuple[Plan2D, str]:
    """Read a run's plan, or search one with the run's pins; return it and its explanation.

    Collectives:
        All ranks agree whether files could be read, and rank 0 broadcasts one pickled object.
    """
    run, world_size = config.runs[name], dist.get_world_size(world_group())
    is_first = dist.get_rank(world_group()) == 0
    with agreeing(world_group()):
        access = AccessStats.load(run.access) if run.access else None
        calibration = Calibration.load(run.calibration) if run.calibration else None
        if run.plan:
            return _plan_of_file(name, run, world_size), ""
        topology = _topology(config, calibration)
        arguments = arguments_of(config, run, dataset, model, topology)
        mesh, sync = config.mesh(name, world_size), run.sync_config
        if calibration is not None:
            # Only rank 0 searches.
            access = access_of(config, run, model, dataset) if is_first else None
            planner = planner_by_cost(config, name, dataset, model, topology, calibration, access)
        elif run.is_planned_by_cost:
            planner = Planner2D(**arguments, mesh=mesh, sync=sync, access=access)
        else:
            planner = None
    if planner is None:
        assert mesh is not None
        pinned = pinned_plan(
            model, sharders, run, dataset, arguments, mesh=mesh, sync=sync, access=access
        )
        return pinned, ""
    plan = planner.collective_plan(model, sharders, world_group())
    return plan, str(planner.explain()) if is_first else ""


def _topology(config: TrainConfig, calibration: Calibration | None = None) -> Topology:
    world_size = dist.get_world_size(world_group())
    local_size = get_local_size(world_size)
    if calibration is not None:
        return calibration.topology(world_size, local_size)
    return TopologyFactory.create_topology(
        TrainerConfig(world_size=world_size, local_world_size=local_size),
        kernel_config=KernelConfig(compute_device=config.loop.device),
    )


def _plan_of_file(name: str, run: RunConfig, world_size: int) -> Plan2D:
    plan = serialize.load(run.plan)
    plan.mesh.check_world(world_size)
    differs = f"and the plan {run.plan} has {plan.mesh}, {plan.sync}; let the run say the same"
    if run.says_sync and plan.sync != run.sync_config:
        raise ConfigError(f"runs.{name} has {run.sync_config}, {differs}")
    if run.num_groups not in (0, plan.mesh.num_groups):
        raise ConfigError(f"runs.{name} has num_groups={run.num_groups}, {differs}")
    return plan


def arguments_of(
    config: TrainConfig, run: RunConfig, dataset: Dataset, model: nn.Module, topology: Topology
) -> dict[str, Any]:
    """Return the arguments that TorchRec's planner and this package's share."""
    return planner_arguments(
        model,
        dataset,
        run.sharding_types or config.model.sharding_types,
        topology,
        batch_size=config.loop.batch_size // topology.world_size,
    )


def planner_by_cost(
    config: TrainConfig,
    name: str,
    dataset: Dataset,
    model: nn.Module,
    topology: Topology,
    calibration: Calibration,
    access: AccessStats | None,
    *,
    reserved: float = RESERVED,
) -> Planner2D:
    """Build the planner for a run on calibrated machines, which needn't be there.

    Args:
        config: the training program's.
        name: the run's; the plan must follow its mesh, exchange and hot rows.
        dataset: the data, for its features.
        model: the unsharded model.
        topology: the calibration's, for the ranks that train.
        calibration: the machines.
        access: row frequencies; `None` on ranks that don't search.
        reserved: the share of memory that isn't for tables.
    """
    run = config.runs[name]
    arguments = arguments_of(config, run, dataset, model, topology)
    arguments["storage_reservation"] = ReservedShare(reserved)
    batch_size, types = arguments["batch_size"], run.sharding_types or config.model.sharding_types
    # Counts give better ids per sample, and the only ones if the data lacks a feature.
    is_counted = access is not None and not run.access
    described = set() if is_counted else {feature.name for feature in dataset.features}
    by_features = arguments["constraints"]
    arguments["constraints"] = constraints = {
        table.name: ParameterConstraints2D(
            sharding_types=list(types),
            pooling_factors=by_features[table.name].pooling_factors
            if described.issuperset(table.feature_names)
            else [1.0],
            exchange=[run.exchange] if run.exchange is not Exchange.POOLED else None,
            transport=[run.row_transport] if run.row_transport is not Transport.FP32 else None,
            stored_as=run.stored_as,
            hot_rows=run.hot_rows or None,
        )
        for table in tables_of(model)
    }
    kernels, transformer = calibration.kernels, transformer_of(config.model)
    if transformer is None or kernels.matmul is None:
        arguments["access"] = access
    else:
        # A weight is used for each item of a sample, not once.
        layers = transformer.layers(kernels).layers
        forward_s = batch_size * sum(layer.forward_s for layer in layers)
        workload = Workload.of_model(
            model, batch_size=batch_size, constraints=constraints, access=access
        )
        dense = DenseWork.of_model(model, workload, kernels)
        arguments["workload"] = replace(
            workload, dense=replace(dense, forward_s=forward_s, backward_s=2 * forward_s)
        )
    return Planner2D(
        **arguments,
        mesh=config.mesh(name, topology.world_size),
        sync=run.sync_config,
        calibration=calibration,
    )


def access_of(
    config: TrainConfig,
    run: RunConfig,
    model: nn.Module,
    dataset: Dataset,
    progress: Progress | None = None,
) -> AccessStats:
    """Return a run's row frequencies: from its file, its data's probabilities, or a count.

    Args:
        config: the training program's.
        run: one of its runs.
        model: the unsharded model.
        dataset: the model's batches; the first are counted if nothing else is known.
        progress: called during the count.
    """
    if run.access:
        return AccessStats.load(run.access)
    if isinstance(config.data, SyntheticConfig) and isinstance(config.model, ModelConfig):
        return true_access(config.data)
    counter = RowCounter.for_model(model, exact_rows=_EXACT_ROWS)
    num_counted, batch_size = 0, config.loop.batch_size
    own = dataset.batches(Split.TRAIN, global_batch_size=batch_size, rank=0, world_size=1)
    with closing(own) as batches:
        for number, batch in enumerate(batches):
            if num_counted >= _COUNTED_IDS and number >= _COUNTED_BATCHES:
                break
            counter.update(batch.sparse_features)
            num_counted += max(batch.sparse_features.values().numel(), batch_size)
            if progress is not None:
                progress("counting lookups", num_counted, _COUNTED_IDS)
    return counter.stats()


def _stock_run(
    config: TrainConfig, model: nn.Module, dataset: Dataset, device: torch.device
) -> tuple[DistributedModelParallel, Plan2D]:
    """Plan and shard a model by TorchRec alone, with the tables that this package's sharders draw.

    The plan is returned as a single group's, for display.

    Collectives:
        Rank 0 broadcasts one pickled object; and the same as `DistributedModelParallel`.
    """
    world, sharders, tables = world_group(), stock_sharders(config.optimizer), table_configs(model)
    arguments = arguments_of(config, RunConfig(), dataset, model, _topology(config))
    mesh = Mesh2D(1, world.size())

    def make_plan() -> Plan2D:
        plan = EmbeddingShardingPlanner(**arguments, debug=False).plan(model, sharders)
        return Plan2D.from_stock(plan, mesh=mesh)

    plan = plan_on_rank_0(make_plan, world)
    rank_plan = plan_for_rank(
        plan,
        world.rank(),
        device_type=device.type,
        local_world_size=get_local_size(world.size()),
    )
    parallel_model = DistributedModelParallel(
        model, device=device, plan=rank_plan, sharders=sharders
    )
    draw_sharded_tables_(parallel_model, tables, config.model.seed)
    return parallel_model, plan


@dataclass(frozen=True)
class RunOptimizers:
    """A run's optimizers."""

    whole: CombinedOptimizer
    """The optimizer for all parameters."""

    tables: KeyedOptimizer
    """The tables' fused optimizers."""

    dense: KeyedOptimizer
    """The optimizer for everything else, as each rank steps it."""

    def rates(self) -> tuple[float, float]:
        """Return the current learning rates, for the tables and for everything else."""
        return _rate(self.tables), _rate(self.dense)

    def set_rates(self, table_lr: float, dense_lr: float) -> None:
        """Set the next step's learning rates; kernels get theirs when gradients are cleared."""
        for optimizer, rate in ((self.tables, table_lr), (self.dense, dense_lr)):
            groups: Any = optimizer.param_groups
            for group in groups:
                group["lr"] = rate


def _rate(optimizer: KeyedOptimizer) -> float:
    groups: Any = optimizer.param_groups
    return float(groups[0]["lr"]) if groups else 0.0


def make_optimizers(
    model: DistributedModelParallel, config: TrainConfig, run: RunConfig
) -> RunOptimizers:
    """Build the tables' fused optimizers and the optimizer for everything else."""
    params = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = dense_optimizer(
        config.optimizer,
        params,
        clip_norm=config.optimizer.dense_clip_norm,
        wrapper=data_parallel_wrapper(model),
    )
    fused: Any = model.fused_optimizer
    whole = CombinedOptimizer([fused, with_meetings(dense, run.dense, model)])
    return RunOptimizers(whole, fused, dense)
