"""A run's model, planned and sharded: by this package, or by TorchRec alone."""

from contextlib import AbstractContextManager

from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_2dsp.comms.naming_faults import naming_faults
from torchrec_2dsp.comms.notice_board import NoticeBoard
from torchrec_2dsp.parallel.failing_together import failing_together
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
from torchrec_2dsp.programs.data.dataset import Dataset
from torchrec_2dsp.programs.models.balance import check_lengths, weigh_losses_
from torchrec_2dsp.programs.models.model import rank_device
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.datasets import shape_of
from torchrec_2dsp.programs.train.parts import (
    PlannedRun,
    make_dense_part,
    make_model,
    make_sharders,
    num_steps_of,
    plan_run,
    plan_stock_run,
)
from torchrec_2dsp.programs.train.stock import stock_model, stock_sharders
from torchrec_2dsp.replicas.sync_report import SyncReport


def sharded_model(
    config: TrainConfig, name: str, dataset: Dataset
) -> tuple[DistributedModelParallel, PlannedRun]:
    """The model of a run, and its plan.

    Args:
        config: equal on all ranks.
        name: the run's.
        dataset: the data that the config names.

    Collectives:
        Those of planning and sharding.
    """
    run, shape = config.runs[name], shape_of(config.data, dataset)
    device = rank_device(config.loop.device)
    check_lengths(f"runs.{name}", run.balance, shape.features)
    model = make_model(config, run, shape)
    num_steps = num_steps_of(config.loop, dataset)
    if run.stock:
        sharders = stock_sharders(config.optimizer)
        planned = plan_stock_run(config, shape, model, sharders, num_steps)
        seed = config.model.seed
        return stock_model(model, planned.plan, sharders, device, seed=seed), planned
    if run.balance is not None:
        weigh_losses_(model)
    own_sharders = make_sharders(config, run, shape)
    planned = plan_run(config, name, shape, model, own_sharders, num_steps)
    part = make_dense_part(config, run, model)
    parallel_model = ModelParallel2D(
        model,
        device=device,
        plan=planned.plan,
        sharders=own_sharders,
        data_parallel_wrapper=part.wrapper,
    )
    return parallel_model, planned.with_dense(part)


def ending_together(
    model: DistributedModelParallel, board: NoticeBoard
) -> AbstractContextManager[object]:
    """The context of a training loop whose errors name the rank that failed.

    Args:
        model: the run's.
        board: the notice board of the world.
    """
    if isinstance(model, ModelParallel2D):
        return failing_together(model)
    return naming_faults(board, "a step of TorchRec")


def complete_tables(model: DistributedModelParallel) -> None:
    """Make all copies of a run's tables equal and complete; TorchRec's own always are.

    Collectives:
        Those of `ModelParallel2D.sync_now`.
    """
    if isinstance(model, ModelParallel2D):
        model.sync_now()


def sync_total_of(model: DistributedModelParallel) -> SyncReport:
    """What the copies of a run's tables have sent each other; nothing by TorchRec alone."""
    return model.sync_total if isinstance(model, ModelParallel2D) else SyncReport()
