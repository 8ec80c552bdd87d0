"""A run's sharder, plan and optimizer."""

from typing import cast

import torch
from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import KernelConfig, TopologyFactory, TrainerConfig
from torchrec.distributed.types import ModuleSharder
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.mesh.mesh2d import Mesh2D
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.planner.planner2d import Planner2D
from torchrec_2dsp.programs.models.exchange import pinned
from torchrec_2dsp.programs.models.model import table_name
from torchrec_2dsp.programs.models.optimizer import table_optimizer
from torchrec_2dsp.programs.train.config import RunConfig, TrainConfig
from torchrec_2dsp.shard.sharders import EmbeddingBagCollectionSharder2D


def make_sharder(config: TrainConfig, run: RunConfig) -> EmbeddingBagCollectionSharder2D:
    """The sharder of a run, which keeps the weights that `build_model` made."""
    optimizer = table_optimizer(
        config.optimizer,
        run,
        config.data,
        num_groups=run.num_groups,
        global_batch_size=config.loop.global_batch_size,
    )
    return EmbeddingBagCollectionSharder2D(optimizer, keep_weights=True)


def make_plan(
    config: TrainConfig,
    run: RunConfig,
    mesh: Mesh2D,
    model: nn.Module,
    sharder: EmbeddingBagCollectionSharder2D,
) -> Plan2D:
    """What `Planner2D` finds for a run, and what the run says besides.

    Collectives:
        One broadcast of a pickled object from rank 0 of the world.
    """
    planner = Planner2D(
        topology=TopologyFactory.create_topology(
            TrainerConfig(
                world_size=mesh.world_size, local_world_size=get_local_size(mesh.world_size)
            ),
            kernel_config=KernelConfig(compute_device=config.loop.device),
        ),
        batch_size=config.loop.global_batch_size // mesh.world_size,
        constraints={
            table_name(feature.name): ParameterConstraints(
                sharding_types=list(run.sharding_types or config.model.sharding_types),
                pooling_factors=[feature.mean_ids],
            )
            for feature in config.data.features
        },
        storage_reservation=FixedPercentageStorageReservation(0.15),
        debug=False,
        mesh=mesh,
        sync=run.sync_config,
    )
    plan = planner.collective_plan(model, cast(list[ModuleSharder[nn.Module]], [sharder]))
    return pinned(plan, run, config.data)


def make_optimizer(model: ModelParallel2D, config: TrainConfig) -> CombinedOptimizer:
    """The tables' fused optimizers and SGD for everything else."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    lr = config.optimizer.dense_lr
    wrapped = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=lr))
    return CombinedOptimizer([model.fused_optimizer, wrapped])
