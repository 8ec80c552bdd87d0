"""A run's sharder, plan and optimizer."""

from torch import nn
from torchrec.distributed.planner.types import KernelConfig, TopologyFactory, TrainerConfig
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.mesh.mesh2d import Mesh2D
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.planner.planner2d import Planner2D
from torchrec_2dsp.programs.models.optimizer import dense_optimizer, table_optimizer, with_meetings
from torchrec_2dsp.programs.models.planned import collective_plan, planner_arguments
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
    """The plan that `Planner2D` finds for a run, with what the run pins besides.

    Collectives:
        One broadcast of a pickled object from rank 0 of the world.
    """
    topology = TopologyFactory.create_topology(
        TrainerConfig(world_size=mesh.world_size, local_world_size=get_local_size(mesh.world_size)),
        kernel_config=KernelConfig(compute_device=config.loop.device),
    )
    arguments = planner_arguments(
        config.data,
        run.sharding_types or config.model.sharding_types,
        topology,
        batch_size=config.loop.global_batch_size // mesh.world_size,
    )
    planner = Planner2D(**arguments, mesh=mesh, sync=run.sync_config)
    return collective_plan(planner, model, sharder, pins=run, data=config.data)


def make_optimizer(
    model: ModelParallel2D, config: TrainConfig, run: RunConfig
) -> CombinedOptimizer:
    """The tables' fused optimizers, and the optimizer of everything else."""
    params = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = with_meetings(dense_optimizer(config.optimizer, params), run.dense, model)
    return CombinedOptimizer([model.fused_optimizer, dense])
