"""Build a case's sharded model: plan, sharders, wrapper, dense part, optimizers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from torchrec.optim import PartialRowWiseAdam, RowWiseAdagrad, SemisyncOptimizer
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_2dsp as tdsp
from tests.fuzz.case import Case, DenseCase, SearchCase, TableCase, table_name
from tests.fuzz.model import FuzzModel, initial_state, tables_path
from tests.fuzz.search import access_of, calibration_of, constraints_of
from tests.fuzz.state import (
    EPS,
    LR,
    OUTER_LR,
    OUTER_MOMENTUM,
    initial_dense,
    initial_layers,
)
from tests.support.devices import copied, rank_device
from tests.support.managed_collisions import hour_of
from tests.support.parity import FUSED
from torchrec_2dsp._compat.hashed_id_map import HashedIdMap
from torchrec_2dsp._compat.id_map_base import Message, WorldBatch

_see, _message = HashedIdMap.see, HashedIdMap.message


def _see_by_batches(self: HashedIdMap, batch: WorldBatch, **options: bool) -> torch.Tensor:
    return _see(self, batch._replace(hour=hour_of(self.batches_seen)), **options)


def _message_by_batches(self: HashedIdMap, own: Sequence[torch.Tensor], hour: int) -> Message:
    return _message(self, own, hour_of(self.batches_seen))


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=LR),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=LR, eps=EPS),
    "adam": lambda params: torch.optim.Adam(params, lr=LR, eps=EPS),
}


class NotedLocalDense(tdsp.LocalDense):
    """Records the mean that ranks exchanged when they met."""

    met: torch.Tensor | None = None
    """The mean of all changes at the last meeting, flat; ``None`` when it was read."""

    def mean(
        self, changes: Mapping[torch.Tensor, torch.Tensor]
    ) -> dict[torch.Tensor, torch.Tensor]:
        means = super().mean(changes)
        self.met = torch.cat([mean.flatten() for mean in means.values()])
        return means


def make_dense(dense: DenseCase) -> DataParallelWrapper | None:
    """Return the wrapper; `None` stands for TorchRec's default."""
    # DDP has to know about parameters without a gradient.
    in_ddp: dict[str, Any] = (
        {"static_graph": False, "find_unused_parameters": True} if dense.has_shortcut else {}
    )
    # Of one parameter each, which DDP rearranges after the first step.
    small_buckets: dict[str, Any] = {**in_ddp, "bucket_cap_mb": 1e-4}
    makers: dict[str, Callable[[], DataParallelWrapper | None]] = {
        "ddp": lambda: DefaultDataParallelWrapper(**in_ddp) if in_ddp else None,
        "fp16": lambda: tdsp.HookedDataParallel("fp16", **in_ddp),
        "thresholded": lambda: tdsp.ThresholdedDataParallel(
            dense.density,
            warm_up=dense.warm_up,
            values=dense.values,
            dense_below=0,
            route=dense.route,
            refresh=dense.refresh,
            exact_thresholds=dense.exact_thresholds,
            **(small_buckets if dense.small_buckets else in_ddp),
        ),
        "fully_sharded": lambda: tdsp.FullyShardedDense(num_copies=dense.num_copies),
        "tensor_parallel": lambda: tdsp.TensorParallelDense(
            _splits(dense), tp=dense.tp, num_copies=dense.num_copies
        ),
        "pipelined": lambda: tdsp.PipelinedDense(
            2,
            num_micro_batches=dense.num_micro_batches,
            schedule=dense.schedule,
            reduction="sum",
            layout=tdsp.RankLayout(dense.layout),
            fully_shard=dense.fully_shard,
        ),
        "delayed": lambda: tdsp.DelayedDense(warm_up=dense.warm_up, **small_buckets),
        "local": lambda: NotedLocalDense(
            density=dense.density, values=dense.values, residual_decay=dense.residual_decay
        ),
    }
    return makers[dense.kind]()


def _splits(dense: DenseCase) -> dict[str, ParallelStyle]:
    """Split layers by outputs and inputs alternately; an unpaired last layer stays whole."""
    num_split = (len(dense.hidden) + 1) // 2 * 2
    return {
        f"over.layers.{2 * number}": RowwiseParallel() if number % 2 else ColwiseParallel()
        for number in range(num_split)
    }


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return a full flat copy of a parameter or gradient; if it is sharded, on all ranks."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return copied(full).flatten()


def gathered(case: Case, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Gather the dense part's parameters from all ranks into one flat tensor."""
    of_ranks: list[Mapping[str, torch.Tensor]] = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    parts = []
    for name in initial_dense(case):
        first, *others = [held[name] for held in of_ranks if name in held]
        assert all(torch.equal(first, other) for other in others), f"copies of {name} differ"
        parts.append(first)
    return torch.cat(parts)


_OURS = {"moment_scaled": tdsp.MomentScaledRowWiseAdaGrad}


def make_plan(case: Case) -> tdsp.Plan2D:
    node_size = case.mesh.node_group_size(case.local_world_size)
    modules = {
        f"m{number}": EmbeddingModuleShardingPlan(
            {
                table_name(number, index): _sharding(table, case.size, node_size)
                for index, table in enumerate(module.tables)
            }
        )
        for number, module in enumerate(case.modules)
    }
    plan = tdsp.Plan2D.from_stock(ShardingPlan(dict(modules)), case.mesh, case.sync.config)
    plan = replace(plan, full_duplex=case.full_duplex)
    for name, table in case.tables.items():
        plan = tdsp.pin(
            plan,
            name,
            exchange=table.exchange,
            transport=table.transport,
            owners=table.owners,
            stored_as="int8" if table.dtype == "int8" else None,
            num_groups=1 if table.once else None,
        )
        if table.hot != "none":
            plan = tdsp.pin(plan, name, hot_rows=case.hot_ids(name))
    return plan


def make_sharders(case: Case) -> list[Any]:
    known: dict[str, Any] = {"bad_ids": case.bad_ids, "accumulates": case.accumulated > 1}
    keeps_weights = case.search is not None and case.search.keeps_weights
    if case.qcomms != "none":
        kind = CommType(case.qcomms)
        known["qcomm_codecs_registry"] = get_qcomm_codecs_registry(
            QCommsConfig(kind, kind), device=rank_device()
        )
    if case.optimizer in _OURS:
        known["optimizer"] = _OURS[case.optimizer](lr=LR, eps=EPS)
    else:
        known["optimizer"] = FUSED[case.optimizer]
        known["fused_params"] = {"learning_rate": LR, "eps": EPS}
    if case.at_random:
        more = {"stochastic_rounding": True, "rounding_seed": case.seed}
        known["fused_params"] = known.get("fused_params", {}) | more
    bags = tdsp.EmbeddingBagCollectionSharder2D(**known, keep_weights=keeps_weights)
    sequences = tdsp.EmbeddingCollectionSharder2D(**known)
    return [
        bags,
        sequences,
        tdsp.FeatureProcessedEmbeddingBagCollectionSharder2D(bags),
        tdsp.ManagedCollisionEmbeddingBagCollectionSharder2D(bags),
        tdsp.ManagedCollisionEmbeddingCollectionSharder2D(sequences),
    ]


def make_parallel(case: Case, dense: DataParallelWrapper | None = None) -> DistributedModelParallel:
    """Return the sharded model with the case's weights; ``dense`` wraps the dense part."""
    model = FuzzModel(case)
    if case.has_maps:
        # An hour passes after each batch of a map.
        HashedIdMap.see, HashedIdMap.message = _see_by_batches, _message_by_batches
    # Once the model is wrapped, a rank may hold only parts.
    model.over.load_state_dict(initial_layers(case))
    model.over.to(rank_device())
    if case.search is not None:
        return _parallelized(case, case.search, model, dense)
    wrapper = DistributedModelParallel if case.wrapper == "stock" else tdsp.ModelParallel2D
    parallel = wrapper(
        model,
        device=rank_device(),
        plan=make_plan(case),
        sharders=make_sharders(case),
        data_parallel_wrapper=dense,
    )
    return _with_weights(case, parallel)


def _with_weights(case: Case, parallel: DistributedModelParallel) -> DistributedModelParallel:
    state = parallel.state_dict() | initial_state(case)
    parallel.load_state_dict(state)  # type: ignore[arg-type]
    return parallel


_BESIDE_TABLES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
    "partial_adam": PartialRowWiseAdam,
}


def _parallelized(
    case: Case, search: SearchCase, model: FuzzModel, dense: DataParallelWrapper | None
) -> DistributedModelParallel:
    """Plan and shard the model by one call to `parallelize`."""
    if search.keeps_weights:
        for number in range(len(case.modules)):
            model.get_submodule(f"m{number}").to_empty(device=rank_device())
        model.load_state_dict(initial_state(case), strict=False)
    optimizer: Any = {}
    if search.gives_sharders:
        optimizer = {"sharders": make_sharders(case)}
    elif case.optimizer in _OURS:
        optimizer = {"optimizer": _OURS[case.optimizer](lr=LR, eps=EPS)}
    else:
        params = {"lr": LR} | ({} if case.optimizer == "sgd" else {"eps": EPS})
        for number in range(len(case.modules)):
            weights = model.get_submodule(tables_path(case, number)).parameters()
            weights = [weight for weight in weights if weight.requires_grad]
            apply_optimizer_in_backward(_BESIDE_TABLES[case.optimizer], weights, params)
    (precision, *others) = search.precision
    parallel = tdsp.parallelize(
        model,
        device=rank_device(),
        batch_size=search.batch_size,
        precision=precision if precision in ("exact", "any") else [precision, *others],
        exchange=search.exchange or None,
        calibration=calibration_of(search),
        mesh=case.mesh if search.has_mesh else None,
        sync=case.sync.config,
        constraints=constraints_of(case) or None,
        access=access_of(case, search),
        data_parallel_wrapper=dense,
        **optimizer,
    )
    return parallel if search.keeps_weights else _with_weights(case, parallel)


def dense_params(parallel: DistributedModelParallel) -> dict[str, torch.Tensor]:
    params = in_backward_optimizer_filter(parallel.named_parameters())
    return {name: param for name, param in params if param.requires_grad}


def named_dense(case: Case, parallel: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Return this rank's dense parameters by their names in an unwrapped model."""
    params = {name.removeprefix("module."): param for name, param in dense_params(parallel).items()}
    return {name: params[name] for name in initial_dense(case) if name in params}


def make_optimizer(
    case: Case,
    parallel: DistributedModelParallel,
    dense: DataParallelWrapper | None,
    seen: Callable[[], None],
) -> CombinedOptimizer:
    """Return the fused optimizer and the dense part's, which calls ``seen`` before it clips."""
    params: Any = dense_params(parallel)
    inner = _OPTIMIZERS[case.dense.optimizer](list(params.values()))

    def before_step(*_: Any) -> None:
        seen()
        if case.dense.max_norm and isinstance(dense, tdsp.PipelinedDense):
            dense.clip_grad_norm_(case.dense.max_norm)
        elif case.dense.max_norm:
            torch.nn.utils.clip_grad_norm_(params.values(), case.dense.max_norm)

    inner.register_step_pre_hook(before_step)
    of_dense: KeyedOptimizer = KeyedOptimizerWrapper(params, lambda _: inner)
    if isinstance(dense, tdsp.LocalDense):
        outer = KeyedOptimizerWrapper(
            params, lambda values: tdsp.DiLoCo(values, dense, OUTER_LR, momentum=OUTER_MOMENTUM)
        )
        of_dense = SemisyncOptimizer(
            list(params.values()), of_dense, outer, num_local_steps=case.dense.local_steps
        )
    return CombinedOptimizer([parallel.fused_optimizer, of_dense])


def halve_learning_rates(optimizer: CombinedOptimizer) -> None:
    """Halve all learning rates, as a scheduler does."""
    for group in cast(list[dict[str, Any]], optimizer.param_groups):
        group["lr"] /= 2


def _sharding(table: TableCase, size: int, node_size: int) -> ParameterSharding:
    """Return how a group of ``size`` ranks, ``node_size`` on each host, shards a table."""
    kind = table.sharding
    if kind == "data_parallel":
        return ParameterSharding(kind, "dense", list(range(size)), None)
    sizes, offsets = calculate_shard_sizes_and_offsets(
        torch.empty(table.rows, table.dim, device="meta"),
        size,
        node_size,
        kind,
        col_wise_shard_dim=table.dim // table.num_blocks,
    )
    ranks = _ranks(table, size, node_size)
    shards = [
        ShardMetadata(offset, shape, f"rank:{rank}/cpu")
        for offset, shape, rank in zip(offsets, sizes, ranks, strict=True)
    ]
    return ParameterSharding(kind, "fused", ranks, EnumerableShardingSpec(shards))


def _ranks(table: TableCase, size: int, node_size: int) -> list[int]:
    num_hosts = size // node_size
    first = table.place % num_hosts * node_size
    if table.sharding == "table_wise":
        return [table.place % size]
    if table.sharding == "row_wise":
        return list(range(size))
    if table.sharding == "column_wise":
        return [(table.place + block) % size for block in range(table.num_blocks)]
    if table.sharding == "table_column_wise":
        return [first + block % node_size for block in range(table.num_blocks)]
    if table.sharding == "table_row_wise":
        return [first + rank for rank in range(node_size)]
    return [
        (table.place + block) % num_hosts * node_size + rank
        for block in range(table.num_blocks)
        for rank in range(node_size)
    ]
