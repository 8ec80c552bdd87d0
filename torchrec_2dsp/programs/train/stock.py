"""Runs by TorchRec alone: its planner, its sharders, its `DistributedModelParallel`."""

from typing import Any, cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.comms.world_groups import world_group
from torchrec_2dsp.mesh.mesh2d import Mesh2D
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.plan.remap import plan_for_rank
from torchrec_2dsp.planner.collective import plan_on_rank_0
from torchrec_2dsp.programs.config.sections import OptimizerConfig
from torchrec_2dsp.programs.models.shards import local_shards
from torchrec_2dsp.programs.models.stock_sequences import StockSequenceSharder
from torchrec_2dsp.shard.initial_tables import configs_of, draw_part_


def stock_sharders(optimizer: OptimizerConfig) -> list[ModuleSharder[nn.Module]]:
    """TorchRec's sharders of bags and sequences, with row-wise AdaGrad in their kernels."""
    fused_params: dict[str, Any] = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": optimizer.lr,
        "eps": optimizer.eps,
    }
    sharders = [
        EmbeddingBagCollectionSharder(fused_params=dict(fused_params)),
        StockSequenceSharder(fused_params=dict(fused_params)),
    ]
    return cast(list[ModuleSharder[nn.Module]], sharders)


def stock_plan(
    model: nn.Module, sharders: list[ModuleSharder[nn.Module]], arguments: dict[str, Any]
) -> Plan2D:
    """The plan that TorchRec's planner finds, as one of a single group, which can be shown.

    Args:
        model: the unsharded model.
        sharders: TorchRec's.
        arguments: of the planner.

    Collectives:
        One broadcast of a pickled object from rank 0 of the world.
    """
    world = world_group()
    mesh = Mesh2D(1, dist.get_world_size(world))

    def make_plan() -> Plan2D:
        plan = EmbeddingShardingPlanner(**arguments).plan(model, sharders)
        return Plan2D.from_stock(plan, mesh=mesh)

    return plan_on_rank_0(make_plan, world)


def stock_model(
    model: nn.Module,
    plan: Plan2D,
    sharders: list[ModuleSharder[nn.Module]],
    device: torch.device,
    *,
    seed: int,
) -> DistributedModelParallel:
    """A model that TorchRec alone shards, with the tables that this package's sharders draw.

    Args:
        model: the unsharded model, whose tables have no weights.
        plan: from `stock_plan`.
        sharders: TorchRec's.
        device: this rank's device.
        seed: of all tables.

    Collectives:
        Those of `DistributedModelParallel`.
    """
    tables = _tables(model)
    world = world_group()
    of_rank = plan_for_rank(
        plan,
        dist.get_rank(world),
        device_type=device.type,
        local_world_size=get_local_size(dist.get_world_size(world)),
    )
    parallel_model = DistributedModelParallel(
        model, device=device, plan=of_rank, sharders=cast(list[ModuleSharder[Any]], sharders)
    )
    state = parallel_model.state_dict()
    with torch.random.fork_rng(devices=[]):
        for key, config in tables.items():
            for part, row, column in local_shards(state[key]):
                draw_part_(part, config, seed, row, column)
    return parallel_model


def _tables(model: nn.Module) -> dict[str, Any]:
    """The configs of a model's tables, by the names of their weights in its state dict."""
    tables: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            is_bags = isinstance(module, EmbeddingBagCollection)
            kind = "embedding_bags" if is_bags else "embeddings"
            for config in configs_of(module):
                tables[f"{path}.{kind}.{config.name}.weight".lstrip(".")] = config
    return tables
