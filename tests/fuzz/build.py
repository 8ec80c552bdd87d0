"""From a case to the sharded model: plan, sharders, wrapper, optimizer."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_2dsp as tdsp
from tests.fuzz.case import Case, TableCase, table_name
from tests.fuzz.dense_wrappers import make_dense_optimizer
from tests.fuzz.model import FuzzModel, initial_state
from tests.fuzz.weights import EPS, LR, initial_dense
from tests.support.rank_device import rank_device
from torchrec_2dsp._compat.fbgemm import EmbOptimType

_FUSED = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
_OURS = {
    "moment_scaled": tdsp.MomentScaledRowWiseAdaGrad,
    "delayed_moment": tdsp.DelayedMomentRowWiseAdaGrad,
}


def make_plan(case: Case) -> tdsp.Plan2D:
    """The plan, written by hand."""
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
    for name, table in case.tables.items():
        plan = tdsp.pin(
            plan,
            name,
            exchange=table.exchange,
            transport=table.transport,
            owners=table.owners,
            num_groups=1 if table.once else None,
        )
        if table.hot != "none":
            plan = tdsp.pin(plan, name, hot_rows=table.hot_rows)
    return plan


def make_sharders(case: Case) -> list[Any]:
    """One for each kind of module."""
    known: dict[str, Any] = {"bad_ids": case.bad_ids, "accumulates": case.accumulated > 1}
    if case.qcomms != "none":
        kind = CommType(case.qcomms)
        known["qcomm_codecs_registry"] = get_qcomm_codecs_registry(
            QCommsConfig(kind, kind), device=rank_device()
        )
    if case.optimizer in _OURS:
        known["optimizer"] = _OURS[case.optimizer](lr=LR, eps=EPS)
    else:
        known["optimizer"] = _FUSED[case.optimizer]
        known["fused_params"] = {"learning_rate": LR, "eps": EPS}
    return [
        tdsp.EmbeddingBagCollectionSharder2D(**known),
        tdsp.EmbeddingCollectionSharder2D(**known),
    ]


def make_parallel(case: Case, dense: DataParallelWrapper | None = None) -> DistributedModelParallel:
    """The sharded model, with the case's weights.

    Args:
        case: says how it is sharded.
        dense: runs what isn't in tables; `None` for TorchRec's own wrapper.
    """
    wrapper = DistributedModelParallel if case.wrapper == "stock" else tdsp.ModelParallel2D
    model = FuzzModel(case)
    # Once the model is wrapped, a rank may have parts of them.
    model.over.load_state_dict(initial_dense(case))
    model.over.to(rank_device())
    parallel = wrapper(
        model,
        device=rank_device(),
        plan=make_plan(case),
        sharders=make_sharders(case),
        data_parallel_wrapper=dense,
    )
    state = parallel.state_dict() | initial_state(case)
    parallel.load_state_dict(state)  # type: ignore[arg-type]
    return parallel


def dense_params(parallel: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """The parameters of the dense part."""
    return {name: param for name, param in _unfused(parallel).items() if "over." in name}


def named_dense(parallel: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """The parameters of the dense part, by their names in a model without a wrapper."""
    params = dense_params(parallel)
    return {name.removeprefix("module."): param for name, param in params.items()}


def make_optimizer(
    case: Case,
    parallel: DistributedModelParallel,
    dense: DataParallelWrapper | None,
    seen: Callable[[], None],
) -> CombinedOptimizer:
    """The fused optimizer, that of the dense part, and SGD for data-parallel tables.

    Args:
        case: says how the dense part is trained.
        parallel: the sharded model.
        dense: the wrapper that it has.
        seen: is called in each step before dense gradients are clipped.
    """
    layer = dense_params(parallel)
    tables = {name: param for name, param in _unfused(parallel).items() if name not in layer}
    optimizers = [parallel.fused_optimizer, make_dense_optimizer(case, layer, dense, seen)]
    if tables:
        optimizers.append(
            KeyedOptimizerWrapper(tables, lambda params: torch.optim.SGD(params, lr=LR))
        )
    return CombinedOptimizer(optimizers)


def halve_learning_rates(optimizer: CombinedOptimizer) -> None:
    """As a scheduler does it."""
    for group in cast(list[dict[str, Any]], optimizer.param_groups):
        group["lr"] /= 2


def _unfused(parallel: DistributedModelParallel) -> dict[str, torch.Tensor]:
    return dict(in_backward_optimizer_filter(parallel.named_parameters()))


def _sharding(table: TableCase, size: int, node_size: int) -> ParameterSharding:
    """How a group of ``size`` ranks, ``node_size`` on each host, shards a table."""
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
    """Where the shards of a table are, by shard."""
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
