"""Build contestants: model, initial tables, plan, optimizer and TorchRec's pipeline.

Their work for the cost model is here, too.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.measuring.clock import Clock
from torchrec_2dsp.cost.workload import DenseWork, Workload
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
from torchrec_2dsp.parallel.parallelize import parallelize
from torchrec_2dsp.parallel.pipelines import AnyPipeline
from torchrec_2dsp.plan.parameter_sharding import Pipeline
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.planner.planner2d import Planner2D
from torchrec_2dsp.programs.bench.config import (
    BenchConfig,
    PlannedContestant,
    StockContestant,
    TwoDContestant,
)
from torchrec_2dsp.programs.config.dense import DenseKinds
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig
from torchrec_2dsp.programs.link_speeds import LinkSpeeds
from torchrec_2dsp.programs.models.dense import autocast_, dense_part
from torchrec_2dsp.programs.models.kinds import build_any_model, dataset_for, layered_of
from torchrec_2dsp.programs.models.model import rank_device, table_name
from torchrec_2dsp.programs.models.optimizer import (
    STATE_PER_WEIGHT,
    dense_optimizer,
    plain_dense_optimizer,
    table_optimizer,
    with_meetings,
)
from torchrec_2dsp.programs.models.planned import (
    draw_sharded_tables_,
    make_pipeline,
    pinned_plan,
    planner_arguments,
    stock_sharders,
    table_configs,
    true_access,
)
from torchrec_2dsp.shard.sharders import (
    EmbeddingBagCollectionSharder2D,
    EmbeddingCollectionSharder2D,
)


def tables_work(config: BenchConfig) -> Workload:
    """Return a step's work with the tables, for any contestant."""
    data = config.data
    model = build_any_model(data.dataset(), config.model, tables_device="meta")
    access = true_access(data) if isinstance(data, SyntheticConfig) else None
    return Workload.of_model(model, batch_size=config.schedule.batch_size, access=access)


def workload_of(
    contestant: PlannedContestant, tables: Workload, dim: int, dense: DenseWork | None
) -> Workload:
    """Return the work in a contestant's step with its own communication."""
    # INT8 has a scale and an offset per row, MX4 an exponent for 32 numbers.
    small = {"int8": 1 + 8 / dim, "mx4": 1 / 2 + 1 / 32}
    bytes_per_number = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, **small}
    wire = bytes_per_number[contestant.qcomms]
    return replace(
        tables,
        dense=dense or DenseWork(),
        forward_wire_bytes=wire,
        backward_wire_bytes=wire,
    )


def scheduled(plan: Plan2D, contestant: PlannedContestant) -> Plan2D:
    """Return the plan with its contestant's pipeline and all-to-all, unless the search chose."""
    if isinstance(contestant, TwoDContestant) and contestant.by_cost:
        return plan
    is_early = isinstance(contestant, TwoDContestant) and contestant.prefetch_rows
    pipeline = Pipeline.ROW_PREFETCH if is_early else Pipeline.SPARSE_DIST
    return replace(plan, pipeline=pipeline, full_duplex=contestant.full_duplex)


def measure_dense(config: BenchConfig, world: dist.ProcessGroup) -> DenseWork:
    """Time a click model without its tables, on all ranks at once."""
    device = rank_device(config.schedule.device)
    data = cast(SyntheticConfig, config.data)
    model: Any = build_any_model(data.dataset(), config.model, tables_device="meta")
    model = model.model
    parts = nn.ModuleList([model.dense_arch, model.inter_arch, model.over_arch]).to(device)
    batch_size, num_tables = config.schedule.batch_size, len(data.features)
    numbers = torch.rand(batch_size, data.num_dense, device=device)
    vectors = torch.rand(batch_size, num_tables, config.model.dim, device=device)
    vectors.requires_grad_()
    clicks = torch.randint(0, 2, (batch_size,), device=device).float()
    optimizer = plain_dense_optimizer(config.optimizer, parts.parameters())

    def forward() -> torch.Tensor:
        scores = model.over_arch(model.inter_arch(model.dense_arch(numbers), vectors))
        return nn.functional.binary_cross_entropy_with_logits(scores.squeeze(-1), clicks)

    def step() -> None:
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()

    clock = Clock(world)
    forward_s = statistics.median(clock.repeated_seconds(forward))
    step_s = statistics.median(clock.repeated_seconds(step))
    return DenseWork(
        forward_s=forward_s,
        backward_s=max(0.0, step_s - forward_s),
        gradient_bytes=float(sum(weight.nbytes for weight in parts.parameters())),
    )


@dataclass(frozen=True)
class Trainer:
    """A sharded model that is ready to train."""

    model: DistributedModelParallel
    pipeline: AnyPipeline
    """TorchRec's, or derived from it: it calls the model's `sync` by itself."""

    optimizer: CombinedOptimizer
    dense_plan: str = ""
    """The dense part that was predicted to be fastest; empty if none was planned."""

    def stop_learning(self) -> None:
        """Freeze all weights from now on."""
        for group in cast(list[dict[str, Any]], self.optimizer.param_groups):
            group["lr"] = 0.0


def build_trainer(
    config: BenchConfig,
    contestant: PlannedContestant,
    mesh: Mesh2D,
    speeds: LinkSpeeds,
    dense: DenseWork | None = None,
) -> Trainer:
    """Shard a contestant's model; all contestants have equal initial weights.

    Collectives:
        Those of planning and sharding.
    """
    device = rank_device(config.schedule.device)
    unsharded = build_any_model(config.data.dataset(), config.model, tables_device="meta")
    tables = table_configs(unsharded)
    part = dense_part(
        contestant.dense,
        layered_of(unsharded),
        calibration=config.calibration,
        batch_size=config.schedule.batch_size,
        state_per_weight=STATE_PER_WEIGHT[config.optimizer.dense_optimizer],
    )
    autocast_(unsharded, contestant.dense, device)
    sharders = _sharders(config, contestant, device)
    wrapping: dict[str, Any] = {
        "device": device,
        "sharders": sharders,
        "data_parallel_wrapper": part.wrapper,
    }
    if isinstance(contestant, TwoDContestant) and contestant.kind == "parallelized":
        first = next(rank_batches(config, dist.get_rank(), dist.get_world_size()))
        model = parallelize(
            unsharded,
            batch_size=config.schedule.batch_size,
            precision=contestant.precision,
            sample=first.sparse_features.to(device),
            calibration=config.calibration or None,
            **wrapping,
        )
    else:
        is_2d = isinstance(contestant, TwoDContestant)
        wrapper = ModelParallel2D if is_2d else DistributedModelParallel
        plan = _planned(config, contestant, mesh, speeds, dense, unsharded, sharders)
        model = wrapper(unsharded, plan=plan, **wrapping)
    draw_sharded_tables_(model, tables, config.model.seed)
    optimizer = _optimizer(config, contestant.dense, model)
    pipeline = make_pipeline(model, optimizer, device)
    dense_plan = str(part.choices.best.plan) if part.choices else ""
    return Trainer(model, pipeline, optimizer, dense_plan)


def _sharders(
    config: BenchConfig, contestant: PlannedContestant, device: torch.device
) -> list[ModuleSharder[nn.Module]]:
    codecs = _codecs(contestant.qcomms, device)
    if isinstance(contestant, StockContestant):
        bags = _AnyTypeSharder if contestant.sharding_types else EmbeddingBagCollectionSharder
        return stock_sharders(config.optimizer, bags, qcomm_codecs_registry=codecs)
    optimizer = table_optimizer(config.optimizer, contestant)
    return cast(
        list[ModuleSharder[nn.Module]],
        [
            EmbeddingBagCollectionSharder2D(optimizer, qcomm_codecs_registry=codecs),
            EmbeddingCollectionSharder2D(optimizer, qcomm_codecs_registry=codecs),
        ],
    )


class _AnyTypeSharder(EmbeddingBagCollectionSharder):
    """A sharder that also offers the row-wise types, which TorchRec's own leaves out on CPU."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [kind.value for kind in ShardingType]


def _planned(
    config: BenchConfig,
    contestant: PlannedContestant,
    mesh: Mesh2D,
    speeds: LinkSpeeds,
    dense: DenseWork | None,
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
) -> ShardingPlan:
    """Plan by the contestant's own planner, on all ranks."""
    dataset = config.data.dataset()
    topology = planner_topology(config, contestant.bandwidths, speeds)
    arguments = planner_arguments(
        model, dataset, contestant.sharding_types, topology, config.schedule.batch_size
    )
    if isinstance(contestant, StockContestant):
        planner = EmbeddingShardingPlanner(**arguments, stats=NoopEmbeddingStats())
        return planner.collective_plan(model, sharders, world_group())
    sync = contestant.sync_config
    if not contestant.by_cost:
        plan = pinned_plan(model, sharders, contestant, dataset, arguments, mesh=mesh, sync=sync)
        return scheduled(plan, contestant)
    planner = Planner2D(
        **arguments,
        mesh=None if contestant.num_groups == "any" else mesh,
        sync=sync,
        calibration=Calibration.load(config.calibration) if config.calibration else None,
        workload=workload_of(contestant, tables_work(config), config.model.dim, dense),
    )
    return planner.collective_plan(model, sharders)


def rank_batches(config: BenchConfig, rank: int, world_size: int) -> Iterator[Batch]:
    """Return the rank's part of each batch."""
    return dataset_for(config.model, config.data.dataset()).batches(
        Split.TRAIN,
        global_batch_size=config.schedule.batch_size * world_size,
        rank=rank,
        world_size=world_size,
    )


def planner_topology(config: BenchConfig, bandwidths: str, speeds: LinkSpeeds) -> Topology:
    """Return the network as the planner knows it; a missing level keeps its default."""
    world_size = dist.get_world_size()
    hardware = HardwareConfig()
    if bandwidths == "measured":
        hardware = HardwareConfig(
            intra_host_bw=_per_ms(speeds.in_host["all-to-all"]),
            inter_host_bw=_per_ms(speeds.across_hosts["all-to-all"]),
        )
    return TopologyFactory.create_topology(
        TrainerConfig(world_size=world_size, local_world_size=get_local_size(world_size)),
        hardware,
        # Without the second, TorchRec drops the bandwidths that it gets.
        KernelConfig(compute_device=config.schedule.device, use_hardware_based_bandwidth=True),
    )


def _per_ms(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else bytes_per_s / 1e3


def _codecs(qcomms: str, device: torch.device) -> Any:
    if qcomms == "fp32":
        return None
    kind = CommType[qcomms.upper()]
    return get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=kind, backward_precision=kind), device=device
    )


def _optimizer(
    config: BenchConfig, dense_config: DenseKinds, model: DistributedModelParallel
) -> CombinedOptimizer:
    """Join the fused optimizers and one for the rest.

    Data-parallel tables of TorchRec alone, which have no fused optimizer, get one with its rule.
    """
    tables = {f"{table_name(feature.name)}.weight" for feature in config.data.dataset().features}
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    parts: list[Any] = [model.fused_optimizer]
    whole_tables = {
        name: dense.pop(name) for name in list(dense) if ".".join(name.split(".")[-2:]) in tables
    }
    if whole_tables:
        rule = config.optimizer
        parts.append(
            KeyedOptimizerWrapper(
                whole_tables,
                lambda params: RowWiseAdagrad(cast(Any, params), lr=rule.lr, eps=rule.eps),
            )
        )
    parts.append(with_meetings(dense_optimizer(config.optimizer, dense), dense_config, model))
    return CombinedOptimizer(parts)


def sharding_of(plan: ShardingPlan) -> dict[str, int]:
    """Count the tables by sharding type."""
    types = [
        table.sharding_type
        for module in plan.plan.values()
        for table in cast(Mapping[str, Any], module).values()
    ]
    return dict(sorted(Counter(types).items()))
