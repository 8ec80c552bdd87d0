"""The data-parallel wrapper of a config, and of a model."""

from torch import nn
from torchrec.distributed.model_parallel import DataParallelWrapper

from torchrec_2dsp._compat.data_parallel import DefaultDataParallelWrapper, data_parallel_wrapper
from torchrec_2dsp.dense.fully_sharded import FullyShardedDense
from torchrec_2dsp.dense.gradient_report import GradientReport
from torchrec_2dsp.dense.hooked_data_parallel import HookedDataParallel
from torchrec_2dsp.dense.local_dense import LocalDense
from torchrec_2dsp.dense.thresholded_data_parallel import ThresholdedDataParallel
from torchrec_2dsp.programs.config.dense import DenseGradientsConfig


def dense_wrapper(
    config: DenseGradientsConfig, *, static_graph: bool = True
) -> DataParallelWrapper | None:
    """What runs the dense part; `None` for TorchRec's own wrapper, which is DDP.

    Args:
        config: the kind of the dense part, and its settings.
        static_graph: whether DDP, if it is that, learns the graph in its first backward.
    """
    if config.kind == "ddp":
        return None if static_graph else DefaultDataParallelWrapper(static_graph=False)
    if config.kind == "fully_sharded":
        return FullyShardedDense(num_copies=config.num_copies)
    if config.kind == "local":
        return LocalDense(density=config.meeting_density, values=config.values)
    if config.kind == "thresholded":
        return ThresholdedDataParallel(
            config.density,
            values=config.values,
            route=config.route,
            warm_up=config.warm_up,
            static_graph=static_graph,
        )
    return HookedDataParallel(
        config.kind, rank=config.rank, warm_up=config.warm_up, static_graph=static_graph
    )


def thresholded_gradients(model: nn.Module) -> ThresholdedDataParallel | None:
    """The wrapper that thresholds a model's dense gradients, if one does."""
    wrapper = data_parallel_wrapper(model)
    return wrapper if isinstance(wrapper, ThresholdedDataParallel) else None


def dense_total(model: nn.Module) -> GradientReport:
    """What was sent of a model's dense gradients since the start, if they are thresholded."""
    wrapper = thresholded_gradients(model)
    return wrapper.total if wrapper else GradientReport()
