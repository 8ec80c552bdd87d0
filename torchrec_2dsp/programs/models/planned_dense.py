"""`dense_part`: what runs a model's dense part, as its config says or as predictions do."""

from dataclasses import dataclass

import torch.distributed as dist
from torchrec.distributed.model_parallel import DataParallelWrapper

from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.comms.agreement import agreeing
from torchrec_2dsp.comms.world_groups import world_group
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.dense.fully_sharded import FullyShardedDense
from torchrec_2dsp.dense.pipelined.pipelined_dense import PipelinedDense
from torchrec_2dsp.dense.tensor_parallel import TensorParallelDense
from torchrec_2dsp.plan.dense_plan import DenseKind, DensePlan
from torchrec_2dsp.planner.dense_search import DenseChoices, search_dense
from torchrec_2dsp.programs.config.dense import DenseGradientsConfig
from torchrec_2dsp.programs.models.dense import check_one_length, dense_wrapper
from torchrec_2dsp.programs.models.layered import Layered


@dataclass(frozen=True)
class DensePart:
    """What runs a model's dense part."""

    wrapper: DataParallelWrapper | None
    """The wrapper; `None` for TorchRec's own, which is DDP."""

    choices: DenseChoices | None = None
    """What a planned one was chosen from, equal on all ranks."""


def dense_part(
    config: DenseGradientsConfig,
    layered: Layered,
    *,
    calibration: str,
    batch_size: int,
    state_per_weight: float,
    static_graph: bool = True,
) -> DensePart:
    """What runs the dense part; for a planned one the layers are measured on these ranks.

    Args:
        config: the kind of the dense part, and its settings.
        layered: the layers that ranks may share.
        calibration: of the machines, if the dense part is planned: a file, or a shipped name.
        batch_size: samples per rank.
        state_per_weight: numbers of optimizer state for each weight.
        static_graph: as for `dense_wrapper`.

    Raises:
        ConfigError: the model can't be run so.

    Collectives:
        For a planned one those of `plan_dense`.
    """
    if config.kind != "planned":
        return DensePart(dense_wrapper(config, layered, static_graph=static_graph))
    check_one_length(config.kind, layered)
    choices = plan_dense(
        layered,
        Calibration.load(calibration),
        batch_size=batch_size,
        state_per_weight=state_per_weight,
        world=world_group(),
    )
    return DensePart(wrapper_of(choices.best.plan, layered), choices)


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
