"""The data-parallel wrapper of a config, and of a model."""

from torch import nn
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_2dsp._compat.data_parallel import DefaultDataParallelWrapper, data_parallel_wrapper
from torchrec_2dsp.dense.delayed_dense import DelayedDense
from torchrec_2dsp.dense.fully_sharded import FullyShardedDense
from torchrec_2dsp.dense.gradient_report import GradientReport
from torchrec_2dsp.dense.hooked_data_parallel import HookedDataParallel
from torchrec_2dsp.dense.local_dense import LocalDense
from torchrec_2dsp.dense.pipelined.pipelined_dense import PipelinedDense
from torchrec_2dsp.dense.tensor_parallel import TensorParallelDense
from torchrec_2dsp.dense.thresholded_data_parallel import ThresholdedDataParallel
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.dense import DenseGradientsConfig
from torchrec_2dsp.programs.models.layered import Layered


def dense_wrapper(
    config: DenseGradientsConfig, layered: Layered | None = None, *, static_graph: bool = True
) -> DataParallelWrapper | None:
    """What runs the dense part; `None` for TorchRec's own wrapper, which is DDP.

    Args:
        config: the kind of the dense part, and its settings; only `dense_part` takes "planned".
        layered: the layers that ranks may share; none for a model without any.
        static_graph: whether DDP, if it is that, learns the graph in its first backward.

    Raises:
        ConfigError: the model has no such layers.
    """
    layered = layered or Layered()
    if config.kind == "ddp":
        return None if static_graph else DefaultDataParallelWrapper(static_graph=False)
    if config.kind == "delayed":
        return DelayedDense(warm_up=config.warm_up)
    if config.kind == "fully_sharded":
        return FullyShardedDense(layered.units, num_copies=config.num_copies)
    if config.kind in ("tensor_parallel", "pipelined") and layered.stack is None:
        raise ConfigError(
            f'dense.kind="{config.kind}" is for models with a LayerStack, such as '
            'model.kind="sequence"'
        )
    if config.kind == "pipelined":
        check_one_length(config.kind, layered)
    if config.kind == "tensor_parallel":
        return TensorParallelDense(layered.tensor_plan, tp=config.tp, num_copies=config.num_copies)
    if config.kind == "pipelined":
        return PipelinedDense(
            config.num_stages,
            num_micro_batches=config.num_micro_batches,
            schedule=config.schedule,
            reduction="sum",
            plan=layered.tensor_plan if config.tp > 1 else None,
            tp=config.tp,
            layout=config.layout,
            fully_shard=config.fully_shard,
        )
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
    assert config.kind != "planned", "dense_part plans it"
    return HookedDataParallel(
        config.kind, rank=config.rank, warm_up=config.warm_up, static_graph=static_graph
    )


def check_one_length(kind: str, layered: Layered) -> None:
    """Raise `ConfigError` if a batch's sequences have several lengths, which no pipeline takes.

    Args:
        kind: of the dense part, for the text.
        layered: the layers.
    """
    if getattr(layered.stack, "num_chunks", 1) > 1:
        raise ConfigError(
            f'dense.kind="{kind}" needs sequences of one length, and model.length_chunks > 1 '
            "fills them up to several; set model.length_chunks=1, or use another kind"
        )


def thresholded_gradients(model: nn.Module) -> ThresholdedDataParallel | None:
    """The wrapper that thresholds a model's dense gradients, if one does."""
    wrapper = data_parallel_wrapper(model)
    return wrapper if isinstance(wrapper, ThresholdedDataParallel) else None


def apply_late_gradients(model: nn.Module, optimizer: KeyedOptimizer) -> None:
    """Apply the dense gradients that are in flight, if a wrapper delays them.

    Collectives:
        Those of `DelayedDense.flush`.
    """
    wrapper = data_parallel_wrapper(model)
    if isinstance(wrapper, DelayedDense):
        wrapper.flush(optimizer)


def dense_total(model: nn.Module) -> GradientReport:
    """What was sent of a model's dense gradients since the start, if they are thresholded."""
    wrapper = thresholded_gradients(model)
    return wrapper.total if wrapper else GradientReport()
