"""The wrapper of a dense part that is predicted to be the fastest."""

import torch.distributed as dist
from torchrec.distributed.model_parallel import DataParallelWrapper

from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.comms.agreement import agreeing
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.dense.fully_sharded import FullyShardedDense
from torchrec_2dsp.dense.pipelined.pipelined_dense import PipelinedDense
from torchrec_2dsp.dense.tensor_parallel import TensorParallelDense
from torchrec_2dsp.plan.dense_plan import DenseKind, DensePlan
from torchrec_2dsp.planner.dense_search import DenseChoices, search_dense
from torchrec_2dsp.programs.models.layered import Layered


def plan_dense(
    layered: Layered,
    calibration: Calibration,
    *,
    batch_size: int,
    state_per_weight: float,
    world: dist.ProcessGroup,
) -> DenseChoices:
    """Measure the layers of a model on these ranks, and predict all ways to run them.

    Args:
        layered: the layers.
        calibration: the constants of the machines.
        batch_size: samples per rank.
        state_per_weight: numbers of optimizer state for each weight.
        world: all ranks.

    Raises:
        ConfigError: the model has no layers that could be shared.

    Collectives:
        Those of `Layered.work`, and an agreement on the fastest way.
    """
    world_size = dist.get_world_size(world)
    work = layered.work(batch_size, world, state_per_weight=state_per_weight)
    with agreeing(world) as facts:
        choices = search_dense(
            work,
            calibration=calibration,
            world_size=world_size,
            local_world_size=get_local_size(world_size),
            batch_size=batch_size,
        )
        facts["the plan of the dense part"] = str(choices.best.plan)
    return choices


def wrapper_of(plan: DensePlan, layered: Layered) -> DataParallelWrapper | None:
    """The wrapper that a plan names; `None` for DDP, which is TorchRec's own."""
    mesh = plan.mesh
    if plan.kind is DenseKind.DDP:
        return None
    if plan.kind is DenseKind.FULLY_SHARDED:
        return FullyShardedDense(layered.units, num_copies=plan.num_copies)
    if plan.kind is DenseKind.TENSOR_PARALLEL:
        return TensorParallelDense(layered.tensor_plan, tp=mesh.tp, num_copies=plan.num_copies)
    return PipelinedDense(
        mesh.pp,
        num_micro_batches=plan.num_micro_batches,
        cuts=plan.cuts,
        reduction="sum",
        plan=layered.tensor_plan if mesh.tp > 1 else None,
        tp=mesh.tp,
        layout=mesh.layout,
        fully_shard=plan.fully_shard,
    )
